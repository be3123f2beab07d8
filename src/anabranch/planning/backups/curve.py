"""The whole trade-off: for every recovery bound, the cheapest plan that meets it.

The least cost falls in steps as the bound grows. Bounds are multiples of a resolution: the
common step of all reprocessing times if they have one (then the curve is exact), else a
fraction of the range. Between two bounds of equal cost nothing can happen, so intervals are
halved only while their ends differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.planning.backups.cover import Effort
from anabranch.planning.backups.exact import TEN_SECONDS, cost_step, optimal_backups
from anabranch.planning.backups.plan import BackupPlan, BackupProblem, latencies, smallest_bound

RANGE_STEPS = 200


@dataclass(frozen=True)
class CurvePoint:
    """From `bound_s` on, until the next point, `plan` is the cheapest that meets the bound."""

    bound_s: float
    plan: BackupPlan


def tradeoff(problem: BackupProblem, effort: Effort = TEN_SECONDS) -> tuple[CurvePoint, ...]:
    """All steps of bound -> least cost, by ascending bound; the problem's own bound is ignored.

    The first point is the smallest bound any plan can meet, the last one needs no backup.
    `effort` is for each plan; a plan that needed more says so (`optimal` is False).
    """
    least = smallest_bound(problem)[0]
    most = max(latencies(problem, ()))
    resolution = cost_step(problem.reprocess_s)
    if resolution == 0.0 or (most - least) / resolution > 10 * RANGE_STEPS:
        resolution = (most - least) / RANGE_STEPS
    if most <= least * (1 + 1e-9) or least <= 0:
        start = max(most, math.ulp(1.0))
        return (CurvePoint(start, optimal_backups(problem.with_bound(start), (), effort)),)
    plans: dict[int, BackupPlan] = {}

    def at(step: int) -> BackupPlan:
        if step not in plans:
            bound = min(most, least + step * resolution)
            plans[step] = optimal_backups(problem.with_bound(bound), (), effort)
        return plans[step]

    last = math.ceil((most - least) / resolution - 1e-9)
    intervals = [(0, last)]
    while intervals:
        low, high = intervals.pop()
        if at(low).cost > at(high).cost and high - low > 1:
            middle = (low + high) // 2
            intervals += [(low, middle), (middle, high)]
    return _steps(plans, least, most, resolution)


def _steps(
    plans: dict[int, BackupPlan], least: float, most: float, resolution: float
) -> tuple[CurvePoint, ...]:
    """Keep the first bound of each cost."""
    points: list[CurvePoint] = []
    for step in sorted(plans):
        if not points or plans[step].cost < points[-1].plan.cost:
            bound = min(most, least + step * resolution)
            points.append(CurvePoint(bound, plans[step]))
    return tuple(points)
