"""The best recovery plan, with a proof of how good it is.

Decides the same as `recovery.plan_dp`, for failures of any size. Two ideas:

* **Tables.** For a set of queries, table[v] is the least cost that brings back priority v.
  Queries that share nothing combine by a (min, +) sum of their tables; a group of partitions
  that all of them need is paid once; a group that many need is branched on (paid, or its
  users dropped); a small tangle is enumerated, the cost of every subset at once, by a
  subset-sum transform. If that resolves everything the plan is optimal.
* **Cost sharing.** Split the cost of every group among its users in any way; then a set of
  queries costs at least the sum of its shares, so a plain knapsack over the shares bounds what
  any plan can reach. Equal shares give the profit density of 001. The shares that equalise
  share/priority as far as possible (Frank-Wolfe on the sum of share²/priority) give the bound
  of the linear program at every resource limit, without solving one. Tangles too large to
  enumerate enter the tables with this bound, and a local search finds the plan.

Invariant: `bound` is never below the optimum, and `plan` never costs more than the resources.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from anabranch.planning.recovery.order import RecoveryOrder, check_resources, plan_of_queries
from anabranch.planning.recovery.queries import Floats, Ints, RecoveryProblem, Sharing
from anabranch.planning.recovery.search import search_plan

#: A tangle of this number of queries is enumerated: 2^18 subsets take about 10 ms.
ENUMERATE_MAX = 18
#: Branches on widely shared groups, and the share of queries that makes a group worth one.
BRANCHES_MAX = 64
BRANCH_SHARE = 0.25
#: Sums of floats that differ by less than this share are equal.
EQUAL = 1e-12
#: Frank-Wolfe steps: enough for the bound to be within about 0.1 % of the linear program's.
SHARING_STEPS = 400
#: Entries of a table, the sum of all priorities; adding two tables takes their product.
VALUES_MAX = 20_000


@dataclass(frozen=True)
class ExactPlan:
    """A plan and the most priority that any plan could reach."""

    plan: RecoveryOrder
    bound: int

    @property
    def gap(self) -> float:
        """Share of the bound that the plan may be missing; 0 when it is proven optimal."""
        return (self.bound - self.plan.priority) / self.bound if self.bound else 0.0


def solve(
    problem: RecoveryProblem, resources: float, may_continue: Callable[[], bool]
) -> ExactPlan:
    """The optimal plan; or, of queries too tangled for that, the best that a search finds until
    `may_continue` says no, and its proven bound."""
    limit = check_resources(resources)
    unit = _unit(problem.sharing.priorities)
    # Rounding up keeps the bound valid; it is exact when the unit divides every priority.
    sharing = replace(problem.sharing, priorities=-(-problem.sharing.priorities // unit))
    groups = [
        (users, float(cost)) for users, cost in zip(sharing.users, sharing.costs, strict=True)
    ]
    solver = _Solver(sharing, limit)
    table = solver.solve(tuple(range(len(sharing.names))), groups)
    bound = int(np.flatnonzero(table.costs <= limit)[-1])
    if solver.exact:
        chosen = table.trace(bound)
    else:
        chosen = search_plan(sharing, limit, solver.shares, bound, may_continue)
    plan = plan_of_queries(problem, sharing.plan_names(chosen))
    return ExactPlan(plan, min(bound * unit, problem.value(problem.queries)))


def _unit(priorities: Ints) -> int:
    """Tables count priority in this unit, so that they have at most VALUES_MAX entries."""
    common = int(np.gcd.reduce(priorities)) or 1
    total = int(priorities.sum())
    return common if total <= VALUES_MAX * common else -(-total // VALUES_MAX)


Groups = Sequence[tuple[tuple[int, ...], float]]


@dataclass(frozen=True)
class _Table:
    """costs[v] = least cost (or a lower bound of it) to recover priority v; how to get there."""

    costs: Floats
    trace: Callable[[int], list[int]]


@dataclass
class _Solver:
    """Builds the table of a set of queries; `exact` turns false when a part was only bounded."""

    sharing: Sharing
    limit: float
    exact: bool = True
    branches: int = 0
    shares: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.shares = np.zeros(len(self.sharing.names))
        for users, cost in zip(self.sharing.users, self.sharing.costs, strict=True):
            self.shares[list(users)] += cost / len(users)

    def solve(self, queries: tuple[int, ...], groups: Groups) -> _Table:
        """Pay for what all share, split the rest into independent parts, add them up."""
        root = sum(cost for users, cost in groups if len(users) == len(queries))
        rest = [(users, cost) for users, cost in groups if len(users) < len(queries)]
        parts = _independent(queries, rest)
        tables = [self._tangle(part, inside) for part, inside in parts]
        return self._paid(self._sum(tables), root)

    def _tangle(self, queries: tuple[int, ...], groups: Groups) -> _Table:
        if any(len(users) == len(queries) for users, _ in groups):
            return self.solve(queries, groups)
        if len(queries) <= ENUMERATE_MAX:
            return self._enumerated(queries, groups)
        users, cost = max(groups, key=lambda group: (len(group[0]), group[1]))
        if len(users) >= BRANCH_SHARE * len(queries) and self.branches < BRANCHES_MAX:
            self.branches += 1
            paid = self.solve(queries, [g for g in groups if g[0] != users])
            kept = tuple(q for q in queries if q not in users)
            unpaid = self.solve(kept, _restricted(groups, set(kept)))
            return _cheaper(self._paid(paid, cost), unpaid)
        self.exact = False
        return self._bounded(queries, groups)

    def _enumerated(self, queries: tuple[int, ...], groups: Groups) -> _Table:
        """All subsets at once: a subset pays every group except those used only outside it."""
        place = {q: i for i, q in enumerate(queries)}
        unused = np.zeros(1 << len(queries))
        for users, cost in groups:
            unused[sum(1 << place[q] for q in users)] += cost
        values = np.zeros(1, dtype=np.int64)
        for i, q in enumerate(queries):
            # After this step unused[m] sums over all subsets of m in the bits up to i.
            halves = unused.reshape(-1, 2, 1 << i)
            halves[:, 1] += halves[:, 0]
            values = np.concatenate([values, values + self.sharing.priorities[q]])
        costs = unused[-1] - unused[::-1]
        best = np.full(int(values[-1]) + 1, np.inf)
        np.minimum.at(best, values, costs)
        subset = np.zeros(len(best), dtype=np.int64)
        # Of equals the first, which is put last.
        hits = np.flatnonzero(costs <= best[values] + EQUAL * max(1.0, unused[-1]))[::-1]
        subset[values[hits]] = hits
        subset[0] = 0

        def trace(value: int) -> list[int]:
            return [q for i, q in enumerate(queries) if int(subset[value]) >> i & 1]

        return self._capped(best, trace)

    def _bounded(self, queries: tuple[int, ...], groups: Groups) -> _Table:
        """A knapsack over cost shares: no plan of these queries is cheaper than this table."""
        shares = cost_shares(queries, groups, self.sharing.priorities)
        self.shares[list(queries)] = shares
        costs = np.zeros(1)
        for q, share in zip(queries, shares, strict=True):
            priority = int(self.sharing.priorities[q])
            taller = np.concatenate([costs, np.full(priority, np.inf)])
            taller[priority:] = np.minimum(taller[priority:], costs + share)
            costs = self._cut(taller)
        return self._capped(costs, _no_trace)

    def _sum(self, tables: Sequence[_Table]) -> _Table:
        """(min, +) sum; smaller tables first, remembering where each value came from."""
        total = _Table(np.zeros(1), lambda _: [])
        for table in sorted(tables, key=lambda t: len(t.costs)):
            total = self._add(total, table)
        return total

    def _add(self, left: _Table, right: _Table) -> _Table:
        costs = np.full(len(left.costs) + len(right.costs) - 1, np.inf)
        origin = np.zeros(len(costs), dtype=np.int64)
        short, long = sorted((left, right), key=lambda t: len(t.costs))
        for value in np.flatnonzero(np.isfinite(short.costs)):
            span = slice(int(value), int(value) + len(long.costs))
            through = long.costs + short.costs[value]
            better = through < costs[span]
            costs[span][better] = through[better]
            origin[span][better] = value

        def trace(value: int) -> list[int]:
            part = int(origin[value])
            return short.trace(part) + long.trace(value - part)

        return self._capped(costs, trace)

    def _paid(self, table: _Table, cost: float) -> _Table:
        if not cost:
            return table
        costs = table.costs + cost
        costs[0] = 0.0
        return self._capped(costs, lambda value: table.trace(value) if value else [])

    def _capped(self, costs: Floats, trace: Callable[[int], list[int]]) -> _Table:
        return _Table(self._cut(costs), trace)

    def _cut(self, costs: Floats) -> Floats:
        """Forget values that cost more than the limit: no plan reaches them."""
        costs = np.where(costs <= self.limit, costs, np.inf)
        return costs[: int(np.flatnonzero(np.isfinite(costs))[-1]) + 1]


def _restricted(groups: Groups, kept: set[int]) -> Groups:
    """The groups that `kept` still need, merged again where they have become alike."""
    merged: dict[tuple[int, ...], float] = {}
    for users, cost in groups:
        left = tuple(q for q in users if q in kept)
        if left:
            merged[left] = merged.get(left, 0.0) + cost
    return list(merged.items())


def _no_trace(value: int) -> list[int]:
    raise AssertionError("a bound has no plan")


def _cheaper(left: _Table, right: _Table) -> _Table:
    size = max(len(left.costs), len(right.costs))
    a, b = (np.concatenate([t.costs, np.full(size - len(t.costs), np.inf)]) for t in (left, right))
    costs = np.minimum(a, b)
    return _Table(costs, lambda value: (left if a[value] <= b[value] else right).trace(value))


def _independent(
    queries: tuple[int, ...], groups: Groups
) -> list[tuple[tuple[int, ...], list[tuple[tuple[int, ...], float]]]]:
    """Split queries into parts that share no group (union-find), in a defined order."""
    parent = {q: q for q in queries}

    def find(q: int) -> int:
        while parent[q] != q:
            parent[q] = parent[parent[q]]
            q = parent[q]
        return q

    for users, _ in groups:
        for q in users[1:]:
            parent[find(q)] = find(users[0])
    members: dict[int, list[int]] = {}
    for q in queries:
        members.setdefault(find(q), []).append(q)
    inside: dict[int, list[tuple[tuple[int, ...], float]]] = {root: [] for root in members}
    for users, cost in groups:
        inside[find(users[0])].append((users, cost))
    return [(tuple(part), inside[root]) for root, part in members.items()]


def cost_shares(queries: Sequence[int], groups: Groups, priorities: Ints) -> Floats:
    """Split every group's cost among its users so that share/priority is as even as possible.

    Frank-Wolfe with exact line search on the sum of share²/priority: each step moves cost to
    the users that have least for their priority. Any split gives a valid bound.
    """
    place = {q: i for i, q in enumerate(queries)}
    degree = np.array([len(users) for users, _ in groups], dtype=np.int64)
    user = np.array([place[q] for users, _ in groups for q in users], dtype=np.int64)
    group = np.repeat(np.arange(len(groups)), degree)
    start = np.cumsum(degree) - degree
    cost = np.array([c for _, c in groups])
    worth = priorities[list(queries)].astype(np.float64)
    shares: Floats = np.bincount(user, (cost / degree)[group], len(queries)).astype(np.float64)
    for _ in range(SHARING_STEPS):
        level = (shares / worth)[user]
        least = level <= np.minimum.reduceat(level, start)[group] * (1 + 1e-12)
        ties = np.add.reduceat(least.astype(np.float64), start)
        move = np.bincount(user, least * (cost / ties)[group], len(queries)) - shares
        curvature = float((move * move / worth).sum())
        step = -float((shares * move / worth).sum()) / curvature if curvature else 0.0
        if step <= 0:
            break
        shares = shares + min(1.0, step) * move
    return shares
