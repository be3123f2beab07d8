"""Shrink a backup problem to its hard parts before anything searches.

Three reductions, none of which loses every optimal plan:

* a task whose successor alone takes it over the bound must keep a backup, and cuts its streams;
* a stream on no path longer than the bound is dropped, and the rest falls into parts that are
  planned apart;
* a task need not be considered when its only neighbour on one side stands on all the same long
  paths and costs no more (`candidate` is False; its time still counts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.planning.backups.plan import BackupProblem


@dataclass(frozen=True)
class ReducedProblem:
    """A part of a problem in its own numbers; `origin` gives the task numbers of the whole."""

    reprocess_s: tuple[float, ...]
    cost: tuple[float, ...]
    candidate: tuple[bool, ...]
    upstream: tuple[tuple[int, ...], ...]
    downstream: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    limit_s: float
    origin: tuple[int, ...]

    @property
    def edges(self) -> int:
        return sum(map(len, self.downstream))

    @property
    def mean_degree(self) -> float:
        return self.edges / max(1, len(self.cost))


@dataclass(frozen=True)
class Reduction:
    """Backups every plan needs (or that are free), and the parts left to plan."""

    forced: frozenset[int]
    parts: tuple[ReducedProblem, ...]


def whole(problem: BackupProblem) -> ReducedProblem:
    """The problem as one part, unreduced."""
    graph = problem.graph
    return ReducedProblem(
        problem.reprocess_s,
        problem.cost,
        tuple(bool(targets) for targets in graph.downstream),
        graph.upstream,
        graph.downstream,
        graph.order,
        problem.limit_s,
        tuple(range(len(graph))),
    )


def reduce(problem: BackupProblem) -> Reduction:
    """Force, drop, split and thin out; see the module's docstring."""
    graph, times, limit = problem.graph, problem.reprocess_s, problem.limit_s
    forced = {
        u
        for u, targets in enumerate(graph.downstream)
        if targets and (problem.cost[u] == 0 or times[u] + max(times[v] for v in targets) > limit)
    }
    down = [() if u in forced else targets for u, targets in enumerate(graph.downstream)]
    up = [tuple(u for u in ups if u not in forced) for ups in graph.upstream]
    longest_to = _longest(graph.order, up, times)
    longest_from = _longest(graph.order[::-1], down, times)
    down = [
        tuple(v for v in targets if longest_to[u] + longest_from[v] > limit)
        for u, targets in enumerate(down)
    ]
    return Reduction(frozenset(forced), _parts(problem, down, longest_to, longest_from))


def _longest(
    order: Sequence[int], before: Sequence[Sequence[int]], times: Sequence[float]
) -> list[float]:
    """Length of the longest path that ends in each task, itself included."""
    longest = list(times)
    for v in order:
        longest[v] += max((longest[u] for u in before[v]), default=0.0)
    return longest


def _parts(
    problem: BackupProblem,
    down: Sequence[tuple[int, ...]],
    longest_to: Sequence[float],
    longest_from: Sequence[float],
) -> tuple[ReducedProblem, ...]:
    up: list[list[int]] = [[] for _ in down]
    for u, targets in enumerate(down):
        for v in targets:
            up[v].append(u)
    candidate = _candidates(problem, down, up, longest_to, longest_from)
    parts = []
    for members in _components(down, up):
        local = {v: i for i, v in enumerate(members)}
        parts.append(
            ReducedProblem(
                tuple(problem.reprocess_s[v] for v in members),
                tuple(problem.cost[v] for v in members),
                tuple(candidate[v] for v in members),
                tuple(tuple(local[u] for u in up[v]) for v in members),
                tuple(tuple(local[w] for w in down[v]) for v in members),
                tuple(local[v] for v in problem.graph.order if v in local),
                problem.limit_s,
                tuple(members),
            )
        )
    return tuple(parts)


def _candidates(
    problem: BackupProblem,
    down: Sequence[Sequence[int]],
    up: Sequence[Sequence[int]],
    longest_to: Sequence[float],
    longest_from: Sequence[float],
) -> list[bool]:
    """False for tasks that a sole neighbour replaces at no extra cost.

    A sole successor w stands on every long path through v, unless one ends in w; a sole
    predecessor, unless one starts in v. Judged one after another, each against tasks that are
    candidates still, so that two equals never strike each other out.
    """
    limit, cost, times = problem.limit_s, problem.cost, problem.reprocess_s
    candidate = [bool(targets) for targets in down]
    for v in problem.graph.order:
        if candidate[v] and len(down[v]) == 1:
            w = down[v][0]
            if candidate[w] and cost[w] <= cost[v] and longest_to[v] + times[w] <= limit:
                candidate[v] = False
        if candidate[v] and len(up[v]) == 1:
            u = up[v][0]
            if candidate[u] and cost[u] <= cost[v] and longest_from[v] <= limit:
                candidate[v] = False
    return candidate


def _components(down: Sequence[Sequence[int]], up: Sequence[Sequence[int]]) -> list[list[int]]:
    """Weakly connected groups of tasks that still have streams, each ascending."""
    seen = [False] * len(down)
    groups = []
    for start in range(len(down)):
        if seen[start] or not (down[start] or up[start]):
            continue
        seen[start] = True
        group = [start]
        for v in group:  # grows while it is read
            for w in (*down[v], *up[v]):
                if not seen[w]:
                    seen[w] = True
                    group.append(w)
        groups.append(sorted(group))
    return groups
