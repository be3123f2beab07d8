"""Atomic files on the local file system (or a mounted, shared one).

A file is written under a temporary name and renamed or, where the first of several writers wins,
linked, so a reader finds all of it or none. What the operating system refuses becomes a
StorageError that names the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from anabranch.errors import ConfigError, StorageError

SYNC_BYTES = 4 << 20
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*):/+")  # a Path has made one slash of two


def directory(given: str | Path, what: str, instead: str = "") -> Path:
    """The directory that a user named. A URL is refused: as a path, it would quietly mean a
    directory of this machine. `instead` says what takes one."""
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{what} is {given!r}; name a directory")
    path = os.fspath(given)
    if not path.strip() or "\0" in path:
        raise ConfigError(f"{what} is {path!r}; name a directory")
    url = _URL.match(path)
    if url is not None:
        kind, local = url[1].lower(), path[url.end() - 1 :]
        hint = f"give {local!r}" if kind == "file" else f"give a path{instead and ', ' + instead}"
        # The rest of a URL may hold a password.
        raise ConfigError(
            f"{what} is a URL ({kind}://…), but has to be a directory, on this machine or mounted "
            f"here; {hint}"
        )
    return Path(path)


@contextlib.contextmanager
def explained(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError into one sentence about what was being done and what to change."""
    try:
        yield
    except OSError as e:
        hint = "check the directory"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space and start again"
        raise StorageError(
            f"cannot {action} {path}: {e.strerror or e}; {hint}", path=str(path)
        ) from e


def make_private(directory: Path) -> None:
    """A checkpoint directory has the job's rows: a new one is its owner's. Who else may look into
    one that is there already was decided by its maker."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def refuse_unwritable(directory: Path) -> None:
    """Refuse, without making anything, a directory in which nothing could be made."""
    nearest = next(d for d in (directory, *directory.parents) if d.exists())
    with explained("write to", directory):
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"Not a directory ({nearest})")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"Permission denied ({nearest})")


def write_atomic(
    path: Path, parts: Iterable[Any], sync: bool = False, unhurried: bool = False
) -> int:
    """Write `parts` as one file; returns its size. `sync` survives a crash of the machine too.

    `unhurried`, the disk has each few megabytes before the next come: a writer that syncs a small
    file meanwhile (the journal does, for every slice) must not wait for gigabytes.
    """
    temporary = temporary_name(path)
    with explained("write", path), removed_on_error(temporary):
        size = write_temporary(temporary, parts, sync, unhurried)
        temporary.replace(path)
        if sync:
            sync_directory(path.parent)
    return size


def temporary_name(path: Path, unique: str = "") -> Path:
    """Under which a file is written before it appears; nobody else has the same one, on this
    machine or another."""
    return path.with_name(f".{path.name}.{unique or uuid.uuid4().hex}.tmp")


def write_temporary(
    temporary: Path, parts: Iterable[Any], sync: bool = False, unhurried: bool = False
) -> int:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with temporary.open("xb", buffering=0) as file:  # nothing that somebody put there
        size = _write_all(file.fileno(), parts, unhurried)
        if sync:
            os.fsync(file.fileno())
    return size


def link_exclusive(temporary: Path, path: Path) -> bool:
    """Let a file appear that is written under its temporary name, unless there is one already;
    whether it did. Then the temporary name goes. A hard link, because a rename would replace."""
    try:
        os.link(temporary, path)
        appeared = True
    except FileExistsError:
        appeared = False
    temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return appeared


@contextlib.contextmanager
def removed_on_error(*temporaries: Path) -> Iterator[None]:
    """Half a file must not fill the disk further."""
    try:
        yield
    except OSError:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)
        raise


def _write_all(fd: int, parts: Iterable[Any], unhurried: bool) -> int:
    size = unsynced = 0
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            done = os.write(fd, view[:SYNC_BYTES])
            view = view[done:]
            size, unsynced = size + done, unsynced + done
            if unhurried and unsynced >= SYNC_BYTES:
                os.fdatasync(fd)
                unsynced = 0
    return size


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a crash of the machine."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
