"""The one interface to what is durable: named bytes that appear whole or not at all.

Names are relative and have slashes, "journal/3-42.jsonl". What a store must bring is what object
stores have: create a name that is not there, put one whatever is there, read, list, delete. There
is no rename, no append and no lock. Two things follow from these, and a store that can do better
does (`LocalStore` in local.py):

- `reveal`: what was written under a hidden name appears under its own; a directory makes a link.
- `grow`: a name gets further parts, one at a time; a directory appends to the file.

What is written is durable when the call returns, unless it says otherwise. A write that raised may
have happened all the same: the next reader finds it or does not, and both must be right.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Protocol

from anabranch.errors import StorageError


class Growing(Protocol):
    """A name that gets further parts, by one writer."""

    def add(self, data: bytes) -> None:
        """Durable when this returns. Of a crash while it is written, a beginning may stay."""
        ...

    def close(self) -> None: ...


class Store(ABC):
    """Raises StorageError for whatever the place refuses."""

    @abstractmethod
    def create(self, name: str, parts: Iterable[Any]) -> int | None:
        """Write a name that is not there, and how many bytes; None, and nothing, if it is. Of
        several callers at once one wins."""

    @abstractmethod
    def put(
        self, name: str, parts: Iterable[Any], *, sync: bool = True, unhurried: bool = False
    ) -> int:
        """Write a name, whatever was there; how many bytes. Without `sync`, a crash of the
        machine may lose it. `unhurried`: nobody waits for it, and it must not hold others up."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """All of a name; None if it is not there."""

    @abstractmethod
    def opened(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A name to be read piece by piece; one that is not there is refused."""

    @abstractmethod
    def names(self, below: str) -> list[str]:
        """The next parts of all names that begin with `below/`; in no order, each once. What a
        writer left half-written may be among them, under a name of its own."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """A name, and all below it; that it is not there is no error."""

    @abstractmethod
    def where(self, name: str = "") -> str:
        """A name as people find it, for messages."""

    def has(self, name: str) -> bool:
        return self.read(name) is not None

    def reveal(self, hidden: str, name: str) -> None:
        """Let what is under `hidden` appear as `name`, unless that is there; `hidden` goes. Several
        callers may be at it."""
        data = self.read(hidden)
        if data is not None:
            self.create(name, [data])
            self.delete(hidden)
        elif not self.has(name):
            raise StorageError(f"{self.where(hidden)} is gone; it was to become {name}", path=name)

    def grow(self, name: str) -> Growing:
        """Add to a name that this writer has just created."""
        return _Parts(self, name)

    def read_grown(self, name: str) -> bytes | None:
        """A name and all that was added to it, one after the other."""
        first = self.read(name)
        if first is None:
            return None
        numbers = sorted(int(n) for n in self.names(name) if n.isdecimal())
        added = (self.read(f"{name}/{n}") for n in numbers)
        return b"".join([first, *(data for data in added if data is not None)])

    @abstractmethod
    def sweep(self, before: str, *names: str) -> None:
        """Remove what killed writers of `names` (patterns) left half-written, if it is older than
        the name `before`."""

    def token(self) -> str:
        """Part of a name that nobody else has, on this machine or another."""
        return uuid.uuid4().hex


class _Parts:
    """Further parts of a name, as names below it: `NAME/1`, `NAME/2`, …"""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._number = 0

    def add(self, data: bytes) -> None:
        self._number += 1
        name = f"{self._name}/{self._number}"
        if self._store.create(name, [data]) is None:
            raise StorageError(
                f"somebody else has written {self._store.where(name)}; look for who else uses the "
                "directory",
                path=name,
            )

    def close(self) -> None:
        pass
