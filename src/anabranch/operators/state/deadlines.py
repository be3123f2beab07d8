"""Which keys have something due, without looking at all keys: deadlines in sorted runs.

A key may stand in the index with a deadline that has since moved; the one who takes it out looks
at the key's state and puts it back. Runs of similar size are merged, so there are logarithmically
many and an entry is copied logarithmically often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import Hashes
from anabranch.operators.state.keyed_table import NEVER, KeyedTable, no_slots
from anabranch.operators.state.row_log import ABSENT, Slots

Hashed = tuple[Hashes, Hashes]


@dataclass(frozen=True, slots=True)
class _Run:
    """Entries in order of their deadline."""

    deadlines: npt.NDArray[np.int64]
    first: Hashes
    second: Hashes

    def __len__(self) -> int:
        return len(self.deadlines)

    def part(self, rows: slice) -> _Run:
        return _Run(self.deadlines[rows].copy(), self.first[rows].copy(), self.second[rows].copy())

    def due(self, until: int) -> int:
        return int(np.searchsorted(self.deadlines, until, side="right"))


class DeadlineIndex:
    """Hashes of keys by deadline."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def add(self, deadlines: npt.NDArray[np.int64], keys: Hashed) -> None:
        if not len(deadlines):
            return
        new = _sorted(_Run(deadlines, *keys))
        while self._runs and len(self._runs[-1]) <= 2 * len(new):
            new = _sorted(_joined([self._runs.pop(), new]))
        self._runs.append(new)

    def until(self, deadline: int) -> Hashed:
        """Distinct keys with an entry at or before the deadline."""
        _, due = self.entries(deadline)
        once = group_rows(*due).firsts
        return due[0][once], due[1][once]

    def entries(self, deadline: int) -> tuple[npt.NDArray[np.int64], Hashed]:
        """All entries at or before the deadline."""
        due = _joined([run.part(slice(0, run.due(deadline))) for run in self._runs])
        return due.deadlines, (due.first, due.second)

    def remove(self, deadline: int) -> None:
        """Forget all entries at or before the deadline."""
        left = [
            run if not run.due(deadline) else run.part(slice(run.due(deadline), None))
            for run in self._runs
        ]
        self._runs = [run for run in left if len(run)]

    @property
    def first(self) -> int | None:
        """The earliest deadline."""
        return min((int(run.deadlines[0]) for run in self._runs), default=None)

    @property
    def nbytes(self) -> int:
        return sum(24 * len(run) for run in self._runs)


class Alarms:
    """The keys of a table whose moment, an int64 value, has come; NEVER stands for none.

    Invariant: a key with a moment has one entry in the index that counts, at its alarm, a further
    value of the key, at or before the moment. So a moment may be moved away again and again at no
    cost, and entries left over by keys that were deleted count for nothing.
    """

    def __init__(self, table: KeyedTable, moment: str, alarm: str, delay: int = 0) -> None:
        self._table = table
        self._moment = moment
        self._alarm = alarm
        self._delay = delay  # from the value to the moment
        self._index = DeadlineIndex()

    def due(self, now: int | None) -> Slots:
        """Slots whose moment is at or before now, ascending."""
        slots = self._ringing(now)
        return slots if now is None else slots[self.moments(slots) <= now]

    def moments(self, slots: Slots) -> npt.NDArray[np.int64]:
        values = self._table.value(self._moment, slots)
        return np.where(values == NEVER, NEVER, values + self._delay)

    def watch(self, slots: Slots) -> None:
        """Call for slots that are new, or have an earlier moment than before."""
        moments = self.moments(slots)
        early = moments < self._table.value(self._alarm, slots)
        slots, moments = slots[early], moments[early]
        self._table.write(slots, {self._alarm: moments}, dirty=False)
        self._index.add(moments, self._table.hashes(slots))

    def settle(self, now: int | None) -> None:
        """Take passed alarms out; keys whose moment is still to come, or has come to nothing, get
        a new one. Call when the change that `due` led to is made."""
        slots = self._ringing(now)
        if now is not None:
            self._index.remove(now)
        self._table.write(slots, {self._alarm: np.full(len(slots), NEVER)}, dirty=False)
        self.watch(slots)

    @property
    def first(self) -> int | None:
        """No moment comes before this one; there may be none at it, since moments move away."""
        return self._index.first

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def _ringing(self, now: int | None) -> Slots:
        if now is None:
            return no_slots()
        deadlines, keys = self._index.entries(now)
        slots = self._table.find(*keys)
        held = slots != ABSENT
        slots, deadlines = slots[held], deadlines[held]
        return np.unique(slots[self._table.value(self._alarm, slots) == deadlines])


def _joined(runs: list[_Run]) -> _Run:
    none = np.empty(0, dtype=np.uint64)
    return _Run(
        np.concatenate([np.empty(0, dtype=np.int64), *(run.deadlines for run in runs)]),
        np.concatenate([none, *(run.first for run in runs)]),
        np.concatenate([none, *(run.second for run in runs)]),
    )


def _sorted(run: _Run) -> _Run:
    order = np.argsort(run.deadlines, kind="stable")
    return _Run(run.deadlines[order], run.first[order], run.second[order])
