"""Which tasks keep their output, so that any lost task is back within a bound.

The failure-effect model of paper 003 (section III): a lost task v reprocesses for T(v) seconds
once its input is there; an upstream task that keeps a backup hands it over at once, any other
must first recover itself. So L(v) = T(v) + max over upstream u of (1 - M(u)) * L(u), and a plan
M is good when L(v) <= R for every v. This module holds the problem, the plan and the model;
the algorithms are in `backups_paper`, `backups_search` and `backups_exact`.

When a node is lost, every task on it is lost and no backup that lived on it counts: with
`hosts`, L is computed once per node, without that node's backups, for the tasks it hosted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anabranch.errors import PlanningError
from anabranch.planning.graph import TaskGraph

# Sums of decimal fractions miss their exact value by a few ulps: 0.1 + 0.2 must fit in 0.3.
ROUNDING = 1e-9
# A cost within this of the bound is the bound: the tolerance of the solvers that prove it.
PROOF = 1e-6

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class BackupProblem:
    """A graph, its bound R, and per task: T(v), the cost of a backup, and the host if known."""

    graph: TaskGraph
    bound_s: float
    reprocess_s: tuple[float, ...]
    cost: tuple[float, ...]
    hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bound_s) and self.bound_s > 0):
            raise PlanningError(
                f"The recovery bound is {self.bound_s}: give a positive number of seconds.",
                bound_s=self.bound_s,
            )
        for what, values in (("reprocessing time", self.reprocess_s), ("backup cost", self.cost)):
            if len(values) != len(self.graph):
                raise PlanningError(f"{len(values)} values of {what} for {len(self.graph)} tasks.")
            for task, value in zip(self.graph.tasks, values, strict=True):
                if not (math.isfinite(value) and value >= 0):
                    raise PlanningError(
                        f"The {what} of task {task!r} is {value}: give a number >= 0.", task=task
                    )
        if self.hosts is not None and len(self.hosts) != len(self.graph):
            raise PlanningError(f"{len(self.hosts)} hosts for {len(self.graph)} tasks.")

    @classmethod
    def of(
        cls,
        graph: TaskGraph,
        bound_s: float,
        reprocess_s: float | Mapping[str, float] = 1.0,
        cost: float | Mapping[str, float] = 1.0,
        hosts: Mapping[str, str] | None = None,
    ) -> BackupProblem:
        """A problem from one value for all tasks, or a mapping that names every task."""
        return cls(
            graph,
            float(bound_s),
            _per_task(graph, reprocess_s, "reprocessing time"),
            _per_task(graph, cost, "backup cost"),
            None if hosts is None else tuple(_named(graph, hosts, "host")),
        )

    @property
    def limit_s(self) -> float:
        """The bound with room for rounding: a latency fits when it is at most this."""
        return self.bound_s * (1 + ROUNDING)

    def with_bound(self, bound_s: float) -> BackupProblem:
        return BackupProblem(self.graph, bound_s, self.reprocess_s, self.cost, self.hosts)

    def cost_of(self, backups: Iterable[int]) -> float:
        return math.fsum(self.cost[i] for i in backups)


@dataclass(frozen=True)
class Violation:
    """A task that would be back too late; `node` is the lost node, or None if it fails alone."""

    task: str
    latency_s: float
    excess_s: float
    node: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """What a plan gives: L of each task, O = the worst of them, the cost, who breaks the bound."""

    latency_s: Mapping[str, float]
    worst_s: float
    cost: float
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class BackupPlan:
    """The tasks that keep backups, their cost, and a proven lower bound on any plan's cost."""

    algorithm: str
    backups: frozenset[str]
    cost: float
    lower_bound: float
    worst_s: float

    @property
    def optimal(self) -> bool:
        """Proven: no plan is cheaper."""
        return self.cost <= self.lower_bound * (1 + PROOF)

    @property
    def gap_pct(self) -> float:
        """How much dearer than the proven bound the plan is, in per cent of the bound."""
        if self.optimal:
            return 0.0
        return math.inf if self.lower_bound <= 0 else 100 * (self.cost / self.lower_bound - 1)


def latencies(
    problem: BackupProblem, backups: Collection[int], lost_node: str | None = None
) -> list[float]:
    """L(v) by task number; with `lost_node`, backups kept on that node do not count."""
    kept = set(backups)
    if lost_node is not None and problem.hosts is not None:
        kept = {i for i in kept if problem.hosts[i] != lost_node}
    latency = list(problem.reprocess_s)
    upstream = problem.graph.upstream
    for v in problem.graph.order:
        waits = [latency[u] for u in upstream[v] if u not in kept]
        if waits:
            latency[v] += max(waits)
    return latency


def evaluate(problem: BackupProblem, backups: Iterable[str]) -> Evaluation:
    """Apply the failure-effect model to a plan: what it costs, and which tasks break the bound.

    With hosts, the latency of a task is the one it has when its node is lost with all on it.
    """
    graph = problem.graph
    chosen = graph.numbers(backups)
    nodes: list[str | None] = [None]
    if problem.hosts is not None:
        nodes = list(dict.fromkeys(problem.hosts))
    worst = [0.0] * len(graph)
    violations = []
    for node in nodes:
        latency = latencies(problem, chosen, node)
        for v in range(len(graph)):
            if node is not None and problem.hosts is not None and problem.hosts[v] != node:
                continue
            worst[v] = latency[v]
            if latency[v] > problem.limit_s:
                excess = latency[v] - problem.bound_s
                violations.append(Violation(graph.tasks[v], latency[v], excess, node))
    return Evaluation(
        dict(zip(graph.tasks, worst, strict=True)),
        max(worst),
        problem.cost_of(chosen),
        tuple(violations),
    )


def smallest_bound(problem: BackupProblem) -> tuple[float, str]:
    """The smallest bound any plan can meet, and the task that needs it.

    With a backup on every task L(v) = T(v). On a lost node none of its own backups counts, so
    a path that stays on one node is recovered from its first task on.
    """
    if problem.hosts is None:
        latency: Sequence[float] = problem.reprocess_s
    else:
        hosts, grown = problem.hosts, list(problem.reprocess_s)
        for v in problem.graph.order:
            same = [grown[u] for u in problem.graph.upstream[v] if hosts[u] == hosts[v]]
            grown[v] += max(same, default=0.0)
        latency = grown
    worst = max(range(len(latency)), key=lambda v: latency[v])
    return latency[worst], problem.graph.tasks[worst]


def require_feasible(problem: BackupProblem) -> None:
    """Refuse a bound that no plan can meet; the message names the task and the bound that works."""
    least, task = smallest_bound(problem)
    if least > problem.limit_s:
        where = "" if problem.hosts is None else " when its node is lost"
        raise PlanningError(
            f"No plan recovers task {task!r} within {problem.bound_s:g} s{where}: even with every "
            f"backup it takes {least:g} s, {least - problem.bound_s:g} s too long. Raise the bound "
            f"to at least {least:g} s, or checkpoint {task!r} more often.",
            task=task,
            smallest_bound_s=least,
        )


def plan_of(
    problem: BackupProblem, algorithm: str, backups: Collection[int], lower_bound: float = 0.0
) -> BackupPlan:
    """Close a plan: check it against the model, for an algorithm's word is not enough."""
    names = problem.graph.names(backups)
    result = evaluate(problem, names)
    if result.violations:
        first = result.violations[0]
        raise PlanningError(
            f"{algorithm} left task {first.task!r} at {first.latency_s:g} s, over the bound of "
            f"{problem.bound_s:g} s: this algorithm does not suit the problem, use `exact`.",
            task=first.task,
        )
    return BackupPlan(algorithm, names, result.cost, min(lower_bound, result.cost), result.worst_s)


def checkpoint_interval_s(failures_per_s: float, checkpoint_s: float) -> float:
    """The interval that loses least time to checkpoints and reprocessing: sqrt(2 C / lambda).

    The first-order optimum for a failure rate lambda and a checkpoint that takes C seconds;
    half of it is the expected reprocessing time T of the model (paper 003, section III-B).
    """
    for what, value in (("failure rate", failures_per_s), ("time of a checkpoint", checkpoint_s)):
        if not (math.isfinite(value) and value > 0):
            raise PlanningError(f"The {what} is {value}: give a positive number.")
    return math.sqrt(2 * checkpoint_s / failures_per_s)


def _per_task(
    graph: TaskGraph, values: float | Mapping[str, float], what: str
) -> tuple[float, ...]:
    if isinstance(values, Mapping):
        return tuple(float(value) for value in _named(graph, values, what))
    return (float(values),) * len(graph)


def _named(graph: TaskGraph, values: Mapping[str, _Value], what: str) -> list[_Value]:
    unknown = next((name for name in values if name not in graph.number), None)
    if unknown is not None:
        raise PlanningError(
            f"A {what} is given for {unknown!r}, which is not a task of the graph.", task=unknown
        )
    missing = next((task for task in graph.tasks if task not in values), None)
    if missing is not None:
        raise PlanningError(f"Task {missing!r} has no {what}: give one.", task=missing)
    return [values[task] for task in graph.tasks]
