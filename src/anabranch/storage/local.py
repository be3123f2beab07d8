"""A store in a directory of the local file system, or of a mounted, shared one.

Files appear by a hard link or a rename from a temporary name (files.py), so a reader finds all of
one or none. What grows is one file that is appended to: a line per slice costs one write and one
sync, and a torn one is at the end of the file, where its reader expects it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from anabranch.storage.files import (
    explained,
    link_exclusive,
    make_private,
    removed_on_error,
    temporary_name,
    write_atomic,
    write_temporary,
)
from anabranch.storage.store import Growing, Store


class LocalStore(Store):
    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name

    def create(self, name: str, parts: Iterable[Any]) -> int | None:
        path = self.path(name)
        temporary = temporary_name(path)
        with explained("create", path), removed_on_error(temporary):
            if not self.root.exists():
                make_private(self.root)
            size = write_temporary(temporary, parts, sync=True)
            return size if link_exclusive(temporary, path) else None

    def put(
        self, name: str, parts: Iterable[Any], *, sync: bool = True, unhurried: bool = False
    ) -> int:
        return write_atomic(self.path(name), parts, sync, unhurried)

    def read(self, name: str) -> bytes | None:
        path = self.path(name)
        with explained("read", path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        path = self.path(name)
        with explained("read", path), path.open("rb") as file:
            yield file

    def names(self, below: str) -> list[str]:
        path = self.path(below)
        with explained("list", path):
            try:
                return [p.name for p in path.iterdir()]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, name: str) -> None:
        path = self.path(name)
        with explained("delete", path):
            try:
                path.unlink(missing_ok=True)
            except (IsADirectoryError, PermissionError):  # some systems say the latter
                if not path.is_dir():
                    raise
                shutil.rmtree(path, ignore_errors=True)

    def where(self, name: str = "") -> str:
        return str(self.path(name))

    def has(self, name: str) -> bool:
        return self.path(name).exists()

    def reveal(self, hidden: str, name: str) -> None:
        path = self.path(name)
        with explained("write", path):
            try:
                link_exclusive(self.path(hidden), path)
            except FileNotFoundError:
                if not path.exists():  # otherwise somebody else has just done it
                    raise

    def grow(self, name: str) -> Growing:
        return _Appended(self.path(name))

    def read_grown(self, name: str) -> bytes | None:
        return self.read(name)

    def sweep(self, before: str, *names: str) -> None:
        with explained("clean up", self.root):
            since = self.path(before).stat().st_mtime_ns
            for name in names:
                place, _, last = name.rpartition("/")
                for leftover in self.root.glob(f"{place}/.{last}.tmp".lstrip("/")):
                    with contextlib.suppress(FileNotFoundError):
                        if leftover.stat().st_mtime_ns < since:
                            leftover.unlink()


class _Appended:
    """A file that is appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained("open", path):
            self._file = path.open("ab", buffering=0)

    def add(self, data: bytes) -> None:
        with explained("append to", self._path):
            descriptor = self._file.fileno()
            position = os.fstat(descriptor).st_size
            try:
                if self._file.write(data) != len(data):
                    raise OSError(28, os.strerror(28))
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, position)  # never leave half of it behind
                raise

    def close(self) -> None:
        self._file.close()
