"""The best recovery plan within a time limit: `solver` with a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from anabranch.planning.recovery.order import RecoveryOrder
from anabranch.planning.recovery.queries import RecoveryProblem
from anabranch.planning.recovery.solver import ExactPlan, solve

Clock = Callable[[], float]


def plan_exact(
    problem: RecoveryProblem,
    resources: float,
    *,
    time_limit_s: float = 2.0,
    clock: Clock = time.perf_counter,
) -> ExactPlan:
    """The optimal plan, or the best found within about `time_limit_s`, and its proven bound."""
    deadline = clock() + time_limit_s
    return solve(problem, resources, lambda: clock() < deadline)


def best_plan(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    """`plan_exact` as a planner for `schedule_recovery`: the plan without its proof."""
    return plan_exact(problem, resources).plan
