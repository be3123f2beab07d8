"""A store in memory that survives drivers and nodes, and does what stores do.

It tears, loses and refuses as its `Weather` says. As an object store it knows only what the
interface asks for; as a directory it appends, and an append may be torn.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from anabranch.errors import StorageError
from anabranch.storage.store import Growing, Store


class Weather:
    """What becomes of what is written and read; subclasses say when it is bad."""

    def write(self, name: str, data: bytes, store: SimStore) -> None:
        """Called before a write of `data` to a name that is not there, or to the end of it; what
        it raises comes instead of it."""

    def written(self, name: str) -> None:
        """Called after a write; what it raises comes though it has happened."""

    def read(self, name: str, data: bytes) -> bytes | None:
        """What a reader gets to see."""
        return data


class SimStore(Store):
    def __init__(self, weather: Weather | None = None, appends: bool = True) -> None:
        self.weather = weather or Weather()
        self.files: dict[str, bytes] = {}
        self._below: dict[str, dict[str, None]] = {}  # in the order in which they came
        self._appends = appends
        self._tokens = 0
        self.changes: Counter[str] = Counter()  # by the first part of names

    def create(self, name: str, parts: Iterable[Any]) -> int | None:
        data = b"".join(parts)
        self.weather.write(name, data, self)
        if name in self.files:
            return None
        self.write(name, data)
        self.weather.written(name)
        return len(data)

    def put(
        self, name: str, parts: Iterable[Any], *, sync: bool = True, unhurried: bool = False
    ) -> int:
        data = b"".join(parts)
        self.weather.write(name, data, self)
        self.write(name, data)
        self.weather.written(name)
        return len(data)

    def write(self, name: str, data: bytes) -> None:
        """Whatever the weather."""
        self.changes[name.partition("/")[0]] += 1
        if name not in self.files:
            below = name
            while below:
                below, _, last = below.rpartition("/")
                beside = self._below.setdefault(below, {})
                if last in beside:
                    break
                beside[last] = None
        self.files[name] = data

    def read(self, name: str) -> bytes | None:
        data = self.files.get(name)
        return None if data is None else self.weather.read(name, data)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        data = self.read(name)
        if data is None:
            raise StorageError(f"cannot read {name}: it is not there", path=name)
        yield io.BytesIO(data)

    def names(self, below: str) -> list[str]:
        return list(self._below.get(below, ()))

    def delete(self, name: str) -> None:
        self.changes[name.partition("/")[0]] += 1
        for last in self.names(name):
            self.delete(f"{name}/{last}")
        if self.files.pop(name, None) is None and name not in self._below:
            return
        self._below.pop(name, None)
        while name:
            name, _, last = name.rpartition("/")
            self._below[name].pop(last, None)
            if self._below[name] or name in self.files:
                return
            del self._below[name]

    def where(self, name: str = "") -> str:
        return name or "the simulated store"

    def has(self, name: str) -> bool:
        return name in self.files

    def grow(self, name: str) -> Growing:
        return _Appended(self, name) if self._appends else super().grow(name)

    def sweep(self, before: str, *names: str) -> None:
        """Nothing half-written has a name here."""

    def token(self) -> str:
        self._tokens += 1
        return f"{self._tokens:08d}"


class _Appended:
    def __init__(self, store: SimStore, name: str) -> None:
        self._store = store
        self._name = name

    def add(self, data: bytes) -> None:
        store, name = self._store, self._name
        store.weather.write(name, data, store)
        if name in store.files:  # otherwise it was deleted under this writer's hands
            store.write(name, store.files[name] + data)
        store.weather.written(name)

    def close(self) -> None:
        pass
