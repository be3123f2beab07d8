"""Load of tasks under a key assignment, and what changing it costs (002, section 2.2).

Holds the cost model that every balance planner shares: c(k) = g(k)^α, the load L(d) of a task
(a replica weighs ρ times its key), the imbalance θ(d) = |L(d) - L̄| / L̄, the size of the routing
table, and the migration KSM makes of two assignments (algorithm 4): only (key, task) pairs
that did not hold the state before. `llfd` is the basic assignment of algorithm 2; `ftlb` has
the planner to use. Invariant: a plan never loses a key, and says so when it misses a limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from anabranch.errors import PlanningError
from anabranch.planning.balance.routing import NONE, Assignment, Floats, Ints

#: Rounding of sums may exceed a limit by this share without breaking it.
SLACK = 1e-9
#: Keys that are selected before they are sorted; if they do not suffice, all are sorted.
SELECTED = 8192


def key_costs(counts: Floats, alpha: float = 1.0) -> Floats:
    """c(k) = g(k)^α: the work of a key that occurred g(k) times."""
    if not alpha > 0:
        raise PlanningError(f"alpha is {alpha}; give a number > 0", alpha=alpha)
    _refuse_bad("count", counts)
    return np.asarray(counts, dtype=np.float64) ** alpha


@dataclass(frozen=True)
class Limits:
    """What a plan must keep: imbalance and table size.

    A plan is made when some θ(d) exceeds `theta_max`; it then aims at `theta_min`, if given, so
    that the next small drift does not ask for another. `replica_weight` is ρ, the load of a
    replica relative to its active key (0 in the paper, up to 1: a replica is processed too).
    """

    theta_max: float
    table: int
    theta_min: float | None = None
    replica_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.theta_max < 1:
            raise PlanningError(f"theta_max is {self.theta_max}; give a share in (0, 1)")
        if self.theta_min is not None and not 0 < self.theta_min <= self.theta_max:
            raise PlanningError(
                f"theta_min is {self.theta_min}; give a share in (0, theta_max = {self.theta_max}]"
            )
        if self.table < 0:
            raise PlanningError(f"the table limit is {self.table}; give a number >= 0")
        if not 0 <= self.replica_weight <= 1:
            raise PlanningError(
                f"the replica weight is {self.replica_weight}; give a share in [0, 1]"
            )

    @property
    def aim(self) -> float:
        return self.theta_max if self.theta_min is None else self.theta_min


@dataclass(frozen=True)
class BalanceProblem:
    """Cost and state of every key, where it is now, and where the hash alone would put it."""

    costs: Floats
    state: Floats
    current: Assignment
    home: Assignment
    limits: Limits

    def __post_init__(self) -> None:
        _refuse_bad("cost", self.costs)
        _refuse_bad("state size", self.state)
        sizes = {len(self.costs), len(self.state), len(self.current.active), len(self.home.active)}
        if len(sizes) != 1:
            raise PlanningError(
                f"costs, state and assignments are of {sorted(sizes)} keys; give one of each a key"
            )
        if self.current.tasks != self.home.tasks:
            raise PlanningError(
                f"keys are on {self.current.tasks} tasks, the hash knows {self.home.tasks}; "
                "route by the present number of tasks first"
            )
        if self.current.backups.shape != self.home.backups.shape:
            raise PlanningError("current and home assignment differ in the number of replicas")

    @property
    def tasks(self) -> int:
        return self.current.tasks

    @cached_property
    def mean(self) -> float:
        """L̄, which no reassignment changes."""
        return float(self.loads(self.current).mean())

    def loads(self, assignment: Assignment) -> Floats:
        loads = np.bincount(assignment.active, self.costs, self.tasks).astype(np.float64)
        weight = self.limits.replica_weight
        if weight:
            for column in assignment.backups.T:
                held = column != NONE
                loads += weight * np.bincount(column[held], self.costs[held], self.tasks)
        return loads

    def imbalance(self, assignment: Assignment) -> float:
        """The largest θ(d)."""
        if self.mean == 0:
            return 0.0
        return float(np.abs(self.loads(assignment) / self.mean - 1).max())

    def table_size(self, assignment: Assignment) -> int:
        return int(np.count_nonzero(assignment.differs(self.home)))

    def oversized_key(self) -> int | None:
        """A key that alone exceeds (1 + θ_max)·L̄: with one, no plan can keep θ_max."""
        largest = int(self.costs.argmax()) if len(self.costs) else 0
        over = len(self.costs) and self.costs[largest] > (1 + self.limits.theta_max) * self.mean
        return largest if over else None


@dataclass(frozen=True)
class Migration:
    """State that has to move: `keys[i]` is copied to `tasks[i]`, `cost` in all (alg. 4, KSM)."""

    keys: Ints
    tasks: Ints
    cost: float


@dataclass(frozen=True)
class BalancePlan:
    """A new assignment with the figures that judge it."""

    assignment: Assignment
    migration: Migration
    theta: float
    skew: float
    table: int
    met: bool


Planner = Callable[[BalanceProblem], BalancePlan]


def judged(problem: BalanceProblem, assignment: Assignment) -> BalancePlan:
    """The plan that `assignment` is, measured the same way for every planner."""
    limits = problem.limits
    theta = problem.imbalance(assignment)
    table = problem.table_size(assignment)
    loads = problem.loads(assignment)
    return BalancePlan(
        assignment=assignment,
        migration=migration(problem.current, assignment, problem.state),
        theta=theta,
        skew=float(loads.max() / problem.mean) if problem.mean else 1.0,
        table=table,
        met=theta <= limits.theta_max + SLACK and table <= limits.table,
    )


def migration(before: Assignment, after: Assignment, state: Floats) -> Migration:
    """F_i ⊕ F_{i-1}: copy a key's state only to tasks that did not hold it, in any role."""
    changed = np.flatnonzero(after.differs(before)).astype(np.int64)
    keys, tasks = [], []
    for column in (after.active, *after.backups.T):
        target = column[changed]
        new = (target != NONE) & ~before.holds(changed, target)
        keys.append(changed[new])
        tasks.append(target[new])
    moved = np.concatenate(keys)
    return Migration(moved, np.concatenate(tasks), float(state[moved].sum()))


def llfd(costs: Floats, loads: Floats) -> Ints:
    """Least-load fit decreasing (alg. 2): dearest key first, each to the least loaded task.

    `loads` is what the tasks carry already. θ ≤ ⅓(1 - 1/N) whenever perfect balance exists.
    """
    _refuse_bad("cost", costs)
    heap = [(float(load), task) for task, load in enumerate(loads)]
    heapq.heapify(heap)
    order = np.argsort(-costs, kind="stable")
    chosen = []
    for cost in costs[order].tolist():
        load, task = heap[0]
        heapq.heapreplace(heap, (load + cost, task))
        chosen.append(task)
    result = np.empty(len(costs), dtype=np.int64)
    result[order] = chosen
    return result


def least_first(metric: Floats, costs: Floats, need: float) -> Ints:
    """Indices by rising metric, at least as many as together cost `need` (if all do).

    A plan needs few of a million keys, so that sorting them all would be most of its time.
    """
    if len(metric) > 2 * SELECTED:
        front = np.argpartition(metric, SELECTED)[:SELECTED]
        if costs[front].sum() >= need:
            return front[np.argsort(metric[front], kind="stable")].astype(np.int64)
    return np.argsort(metric, kind="stable").astype(np.int64)


def _refuse_bad(what: str, values: Floats) -> None:
    wrong = ~(np.isfinite(values) & (np.asarray(values) >= 0))
    if wrong.any():
        key = int(np.flatnonzero(wrong)[0])
        raise PlanningError(
            f"key number {key} has {what} {values[key]}; give a finite number >= 0", key=key
        )
