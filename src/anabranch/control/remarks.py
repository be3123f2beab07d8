"""What a job says of itself that its user should know: once for each operator, when it is sure.

- Rows were dropped as late, or put aside: with the first of them.
- State grows and nothing will end that: only of operators that keep keys for ever (state that ends
  with a window, or with a time to live, fills up and then stays), once it has grown from checkpoint
  to checkpoint for a long time, in the second half of it nearly as much as in the first. Keys that
  repeat make growth slow down, so a known set of keys gives no remark.
- The job falls behind: for a minute every batch took longer than the interval between two, and they
  took longer and longer. A batch has all rows that came during the one before, so what was held up
  (by a start, or a recovery) shows as batches that get shorter, and a slow job that keeps up as
  batches that stay as they are.

No clock: slices carry the times at which they ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

CHECKPOINTS = 30  # five minutes by default
STEADY = 0.9  # of the growth in the first half: less in the second is a sign of levelling
GROWN = 0.2  # of the state: less than that is not worth a word
BEHIND_MS = 60_000
BATCHES = 6  # that a trend takes at the least
SLOWER = 1.25  # from the first third of them to the last


@dataclass(frozen=True, slots=True)
class Seen:
    """A slice that has happened. State and CPU seconds are by the first operator of a chain."""

    ended_ms: int
    batch: int | None
    seconds: float
    checkpoint_slice: int
    late: Mapping[str, int] = field(default_factory=dict)
    dead: Mapping[str, int] = field(default_factory=dict)
    state_rows: Mapping[str, int] = field(default_factory=dict)
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    sources_cpu_s: float = 0.0  # with all that is computed before the first shuffle


class Remarks:
    """Give it every slice; what it returns is new."""

    def __init__(
        self,
        *,
        interval_ms: int | None = None,  # between two batches; None: they come as they can
        endless: frozenset[str] = frozenset(),  # chains with state that is kept for ever
        wanted: frozenset[str] = frozenset(),  # operators whose late rows are not dropped
        dead_letters: str | None = None,  # the sink they go to
    ) -> None:
        self._interval_s = None if interval_ms is None else interval_ms / 1000
        self._endless = endless
        self._wanted = wanted
        self._dead_letters = dead_letters
        self._said: set[tuple[str, str]] = set()
        self._checkpoint = 0
        self._sizes: dict[str, deque[int]] = {}  # at the newest checkpoints
        self._batches: deque[tuple[int, int, float]] = deque()  # number, end in ms, seconds

    def observe(self, seen: Seen) -> list[str]:
        return [*self._lost_rows(seen), *self._growth(seen), *self._falling_behind(seen)]

    def interrupted(self) -> None:
        """Partitions were restored or moved: what comes next catches up."""
        self._batches.clear()

    def totals(self, late: Mapping[str, int], dead: Mapping[str, int]) -> list[str]:
        """What there is to say at the end of a run."""
        dropped = {n: rows for n, rows in late.items() if n not in self._wanted}
        return [
            *(f"in all, {_rows(n)} came too late for {op!r}" for op, n in sorted(dropped.items())),
            *(f"in all, {op!r} put {_rows(n)} aside" for op, n in sorted(dead.items())),
        ]

    def _lost_rows(self, seen: Seen) -> list[str]:
        found = []
        for operator, rows in seen.late.items():
            if rows and operator not in self._wanted and self._first("late", operator):
                found.append(
                    f"{operator!r} dropped {_rows(rows)} as too late; if there are many, give the "
                    "source a larger watermark= or the window a lateness=, or keep such rows with "
                    ".late(...). The end of the run says how many there were in all"
                )
        for operator, rows in seen.dead.items():
            if rows and self._first("dead", operator):
                found.append(
                    f"{operator!r} put {_rows(rows)} aside that it cannot take; the reasons are in "
                    f"the sink {self._dead_letters!r}. The end of the run says how many there were "
                    "in all"
                )
        return found

    def _growth(self, seen: Seen) -> list[str]:
        if seen.checkpoint_slice == self._checkpoint:
            return []
        self._checkpoint = seen.checkpoint_slice
        found = []
        for chain in sorted(self._endless & seen.state_rows.keys()):
            sizes = self._sizes.setdefault(chain, deque(maxlen=CHECKPOINTS + 1))
            sizes.append(seen.state_rows[chain])
            if _grows(sizes) and self._first("state", chain):
                found.append(
                    f"the state of {chain!r} grows with every checkpoint, to {sizes[-1]:,} rows by "
                    f"now from {sizes[0]:,} {CHECKPOINTS} checkpoints ago; if new keys never end, "
                    "give it a ttl=, or aggregate by window"
                )
        return found

    def _falling_behind(self, seen: Seen) -> list[str]:
        if self._interval_s is None or seen.batch is None:
            return []
        if self._batches and self._batches[-1][0] == seen.batch:  # cut into several slices
            seconds = self._batches.pop()[2] + seen.seconds
        else:
            seconds = seen.seconds
        self._batches.append((seen.batch, seen.ended_ms, seconds))
        while len(self._batches) > BATCHES and self._batches[1][1] <= seen.ended_ms - BEHIND_MS:
            self._batches.popleft()
        took = [s for _, _, s in self._batches]
        lasted_ms = seen.ended_ms - self._batches[0][1]
        if lasted_ms < BEHIND_MS or not _slower(took, self._interval_s):
            return []
        if not self._first("behind", ""):
            return []
        return [
            f"the job falls behind: a batch takes {took[-1]:.1f} s by now, {took[0]:.1f} s a while "
            f"ago, and should take {self._interval_s:g} s. {_busiest(seen)}"
        ]

    def _first(self, kind: str, operator: str) -> bool:
        """Is it the first time that this is said?"""
        if (kind, operator) in self._said:
            return False
        self._said.add((kind, operator))
        return True


def _grows(sizes: Sequence[int]) -> bool:
    if len(sizes) <= CHECKPOINTS:
        return False
    first, middle, last = sizes[0], sizes[CHECKPOINTS // 2], sizes[-1]
    always = all(sizes[i] < sizes[i + 1] for i in range(CHECKPOINTS))
    return always and last - middle >= STEADY * (middle - first) and last - first >= GROWN * last


def _slower(took: Sequence[float], interval_s: float) -> bool:
    if len(took) < BATCHES or min(took) <= interval_s:
        return False
    third = len(took) // 3
    first, middle, last = fmean(took[:third]), fmean(took[third:-third]), fmean(took[-third:])
    return first < middle < last and last >= SLOWER * first


def _busiest(seen: Seen) -> str:
    """Who uses most CPU, and what would help."""
    chain = max(seen.cpu_s, key=lambda c: seen.cpu_s[c], default=None)
    if chain is None or seen.cpu_s[chain] < seen.sources_cpu_s:
        return "What comes before the first key uses most CPU; give the job more nodes"
    return f"{chain!r} uses most CPU; give it more partitions, and the job more nodes"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"
