"""Figures for the live view and the summary, folded from the progress of slices.

Pure: time is handed in. Latency is that of the slice's Spark job.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from anabranch.driver.progress import Progress, Totals
from anabranch.driver.queries import CapacityStatus, QueryStatus
from anabranch.model.recovery import Adjustment, Recovery
from anabranch.model.scaling import Decision

RATE_WINDOW_MS = 10_000
LATENCIES_KEPT = 1_000


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from the start of a slice's Spark job to the last node's report."""

    last: float
    median: float
    p99: float


class Meter:
    """The owner of the totals of one run."""

    def __init__(self) -> None:
        self.newest: Progress | None = None
        self.recoveries: list[Recovery] = []  # after the start
        self.recovering = False
        self.nodes: Mapping[str, str] = {}  # all there are: "", or why one has no work
        self.adjustments: list[Adjustment] = []
        self.adjusting = False
        self.decisions: list[Decision] = []
        self.remarks: list[str] = []
        self.queries: tuple[QueryStatus, ...] = ()
        self.capacity: CapacityStatus | None = None
        self.partial_plan: str | None = None  # while queries wait
        self.totals = Totals()
        self.slices = 0
        self.rows = 0
        self.late_rows = 0
        self.rows_to_sinks = 0
        self.rows_by_operator: dict[str, int] = {}
        self._first_ms: int | None = None
        self._recent: deque[tuple[int, int]] = deque()  # (end in ms, rows)
        self._seconds: deque[float] = deque(maxlen=LATENCIES_KEPT)

    def observe(self, slices: Iterable[Progress]) -> None:
        """Take in slices, oldest first; those seen before are skipped."""
        for progress in slices:
            if self.newest is None or progress.slice > self.newest.slice:
                self.newest = progress
                self._fold(progress)

    def _fold(self, progress: Progress) -> None:
        self.slices += 1
        self.rows += progress.rows_in
        self.late_rows += progress.late_rows
        self.rows_to_sinks += progress.rows_to_sinks
        for operator, rows in progress.rows_by_operator.items():
            self.rows_by_operator[operator] = self.rows_by_operator.get(operator, 0) + rows
        if self._first_ms is None:
            self._first_ms = progress.ended_ms - round(progress.seconds * 1_000)
        self._recent.append((progress.ended_ms, progress.rows_in))
        self._seconds.append(progress.seconds)

    def rate(self, now_ms: int) -> float:
        """Rows per second over the last ten seconds, or since the first slice if that is less."""
        if self._first_ms is None:
            return 0.0
        start = now_ms - RATE_WINDOW_MS
        while self._recent and self._recent[0][0] < start:
            self._recent.popleft()
        span = max(1_000, min(RATE_WINDOW_MS, now_ms - self._first_ms))
        return sum(rows for _, rows in self._recent) * 1_000 / span

    def latency(self) -> Latency | None:
        if not self._seconds:
            return None
        ordered = sorted(self._seconds)
        return Latency(self._seconds[-1], _quantile(ordered, 0.5), _quantile(ordered, 0.99))

    def lag_s(self, wall_ms: int) -> float | None:
        """How far the watermark is behind the wall clock; None without event time."""
        if self.newest is None or self.newest.watermark_us is None:
            return None
        return wall_ms / 1e3 - self.newest.watermark_us / 1e6


def _quantile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]
