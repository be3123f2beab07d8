"""When keys move, and where (paper 002, section 4): from measurements to layouts.

What moves is a key group, with all that its keys have. Rows are counted by key group where they
arrive; a row costs the same in all groups of an operator, so that what differs from measurement to
measurement is the keys, and not what else a machine is busy with. If the busiest partition of an
operator got more than its share in two measurements in a row, FTLB plans which groups it gives
away, for as little state as possible. A chain that does not matter is left alone, and so is one
that a plan would help but little: a key group cannot be divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from anabranch.control.policies.balance import Balance
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement, count_of, even_groups
from anabranch.model.reports import NodeReport
from anabranch.model.scaling import Decision
from anabranch.planning.balance.ftlb import plan_ftlb
from anabranch.planning.balance.load import BalancePlan, BalanceProblem, Limits, judged
from anabranch.planning.balance.routing import Assignment, Ints

IN_A_ROW = 2  # measurements that count as one observation
MATTERS = 0.1  # of the time: a partition that is busy for less keeps nobody waiting
WORTH = 0.2  # of what the busiest partition has too much: a plan that takes less is none


@dataclass
class _Sums:
    """The measurement in hand, under one placement."""

    placement: int
    began_ms: int
    rows: dict[str, Counter[int]] = field(default_factory=dict)  # by chain and key group
    busy_s: Counter[PartitionId] = field(default_factory=Counter)
    state: dict[PartitionId, int] = field(default_factory=dict)  # bytes, at its end


@dataclass(frozen=True)
class _Moved:
    """A plan for a chain: its partitions have `skew` times the mean, now and then."""

    groups: tuple[int, ...]
    skew: tuple[float, float]
    moved: int  # key groups
    state: float  # share of it that moves


class Balancer:
    """Show it every slice, then ask it; it has no opinion before it has measured twice."""

    def __init__(self, config: Balance) -> None:
        self._config = config
        self._sums: _Sums | None = None
        self._skewed: Counter[str] = Counter()  # measurements in a row
        self._calm_until_ms: int | None = None
        self._last = ""  # what was said last

    def observe(self, placement: Placement, reports: Sequence[NodeReport], now_ms: int) -> None:
        """Fold in a slice that has happened. The first one under a placement only starts the
        clock."""
        sums = self._sums
        if sums is None or sums.placement != placement.version:
            self._sums = _Sums(placement.version, now_ms)
            self._skewed.clear()
            return
        for report in reports:
            for partition, seen in report.partitions.items():
                sums.rows.setdefault(partition.chain, Counter()).update(seen.rows_by_group)
                sums.busy_s[partition] += seen.busy_s  # type: ignore[assignment]
                sums.state[partition] = seen.state_bytes

    def decide(
        self, placement: Placement, now_ms: int, wall_ms: int
    ) -> tuple[Decision, Mapping[str, tuple[int, ...]]] | None:
        """At the end of a measurement: what to say, and which chains get another layout."""
        sums = self._sums
        if sums is None or sums.placement != placement.version:
            return None
        seconds = (now_ms - sums.began_ms) / 1000
        if 1000 * seconds < self._config.ms("interval"):
            return None
        self._sums = _Sums(placement.version, now_ms)
        skewed = {c for c in placement.groups if self._is_skewed(c, placement, sums, seconds)}
        self._skewed = Counter({c: self._skewed[c] + 1 for c in skewed})
        if self._calm_until_ms is not None and now_ms < self._calm_until_ms:
            return None
        due = sorted(c for c, n in self._skewed.items() if n >= IN_A_ROW)
        plans = {c: self._planned(c, placement, sums) for c in due}
        worth = {c: p for c, p in plans.items() if _is_worth(p)}
        if not plans:
            return None
        decision = self._said(worth, wall_ms) if worth else self._refused(plans, wall_ms)
        if decision.what == self._last and (decision.dry_run or decision.kind == "none"):
            return None  # said already
        self._last = decision.what
        self._calm_until_ms = now_ms + self._config.ms("cool_down")
        return decision, {} if decision.dry_run else {c: p.groups for c, p in worth.items()}

    def _is_skewed(self, chain: str, placement: Placement, sums: _Sums, seconds: float) -> bool:
        rows = _by_partition(placement.groups[chain], sums.rows.get(chain, Counter()))
        mean = rows.sum() / len(rows)
        busiest = max((s for p, s in sums.busy_s.items() if p.chain == chain), default=0.0)
        too_much = len(rows) > 1 and rows.max() > (1 + self._config.theta_max) * mean
        return bool(too_much and busiest >= MATTERS * seconds)

    def _planned(self, chain: str, placement: Placement, sums: _Sums) -> _Moved:
        groups = placement.groups[chain]
        tasks, size = count_of(groups), len(groups)
        rows = np.array([sums.rows[chain][g] for g in range(size)], dtype=np.float64)
        had = Counter(groups)
        bytes_of = {i: sums.state.get(PartitionId(chain, i), 0) / had[i] for i in had}
        limits = Limits(self._config.theta_max, size, self._config.theta_min)
        problem = BalanceProblem(
            rows,
            np.array([bytes_of[i] for i in groups], dtype=np.float64),
            _assignment(groups, tasks),
            _assignment(even_groups(size, tasks), tasks),
            limits,
        )
        plan = plan_ftlb(problem)
        after = _whole(plan, groups, tasks)
        before = judged(problem, problem.current).skew
        moved = sum(a != b for a, b in zip(groups, after, strict=True))
        state = float(problem.state.sum())
        share = plan.migration.cost / state if state else moved / size
        return _Moved(after, (before, _skew(after, rows)), moved, share)

    def _said(self, plans: Mapping[str, _Moved], wall_ms: int) -> Decision:
        what = "; ".join(
            f"{p.moved} key groups of {c} move" if p.moved > 1 else f"1 key group of {c} moves"
            for c, p in plans.items()
        )
        why = "; ".join(
            f"a partition of {c} gets {p.skew[0]:.2f} times the mean of them (limit "
            f"{1 + self._config.theta_max:.2f}), {p.skew[1]:.2f} then; {p.state:.1%} of their "
            "state moves"
            for c, p in plans.items()
        )
        return self._decision(wall_ms, "balance", what, why)

    def _refused(self, plans: Mapping[str, _Moved], wall_ms: int) -> Decision:
        names = ", ".join(plans)
        why = "; ".join(
            f"a partition of {c} gets {p.skew[0]:.2f} times the mean of them, and no other way to "
            "share out its key groups is much better: one key, or the keys of one group, are most "
            "of it"
            for c, p in plans.items()
        )
        return self._decision(wall_ms, "none", f"the keys of {names} stay where they are", why)

    def _decision(self, wall_ms: int, kind: str, what: str, why: str) -> Decision:
        return Decision(wall_ms, kind, what, why, dry_run=self._config.dry_run, by="balancer")


def _is_worth(plan: _Moved) -> bool:
    before, after = plan.skew
    return before - after >= WORTH * (before - 1)


def _by_partition(groups: Sequence[int], rows: Counter[int]) -> Ints:
    counts = [rows[g] for g in range(len(groups))]
    return np.bincount(groups, counts, count_of(groups)).astype(np.int64)


def _assignment(groups: Sequence[int], tasks: int) -> Assignment:
    active = np.array(groups, dtype=np.int64)
    return Assignment(active, np.empty((len(groups), 0), dtype=np.int64), tasks)


def _skew(groups: Sequence[int], rows: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    loads = np.bincount(groups, rows, count_of(groups))
    return float(loads.max() / loads.mean()) if loads.sum() else 1.0


def _whole(plan: BalancePlan, before: Sequence[int], tasks: int) -> tuple[int, ...]:
    """As planned, but that every partition keeps a key group: it has a number for what it has."""
    after = [int(task) for task in plan.assignment.active]
    held = Counter(after)
    for task in (t for t in range(tasks) if not held[t]):
        mine = next(g for g, t in enumerate(before) if t == task)
        held[after[mine]] -= 1
        after[mine] = task
        held[task] += 1
    return tuple(after)
