"""In which order failed partitions come back: most priority first, under limited resources.

Decides the set of partitions to recover when the resources R do not suffice for all (001,
section 5; set-union knapsack, NP-hard). Planners: `plan_dp` (algorithm 3, exact, exponential),
`plan_best_density` (algorithm 4), `plan_progressive` (004, PRG) and the operator-centric
baseline `plan_operator_centric`; `exact.plan_exact` is the one to use in earnest.
`schedule_recovery` turns a planner into the sequence of partial plans for nodes that arrive one
by one. Invariant: no plan costs more than R, no node is filled above its cap, and a recovered
query never loses a partition again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from anabranch.errors import PlanningError
from anabranch.planning.recovery.placing import SLACK, Placing
from anabranch.planning.recovery.queries import Floats, Ints, RecoveryProblem, Sharing

#: CPU share of a node that recovery may fill (001, end of section 5).
CPU_CAP = 0.8
#: Candidate plans algorithm 3 may hold at once: 22 queries with ample resources.
MAX_CANDIDATES = 1 << 22
#: Candidate plans of algorithm 4 that are extended together (bounds memory).
_BATCH = 4096


@dataclass(frozen=True)
class RecoveryOrder:
    """Partitions to recover, the queries that this brings back, and what it costs."""

    partitions: frozenset[str]
    queries: tuple[str, ...]
    priority: int
    cost: float


Planner = Callable[[RecoveryProblem, float], RecoveryOrder]


def plan_of(problem: RecoveryProblem, partitions: Iterable[str]) -> RecoveryOrder:
    """The plan that recovers `partitions`; queries completed on the way are counted too."""
    chosen = frozenset(partitions)
    queries = problem.recovered(chosen)
    return RecoveryOrder(chosen, queries, problem.value(queries), problem.cost(chosen))


def plan_of_queries(problem: RecoveryProblem, queries: Iterable[str]) -> RecoveryOrder:
    return plan_of(problem, frozenset[str]().union(*(problem.queries[q] for q in queries)))


def check_resources(resources: float) -> float:
    """The limit as planners compare against it; refuses NaN, infinity and negative numbers."""
    if not (math.isfinite(resources) and resources >= 0):
        raise PlanningError(
            f"resources are {resources}; give a finite number >= 0", resources=resources
        )
    return resources + SLACK * max(1.0, resources)


@dataclass(frozen=True)
class CandidatePlans:
    """All candidate plans of algorithm 3 by rising cost, with the best priority up to each."""

    problem: RecoveryProblem
    costs: Floats
    queries: Ints
    best: Ints

    def best_for(self, resources: float) -> RecoveryOrder:
        last = int(np.searchsorted(self.costs, check_resources(resources), side="right")) - 1
        mask = int(self.queries[self.best[last]])
        names = self.problem.sharing.names
        return plan_of_queries(self.problem, (names[q] for q in range(len(names)) if mask >> q & 1))


def candidate_plans(problem: RecoveryProblem, resources: float) -> CandidatePlans:
    """Algorithm 3, corrected: every set of queries that fits, grown query by query.

    The paper grows candidates by one unit of resource at a time and drops finished ones; growing
    them by one query at a time needs no unit, and every candidate is kept, since any may be best.
    """
    limit = check_resources(resources)
    sharing = problem.sharing
    words = -(-len(sharing.users) // 64) or 1
    held = np.zeros((1, words), dtype=np.uint64)
    costs = np.zeros(1)
    priorities = np.zeros(1, dtype=np.int64)
    queries = np.zeros(1, dtype=np.int64)
    for query in range(len(sharing.names)):
        added = np.zeros(len(costs))
        grown = held.copy()
        for group in np.flatnonzero(sharing.uses[query]):
            word, bit = divmod(int(group), 64)
            missing = (held[:, word] >> np.uint64(bit)) & np.uint64(1) == 0
            added += np.where(missing, sharing.costs[group], 0.0)
            grown[:, word] |= np.uint64(1 << bit)
        fits = costs + added <= limit
        if len(costs) + np.count_nonzero(fits) > MAX_CANDIDATES:
            raise PlanningError(
                f"{len(sharing.names)} queries give more than {MAX_CANDIDATES} candidate plans; "
                "use plan_exact, or plan_best_density",
                queries=len(sharing.names),
            )
        held = np.concatenate([held, grown[fits]])
        costs = np.concatenate([costs, (costs + added)[fits]])
        priorities = np.concatenate([priorities, priorities[fits] + sharing.priorities[query]])
        queries = np.concatenate([queries, queries[fits] | (1 << query)])
    order = np.argsort(costs, kind="stable")
    ranked = priorities[order]
    improves = ranked > np.concatenate([[-1], np.maximum.accumulate(ranked)[:-1]])
    best = np.maximum.accumulate(np.where(improves, np.arange(len(order)), 0))
    return CandidatePlans(problem, costs[order], queries[order], best)


def plan_dp(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    """Algorithm 3: the optimal plan, in time and memory O(2^M) for M queries."""
    return candidate_plans(problem, resources).best_for(resources)


def plan_best_density(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    """Algorithm 4: extend every single query and every pair by profit density; keep the best.

    At least 1 - e^(-1/d) of the optimum when no partition is shared by more than d queries;
    for that every feasible single query is a seed, not only the densest.
    """
    limit = check_resources(resources)
    count = len(problem.queries)
    ones = [(q,) for q in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return _densest(problem, limit, [(), *ones, *pairs])


def plan_progressive(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    """PRG (004, section 5): take the densest query that fits, re-rank, repeat."""
    return _densest(problem, check_resources(resources), [()])


def plan_operator_centric(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    """OC, the baseline: partitions in topological order, cheapest first, while they fit."""
    room = check_resources(resources)
    chosen = []
    depth = problem.depths
    for name in sorted(problem.costs, key=lambda p: (depth.get(p, 0), problem.costs[p], p)):
        if problem.costs[name] <= room:
            room -= problem.costs[name]
            chosen.append(name)
    return plan_of(problem, chosen)


def _densest(
    problem: RecoveryProblem, limit: float, seeds: Sequence[tuple[int, ...]]
) -> RecoveryOrder:
    sharing = problem.sharing
    if not sharing.names:
        return plan_of(problem, ())
    best_value, best = -1, np.zeros(0, dtype=bool)
    for start in range(0, len(seeds), _BATCH):
        batch = seeds[start : start + _BATCH]
        taken = np.zeros((len(batch), len(sharing.names)), dtype=bool)
        for row, seed in enumerate(batch):
            taken[row, list(seed)] = True
        taken = _extend(sharing, limit, taken)
        values = taken @ sharing.priorities
        if len(values) and values.max() > best_value:
            best_value, best = int(values.max()), taken[values.argmax()]
    return plan_of_queries(problem, sharing.plan_names(np.flatnonzero(best).tolist()))


def _extend(
    sharing: Sharing, limit: float, taken: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Grow all candidate plans (rows) together until nothing more fits any of them.

    Profit density of a query: its priority over what it still needs, every partition's cost
    divided by the number of failed queries, itself included, that share it.
    """
    uses = sharing.uses
    missing = (taken.astype(float) @ uses) == 0
    room = limit - (~missing) @ sharing.costs
    taken, missing, room = taken[room >= 0], missing[room >= 0], room[room >= 0]
    active = np.arange(len(taken))
    while len(active):
        need = missing[active] * sharing.costs
        cost = need @ uses.T
        sharers = (~taken[active]).astype(float) @ uses
        split = (need / np.maximum(sharers, 1.0)) @ uses.T
        eligible = ~taken[active] & (cost <= room[active, None])
        # A query that costs nothing more is infinitely dense: it is recovered for free.
        with np.errstate(divide="ignore"):
            density = np.where(eligible, sharing.priorities / np.maximum(split, 0.0), -1.0)
        pick = density.argmax(axis=1)
        found = density[np.arange(len(active)), pick] >= 0
        active, pick = active[found], pick[found]
        room[active] -= cost[found, pick]
        taken[active, pick] = True
        missing[active] &= uses[pick] == 0
    return taken


@dataclass(frozen=True)
class Node:
    """A node that arrives for recovery: its CPU and the part already used by healthy work."""

    name: str
    cpu: float
    used: float = 0.0

    def room(self, cap: float) -> float:
        if not (math.isfinite(self.cpu) and self.cpu > 0 and 0 <= self.used < math.inf):
            raise PlanningError(
                f"node {self.name!r} has cpu {self.cpu} and {self.used} used; "
                "give cpu > 0 and used >= 0",
                node=self.name,
            )
        return max(0.0, cap * self.cpu - self.used)


@dataclass(frozen=True)
class PartialPlan:
    """What starts when one more node is there: partition -> node, and the queries now whole."""

    arrived: str
    placement: dict[str, str]
    recovered: tuple[str, ...]


def schedule_recovery(
    problem: RecoveryProblem,
    arrivals: Sequence[Node],
    planner: Planner,
    cap: float = CPU_CAP,
) -> list[PartialPlan]:
    """One partial plan per arriving node (001, sections 2.3 and 4.4).

    Each plan is made for the room of all nodes so far; what it leaves is spent toward the next
    query, so that the next node has less to do.
    """
    if not 0 < cap <= 1:
        raise PlanningError(f"the CPU cap is {cap}; give a share in (0, 1]", cap=cap)
    if len({node.name for node in arrivals}) < len(arrivals):
        raise PlanningError("two arriving nodes have the same name; rename one")
    placed: set[str] = set()
    rooms: dict[str, float] = {}
    done: set[str] = set()
    plans = []
    for node in arrivals:
        rooms[node.name] = node.room(cap)
        placement = _place_partial(_rest(problem, placed), rooms, planner)
        placed |= placement.keys()
        recovered = tuple(q for q in problem.recovered(placed) if q not in done)
        done.update(recovered)
        plans.append(PartialPlan(node.name, placement, recovered))
    return plans


def _rest(problem: RecoveryProblem, placed: set[str]) -> RecoveryProblem:
    """The problem that is left: recovered queries gone, placed partitions free."""
    queries = {q: needs - placed for q, needs in problem.queries.items() if needs - placed}
    return replace(
        problem,
        costs={p: c for p, c in problem.costs.items() if p not in placed},
        queries=queries,
        priorities={q: problem.priority(q) for q in queries},
    )


def _place_partial(
    problem: RecoveryProblem, rooms: dict[str, float], planner: Planner
) -> dict[str, str]:
    """Place a plan query by query, then spend what is left toward the next query.

    Room is split over nodes, so a plan that fits in sum may not fit node by node; a query that
    cannot be placed whole waits, and others that can take its place.
    """
    placing = Placing(rooms, problem.costs)
    plan = planner(problem, sum(rooms.values()))
    planned = list(plan.queries)
    others = [q for q in problem.queries if q not in set(planned)]
    for query in by_density(problem, planned) + by_density(problem, others):
        placing.place_whole(problem.queries[query])
    sharers = Counter(p for needs in problem.queries.values() for p in needs)
    left = [q for q in problem.queries if not problem.queries[q] <= placing.placed.keys()]
    for query in by_density(problem, left):
        # The most shared come first: they bring most queries closer.
        missing = problem.queries[query] - placing.placed.keys()
        for name in sorted(missing, key=lambda p: (-sharers[p], -problem.costs[p], p)):
            placing.place(name)
    return placing.placed


def by_density(problem: RecoveryProblem, queries: Iterable[str]) -> list[str]:
    """Those that bring most priority for what they cost come first."""
    return sorted(
        queries,
        key=lambda q: (problem.cost(problem.queries[q]) / problem.priority(q), q),
    )
