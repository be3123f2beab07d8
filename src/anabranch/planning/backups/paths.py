"""The family of paths that are too long, swept in one pass down and one pass up the graph.

A plan is good when every path whose reprocessing times sum to more than R keeps a backup on one
of its tasks before the last. There are far too many such paths to list; sums and minima over all
of them are computed by dynamic programming over (task, length so far), with lengths in cells of
a grid. The family is exact when all T are multiples of one step and not too many of them fit in
R; otherwise times are rounded down, which can only lose paths: what is proven about the family
stays proven about the problem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from anabranch.planning.backups.reduce import ReducedProblem

Floats = NDArray[np.float64]

# Of the grid: states (tasks times cells) that a sweep may hold, and cells when times have no
# common step.
STATES = 2_000_000
COARSEST_GRID = 64
FINEST_GRID = 1000

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


def _grid(times: Floats, limit_s: float) -> tuple[int, NDArray[np.int64]]:
    """Cells to the bound, and each time in cells: exact if a common step allows, else floored."""
    most = max(COARSEST_GRID, STATES // len(times))
    distinct = sorted(set(times.tolist()))
    fractions = [Fraction(t).limit_denominator(1000) for t in distinct]
    denominator = math.lcm(*(f.denominator for f in fractions))
    whole = math.gcd(*(int(f * denominator) for f in fractions))
    exact = np.allclose([float(f) for f in fractions], distinct, rtol=1e-12, atol=0.0)
    if exact and whole and limit_s * denominator / whole < most + 1:
        step = whole / denominator
        return int(limit_s / step), np.rint(times / step).astype(np.int64)
    cells = min(most, FINEST_GRID)
    # A hair below the cell, so that no sum of cells passes the bound when the times do not.
    return cells, np.floor(times * (cells / limit_s) * (1 - 1e-12)).astype(np.int64)
