"""How fast chains make up for what they lack, on nodes that have a part in slices, too.

A part of a replay takes a share of their time there, from one slice to the next, and slices may
wait for it. If what is left does not get less, that share is too small: it is doubled, up to a
limit. Slices that are late follow each other more slowly, and parts are larger then, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

SHARED = 0.2  # of the time from slice to slice
MOST = 2.0  # of an interval, and of that time
LATEST = 20  # intervals: slices that are later than that may have waited for rows, or nodes
IN_VAIN = 5  # parts after which no less is left
MOST_WAITED_FOR = 2  # of the slices that what comes back has yet to make up for, when …
NEARLY = 3  # … that number of parts has not brought it down to one


class Pace:
    """Of the chains that come back."""

    def __init__(self, interval_ms: int) -> None:
        self._share = SHARED
        self._interval_ms = self._period_ms = interval_ms
        self._began_ms: int | None = None  # the newest slice
        self._least = math.inf  # rows that were left to replay, and the parts since that was so
        self._vain = 0
        self._nearly = 0  # parts in a row after which something was nearly there
        self._furthest: dict[str, int] = {}  # the slice that a chain came to, however often

    def begin(self) -> None:
        """Others come back, too."""
        self._share, self._least, self._vain = SHARED, math.inf, 0

    def slice_ran(self, began_ms: int) -> None:
        before_ms, self._began_ms = self._began_ms, began_ms
        if before_ms is not None:
            self._period_ms = min(
                max(self._interval_ms, began_ms - before_ms), LATEST * self._interval_ms
            )

    @property
    def shared_s(self) -> float:
        """What a part takes of a node that has a part in slices."""
        return min(self._share * self._period_ms, MOST * self._interval_ms) / 1000

    @property
    def least_s(self) -> float:
        """What it takes where there is no need for more."""
        return min(SHARED * self._period_ms, MOST * self._interval_ms) / 1000

    @property
    def waited_for(self) -> int:
        """Slices that others may have to wait for, until these are made up for."""
        return MOST_WAITED_FOR if self._nearly >= NEARLY else 1

    def nearly(self, there: object) -> None:
        """Is something, after this part?"""
        self._nearly = self._nearly + 1 if there else 0

    def left(self, rows: int) -> None:
        """A part is to follow."""
        self._least, self._vain = (rows, 0) if rows < self._least else (self._least, self._vain + 1)
        if self._vain > IN_VAIN:
            self._vain, self._share = 0, min(MOST, 2 * self._share)

    @property
    def is_highest(self) -> bool:
        return self._share >= MOST

    def came_to(self, ends: Mapping[str, int]) -> bool:
        """Is a chain further than ever?"""
        before, self._furthest = self._furthest, dict(self._furthest)
        for chain, end in ends.items():
            self._furthest[chain] = max(end, before.get(chain, 0))
        return self._furthest != before

    def back(self, chains: Collection[str]) -> None:
        """They have a part in slices again."""
        self._furthest = {c: n for c, n in self._furthest.items() if c not in chains}
