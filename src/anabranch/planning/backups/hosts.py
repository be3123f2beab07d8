"""The cheapest plan that holds when a whole node is lost, with proof.

A lost node takes its tasks and their backups. For each node and each task on it, every path
into that task longer than the bound needs a backup on another node. The rows are found by
losing each node in turn under the current plan (see `backups_cover` for the loop).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from anabranch.planning.backups.cover import Effort, RowProgram, Rows, cover
from anabranch.planning.backups.plan import BackupProblem, latencies


def hosted_backups(problem: BackupProblem, step: float, effort: Effort) -> tuple[set[int], float]:
    """A plan that no lost node breaks, and a proven lower bound on the cost of any such plan."""
    candidate = [bool(targets) for targets in problem.graph.downstream]
    program = RowProgram(problem.cost, candidate, 0.999 * step)
    program.make_whole()
    found = cover(program, lambda price: _rows(problem, price), effort)
    if found.chosen is not None:
        return _without_needless(problem, set(found.chosen)), found.lower_bound
    chosen: set[int] = set()
    while rows := _rows(problem, _prices(problem, chosen)):
        common = Counter(v for row in rows for v in row)
        chosen.add(max(common, key=lambda v: (common[v] / (problem.cost[v] or 1e-300), -v)))
    return _without_needless(problem, chosen), found.lower_bound


def _rows(problem: BackupProblem, price: NDArray[np.float64]) -> Rows:
    """One row for each task that is back too late when its node is lost."""
    assert problem.hosts is not None
    backups = {int(v) for v in np.flatnonzero(price > 0.5)}
    rows = []
    for node in dict.fromkeys(problem.hosts):
        working = {u for u in backups if problem.hosts[u] != node}
        latency = latencies(problem, working)
        for v, host in enumerate(problem.hosts):
            if host == node and latency[v] > problem.limit_s:
                path = _slowest_way(problem, latency, v, working)
                rows.append(tuple(u for u in path if problem.hosts[u] != node))
    return rows


def _slowest_way(
    problem: BackupProblem, latency: list[float], v: int, backups: set[int]
) -> list[int]:
    """The tasks whose recovery v waits for, nearest first, as far back as the bound is broken."""
    path, length = [], problem.reprocess_s[v]
    while length <= problem.limit_s:
        waits_for = [u for u in problem.graph.upstream[v] if u not in backups]
        v = max(waits_for, key=latency.__getitem__)
        path.append(v)
        length += problem.reprocess_s[v]
    return path


def _prices(problem: BackupProblem, chosen: set[int]) -> NDArray[np.float64]:
    price = np.zeros(len(problem.graph))
    price[sorted(chosen)] = 1.0
    return price


def _without_needless(problem: BackupProblem, chosen: set[int]) -> set[int]:
    """Drop free backups that no row needs; paid ones are needed already."""
    for v in sorted(chosen, key=lambda v: (-problem.cost[v], v)):
        if not _rows(problem, _prices(problem, chosen - {v})):
            chosen = chosen - {v}
    return chosen
