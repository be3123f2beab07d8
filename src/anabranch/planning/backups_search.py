"""Backup plans for large graphs, and a proven lower bound on the cost of any plan.

A plan is good when every path whose reprocessing times sum to more than R keeps a backup on
one of its tasks before the last: the problem is to hit all long paths. Two views of the family
of long paths, computed by one sweep down and one sweep up the graph, do the work:

* counting the long paths through each task tells which backup cuts most of them (`cut_greedily`);
* spreading flow over the long paths so that no task carries more than the cost of its backup is
  a fractional packing of paths, and its total is a lower bound (`packing_bound`): every path must
  pay for one backup, and no backup is paid for more than once.

The family is exact when R and all T are multiples of one step (at most `GRID` of them to R);
otherwise times are rounded down to a grid, which can only lose paths: the bound stays proven,
and the search repairs what the grid did not see.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anabranch.planning.backups_reduce import ReducedProblem

GRID = 128
COARSE_GRID = 64
Floats = NDArray[np.float64]

# Of the packing: room for the multipliers per task of a path, momentum of their update, and
# how far the logarithm of one may move in a step. Chosen by trial on random graphs: without
# the cap tasks that can never be full slow the rest down (half the bound after the same time).
CAP_PER_TASK = 2.0
MOMENTUM = 0.8
STEP_LIMIT = 1.0

# Rows of one round that may share a task: more rows per round, fewer rounds, slower programs.
SHARED_ROWS = 3


class LongPaths:
    """The family of paths longer than the bound, weighted by a product of task weights.

    State of a path so far: its last task and its length in cells of the grid. Tasks of equal
    depth and equal time form a block, so that a sweep is one array step per block.
    """

    def __init__(self, problem: ReducedProblem) -> None:
        self.n = len(problem.reprocess_s)
        self.grid, ticks = _grid(np.asarray(problem.reprocess_s), problem.limit_s)
        depth = [0] * self.n
        for v in problem.order:
            depth[v] = 1 + max((depth[u] for u in problem.upstream[v]), default=-1)
        depths = np.asarray(depth)
        self.at = np.lexsort(np.stack([ticks, depths]))
        self.position = np.empty(self.n, dtype=np.int64)
        self.position[self.at] = np.arange(self.n)
        self.ticks = ticks[self.at]
        keys = depths[self.at] * (self.ticks.max() + 1) + self.ticks
        edges_of = np.flatnonzero(np.diff(keys)) + 1
        bounds = [0, *edges_of.tolist(), self.n]
        downs = [problem.downstream[v] for v in self.at]
        self._upstream = [self.position[list(problem.upstream[v])].tolist() for v in self.at]
        self._down = self._blocks(bounds, [problem.upstream[v] for v in self.at])
        self._up = self._blocks(bounds, downs)[::-1]
        largest_next = np.full(self.n, -self.grid - 1)
        for i, targets in enumerate(downs):
            if targets:
                largest_next[i] = self.ticks[self.position[list(targets)]].max()
        # A prefix is complete when some next task takes it over the bound.
        self.complete = np.arange(self.grid + 1) + largest_next[:, None] > self.grid
        self._open = (~self.complete).astype(np.float64)

    def loads(self, weight: Floats) -> tuple[Floats, float]:
        """The weight of all paths, through each task (by the problem's numbers) and in total."""
        w = weight[self.at]
        arrive = self._sweep_down(w)
        leave = self._sweep_up(w)
        through = np.empty(self.n)
        through[self.at] = np.einsum("ij,ij->i", arrive, leave)
        return through, float(arrive[self.complete].sum())

    def _blocks(self, bounds: list[int], neighbours: list[tuple[int, ...]]) -> list[_Block]:
        """Per block: its rows, its time in cells, and the neighbours of the rows that have any."""
        blocks = []
        for lo, hi in pairwise(bounds):
            rows = [i for i in range(lo, hi) if neighbours[i]]
            flat = [v for i in rows for v in neighbours[i]]
            sizes = [len(neighbours[i]) for i in rows]
            groups = np.cumsum([0, *sizes])[:-1].astype(np.int64)
            ends = self.position[np.asarray(flat, dtype=np.int64)]
            index = np.asarray(rows, dtype=np.int64)
            blocks.append(_Block(lo, hi, int(self.ticks[lo]), index, ends, groups))
        return blocks

    def _sweep_down(self, w: Floats) -> Floats:
        """arrive[v, a]: weight of prefixes that end in v with total length a, v included."""
        width = self.grid + 1
        arrive = np.zeros((self.n, width))
        onward = np.zeros((self.n, width))
        for block in self._down:
            lo, hi, tick = block.lo, block.hi, block.tick
            if tick > self.grid:
                continue
            if len(block.rows):
                summed = np.add.reduceat(onward.take(block.ends, axis=0), block.groups, axis=0)
                arrive[block.rows, tick:] = summed[:, : width - tick]
            arrive[lo:hi, tick] += 1.0
            arrive[lo:hi] *= w[lo:hi, None]
            np.multiply(arrive[lo:hi], self._open[lo:hi], out=onward[lo:hi])
        return arrive

    def _sweep_up(self, w: Floats) -> Floats:
        """leave[v, a]: weight of what can follow a prefix of length a that ends in v."""
        width = self.grid + 1
        leave: Floats = self.complete.astype(np.float64)
        enter = np.zeros((self.n, width))
        for block in self._up:
            lo, hi, tick = block.lo, block.hi, block.tick
            if len(block.rows):
                summed = np.add.reduceat(enter.take(block.ends, axis=0), block.groups, axis=0)
                leave[block.rows] += summed * self._open[block.rows]
            if tick <= self.grid:
                enter[lo:hi, : width - tick] = leave[lo:hi, tick:] * w[lo:hi, None]
        return leave

    def cheapest(self, price: Floats) -> list[tuple[int, ...]]:
        """Long paths that cost less than 1 at these prices: at most one per second-last task.

        Tasks before the last only: those whose backup would cut the path. At most
        `SHARED_ROWS` of the paths returned run through any one task.
        """
        best = self._cheapest_prefixes(price[self.at])
        closing = np.where(self.complete, best, np.inf)
        at_length = closing.argmin(axis=1)
        value = closing[np.arange(self.n), at_length]
        taken = np.zeros(self.n, dtype=np.int64)
        found = []
        for v in np.argsort(value, kind="stable"):
            if value[v] >= 1 - 1e-6:
                break
            path = self._trace(best, int(v), int(at_length[v]))
            if taken[path].max() < SHARED_ROWS:
                taken[path] += 1
                found.append(tuple(int(self.at[u]) for u in path))
        return found

    def _cheapest_prefixes(self, x: Floats) -> Floats:
        """best[v, a]: price of the cheapest prefix that ends in v with length a, v included."""
        width = self.grid + 1
        best = np.full((self.n, width), np.inf)
        onward = np.full((self.n, width), np.inf)
        for block in self._down:
            lo, hi, tick = block.lo, block.hi, block.tick
            if tick > self.grid:
                continue
            if len(block.rows):
                least = np.minimum.reduceat(onward.take(block.ends, axis=0), block.groups, axis=0)
                best[block.rows, tick:] = least[:, : width - tick]
            best[lo:hi, tick] = 0.0  # a path may start here, and nothing is cheaper
            best[lo:hi] += x[lo:hi, None]
            onward[lo:hi] = np.where(self.complete[lo:hi], np.inf, best[lo:hi])
        return best

    def _trace(self, best: Floats, v: int, length: int) -> list[int]:
        """The tasks of a cheapest prefix, from its end back to its start."""
        path = [v]
        while length > self.ticks[v]:
            length -= int(self.ticks[v])
            ups = self._upstream[v]
            open_ups = [u for u in ups if not self.complete[u, length]]
            v = min(open_ups, key=lambda u: best[u, length])
            path.append(v)
        return path


@dataclass(frozen=True)
class _Block:
    """Rows lo..hi of one depth and time; `rows` have neighbours, `ends` in runs of `groups`."""

    lo: int
    hi: int
    tick: int
    rows: NDArray[np.int64]
    ends: NDArray[np.int64]
    groups: NDArray[np.int64]


def packing_bound(problem: ReducedProblem, paths: LongPaths, rounds: int) -> float:
    """A proven lower bound: the best fractional packing of long paths in `rounds` steps.

    A path p carries exp(room) * product of w(v), 0 < w <= 1: the entropy-smoothed optimum has
    this form, and w(v) < 1 only where task v is full. Each step moves log w against the log of
    the load. Any w gives a packing once divided by its largest load, so every step is a bound.
    """
    cost = np.asarray(problem.cost)
    candidate = np.asarray(problem.candidate)
    weight = np.full(paths.n, 1.0 / max(1.0, problem.mean_degree))
    load, total = paths.loads(weight)
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
    cost = np.asarray(problem.cost)
    candidate = np.asarray(problem.candidate)
    weight = np.full(paths.n, 1.0 / max(1.0, problem.mean_degree))
    chosen: set[int] = set()
    batch = max(1, paths.n // 500)
    while True:
        load, total = paths.loads(weight)
        load[~candidate] = 0.0
        gain = load / cost
        best = gain.max()
        if total <= 0 or best <= 0:
            break
        top = np.argsort(-gain, kind="stable")[:batch]
        top = top[gain[top] >= 0.8 * best]
        weight[top] = 0.0
        chosen.update(int(v) for v in top)
    return prune(problem, repair(problem, chosen))


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


def _grid(times: Floats, limit_s: float) -> tuple[int, NDArray[np.int64]]:
    """Cells to the bound, and each time in cells: exact if a common step allows, else floored."""
    distinct = [Fraction(t).limit_denominator(1000) for t in sorted(set(times.tolist()))]
    denominator = math.lcm(*(f.denominator for f in distinct))
    whole = math.gcd(*(int(f * denominator) for f in distinct))
    exact = np.allclose([float(f) for f in distinct], sorted(set(times.tolist())), rtol=1e-12)
    if exact and whole and limit_s * denominator / whole < GRID + 1:
        step = whole / denominator
        return int(limit_s / step), np.rint(times / step).astype(np.int64)
    # A hair below the cell, so that no sum of cells passes the bound when the times do not.
    return COARSE_GRID, np.floor(times * (COARSE_GRID / limit_s) * (1 - 1e-12)).astype(np.int64)
