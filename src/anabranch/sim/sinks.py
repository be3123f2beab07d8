"""The sinks of a simulated job: the real two steps, with rows that are tuples, and targets that
outlive drivers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.errors import StorageError
from anabranch.model.reports import Staged
from anabranch.sim.payload import Rows, decode, encode
from anabranch.sinks.base import Home
from anabranch.sinks.staged import Held, StagedSink
from anabranch.storage.store import Store


@dataclass(frozen=True)
class SimHome(Home):
    """Whose sink it is, with the simulated store in place of a directory."""

    within: Store | None = None

    @property
    def store(self) -> Store:
        assert self.within is not None
        return self.within


@dataclass
class Target:
    """Where the rows of one sink go. It remembers the newest slice it has, whose it is and which
    rows that were; one that `forgets`, as a user's function does, remembers nothing."""

    sink: str
    forgets: bool = False
    owner: int = 0  # the newest generation that has claimed it
    held: Held = field(default_factory=lambda: Held("a place"))
    # Called with a slice that is about to be shown, and its rows by writer; may raise.
    on_given: Callable[[str, int, dict[str, Rows]], None] = lambda sink, slice_no, rows: None
    function: Callable[[str], None] = lambda sink: None  # the user's, if it is one
    # Called right before and right after; may raise, too.
    on_moment: Callable[[str], None] = lambda sink: None


class SimSink(StagedSink):
    def __init__(self, target: Target) -> None:
        self._target = target

    def _place(self) -> str:
        return f"the target of {self._target.sink}"

    def _look(self) -> Held | None:
        return None if self._target.forgets else self._target.held

    def _claim(self, newest: int) -> Held:
        self._target.owner = max(self._target.owner, self._generation)
        return Held("a function") if self._target.forgets else self._target.held

    def stage(self, name: str, table: Any, slice_no: int, generation: int, writer: str) -> Staged:
        path = self._attempt(slice_no, generation, writer)
        if self.home.store.create(str(path), [encode(table)]) is None:
            raise StorageError(f"{path} is there already")
        return Staged(name, writer, len(table), path=self._journalled(path))

    def _deliver(self, slice_no: int, exposure: str, files: Sequence[Path]) -> None:
        target = self._target
        if not target.forgets and self._has(target.held, slice_no, exposure):
            return
        self._refuse_missing(slice_no, files)
        rows: dict[str, Rows] = {}
        for path in files:
            data = self.home.store.read(str(path))
            writer = path.name.partition(".")[0]
            rows[writer] = (*rows.get(writer, ()), *decode(data))
        self._still_mine()
        if target.owner > self._generation and not target.forgets:
            raise StorageError(f"{self._place()} belongs to a newer driver")
        target.on_moment(target.sink)
        target.function(target.sink)
        target.on_given(target.sink, slice_no, rows)
        target.held = Held(target.held.place, slice_no, exposure)
        target.on_moment(target.sink)

    def _drop(self, directory: Path) -> None:
        self.home.store.delete(str(directory))


def bound_sinks(targets: Mapping[str, Target], job: str, store: Store) -> dict[str, SimSink]:
    """The sinks of a job, as its driver and its nodes each have them."""
    sinks = {name: SimSink(target) for name, target in targets.items()}
    for name, sink in sinks.items():
        sink.bind(SimHome(job, name, Path(), within=store))
    return sinks
