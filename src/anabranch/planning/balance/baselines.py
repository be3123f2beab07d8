"""The planners FTLB is compared with (002, section 5.1.2), under the same cost model.

`plan_min_table` (MRT) and `plan_mixed` are the key-based planners the paper builds on,
`plan_readj` re-adjusts by the best single move or swap of hot keys, `plan_task_backup` (TaskB)
replicates whole tasks and never balances, `plan_hash` does nothing. They know nothing of
replicas; where a move happens to hit one, `reassigned` switches roles for them, in their favour.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from anabranch.planning.balance.load import BalancePlan, BalanceProblem, judged, least_first
from anabranch.planning.balance.routing import NONE, Assignment, Floats, Ints, reassigned

#: Weight of load against state in Mixed's choice of keys: c^β/S.
MIXED_BETA = 1.5
#: Readj looks at this many of the dearest keys per task and makes at most that many changes.
READJ_KEYS = 100
READJ_CHANGES = 2000
#: Tasks that LLFD may try to push cheaper keys out of, per plan.
PUSHES_MAX = 1000


def plan_hash(problem: BalanceProblem) -> BalancePlan:
    """Every key where the hash puts it."""
    return judged(problem, problem.home)


def task_backups(home: Assignment) -> Assignment:
    """Every task copied whole to the next one, if keys have replicas at all."""
    backups = np.full_like(home.backups, NONE)
    if backups.shape[1]:
        backups[:, 0] = (home.active + 1) % home.tasks
    return Assignment(home.active, backups, home.tasks)


def plan_task_backup(problem: BalanceProblem) -> BalancePlan:
    """TaskB: the hash and whole-task replicas; without a table, since tasks name each other."""
    return replace(judged(problem, task_backups(problem.home)), table=0)


def plan_min_table(problem: BalanceProblem) -> BalancePlan:
    """MRT: forget the table, then move the dearest keys off overloaded tasks: fewest entries."""
    return judged(problem, _offload(problem, problem.home, -problem.costs))


def plan_mixed(problem: BalanceProblem) -> BalancePlan:
    """Mixed: send home the n entries with least state, n grown until the table fits."""
    with np.errstate(divide="ignore", invalid="ignore"):
        metric = np.nan_to_num(problem.state / problem.costs**MIXED_BETA, nan=np.inf)
    listed = np.flatnonzero(problem.current.differs(problem.home))
    listed = listed[np.argsort(problem.state[listed], kind="stable")]
    cleaned = 0
    while True:
        plan = judged(problem, _offload(problem, _cleaned(problem, listed[:cleaned]), metric))
        if plan.table <= problem.limits.table:
            return plan
        if cleaned >= len(listed):
            return plan_min_table(problem)
        cleaned = min(len(listed), max(2 * cleaned, plan.table - problem.limits.table))


def plan_readj(problem: BalanceProblem) -> BalancePlan:
    """Readj: the best move or swap of hot keys from the most loaded task, again and again."""
    costs, tasks = problem.costs, problem.tasks
    active = problem.current.active.copy()
    loads = np.bincount(active, costs, tasks).astype(np.float64)
    size = min(len(costs), READJ_KEYS * tasks)
    hot = np.argpartition(-costs, size - 1)[:size]
    for _ in range(READJ_CHANGES):
        if np.abs(loads / problem.mean - 1).max() <= problem.limits.theta_max:
            break
        change = _best_change(costs, active, hot, loads)
        if change is None:
            break
        for key, task in change:
            loads[active[key]] -= costs[key]
            loads[task] += costs[key]
            active[key] = task
    moved = np.flatnonzero(active != problem.current.active)
    return judged(problem, reassigned(problem.current, moved, active[moved]))


def _best_change(
    costs: Floats, active: Ints, hot: Ints, loads: Floats
) -> list[tuple[int, int]] | None:
    """The move or swap between the most loaded task and another that lowers both loads most."""
    top = int(loads.argmax())
    mine = hot[active[hot] == top]
    best, change = loads[top] * (1 - 1e-9), None
    for other in np.argsort(loads, kind="stable"):
        if other == top or not len(mine):
            continue
        theirs = np.append(hot[active[hot] == other], -1)
        gives = np.where(theirs < 0, 0.0, costs[theirs])
        shift = costs[mine][:, None] - gives[None, :]
        worst = np.maximum(loads[top] - shift, loads[other] + shift)
        i, j = np.unravel_index(int(worst.argmin()), worst.shape)
        if worst[i, j] < best:
            best, change = float(worst[i, j]), [(int(mine[i]), int(other))]
            if theirs[j] >= 0:
                change.append((int(theirs[j]), top))
    return change


def _cleaned(problem: BalanceProblem, keys: Ints) -> Assignment:
    active, backups = problem.current.active.copy(), problem.current.backups.copy()
    active[keys] = problem.home.active[keys]
    backups[keys] = problem.home.backups[keys]
    return Assignment(active, backups, problem.tasks)


def _offload(problem: BalanceProblem, start: Assignment, metric: Floats) -> Assignment:
    """Take keys of least metric from each overloaded task, then place them by adjusted LLFD.

    A key that overloads the least loaded task may push cheaper keys out of it; otherwise the
    next task is tried. What fits nowhere goes to the least loaded.
    """
    costs, active = problem.costs, start.active
    loads = problem.loads(start)
    upper = (1 + problem.limits.theta_max) * problem.mean
    queued = np.zeros(len(costs), dtype=np.bool_)
    for task in np.flatnonzero(loads > upper):
        queued[_least(np.flatnonzero(active == task), costs, metric, loads[task] - upper)] = True
    queue = [(-float(costs[k]), int(k)) for k in np.flatnonzero(queued)]
    loads -= np.bincount(active[queued], costs[queued], problem.tasks)
    heapq.heapify(queue)
    placed: dict[int, int] = {}
    pushes = 0
    while queue:
        negative, key = heapq.heappop(queue)
        order = np.argsort(loads, kind="stable")
        target, pushed = int(order[0]), np.zeros(0, dtype=np.int64)
        for task in order if pushes < PUSHES_MAX else ():
            over = loads[task] - negative - upper
            if over <= 0:
                target = int(task)
                break
            pushes += 1
            cheaper = np.flatnonzero((active == task) & ~queued & (costs < -negative))
            candidates = _least(cheaper, costs, metric, over)
            if costs[candidates].sum() >= over:
                target, pushed = int(task), candidates
                break
        placed[key] = target
        loads[target] -= negative + float(costs[pushed].sum())
        queued[pushed] = True
        for k in pushed.tolist():
            heapq.heappush(queue, (-float(costs[k]), k))
    keys = np.fromiter(placed.keys(), dtype=np.int64, count=len(placed))
    return reassigned(start, keys, np.fromiter(placed.values(), np.int64, len(placed)))


def _least(keys: Ints, costs: Floats, metric: Floats, need: float) -> Ints:
    """Keys of least metric that together cost at least `need` (all of them, if too few)."""
    keys = keys[least_first(metric[keys], costs[keys], need)]
    return keys[: int(np.searchsorted(np.cumsum(costs[keys]), need)) + 1]
