"""Atomic files on the local file system (or a mounted, shared one).

A file is written under a temporary name and renamed, so a reader finds all of it or none. What
the operating system refuses becomes a StorageError that names the path.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from anabranch.errors import StorageError

SYNC_BYTES = 4 << 20


@contextlib.contextmanager
def explained(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError into one sentence about what was being done and what to change."""
    try:
        yield
    except OSError as e:
        hint = "free some space and start again" if e.errno == 28 else "check the directory"
        raise StorageError(
            f"cannot {action} {path}: {e.strerror or e}; {hint}", path=str(path)
        ) from e


def make_private(directory: Path) -> None:
    """A checkpoint directory has the job's rows: a new one is its owner's. Who else may look into
    one that is there already was decided by whoever made it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_atomic(
    path: Path, parts: Iterable[Any], sync: bool = False, unhurried: bool = False
) -> int:
    """Write `parts` as one file; returns its size. `sync` survives a crash of the machine too.

    `unhurried`, the disk has each few megabytes before the next come: whoever syncs a small file
    meanwhile (the journal does, for every slice) must not wait for gigabytes.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Its name can be guessed: what somebody put there, a link say, is not written to.
            temporary.unlink(missing_ok=True)
            with temporary.open("xb", buffering=0) as file:
                size = _write_all(file.fileno(), parts, unhurried)
                if sync:
                    os.fsync(file.fileno())
            temporary.replace(path)
            if sync:
                sync_directory(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)  # half a file must not fill the disk further
            raise
    return size


def create_exclusive(path: Path, data: bytes) -> bool:
    """Write a small file unless there is one; whether this call did. All of it or none is seen,
    and of several callers at once one wins."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with explained("create", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
    return True


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
