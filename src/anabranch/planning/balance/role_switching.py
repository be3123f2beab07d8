"""Balance without moving state: activate the replicas of keys on tasks that have room.

Decides which keys swap the roles of their active copy and a replica (002, section 4.2.2). An
overloaded task gives, one with room takes; dearest keys first, so that few entries of the routing
table do it. Where overloaded tasks share no keys with idle ones, tasks in between pass load on:
the idle ones pull from anyone, then the overloaded ones push to anyone, in turns. Invariant: a
switch never needs a copy that is not there, and never a table entry that is not free.
"""

from __future__ import annotations

import numpy as np

from anabranch.planning.balance.load import SLACK, BalanceProblem
from anabranch.planning.balance.routing import NONE, Assignment, Bools, Floats, Ints, reassigned

#: Keys per task that are looked at: the dearest.
SWITCH_KEYS = 5000
#: Switches aim a little closer than they must, since they are free, and may miss by a little:
#: then nothing is left for migration, and no crowd of small keys is needed to finish.
SWITCH_AIM = 0.8
REST = 0.15
#: Turns of giving, pulling and pushing.
SWITCH_TURNS = 7


def switch_roles(
    problem: BalanceProblem, assignment: Assignment, aim: float
) -> tuple[Assignment, Bools]:
    """The assignment after switching, and which keys were switched; `aim` is in units of load."""
    switched = np.zeros(len(problem.costs), dtype=np.bool_)
    gain = 1 - problem.limits.replica_weight
    if gain <= 0 or assignment.backups.shape[1] == 0:
        return assignment, switched
    close, rest = SWITCH_AIM * aim, REST * aim
    for turn in range(SWITCH_TURNS):
        gap = problem.loads(assignment) - problem.mean
        if np.abs(gap).max() <= aim:
            break
        if turn == 0:
            need, room = needs(gap + problem.mean, problem.mean, close)
            room += (room > 0) * rest
        elif turn % 2:
            need = np.where(gap < -close, 0.0, np.maximum(gap + close, 0))
            room = np.where(gap < -close, -gap, 0.0)
        else:
            need = np.where(gap > close, gap - close, 0.0)
            room = np.where(gap > close, 0.0, np.maximum(close - gap, 0))
        keys, tasks = _switches(problem, assignment, need, room, rest)
        assignment = reassigned(assignment, keys, tasks)
        switched[keys] = True
    return assignment, switched


def _switches(
    problem: BalanceProblem, assignment: Assignment, needed: Floats, free: Floats, rest: float
) -> tuple[Ints, Ints]:
    """Keys of tasks in need and the replicas' tasks with room that take them."""
    active, gain = assignment.active, 1 - problem.limits.replica_weight
    need, room = needed.tolist(), free.tolist()
    donors = [
        dearest(np.flatnonzero(active == d), problem.costs, SWITCH_KEYS)
        for d in np.flatnonzero(needed > 0)
    ]
    keys = np.concatenate([*donors, np.zeros(0, dtype=np.int64)])
    keys = dearest(keys, problem.costs, len(keys))
    listed = assignment.differs(problem.home)
    spare = problem.limits.table - int(listed.sum())
    rows = zip(
        keys.tolist(),
        (problem.costs[keys] * gain).tolist(),
        active[keys].tolist(),
        assignment.backups[keys].tolist(),
        listed[keys].tolist(),
        strict=True,
    )
    chosen: dict[int, int] = {}
    for key, load, donor, holders, known in rows:
        if need[donor] <= 0 or load > need[donor] + rest:
            continue
        holder = max((t for t in holders if t != NONE), key=room.__getitem__, default=NONE)
        if holder == NONE or room[holder] < load or (spare <= 0 and not known):
            continue
        spare -= not known
        need[donor] -= load
        room[holder] -= load
        chosen[key] = holder
    count = len(chosen)
    return (
        np.fromiter(chosen.keys(), dtype=np.int64, count=count),
        np.fromiter(chosen.values(), dtype=np.int64, count=count),
    )


def needs(loads: Floats, mean: float, aim: float) -> tuple[Floats, Floats]:
    """How much each task should give, and how much each may take.

    Tasks above (mean + aim) give what is over; if those below (mean - aim) lack more than that,
    everyone above a lower level gives. What is given fills the others to one level.
    """
    short = float(np.maximum(mean - aim - loads, 0).sum())
    over = float(np.maximum(loads - mean - aim, 0).sum())
    level = mean + aim if over >= short else -water_level(-loads, short)
    need = np.maximum(loads - level, 0)
    need[need <= SLACK * mean] = 0.0
    room = np.maximum(water_level(loads, float(need.sum())) - loads, 0)
    room[need > 0] = 0.0
    return need, room


def water_level(loads: Floats, amount: float) -> float:
    """The level to which `amount` fills the tasks, lowest first."""
    ordered = np.sort(loads)
    levels = (amount + np.cumsum(ordered)) / np.arange(1, len(ordered) + 1)
    above = np.append(ordered[1:], np.inf)
    return float(levels[int(np.argmax(levels <= above))])


def dearest(keys: Ints, costs: Floats, size: int) -> Ints:
    """At most `size` of `keys`, those with the greatest cost, dearest first."""
    if len(keys) > size > 0:
        keys = keys[np.argpartition(-costs[keys], size)[:size]]
    return keys[np.argsort(-costs[keys], kind="stable")][:size].astype(np.int64)
