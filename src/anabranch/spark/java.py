"""Finds the Java that Spark's processes run on.

Spark 4 needs Java 17. The search goes from the most to the least explicit choice (JAVA_HOME,
PATH, /usr/lib/jvm) and takes the first that is new enough, so an old default Java does not hide
a good one. The version is read from the runtime's `release` file; only a runtime without one is
started to ask.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.errors import ClusterError

MIN_JAVA_VERSION = 17
JVM_DIRECTORY = Path("/usr/lib/jvm")
ASK_TIMEOUT_S = 20


@dataclass(frozen=True)
class JavaInfo:
    """A usable Java: its home (what JAVA_HOME would say) and its major version."""

    home: Path
    version: int

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


def find_java(
    environ: Mapping[str, str] | None = None, jvm_directory: Path = JVM_DIRECTORY
) -> JavaInfo:
    """The first Java that is new enough, else a ClusterError that says what to install."""
    environ = os.environ if environ is None else environ
    too_old: list[str] = []
    for home in _candidates(environ, jvm_directory):
        version = _version(home)
        if version is None:
            continue
        if version >= MIN_JAVA_VERSION:
            return JavaInfo(home, version)
        too_old.append(f"{home} is Java {version}")
    found = f"only older ones were found ({', '.join(too_old)})" if too_old else "none was found"
    raise ClusterError(
        f"Spark needs Java {MIN_JAVA_VERSION} or newer and {found} in JAVA_HOME, on PATH or under "
        f"{jvm_directory}: install one (Debian: apt-get install openjdk-17-jre-headless) "
        "or point JAVA_HOME at it",
        too_old=too_old,
    )


def said_by_java(error: Exception, log: Path) -> str:
    """Why a JVM did not do what it was asked for, in one line: the deepest cause of its trace, else
    what it logged last."""
    try:
        text = f"{error}\n{log.read_text(errors='replace')}"
    except Exception:  # an error of a JVM that is gone cannot even be shown
        text = type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    named = [line.removeprefix(": ") for line in lines if re.search(r"(Exception|Error): \S", line)]
    return (causes or named or lines or [type(error).__name__])[-1 if causes else 0][:300]


def _candidates(environ: Mapping[str, str], jvm_directory: Path) -> Iterator[Path]:
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield Path(on_path).resolve().parent.parent
    if jvm_directory.is_dir():
        homes = [home for home in jvm_directory.iterdir() if _version(home) is not None]
        # The oldest that is new enough: Spark is tested longest on it.
        yield from sorted(homes, key=lambda home: (_version(home) or 0, home))


def _version(home: Path) -> int | None:
    """Major version of the runtime in `home`; None when there is none, or a broken one."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return None
    release = home / "release"
    if release.is_file():
        text = release.read_text(encoding="utf-8", errors="replace")
        stated = _major(r'^JAVA_VERSION="([^"]+)"', text)
        if stated is not None:
            return stated
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _major(r'version "([^"]+)"', answer.stderr + answer.stdout)


def _major(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text, flags=re.MULTILINE)
    numbers = re.findall(r"\d+", found.group(1)) if found else []
    if not numbers:
        return None
    # Java 8 and before called themselves 1.8.
    return int(numbers[1]) if numbers[0] == "1" and len(numbers) > 1 else int(numbers[0])
