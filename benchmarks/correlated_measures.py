"""What an episode of `correlated` is worth: latency and available queries over time, beside what
the planner's schedule and the load of the nodes would allow.

Latency is that of a slice a sink shows: from when its rows were written, in the mean, to when they
could be read; relative to what it was before the disaster. A query is available while that is below
1.2 and the next slice is not overdue. Who was down for T on a node with load u needs T·u/(1−u) to
catch up, however good the system is: that belongs to the ideal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anabranch.control.policies.shortage import LEAST, LONGEST
from anabranch.planning.recovery.exact import plan_exact
from anabranch.planning.recovery.order import CPU_CAP, Node, RecoveryOrder, schedule_recovery
from anabranch.planning.recovery.queries import RecoveryProblem
from benchmarks.correlated_episode import USUAL_S, Episode

AVAILABLE = 1.2  # relative latency below which a query is said to be available …
WITHIN_S = 3.0  # … in the mean of this time, as the paper has it
DONE_S = 0.25  # after the disaster, what was computed before it may still be shown
START_S = 3.0  # from a node being warm to the first output, as it is allowed to be

Floats = npt.NDArray[np.float64]
Span = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """What a sink showed: seconds after the disaster, and the relative latency then."""

    at: Floats
    relative: Floats
    gap: float  # usually between two slices

    @property
    def smooth(self) -> Floats:
        """The mean relative latency of each slice and of those shown soon after it."""
        ends = np.searchsorted(self.at, self.at + WITHIN_S)
        sums = np.concatenate([[0.0], np.cumsum(self.relative)])
        starts = np.arange(len(self.at))
        return np.asarray((sums[ends] - sums[starts]) / (ends - starts), dtype=np.float64)

    @property
    def available(self) -> list[Span]:
        """When it was available."""
        spans: list[Span] = []
        good = self.smooth < AVAILABLE
        for i in np.flatnonzero(good):
            begin, last = float(self.at[i]), i + 1 == len(self.at)
            end = begin + self.gap if last or not good[i + 1] else float(self.at[i + 1])
            if spans and spans[-1][1] >= begin:
                spans[-1] = spans[-1][0], end
            else:
                spans.append((begin, end))
        return spans

    def seconds(self, begin: float, end: float) -> float:
        """For how long it was available between these."""
        return sum(max(0.0, min(e, end) - max(b, begin)) for b, e in self.available)

    def available_from(self, after: float) -> float:
        """When it was so for the first time after this; infinite: never."""
        return min((max(b, after) for b, e in self.available if e > after), default=math.inf)


def lines(found: Episode) -> Mapping[str, Line]:
    """By sink."""
    return {sink: _line(found, *shown) for sink, shown in sorted(found.shown.items())}


def _line(found: Episode, written: Floats, shown: Floats) -> Line:
    """A slice is what was shown at one moment."""
    at, which, rows = np.unique(shown, return_inverse=True, return_counts=True)
    latency = at - np.bincount(which, written) / rows
    before = (at > found.killed - USUAL_S) & (at < found.killed)
    usual = float(np.median(latency[before])) if before.any() else math.nan
    gap = float(np.median(np.diff(at[before]))) if before.sum() > 1 else math.nan
    return Line(at - found.killed, latency / usual, gap)


# -- what could be -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Due:
    """When a query can come back: its nodes are there, and so full (`load` of the fullest)."""

    at: float
    load: float

    @property
    def catch_up(self) -> float:
        """What it needs for that, having been down until then."""
        return self.at * self.load / (1 - self.load) if self.load < 1 else math.inf

    @property
    def live(self) -> float:
        return self.at + self.catch_up


def schedule(found: Episode, cap: float) -> Mapping[str, Due]:
    """By sink that lost something, for the nodes that came when they came, by measured loads; nodes
    are filled up to `cap`."""
    lost = {s: needs - found.survivors.keys() for s, needs in found.needs.items()}
    lost = {s: needs for s, needs in lost.items() if needs}
    costs = {p: found.loads[p] for needs in lost.values() for p in needs}
    problem = RecoveryProblem(costs, lost, {s: found.priorities[s] for s in lost})
    used: dict[str, float] = {}
    for partition, node in found.survivors.items():
        used[node] = used.get(node, 0.0) + found.loads[partition]
    arrivals = [Node(n, 1.0, load) for n, load in sorted(used.items())]
    times = [0.0] * len(arrivals) + [at - found.killed for at in found.warm]
    arrivals += [Node(f"new {i}", 1.0) for i in range(len(found.warm))]
    homes, due = dict(found.survivors), {}
    plans = schedule_recovery(problem, arrivals, _exact, cap)
    for at, plan in zip(times, plans, strict=True):
        homes |= plan.placement
        for partition, node in plan.placement.items():
            used[node] = used.get(node, 0.0) + found.loads[partition]
        for sink in plan.recovered:
            due[sink] = Due(at, max(used[homes[p]] for p in found.needs[sink]))
    return due


def _exact(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    return plan_exact(problem, resources).plan


# -- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measures:
    """Of one episode; seconds after the disaster."""

    lines: Mapping[str, Line]
    due: Mapping[str, Due]
    unhurt: frozenset[str]
    warm: Sequence[float]  # when nodes were
    measured: float  # until then
    until: float  # all nodes are there and all queries could be back, or the measurement ended

    @staticmethod
    def of(found: Episode, alone: bool = False) -> Measures:
        """The ideal is that of the planner, whose slices take what they take beside the work of
        nodes; `alone`: as if they took nothing."""
        room = max(LEAST * CPU_CAP, LONGEST - found.fixed)
        due = schedule(found, CPU_CAP if alone else min(CPU_CAP, room))
        measured = found.ended - found.killed
        warm = [at - found.killed for at in found.warm]
        lives = [due[s].live if s in due else math.inf for s in found.needs.keys() - found.unhurt]
        until = min(measured, max([*lives, *warm], default=0.0) or measured)
        return Measures(lines(found), due, found.unhurt, warm, measured, until)

    @property
    def lost(self) -> frozenset[str]:
        """Queries that lost something."""
        return frozenset(self.lines) - self.unhurt

    def could(self, sink: str) -> float:
        """From when on a query could be available; infinite: there was no room for it."""
        if sink in self.unhurt:
            return 0.0
        return self.due[sink].live if sink in self.due else math.inf

    def area(self, until: float) -> float:
        """Query-seconds in which queries were available."""
        return sum(line.seconds(0.0, until) for line in self.lines.values())

    @property
    def ideal_area(self) -> float:
        return sum(max(0.0, self.until - self.could(s)) for s in self.lines)

    @property
    def of_ideal(self) -> float:
        return self.area(self.until) / self.ideal_area if self.ideal_area else math.nan

    @property
    def back_s(self) -> float:
        """Until the last query was available for the first time since it was lost."""
        lost = (self.lines[s] for s in self.lost)
        return max((line.available_from(line.gap) for line in lost), default=0.0)

    @property
    def first_query_s(self) -> float:
        """To the first output of a query that lost a partition."""
        lost = [self.lines[s] for s in self.lost]
        return min((float(at) for x in lost for at in x.at if at > DONE_S), default=math.inf)

    @property
    def after_arrival(self) -> list[float]:
        """Per query that an arrival brought back: how long that took, as a multiple of what it
        is allowed to."""
        return [
            (self.lines[s].available_from(due.at) - due.at) / (START_S + due.catch_up)
            for s, due in sorted(self.due.items())
            if due.at > 0
        ]

    @property
    def live_latency(self) -> Floats:
        """Relative, of all slices that queries which lost nothing have shown since."""
        parts = [self.lines[s].relative[self.lines[s].at > 0] for s in sorted(self.unhurt)]
        return np.concatenate(parts) if parts else np.array([])

    def latency(self, at: Floats, sinks: Collection[str]) -> Floats:
        """The mean relative latency of these queries at these times: of the slice that each shows
        next. Without queries there is none."""
        each = [np.full(len(at), np.nan)] if not sinks else []
        for sink in sorted(sinks):
            line = self.lines[sink]
            after = np.minimum(np.searchsorted(line.at, at), len(line.at) - 1)
            each.append(line.relative[after])
        return np.asarray(np.mean(each, axis=0), dtype=np.float64)

    def available(self, at: Floats) -> Floats:
        """How many queries are, at these times."""
        return _count([s for line in self.lines.values() for s in line.available], at)

    def ideal(self, at: Floats) -> Floats:
        return _count([(self.could(s), math.inf) for s in self.lines], at)


def _count(spans: Sequence[Span], at: Floats) -> Floats:
    return np.array([sum(b <= t < e for b, e in spans) for t in at], dtype=np.float64)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.inf
