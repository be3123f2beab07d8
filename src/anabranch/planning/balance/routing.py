"""Where a key goes: a bounded routing table first, a consistent hash otherwise (002, eq. 1).

Decides the active task of every key and the tasks of its replicas. Invariants: every key has
exactly one active task; a replica is never on the active task nor on another replica's; the
table never exceeds its limit. Keys are 64-bit integers; `key_id` makes one of a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from anabranch.errors import PlanningError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

#: No replica in this place of a row of `Assignment.backups`.
NONE = -1


@dataclass(frozen=True)
class Assignment:
    """Active task and replica tasks of every key: `active[k]`, and `backups[k]` padded by NONE."""

    active: Ints
    backups: Ints
    tasks: int

    def __post_init__(self) -> None:
        if self.active.ndim != 1 or self.backups.shape[:1] != self.active.shape:
            raise PlanningError(
                f"{len(self.active)} active tasks and replicas of shape {self.backups.shape}; "
                "give one row of replicas per key"
            )
        self._refuse(~_between(self.active, 0, self.tasks), "has no valid active task")
        inside = _between(self.backups, NONE, self.tasks)
        self._refuse(~_every(inside), "has a replica on no task")
        clash = ~_every(self.backups != self.active[:, None])
        self._refuse(clash, "has its replica on its active task")
        for a in range(self.backups.shape[1]):
            for b in range(a):
                same = (self.backups[:, a] == self.backups[:, b]) & (self.backups[:, a] != NONE)
                self._refuse(same, "has two replicas on one task")

    def _refuse(self, wrong: Bools, what: str) -> None:
        if wrong.any():
            key = int(np.flatnonzero(wrong)[0])
            raise PlanningError(
                f"key number {key} {what}: active {self.active[key]}, replicas "
                f"{self.backups[key].tolist()}, tasks 0..{self.tasks - 1}",
                key=key,
            )

    def holds(self, keys: Ints, tasks: Ints) -> Bools:
        """Whether tasks[i] has the state of keys[i], as active or as replica."""
        replica = ~_every(self.backups[keys] != tasks[:, None])
        held: Bools = (self.active[keys] == tasks) | replica
        return held

    def differs(self, other: Assignment) -> Bools:
        """Keys with another active task or another set of replicas than in `other`."""
        mine, theirs = self.backups, other.backups
        if mine.shape[1] > 1:
            mine, theirs = np.sort(mine, axis=1), np.sort(theirs, axis=1)
        changed: Bools = (self.active != other.active) | ~_every(mine == theirs)
        return changed


def reassigned(assignment: Assignment, keys: Ints, tasks: Ints) -> Assignment:
    """Give each of `keys` (distinct) a new active task.

    When the task holds a replica of the key the two change roles and no state moves; otherwise
    the state moves and the replicas stay where they are.
    """
    active, backups = assignment.active.copy(), assignment.backups.copy()
    rows = backups[keys]
    rows = np.where(rows == tasks[:, None], active[keys][:, None], rows)
    backups[keys] = rows
    active[keys] = tasks
    return Assignment(active, backups, assignment.tasks)


@dataclass(frozen=True)
class Sla:
    """How many copies, the active one included, a key of each importance has (002, section 4.1)."""

    copies: Mapping[str, int]
    importance: Mapping[int, str] = field(default_factory=dict)
    default: str = "normal"

    def __post_init__(self) -> None:
        for level, number in self.copies.items():
            if number < 1:
                raise PlanningError(
                    f"importance {level!r} has {number} copies; the active one counts, give >= 1",
                    importance=level,
                )
        for level in (*self.importance.values(), self.default):
            if level not in self.copies:
                raise PlanningError(
                    f"importance {level!r} has no number of copies; add it to copies",
                    importance=level,
                )

    def replica_numbers(self, keys: Keys) -> Ints:
        """RN of every key: copies including the active one."""
        if not self.importance:
            return np.full(len(keys), self.copies[self.default], dtype=np.int64)
        levels = (self.importance.get(int(k), self.default) for k in keys)
        return np.fromiter((self.copies[x] for x in levels), dtype=np.int64, count=len(keys))


@dataclass(frozen=True)
class Destination:
    """Where a tuple goes: to `active` (AC=1, emits) and to every task of `backups` (AC=0)."""

    active: int
    backups: tuple[int, ...]


@dataclass(frozen=True)
class MixedRouting:
    """F(k): the table's entry if there is one, else the hash (algorithm 1)."""

    tasks: int
    sla: Sla
    table: Mapping[int, Destination]
    limit: int

    def __post_init__(self) -> None:
        if len(self.table) > self.limit:
            raise PlanningError(
                f"the routing table has {len(self.table)} entries, its limit is {self.limit}; "
                "raise the limit or theta_max"
            )

    def route(self, key: int) -> Destination:
        if key in self.table:
            return self.table[key]
        home = home_assignment(np.array([key], dtype=np.uint64), self.tasks, self.sla)
        return _destination(home, 0)


def routing(keys: Keys, assignment: Assignment, sla: Sla, limit: int) -> MixedRouting:
    """The routing that yields `assignment`: entries only for keys that the hash would miss."""
    home = home_assignment(keys, assignment.tasks, sla)
    away = np.flatnonzero(assignment.differs(home))
    table = {int(keys[k]): _destination(assignment, int(k)) for k in away}
    return MixedRouting(assignment.tasks, sla, table, limit)


def _destination(assignment: Assignment, key: int) -> Destination:
    backups = tuple(int(t) for t in assignment.backups[key] if t != NONE)
    return Destination(int(assignment.active[key]), backups)


def home_assignment(keys: Keys, tasks: int, sla: Sla) -> Assignment:
    """h(k) and f(h(k)) of every key, replicas as the SLA asks.

    Replicas of one task's keys are spread over all others by a second hash, not put on the
    next task: a lost or overloaded task then hands its keys to everyone.
    """
    if tasks < 1:
        raise PlanningError(f"{tasks} tasks; give at least 1")
    numbers = sla.replica_numbers(keys)
    most = int(numbers.max()) if len(numbers) else 1
    if most > tasks:
        raise PlanningError(
            f"the SLA asks for {most} copies, but there are {tasks} tasks and no two copies may "
            "share one; lower the copies or add tasks",
            copies=most,
            tasks=tasks,
        )
    mixed = hash_keys(keys)
    active = _jump(mixed, tasks)
    backups = np.full((len(keys), most - 1), NONE, dtype=np.int64)
    if most > 1:
        first = (hash_keys(mixed) % np.uint64(tasks - 1)).astype(np.int64)
        for j in range(most - 1):
            spread = (active + 1 + (first + j) % (tasks - 1)) % tasks
            backups[:, j] = np.where(numbers > j + 1, spread, NONE)
    return Assignment(active, backups, tasks)


def key_id(name: str) -> int:
    """A 64-bit number for a key's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def hash_keys(keys: Keys) -> Keys:
    """The finaliser of SplitMix64: every bit of the key reaches every bit of the hash."""
    x = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _jump(hashes: Keys, tasks: int) -> Ints:
    """Jump consistent hash (Lamping, Veach): from n to n+1 tasks only 1/(n+1) of keys move."""
    task = np.zeros(len(hashes), dtype=np.int64)
    state = hashes.copy()
    pending = np.arange(len(hashes))
    while len(pending):
        state = state * np.uint64(2862933555777941757) + np.uint64(1)
        draw = ((state >> np.uint64(33)) + np.uint64(1)).astype(np.float64)
        following = ((task[pending] + 1) * (float(1 << 31) / draw)).astype(np.int64)
        inside = following < tasks
        pending, state = pending[inside], state[inside]
        task[pending] = following[inside]
    return task


def _between(values: Ints, low: int, high: int) -> Bools:
    return np.logical_and(values >= low, values < high)


def _every(rows: Bools) -> Bools:
    """all(axis=1), column by column: rows are short, and NumPy is slow on many short rows."""
    result = np.ones(len(rows), dtype=np.bool_)
    for column in rows.T:
        result &= column
    return result
