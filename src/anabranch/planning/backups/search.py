"""Backup plans for large graphs, and a proven lower bound on the cost of any plan.

The problem is to hit every path that is too long (`backups_paths`). Counting the long paths
through each task tells which backup cuts most of them (`cut_greedily`). Spreading flow over the
long paths so that no task carries more than the cost of its backup is a fractional packing, and
its total is a lower bound (`packing_bound`): every path must pay for one backup, and no backup
is paid for more than once.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Sequence

import numpy as np

from anabranch.planning.backups.paths import Floats, LongPaths
from anabranch.planning.backups.reduce import ReducedProblem

# Of the packing: room for the multipliers per task of a path, momentum of their update, and
# how far the logarithm of one may move in a step. Chosen by trial on random graphs: without
# the cap tasks that can never be full slow the rest down (half the bound after the same time).
CAP_PER_TASK = 2.5
MOMENTUM = 0.9
STEP_LIMIT = 1.0

# Part of a plan that one round of `improve` drops.
RUINED = 0.2


def packing_bound(problem: ReducedProblem, paths: LongPaths, rounds: int) -> float:
    """A proven lower bound: the best fractional packing of long paths in `rounds` steps.

    A path p carries exp(room) * product of w(v), 0 < w <= 1: the entropy-smoothed optimum has
    this form, and w(v) < 1 only where task v is full. Each step moves log w against the log of
    the load. Any w gives a packing once divided by its largest load, so every step is a bound.
    """
    cost = np.asarray(problem.cost)
    candidate = np.asarray(problem.candidate)
    load, total = paths.loads(_even_weights(problem))
    if total <= 0:
        return 0.0
    full = candidate & (load > 0)
    length = load[full].sum() / total
    room = min(CAP_PER_TASK * length, 200.0)
    log_w = np.zeros(paths.n)
    log_w[full] = -(room + math.log(paths.loads(np.ones(paths.n))[1])) / length
    speed = np.zeros(paths.n)
    best = 0.0
    for _ in range(rounds):
        load, total = paths.loads(np.exp(log_w))
        relative = load[full] / cost[full]
        best = max(best, total / relative.max())
        pull = -(np.log(np.maximum(relative, 1e-300)) + room) / length
        speed[full] = MOMENTUM * speed[full] + np.clip(pull, -STEP_LIMIT, STEP_LIMIT)
        log_w[full] += speed[full]
        over = log_w > 0
        log_w[over] = 0.0
        speed[over] = 0.0
    return best


def cut_greedily(problem: ReducedProblem, paths: LongPaths) -> set[int]:
    """Back up the tasks through which most long paths run, per cost, a few at a time."""
    batch = max(1, paths.n * (paths.grid + 1) // 8000)  # wide sweeps take long: fewer of them
    return _cut(problem, paths, (), batch)


def improve(problem: ReducedProblem, paths: LongPaths, plan: set[int], rounds: int) -> set[int]:
    """Ruin and recreate: drop a random part of the plan, cut again, keep what costs no more."""
    draw = random.Random(0)
    best, least = plan, _cost(problem, plan)
    for _ in range(rounds):
        dropped = max(1, int(RUINED * len(best)))
        if dropped >= len(best):
            break
        left = draw.sample(sorted(best), len(best) - dropped)
        again = _cut(problem, paths, left, max(1, dropped // 10))
        if _cost(problem, again) <= least:
            best, least = again, _cost(problem, again)
    return best


def _cut(problem: ReducedProblem, paths: LongPaths, start: Collection[int], batch: int) -> set[int]:
    """Add to `start`, `batch` tasks at a time, until no path is too long; then prune."""
    candidate, cost = np.asarray(problem.candidate), np.asarray(problem.cost)
    weight = _even_weights(problem)
    chosen = set(start)
    weight[list(chosen)] = 0.0
    while True:
        load, total = paths.loads(weight)
        # Only candidates surely cost something: a free task may still end a path.
        gain: Floats = np.divide(load, cost, out=np.zeros(paths.n), where=candidate)
        best = gain.max()
        if total <= 0 or best <= 0:
            return prune(problem, repair(problem, chosen))
        top = np.argsort(-gain, kind="stable")[:batch]
        top = top[gain[top] >= 0.8 * best]
        weight[top] = 0.0
        chosen.update(int(v) for v in top)


def _cost(problem: ReducedProblem, plan: Collection[int]) -> float:
    return math.fsum(problem.cost[v] for v in plan)


def _even_weights(problem: ReducedProblem) -> Floats:
    """One weight for all tasks, small enough that sums over all paths stay finite."""
    return np.full(len(problem.cost), 1.0 / max(1.0, problem.mean_degree))


def repair(problem: ReducedProblem, chosen: Collection[int]) -> set[int]:
    """Add backups, in topological order, where a task would still be back too late."""
    backups = set(chosen)
    latency = list(problem.reprocess_s)
    for v in problem.order:
        for u in sorted(problem.upstream[v], key=latency.__getitem__, reverse=True):
            if u not in backups and latency[u] + problem.reprocess_s[v] > problem.limit_s:
                backups.add(u)
        waits = [latency[u] for u in problem.upstream[v] if u not in backups]
        latency[v] = problem.reprocess_s[v] + max(waits, default=0.0)
    return backups


def slow_paths(problem: ReducedProblem, chosen: Collection[int]) -> list[tuple[int, ...]]:
    """For each task still back too late: the tasks whose recovery it waits for, to the bound."""
    latency = list(problem.reprocess_s)
    waits_for: dict[int, int] = {}
    found = []
    for v in problem.order:
        waits = [u for u in problem.upstream[v] if u not in chosen]
        if waits:
            waits_for[v] = max(waits, key=latency.__getitem__)
            latency[v] += latency[waits_for[v]]
        if latency[v] > problem.limit_s:
            path, length, u = [], problem.reprocess_s[v], v
            while length <= problem.limit_s:
                u = waits_for[u]
                path.append(u)
                length += problem.reprocess_s[u]
            found.append(tuple(path))
    return found


def prune(problem: ReducedProblem, chosen: Collection[int]) -> set[int]:
    """Drop backups that the others make needless: dearest first, then the latest in the graph.

    A backup on v may go when the longest way into v and the longest way out of it, both without
    backups on them, fit the bound together. Both are kept up to date after each drop.
    """
    times, limit = problem.reprocess_s, problem.limit_s
    backups = set(chosen)
    rank = [0] * len(times)
    for i, v in enumerate(problem.order):
        rank[v] = i
    back_rank = [-r for r in rank]

    def way_in(v: int) -> float:
        waits = [into[u] for u in problem.upstream[v] if u not in backups]
        return times[v] + max(waits, default=0.0)

    def way_out(v: int) -> float:
        """A backup further down still recovers itself: it ends the way, with its own time."""
        tails = [times[w] if w in backups else out[w] for w in problem.downstream[v]]
        return times[v] + max(tails, default=0.0)

    into = [0.0] * len(times)
    out = [0.0] * len(times)
    for v in problem.order:
        into[v] = way_in(v)
    for v in reversed(problem.order):
        out[v] = way_out(v)
    for v in sorted(backups, key=lambda v: (-problem.cost[v], -rank[v])):
        if into[v] + out[v] - times[v] > limit:
            continue
        backups.discard(v)
        _spread(v, into, way_in, problem.downstream, rank, backups)
        _spread(v, out, way_out, problem.upstream, back_rank, backups)
    return backups


def _spread(
    start: int,
    values: list[float],
    value_of: Callable[[int], float],
    onward: Sequence[Sequence[int]],
    rank: Sequence[int],
    backups: Collection[int],
) -> None:
    """Recompute `values` from `start` on, in order of `rank`, as far as they change."""
    waiting = [(rank[w], w) for w in onward[start]]
    heapq.heapify(waiting)
    done = set()
    while waiting:
        _, v = heapq.heappop(waiting)
        if v in done:
            continue
        done.add(v)
        value = value_of(v)
        if value == values[v]:
            continue
        values[v] = value
        if v not in backups:
            for w in onward[v]:
                heapq.heappush(waiting, (rank[w], w))
