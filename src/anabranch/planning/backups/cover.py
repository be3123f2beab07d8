"""Covering by rows: pay for the cheapest set of tasks that meets every row found so far.

A row is a set of tasks of which one must keep a backup (the tasks of a path that is too long,
before its last). There are too many to list, so `find_rows` gives only those that the current
solution misses. Any subset of the rows is a relaxation, so each bound here is proven, and a
whole solution that misses no row is optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

Rows = list[tuple[int, ...]]
FindRows = Callable[[NDArray[np.float64]], Rows]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look for the optimum: for some seconds, or for some work, which comes to
    the same plan whatever the machine and its load."""

    seconds: float = math.inf
    rows: int | None = None  # as long as no more of them are known: each makes solving harder
    nodes: int | None = None  # of branch and bound, whenever a program is solved

    def shared_by(self, parts: int) -> Effort:
        """What each of several problems may take; only time is shared."""
        return Effort(self.seconds / parts, self.rows, self.nodes)

    def limit(self, solver: highspy.Highs) -> None:
        """Time counts over all runs of a solver."""
        solver.setOptionValue("time_limit", max(self.seconds, 0.01))
        if self.nodes is not None:
            solver.setOptionValue("mip_max_nodes", self.nodes)


@dataclass(frozen=True)
class Cover:
    """A proven lower bound, and the whole solution that meets all rows, if one was reached."""

    lower_bound: float
    chosen: frozenset[int] | None


class RowProgram:
    """The program over the rows known so far, as HiGHS holds it."""

    def __init__(self, cost: Sequence[float], candidate: Sequence[bool], gap: float) -> None:
        self.tasks = [v for v, may in enumerate(candidate) if may]
        self.column = {v: i for i, v in enumerate(self.tasks)}
        self.size = len(cost)
        self.solver = highspy.Highs()
        self.solver.silent()
        self.solver.setOptionValue("mip_rel_gap", 0.0)
        self.solver.setOptionValue("mip_abs_gap", gap)
        self.seen: set[tuple[int, ...]] = set()
        self.whole = False
        for v in self.tasks:
            self.solver.addVar(0.0, 1.0)
            self.solver.changeColCost(self.column[v], cost[v])

    def add(self, rows: Rows) -> int:
        """Add the rows that are new; how many were."""
        added = 0
        for row in rows:
            columns = tuple(sorted(self.column[v] for v in row if v in self.column))
            if columns not in self.seen:
                self.seen.add(columns)
                self.solver.addRow(
                    1.0,
                    highspy.kHighsInf,
                    len(columns),
                    np.asarray(columns, dtype=np.int32),
                    np.ones(len(columns)),
                )
                added += 1
        return added

    def make_whole(self) -> None:
        """From here on, a task keeps a backup or it does not."""
        self.whole = True
        for i in range(len(self.tasks)):
            self.solver.changeColIntegrality(i, highspy.HighsVarType.kInteger)

    def solve(self, effort: Effort) -> tuple[NDArray[np.float64], float, bool]:
        """The solution by task, the proven bound, and whether the program was solved to the end."""
        effort.limit(self.solver)
        self.solver.run()
        info = self.solver.getInfo()
        done = self.solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        bound = info.mip_dual_bound if self.whole else info.objective_function_value
        price = np.zeros(self.size)
        if done:
            price[self.tasks] = self.solver.getSolution().col_value
        return price, float(bound) if done or self.whole else 0.0, done


def cover(program: RowProgram, find_rows: FindRows, effort: Effort) -> Cover:
    """Solve, add the rows missed, solve again; first relaxed, where rows are cheap to find.

    `find_rows` gets prices between 0 and 1 and returns rows that cost less than 1.
    """
    best = 0.0
    program.add(find_rows(np.zeros(program.size)))
    while effort.rows is None or len(program.seen) <= effort.rows:
        price, bound, done = program.solve(effort)
        best = max(best, bound)
        if not done:
            break
        if program.whole:
            price = np.rint(price)
        if program.add(find_rows(price)):
            continue
        if program.whole:
            return Cover(best, frozenset(int(v) for v in np.flatnonzero(price > 0.5)))
        program.make_whole()
    return Cover(best, None)
