"""The cheapest backup plan, with proof.

After the reductions every part is planned by the strongest method its size allows:

* small parts by an integer program. Tasks with the same upstream and the same downstream tasks
  form a class: all wait equally long for their input, U, and the class hands on U + T of its
  slowest task without a backup. One variable U per class and one row per task and downstream
  class say everything, in place of one row per edge:

      U(d) >= U(c) + T(u) - (T(u) + cap of U(c)) * M(u)     u in class c, d downstream of c
      U(c) <= R - slowest T of c

* larger ones by rows of long paths (`backups_cover`);
* the largest by the greedy search, with the packing bound (`backups_search`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import highspy
import numpy as np

from anabranch.planning.backups.cover import Effort, RowProgram, cover
from anabranch.planning.backups.hosts import hosted_backups
from anabranch.planning.backups.paths import Floats, LongPaths
from anabranch.planning.backups.plan import (
    BackupPlan,
    BackupProblem,
    plan_of,
    require_feasible,
)
from anabranch.planning.backups.reduce import ReducedProblem, reduce
from anabranch.planning.backups.search import (
    cut_greedily,
    improve,
    packing_bound,
    prune,
    repair,
    slow_paths,
)

# Measured on random graphs: below PROGRAM_TASKS the program with classes is the faster one,
# above ROW_TASKS candidates the rows do not converge within seconds.
PROGRAM_TASKS = 400
ROW_TASKS = 2500

# The bound in the program's unit of time, so that its tolerances are relative.
SCALED_LIMIT = 100.0

# Of large parts: cells of the path sweeps spent on the packing bound, with limits to its rounds,
# and rounds of improvement, made only where sweeps are cheap (elsewhere one takes a second for
# half a per cent). Together two to four seconds on one core for 10,000 tasks.
SWEPT_CELLS = 160_000_000
PACKING_ROUNDS = (30, 300)
IMPROVE_ROUNDS = 12

TEN_SECONDS = Effort(10.0)


@dataclass(frozen=True)
class _PartPlan:
    """Backups of one part, in its own numbers, with a proven lower bound on their cost."""

    backups: Collection[int]
    lower_bound: float


def optimal_backups(
    problem: BackupProblem, keep: Iterable[str] = (), effort: Effort = TEN_SECONDS
) -> BackupPlan:
    """The cheapest plan; if the effort is not enough, the best found, with its proven bound.

    Among plans of equal cost it has as many of the backups in `keep` as possible: what runs
    already need not be started.
    """
    require_feasible(problem)
    kept = problem.graph.numbers(keep)
    step = cost_step(problem.cost)
    unit = step or max(problem.cost) or 1.0  # solvers work to absolute tolerances
    nudge = _nudge(problem, unit, step) if kept else 0.0
    costs = tuple(
        cost / unit + (nudge if kept and v not in kept else 0.0)
        for v, cost in enumerate(problem.cost)
    )
    scaled = replace(problem, cost=costs)
    fine = 0.0 if not step else nudge or 1.0
    if problem.hosts is not None:
        chosen, bound = hosted_backups(scaled, fine, effort)
    else:
        chosen, bound = _by_parts(scaled, fine, effort)
    # All nudges together stay below half a step, so taking them off loses nothing.
    bound = round_up(bound - nudge * len(problem.graph), 1.0 if step else 0.0)
    return plan_of(problem, "exact", chosen, bound * unit)


def replan_backups(
    problem: BackupProblem, existing: Iterable[str], effort: Effort = TEN_SECONDS
) -> BackupPlan:
    """Plan again after a scaling: the cheapest plan that keeps most of the existing backups.

    Tasks that the scaling removed are forgotten.
    """
    left = [name for name in existing if name in problem.graph.number]
    return optimal_backups(problem, left, effort)


def cost_step(costs: Iterable[float]) -> float:
    """The largest step of which every cost is a multiple, or 0 if there is no sensible one."""
    distinct = sorted(set(costs))
    fractions = [Fraction(c).limit_denominator(1000) for c in distinct]
    if not np.allclose([float(f) for f in fractions], distinct, rtol=1e-12, atol=0.0):
        return 0.0
    denominator = math.lcm(*(f.denominator for f in fractions))
    whole = math.gcd(*(int(f * denominator) for f in fractions))
    return whole / denominator if denominator < 10**6 else 0.0


def round_up(bound: float, step: float) -> float:
    """A bound on sums of steps is itself a sum of steps; a hair below counts as reached."""
    return max(0.0, math.ceil(bound / step - 1e-6) * step if step else bound)


def _nudge(problem: BackupProblem, unit: float, step: float) -> float:
    """What a new backup costs more than one that exists: too little to change the total."""
    least = 1.0 if step else 1e-4 * min((c / unit for c in problem.cost if c > 0), default=1.0)
    return least / (2 * (len(problem.graph) + 1))


def _by_parts(problem: BackupProblem, step: float, effort: Effort) -> tuple[set[int], float]:
    reduction = reduce(problem)
    chosen = set(reduction.forced)
    bound = problem.cost_of(chosen)
    for part in reduction.parts:
        planned = _plan_part(part, step, effort.shared_by(len(reduction.parts)))
        chosen.update(part.origin[v] for v in planned.backups)
        bound += planned.lower_bound
    return chosen, bound


def _plan_part(part: ReducedProblem, step: float, effort: Effort) -> _PartPlan:
    if len(part.cost) <= PROGRAM_TASKS:
        return _by_program(part, step, effort)
    paths = LongPaths(part)
    greedy = cut_greedily(part, paths)
    if sum(part.candidate) > ROW_TASKS:
        fewest, most = PACKING_ROUNDS
        rounds = max(fewest, min(most, SWEPT_CELLS // (part.edges * (paths.grid + 1))))
        bound = packing_bound(part, paths, rounds)
        plan = improve(part, paths, greedy, IMPROVE_ROUNDS if rounds == most else 0)
        return _PartPlan(plan, round_up(bound, step))
    program = RowProgram(part.cost, part.candidate, 0.999 * step)

    def find_rows(price: Floats) -> list[tuple[int, ...]]:
        """Paths of the grid; if it sees none, those that rounding hid from it."""
        return paths.cheapest(price) or slow_paths(part, set(np.flatnonzero(price > 0.5)))

    found = cover(program, find_rows, effort)
    bound = round_up(found.lower_bound, step)
    if found.chosen is None:
        return _PartPlan(greedy, bound)
    whole = prune(part, found.chosen)
    return _PartPlan(min(whole, greedy, key=lambda plan: _cost(part, plan)), bound)


def _cost(part: ReducedProblem, plan: Collection[int]) -> float:
    return math.fsum(part.cost[v] for v in plan)


def _by_program(part: ReducedProblem, step: float, effort: Effort) -> _PartPlan:
    """The program with classes; what it leaves over the bound by rounding is repaired."""
    tasks = len(part.cost)
    solver = _program(part, _classes(part))
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.999 * step)
    effort.limit(solver)
    solver.run()
    info = solver.getInfo()
    values = solver.getSolution().col_value[:tasks]
    plan: Collection[int] = prune(part, repair(part, {v for v in range(tasks) if values[v] > 0.5}))
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        plan = min(plan, cut_greedily(part, LongPaths(part)), key=lambda p: _cost(part, p))
    return _PartPlan(plan, round_up(max(0.0, info.mip_dual_bound), step))


def _classes(part: ReducedProblem) -> list[list[int]]:
    """Tasks with the same neighbours, in the order of their first member."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for v in range(len(part.cost)):
        groups.setdefault((part.upstream[v], part.downstream[v]), []).append(v)
    return list(groups.values())


def _program(part: ReducedProblem, classes: list[list[int]]) -> highspy.Highs:
    """Columns: M of each task, then U of each class."""
    tasks = len(part.cost)
    scale = SCALED_LIMIT / part.limit_s
    times = [t * scale for t in part.reprocess_s]
    of = {v: c for c, members in enumerate(classes) for v in members}
    waits = _longest_waits(part)
    solver = highspy.Highs()
    solver.silent()
    for v in range(tasks):
        solver.addVar(0.0, 1.0 if part.candidate[v] else 0.0)
        solver.changeColCost(v, part.cost[v])
        solver.changeColIntegrality(v, highspy.HighsVarType.kInteger)
    caps = []
    for members in classes:
        slowest = max(times[v] for v in members)
        caps.append(min(SCALED_LIMIT - slowest, waits[members[0]] * scale))
        solver.addVar(0.0, caps[-1])
    for c, members in enumerate(classes):
        for d in sorted({of[w] for w in part.downstream[members[0]]}):
            for u in members:
                row = [(tasks + d, 1.0), (tasks + c, -1.0), (u, times[u] + caps[c])]
                _add_row(solver, times[u], row)
        for slow, fast in _dominance(part, members):
            _add_row(solver, 0.0, [(slow, 1.0), (fast, -1.0)])
    return solver


def _dominance(part: ReducedProblem, members: list[int]) -> list[tuple[int, int]]:
    """Within a class the slower task is backed up first, if it costs no more."""
    ranked = sorted(
        (v for v in members if part.candidate[v]),
        key=lambda v: (-part.reprocess_s[v], part.cost[v]),
    )
    return [(slow, fast) for slow, fast in pairwise(ranked) if part.cost[slow] <= part.cost[fast]]


def _longest_waits(part: ReducedProblem) -> list[float]:
    """U of each task if nothing were backed up."""
    latency = list(part.reprocess_s)
    waits = [0.0] * len(latency)
    for v in part.order:
        waits[v] = max((latency[u] for u in part.upstream[v]), default=0.0)
        latency[v] += waits[v]
    return waits


def _add_row(solver: highspy.Highs, least: float, row: list[tuple[int, float]]) -> None:
    columns = np.asarray([column for column, _ in row], dtype=np.int32)
    values = np.asarray([value for _, value in row])
    solver.addRow(least, highspy.kHighsInf, len(row), columns, values)
