"""Which keys may have something due: deadlines in sorted runs, without looking at all keys.

A key may stand in the index with a deadline that has since moved; whoever takes it out looks at the
key's state and puts it back. Runs of similar size are merged, so there are logarithmically many and
an entry is copied logarithmically often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anabranch.operators.grouping import group_rows
from anabranch.operators.hashing import Hashes

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
        due = _joined([run.part(slice(0, run.due(deadline))) for run in self._runs])
        once = group_rows(due.first, due.second).firsts
        return due.first[once], due.second[once]

    def remove(self, deadline: int) -> None:
        """Forget all entries at or before the deadline."""
        left = [
            run if not run.due(deadline) else run.part(slice(run.due(deadline), None))
            for run in self._runs
        ]
        self._runs = [run for run in left if len(run)]

    @property
    def nbytes(self) -> int:
        return sum(24 * len(run) for run in self._runs)


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
