"""Which partitions back up so that any lost node is back within a bound (paper 003, on a live job).

T(v) of a partition is what it takes to restore its state and to run again the slices of one
checkpoint interval; both are measured as the job runs. The cost of a backup is the bytes per second
it would keep. A node takes all its partitions and their backups with it, so the plan is the one for
lost nodes, not for lost tasks. What a recovery costs whatever it restores is taken off the bound: a
Spark job, which takes what the jobs of slices take beside their work, and a rest that is learnt
from the recoveries that happen. So is how fast state is restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from anabranch.errors import PlanningError
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan
from anabranch.model.reports import NodeReport
from anabranch.planning.backups.cover import Effort
from anabranch.planning.backups.exact import replan_backups
from anabranch.planning.backups.plan import BackupProblem, evaluate
from anabranch.planning.graph import TaskGraph

RESTORE_BYTES_PER_S = 200e6  # until a restore was seen that says something:
MIN_RESTORED_BYTES = 10e6
FIXED_S = 0.2  # … and until a recovery was
SMOOTHING = 0.2  # weight of the newest slice in a mean
PLAN_EVERY = 20  # slices
# A slice waits for the plan, so the solver gets what takes it less than 0.1 s: enough to plan some
# twenty partitions with proof. For more of them the greedy plan is taken.
EFFORT = Effort(rows=50, nodes=16)


@dataclass(frozen=True, slots=True)
class BackupChoice:
    """Who backs up, and in how many seconds each partition is predicted to be back."""

    backups: frozenset[PartitionId]
    predicted_s: Mapping[PartitionId, float]
    problem: str = ""  # why the bound cannot be met, if it cannot


@dataclass(slots=True)
class _Measured:
    cpu_s: float = 0.0  # of a slice
    state_bytes: float = 0.0
    out_bytes: float = 0.0  # of a slice


class RecoveryBound:
    """Measures, and plans when it is time to."""

    def __init__(self, plan: Plan, bound_s: float, checkpoint_interval_s: float) -> None:
        self._plan = plan
        self._bound_s = bound_s
        self._interval_s = checkpoint_interval_s
        self._measured: dict[PartitionId, _Measured] = {}
        self._slice_s: float | None = None
        self._last_ms: int | None = None
        self._fixed_s = FIXED_S
        self._jobs_s: deque[float] = deque(maxlen=PLAN_EVERY)  # of slices, beside their work
        self._restore_bytes_per_s = RESTORE_BYTES_PER_S
        self._since_plan = 0
        self._version = 0  # of the placement that was planned for
        self.choice: BackupChoice | None = None

    def observe(self, reports: Sequence[NodeReport], began_ms: int, seconds: float = 0.0) -> None:
        """Fold in the loads of one slice, which took so long in all."""
        worked = max((sum(x.cpu_s for x in r.partitions.values()) for r in reports), default=0.0)
        self._jobs_s.append(max(0.0, seconds - worked))
        for report in reports:
            for partition, seen in report.partitions.items():
                known = self._measured.setdefault(
                    partition, _Measured(seen.cpu_s, seen.state_bytes, seen.out_bytes)
                )
                known.cpu_s += SMOOTHING * (seen.cpu_s - known.cpu_s)
                known.state_bytes = seen.state_bytes
                known.out_bytes += SMOOTHING * (seen.out_bytes - known.out_bytes)
        if self._last_ms is not None and began_ms > self._last_ms:
            gap = (began_ms - self._last_ms) / 1000
            before = self._slice_s or gap
            self._slice_s = before + SMOOTHING * (gap - before)
        self._last_ms = began_ms
        self._since_plan += 1

    def recovered(
        self,
        seconds: float,
        partitions: frozenset[PartitionId],
        slices: int,
        reports: Sequence[NodeReport],
    ) -> None:
        """Learn from a recovery: how long it took, for which partitions and how many slices."""
        for report in reports:
            here = [x for p, x in report.partitions.items() if p in partitions]
            restored = sum(x.state_bytes for x in here)
            if restored >= MIN_RESTORED_BYTES and report.restore_s > 0:
                seen = restored / report.restore_s
                self._restore_bytes_per_s += 0.5 * (seen - self._restore_bytes_per_s)
        known = [self._work_s(p, slices) for p in partitions if p in self._measured]
        if known:
            rest = seconds - max(known) - self._job_s
            self._fixed_s = max(0.1, self._fixed_s + 0.5 * (rest - self._fixed_s))

    def plan(self, placement: Placement) -> BackupChoice | None:
        """A new choice, or the same one with a new prediction, when it is time for one."""
        moved = placement.version != self._version
        if self._slice_s is None or (self._since_plan < PLAN_EVERY and not moved):
            return None
        if not self._measured.keys() >= placement.owners.keys() or not placement.owners:
            return None
        self._since_plan, self._version = 0, placement.version
        self.choice = self._choose(placement)
        return self.choice

    @property
    def _job_s(self) -> float:
        """The median: a slice that has waited for something says nothing."""
        return median(self._jobs_s) if self._jobs_s else 0.0

    def _choose(self, placement: Placement) -> BackupChoice:
        names = {str(p): p for p in placement.owners}
        fixed_s = self._fixed_s + self._job_s
        problem = BackupProblem.of(
            TaskGraph(tuple(names), tuple(self._streams(placement))),
            max(self._bound_s - fixed_s, 0.001),
            {name: self._reprocess_s(p) for name, p in names.items()},
            {name: self._out_rate(p) for name, p in names.items()},
            {name: str(placement.owners[p].node) for name, p in names.items()},
        )
        kept = self.choice.backups & placement.owners.keys() if self.choice else ()
        existing = [str(p) for p in kept]
        why = ""
        try:
            chosen = replan_backups(problem, existing, EFFORT).backups
        except PlanningError as e:  # back up all that helps, and say so
            senders = {source for source, _ in problem.graph.edges}
            chosen, why = frozenset(senders), e.message
        latency = evaluate(problem, chosen).latency_s
        return BackupChoice(
            frozenset(names[n] for n in chosen),
            {p: latency[name] + fixed_s for name, p in names.items()},
            why,
        )

    def _streams(self, placement: Placement) -> list[tuple[str, str]]:
        """From every partition of a chain to every one of the chains behind it; sources have
        their log, so they are not part of the problem."""
        pairs = {
            (e.source, e.target)
            for c in self._plan.node_chains
            for e in c.inputs
            if not self._plan.by_name[e.source].is_source
        }
        return [
            (str(u), str(v))
            for source, target in sorted(pairs)
            for u in placement.partitions(source)
            for v in placement.partitions(target)
        ]

    def _reprocess_s(self, partition: PartitionId) -> float:
        """At worst: the loss comes just before the next checkpoint."""
        return self._work_s(partition, self._interval_s / (self._slice_s or 1.0))

    def _work_s(self, partition: PartitionId, slices: float) -> float:
        seen = self._measured[partition]
        return slices * seen.cpu_s + seen.state_bytes / self._restore_bytes_per_s

    def _out_rate(self, partition: PartitionId) -> float:
        return self._measured[partition].out_bytes / (self._slice_s or 1.0)
