"""Local search for recovery plans of thousands of queries.

Decides a plan for tangles that cannot be enumerated: a greedy by density, then rounds that
drop a few recovered queries, refill by density, and keep what is better. Deterministic: the
seed is fixed, and it stops when told to. Invariant: the plan in hand always fits the limit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anabranch.planning.recovery.queries import Floats, Ints, Sharing

#: Rounds without an improvement after which the search gives up.
PATIENCE = 10_000
#: How much a query's cost share counts beside the cost it adds now. Small values suit little
#: sharing, large ones suit queries that only pay off together; every start is tried.
SHARE_WEIGHTS = (0.0, 1.0, 1000.0)
#: Relative noise on the densities of a refill, so that rounds differ.
NOISE = 0.15


def search_plan(
    sharing: Sharing,
    limit: float,
    shares: Floats,
    bound: int,
    may_continue: Callable[[], bool],
) -> list[int]:
    """The best set of query indices found before `may_continue` says no or `bound` is met.

    `shares` is a split of all costs over the queries, as `solver.cost_shares` makes it.
    """
    state = _State(sharing, limit)
    rng = np.random.default_rng(0)
    best, best_value = state.taken.copy(), -1
    for weight in SHARE_WEIGHTS:
        state.clear()
        state.fill(sharing.priorities, weight * shares)
        if state.value > best_value:
            best, best_value = state.taken.copy(), state.value
    state.reset(best)
    stale = 0
    while best_value < bound and stale < PATIENCE and may_continue():
        state.drop(rng)
        noise = np.maximum(1 + NOISE * rng.standard_normal(len(shares)), 0.1)
        state.fill(sharing.priorities * noise, float(rng.choice(SHARE_WEIGHTS)) * shares)
        stale += 1
        if state.value > best_value:
            stale = 0
        if state.value >= best_value:
            best, best_value = state.taken.copy(), state.value
        else:
            state.reset(best)
    return [int(q) for q in np.flatnonzero(best)]


class _State:
    """A plan with, per query, the cost it would still add; updated as queries come and go."""

    def __init__(self, sharing: Sharing, limit: float) -> None:
        self.limit = limit
        self.priorities = sharing.priorities
        count = len(sharing.names)
        degree = np.array([len(u) for u in sharing.users], dtype=np.int64)
        user = np.array([q for u in sharing.users for q in u], dtype=np.int64)
        group = np.repeat(np.arange(len(degree)), degree)
        self.costs: Floats = sharing.costs
        self.user_end = np.cumsum(degree)
        self.user_start = self.user_end - degree
        self.users = user
        order = np.argsort(user, kind="stable")
        self.groups = [
            part.astype(np.int64)
            for part in np.split(group[order], np.cumsum(np.bincount(user, minlength=count))[:-1])
        ]
        self.degree = degree
        self.clear()

    def clear(self) -> None:
        count = len(self.priorities)
        self.taken = np.zeros(count, dtype=bool)
        self.holders = np.zeros(len(self.costs), dtype=np.int64)
        full = np.repeat(self.costs, self.degree)
        self.adds: Floats = np.bincount(self.users, full, count).astype(np.float64)
        self.cost = 0.0
        self.value = 0

    def reset(self, taken: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        for q in np.flatnonzero(self.taken & ~taken):
            self._remove(int(q))
        for q in np.flatnonzero(taken & ~self.taken):
            self._add(int(q))

    def fill(self, worth: Floats | Ints, effort: Floats) -> None:
        """Take the query with most worth for its effort and the cost it adds, while one fits."""
        while True:
            fits = ~self.taken & (self.cost + self.adds <= self.limit)
            if not fits.any():
                return
            density = np.where(fits, worth / np.maximum(effort + self.adds, 1e-12), -1.0)
            self._add(int(density.argmax()))

    def drop(self, rng: np.random.Generator) -> None:
        """Remove a query and some that share with it: freeing shared groups frees their cost."""
        members = np.flatnonzero(self.taken)
        if not len(members):
            return
        first = int(rng.choice(members))
        near = self._neighbours(first)
        count = int(rng.integers(1, 9))
        chosen = {first, *rng.permutation(near)[: count - 1].tolist()}
        for q in sorted(chosen):
            if self.taken[q]:
                self._remove(int(q))

    def _neighbours(self, query: int) -> Ints:
        near = [self.users[self.user_start[g] : self.user_end[g]] for g in self.groups[query]]
        return np.unique(np.concatenate(near)) if near else np.zeros(0, dtype=np.int64)

    def _add(self, query: int) -> None:
        self.cost += float(self.adds[query])
        self.value += int(self.priorities[query])
        self.taken[query] = True
        self._count(self.groups[query], 1)

    def _remove(self, query: int) -> None:
        self.value -= int(self.priorities[query])
        self.taken[query] = False
        self._count(self.groups[query], -1)
        self.cost -= float(self.adds[query])

    def _count(self, groups: Ints, step: int) -> None:
        """Raise or lower how many taken queries hold `groups`; price those that flip."""
        before = self.holders[groups]
        self.holders[groups] = before + step
        flipped = groups[before == (0 if step > 0 else 1)]
        length = self.degree[flipped]
        total = int(length.sum())
        if not total:
            return
        offset = np.repeat(self.user_start[flipped] - np.cumsum(length) + length, length)
        users = self.users[offset + np.arange(total)]
        np.add.at(self.adds, users, -step * np.repeat(self.costs[flipped], length))
