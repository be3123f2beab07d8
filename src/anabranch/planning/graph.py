"""The task graph that planners read: names, streams between tasks, a topological order.

Invariant: a `TaskGraph` that exists is a DAG with distinct task names and distinct edges
between known tasks; every planner may rely on it without checking again. Planners work on
task numbers (positions in `tasks`); names appear only at the border.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from anabranch.errors import PlanningError


@dataclass(frozen=True)
class TaskGraph:
    """A DAG of named tasks; `upstream[i]` and `downstream[i]` are task numbers, ascending."""

    tasks: tuple[str, ...]
    edges: tuple[tuple[str, str], ...]
    number: dict[str, int] = field(init=False, repr=False, compare=False)
    upstream: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    downstream: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise PlanningError("The graph has no tasks: name at least one.")
        number = {name: i for i, name in enumerate(self.tasks)}
        if len(number) < len(self.tasks):
            twice = next(t for i, t in enumerate(self.tasks) if number[t] != i)
            raise PlanningError(f"Task {twice!r} is listed twice: names must differ.", task=twice)
        upstream: list[list[int]] = [[] for _ in self.tasks]
        downstream: list[list[int]] = [[] for _ in self.tasks]
        for source, target in self.edges:
            for end in (source, target):
                if end not in number:
                    raise PlanningError(
                        f"Edge {source!r} -> {target!r} names the unknown task {end!r}: "
                        "add it to the tasks or correct the edge.",
                        task=end,
                    )
            downstream[number[source]].append(number[target])
            upstream[number[target]].append(number[source])
        for i, targets in enumerate(downstream):
            targets.sort()
            upstream[i].sort()
            repeated = next((b for a, b in pairwise(targets) if a == b), None)
            if repeated is not None:
                raise PlanningError(
                    f"Edge {self.tasks[i]!r} -> {self.tasks[repeated]!r} is listed twice: "
                    "keep one of them."
                )
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "upstream", tuple(map(tuple, upstream)))
        object.__setattr__(self, "downstream", tuple(map(tuple, downstream)))
        object.__setattr__(self, "order", self._topological_order())

    @classmethod
    def of(cls, edges: Iterable[tuple[str, str]], tasks: Iterable[str] = ()) -> TaskGraph:
        """The graph of `edges`; `tasks` may add lone tasks or fix the order of the names."""
        kept = tuple((str(a), str(b)) for a, b in edges)
        names = dict.fromkeys([*tasks, *(end for edge in kept for end in edge)])
        return cls(tuple(names), kept)

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def sources(self) -> tuple[int, ...]:
        """Tasks without upstream, ascending."""
        return tuple(i for i in range(len(self.tasks)) if not self.upstream[i])

    @property
    def sinks(self) -> tuple[int, ...]:
        """Tasks without downstream, ascending."""
        return tuple(i for i in range(len(self.tasks)) if not self.downstream[i])

    @property
    def is_forest(self) -> bool:
        """Every task has at most one downstream task: the line(s) and trees of paper 003."""
        return all(len(targets) <= 1 for targets in self.downstream)

    def names(self, numbers: Iterable[int]) -> frozenset[str]:
        return frozenset(self.tasks[i] for i in numbers)

    def numbers(self, names: Iterable[str], what: str = "backup") -> frozenset[int]:
        """Task numbers of `names`; an unknown name is refused, `what` says what it was for."""
        found = set()
        for name in names:
            if name not in self.number:
                raise PlanningError(f"The {what} {name!r} is not a task of the graph.", task=name)
            found.add(self.number[name])
        return frozenset(found)

    def _topological_order(self) -> tuple[int, ...]:
        waiting = [len(ups) for ups in self.upstream]
        order = [i for i, count in enumerate(waiting) if count == 0]
        for i in order:  # grows while it is read: each task enters once its last upstream left
            for target in self.downstream[i]:
                waiting[target] -= 1
                if waiting[target] == 0:
                    order.append(target)
        if len(order) < len(self.tasks):
            cycle = self._cycle([i for i, count in enumerate(waiting) if count > 0])
            path = " -> ".join(self.tasks[i] for i in cycle)
            raise PlanningError(f"The graph has a cycle: {path}. Remove one of its edges.")
        return tuple(order)

    def _cycle(self, stuck: Sequence[int]) -> list[int]:
        """A cycle among tasks that never became ready: walk upstream until a task repeats."""
        left = set(stuck)
        seen: dict[int, int] = {}
        walk: list[int] = []
        at = stuck[0]
        while at not in seen:
            seen[at] = len(walk)
            walk.append(at)
            at = next(u for u in self.upstream[at] if u in left)
        return [at, *reversed(walk[seen[at] :])]
