"""The algorithms of paper 003 under their names, corrected where the print is wrong.

* `line_backups`, `tree_backups` (algorithms 2 and 3): fewest backups when every task has at most
  one downstream task. The printed tree search keeps backups of earlier searches and is not
  optimal; going down in topological order and backing up u exactly when its successor would be
  too late is.
* `dag_backups` (algorithm 4): the general heuristic with b-cover share F and backup workload B.
  The printed line 11 strikes tasks that another branch still needs; here a search goes on until
  no path from its source leaves the bound, so the guarantee holds by construction. Ours too:
  parallel tasks are cut together, and shorter reaches than the bound are tried.
* `exhaustive_backups`: all choices, cheapest first, from none at all.
* `share_based_backups`: the paper's baseline; its formula is only in the work it cites. Ours: a
  task's share is T(v) times the part of the stream that reaches it when every task splits its
  output evenly; the largest share on any path that is too long is backed up, until none is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from anabranch.errors import PlanningError
from anabranch.planning.backups.plan import (
    BackupPlan,
    BackupProblem,
    latencies,
    plan_of,
    require_feasible,
)
from anabranch.planning.backups.reduce import whole
from anabranch.planning.backups.search import prune

EXHAUSTIVE_TASKS = 22
# Of the bound, how far a search of `dag_backups` may reach. On SignalGuru with unequal times the
# full reach alone takes 16 % more backups than the optimum, the best of these four 6 %.
REACHES = (1.0, 0.9, 0.8, 0.7)


def line_backups(problem: BackupProblem) -> BackupPlan:
    """Fewest backups on one line, or on lines that join in a common sink."""
    graph = problem.graph
    joins = [v for v in range(len(graph)) if len(graph.upstream[v]) > 1 and graph.downstream[v]]
    if joins or not graph.is_forest:
        at = graph.tasks[joins[0]] if joins else "a task with several downstream tasks"
        raise PlanningError(f"Not a line topology (see {at!r}): use `tree`, `dag` or `exact`.")
    return _down_the_tree(problem, "line")


def tree_backups(problem: BackupProblem) -> BackupPlan:
    """Fewest backups when every task has at most one downstream task."""
    fork = next((i for i, t in enumerate(problem.graph.downstream) if len(t) > 1), None)
    if fork is not None:
        name = problem.graph.tasks[fork]
        raise PlanningError(
            f"Not a tree: task {name!r} has several downstream tasks. Use `dag` or `exact`.",
            task=name,
        )
    return _down_the_tree(problem, "tree")


def _down_the_tree(problem: BackupProblem, algorithm: str) -> BackupPlan:
    """Back up u iff L(u) + T(v) > R for its successor v: as late as the bound allows.

    Optimal for equal costs, since a later backup covers all that an earlier one does.
    """
    require_feasible(problem)
    graph, times = problem.graph, problem.reprocess_s
    latency = list(times)
    backups = []
    for u in graph.order:
        for v in graph.downstream[u]:
            if latency[u] + times[v] > problem.limit_s:
                backups.append(u)
            else:
                latency[v] = max(latency[v], latency[u] + times[v])
    equal = len({problem.cost[u] for u in range(len(graph)) if graph.downstream[u]}) <= 1
    bound = problem.cost_of(backups) if equal else 0.0
    return plan_of(problem, algorithm, backups, bound)


def dag_backups(problem: BackupProblem) -> BackupPlan:
    """The general heuristic: searches from the sources and from each new backup (algorithm 1).

    Backups that the later ones made needless are dropped at the end, as the paper's text asks.
    A search that always goes as far as the bound allows may end among many parallel tasks, one
    step behind a narrow one: so shorter reaches are tried too, and the cheapest plan is kept.
    """
    require_feasible(problem)
    least = max(problem.reprocess_s)
    bounds = dict.fromkeys(max(least, reach * problem.bound_s) for reach in REACHES)
    plans = [prune(whole(problem), _search(problem.with_bound(bound))) for bound in bounds]
    return plan_of(problem, "dag", min(plans, key=problem.cost_of))


def _search(problem: BackupProblem) -> set[int]:
    """Algorithm 1: search from each source, then from each new backup, farthest first."""
    graph = problem.graph
    hops = [0] * len(graph)  # most hops to a sink
    for v in reversed(graph.order):
        hops[v] = 1 + max((hops[w] for w in graph.downstream[v]), default=-1)
    place = {v: i for i, v in enumerate(graph.order)}
    backups: set[int] = set()
    pending = sorted(graph.sources, key=lambda v: (hops[v], -v))
    while pending:
        source = pending.pop()
        fresh = _search_from(problem, graph.order[place[source] :], backups)
        if fresh:
            pending = sorted({*pending, *fresh}, key=lambda v: (hops[v], -v))
    return backups


def _search_from(problem: BackupProblem, order: Sequence[int], backups: set[int]) -> list[int]:
    """Back up, by highest B per cost, until no path from `order[0]` is longer than the bound.

    Parallel tasks (same upstream, same downstream) are cut together; pruning thins them out.
    """
    upstream, downstream = problem.graph.upstream, problem.graph.downstream
    cost = problem.cost
    fresh: list[int] = []
    while True:
        reached, exits = _region(problem, order, backups)
        if not exits:
            return fresh
        ways = _ways_out(problem, reached, exits, backups)
        work = _backup_workload(problem, reached)
        best = max(ways, key=lambda v: (work[v] / cost[v] if cost[v] else math.inf, reached[v], -v))
        ups, downs = upstream[best], downstream[best]
        chosen = [v for v in ways if upstream[v] == ups and downstream[v] == downs]
        backups.update(chosen)
        fresh += chosen


def _region(
    problem: BackupProblem, order: Sequence[int], backups: set[int]
) -> tuple[dict[int, float], set[int]]:
    """Tasks reached from `order[0]` within the bound, with their distance, in order; and exits.

    An exit is a task with a successor beyond the bound. The source's own time counts only if
    it keeps no backup.
    """
    times, downstream, limit = problem.reprocess_s, problem.graph.downstream, problem.limit_s
    source = order[0]
    distance = {source: 0.0 if source in backups else times[source]}
    reached: dict[int, float] = {}
    exits = set()
    for v in order:
        if v not in distance or (v in backups and v != source):
            continue
        at = reached[v] = distance[v]
        for w in downstream[v]:
            there = at + times[w]
            if there > limit:
                exits.add(v)
            elif there > distance.get(w, -1.0):
                distance[w] = there
    return reached, exits


def _ways_out(
    problem: BackupProblem, reached: dict[int, float], exits: set[int], backups: set[int]
) -> list[int]:
    """The candidates: reached tasks without a backup from which a path leads to an exit."""
    leading = set(exits)
    for v in reversed(reached):
        if not leading.isdisjoint(problem.graph.downstream[v]):
            leading.add(v)
    return [v for v in leading if v not in backups]


def _backup_workload(problem: BackupProblem, reached: dict[int, float]) -> dict[int, float]:
    """B of equations 7 and 8: the work each task covers, split evenly over the branches."""
    times, downstream = problem.reprocess_s, problem.graph.downstream
    source = next(iter(reached))
    share = dict.fromkeys(reached, 0.0)
    work = dict.fromkeys(reached, 0.0)
    share[source] = 1.0
    for v in reached:
        work[v] += share[v] * times[v]
        parts = len(downstream[v]) or 1
        share_each, work_each = share[v] / parts, work[v] / parts
        for w in downstream[v]:
            if w in share:
                share[w] += share_each
                work[w] += work_each
    return work


def exhaustive_backups(problem: BackupProblem) -> BackupPlan:
    """The cheapest plan, by trying every choice of backups from the fewest on.

    A dearer choice than the best plan so far is skipped; sinks never need a backup.
    """
    require_feasible(problem)
    graph = problem.graph
    tasks = [v for v in range(len(graph)) if graph.downstream[v]]
    if len(tasks) > EXHAUSTIVE_TASKS:
        raise PlanningError(
            f"Exhaustive search over {len(tasks)} tasks would try 2^{len(tasks)} plans; the limit "
            f"is {EXHAUSTIVE_TASKS} tasks. Use `exact`.",
            tasks=len(tasks),
        )
    best: tuple[int, ...] = tuple(tasks)
    best_cost = problem.cost_of(best)
    cheapest = sorted(problem.cost[v] for v in tasks)
    for size in range(len(tasks) + 1):
        if sum(cheapest[:size]) >= best_cost and size:
            break
        for choice in combinations(tasks, size):
            cost = problem.cost_of(choice)
            if cost < best_cost and max(latencies(problem, choice)) <= problem.limit_s:
                best, best_cost = choice, cost
    return plan_of(problem, "exhaustive", best, best_cost)


def share_based_backups(problem: BackupProblem) -> BackupPlan:
    """The paper's baseline: the largest share of the work first (see the module's docstring)."""
    require_feasible(problem)
    graph, times = problem.graph, problem.reprocess_s
    reach = [1.0 if not ups else 0.0 for ups in graph.upstream]
    for v in graph.order:
        for w in graph.downstream[v]:
            reach[w] += reach[v] / len(graph.downstream[v])
    share = [reach[v] * times[v] / (problem.cost[v] or 1e-300) for v in range(len(graph))]
    backups: set[int] = set()
    while candidates := _on_long_paths(problem, backups):
        backups.add(max(candidates, key=lambda v: (share[v], -v)))
    return plan_of(problem, "share", backups)


def _on_long_paths(problem: BackupProblem, backups: set[int]) -> list[int]:
    """Tasks without a backup that stand, before its end, on a path longer than the bound."""
    graph, times = problem.graph, problem.reprocess_s
    latency = latencies(problem, backups)
    tail = [0.0] * len(graph)  # the longest way on from v, up to and with the next backup
    for v in reversed(graph.order):
        for w in graph.downstream[v]:
            tail[v] = max(tail[v], times[w] + (0.0 if w in backups else tail[w]))
    return [
        v
        for v in range(len(graph))
        if v not in backups and graph.downstream[v] and latency[v] + tail[v] > problem.limit_s
    ]
