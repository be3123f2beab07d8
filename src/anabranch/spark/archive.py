"""Classes that the JVMs of a cluster on this machine need not find, parse and verify again.

A JVM can write the classes it has loaded to an archive when it exits, and another one with the same
jars maps that file instead of looking into them. The first cluster's driver writes it, into the
user's cache directory. An archive is only ever a gain: whatever stands in its way (no rights, no
space, another owner's file) means a start without one, and says nothing. A JVM itself passes over
an archive that does not fit its class path or its flags.

The invariant: a file that is mapped into a JVM was made by this user and could be changed by
nobody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.spark.java import JavaInfo

# What a JVM has to say about an archive belongs into its log, not onto the user's screen.
_QUIET = ("-XX:+DisplayVMOutputToStderr", "-Xlog:disable", "-Xlog:all=warning:stderr")
# Writing one takes 10 s of CPU time, once.
MAKE_TIMEOUT_S = 30.0
# A driver that has done nothing yet has loaded 12 000, after a query 18 000. An archive is made
# once: one of the former would be poor for ever.
MIN_CLASSES = 15_000
KEPT = 4  # one per virtual environment, of 150 MB each
STALE_S = 3600.0


class ClassArchive:
    """The archive for a Java and a list of jars; there, or still to be made, or neither."""

    def __init__(
        self,
        java: JavaInfo,
        jars: Sequence[Path],
        spark_version: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.path: Path | None = None
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home
            if (java.home / "lib/server/classes.jsa").is_file():  # the one that ours builds upon
                directory = _directory(os.environ if environ is None else environ)
                self.path = directory / _name(java, jars, spark_version)
        # In options, Spark and Java take these characters for something else.
        if self.path is not None and re.search(r"[\s:'\"\\%]", str(self.path)):
            self.path = None

    def use(self) -> tuple[str, ...]:
        """Options of a JVM that may use it; none if there is no archive."""
        if self.path is None or not _is_private_file(self.path):
            return ()
        return (*_QUIET, "-Xshare:auto", f"-XX:SharedArchiveFile={self.path}")

    def make(self) -> Making | None:
        """For a JVM that is to write the archive at its exit; None where it cannot, or need not."""
        if self.path is None or self.path.is_symlink() or self.path.exists():
            return None
        return Making(self.path) if os.access(self.path.parent, os.W_OK) else None


class Making:
    """An archive on its way: written under a name of its own, and renamed when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        self.options = (*_QUIET, f"-XX:ArchiveClassesAtExit={self._temporary}")

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the JVM, which has been told to exit, and keep what it has written."""
        try:
            if process.wait(MAKE_TIMEOUT_S) == 0 and _is_private_file(self._temporary):
                with self._temporary.open("rb") as file:
                    os.fsync(file)  # a JVM crashes with a file that a power cut has shortened
                self._temporary.rename(self._path)
                self._tidy()
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Archives of Sparks that have been replaced would stay for ever."""
        files = {p: p.lstat().st_mtime for p in self._path.parent.iterdir()}
        archives = sorted((p for p in files if p.suffix == ".jsa"), key=files.__getitem__)
        killed = [p for p in files if p.suffix == ".tmp" and files[p] < time.time() - STALE_S]
        for path in (*archives[:-KEPT], *killed):
            path.unlink(missing_ok=True)


def _directory(environ: Mapping[str, str]) -> Path:
    """Where this user's archives are; OSError unless it is this user's alone to write to."""
    caches = Path(environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        caches = Path(environ["HOME"]) / ".cache" if "HOME" in environ else Path.home() / ".cache"
    directory = caches / "anabranch"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (caches, directory):
        found = place.lstat() if place is directory else place.stat()
        if not (stat.S_ISDIR(found.st_mode) and _is_mine(found)):
            raise PermissionError(f"{place} is not this user's alone")
    return directory


def _is_private_file(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and _is_mine(found) and os.access(path, os.R_OK)


def _is_mine(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _name(java: JavaInfo, jars: Sequence[Path], spark_version: str) -> str:
    """Everything that a JVM compares before it uses an archive is part of the name, so another Java
    or changed jars get another archive."""
    release = java.home / "release"
    text = release.read_text(errors="replace") if release.is_file() else str(java.version)
    exact = re.search(r'^JAVA_RUNTIME_VERSION="([\w.+-]+)"', text, flags=re.MULTILINE)
    digest = hashlib.sha256(f"{java.home}\n{text}\n".encode())
    for jar in jars:
        found = jar.stat()
        digest.update(f"{jar}\n{found.st_size}\n{found.st_mtime_ns}\n".encode())
    version = exact[1] if exact else str(java.version)
    return f"spark-{spark_version}-java-{version}-{digest.hexdigest()[:16]}.jsa"
