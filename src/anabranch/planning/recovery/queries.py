"""Which queries a correlated failure breaks, and what each needs to come back.

A query is an output partition and everything upstream of it; it is recovered when all its failed
partitions are (001, definition 1). This module turns a topology into a `RecoveryProblem`, the
value every planner of recovery order takes, and draws random ones for tests and benchmarks.
Invariant: every name in a problem is known and every number in it is usable.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from anabranch.errors import PlanningError

Routing = Literal["all", "keyed"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecoveryProblem:
    """Failed partitions with their resource needs, and the failed queries that need them.

    `costs` is the CPU (any one unit) of each failed partition, `queries` the failed partitions
    of each query, `priorities` a positive integer per query (1 where absent), `depths` the
    topological depth of a partition, which only the operator-centric baseline reads.
    """

    costs: Mapping[str, float]
    queries: Mapping[str, frozenset[str]]
    priorities: Mapping[str, int] = field(default_factory=dict)
    depths: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, cost in self.costs.items():
            if not (math.isfinite(cost) and cost >= 0):
                raise PlanningError(
                    f"partition {name!r} needs {cost} resources; give a finite number >= 0",
                    partition=name,
                    cost=cost,
                )
        for query, needs in self.queries.items():
            unknown = sorted(needs - self.costs.keys())
            if unknown:
                raise PlanningError(
                    f"query {query!r} needs partition {unknown[0]!r}, which has no cost; "
                    "add it to costs or remove it from the query",
                    query=query,
                    unknown=unknown,
                )
        for query, priority in self.priorities.items():
            if query not in self.queries:
                raise PlanningError(
                    f"priority given for unknown query {query!r}; known: {_some(self.queries)}",
                    query=query,
                )
            if isinstance(priority, bool) or not isinstance(priority, int) or priority < 1:
                raise PlanningError(
                    f"query {query!r} has priority {priority!r}; give an integer >= 1",
                    query=query,
                    priority=priority,
                )

    def priority(self, query: str) -> int:
        return self.priorities.get(query, 1)

    def cost(self, partitions: Iterable[str]) -> float:
        """Resources of a set of partitions, each counted once."""
        return math.fsum(self.costs[p] for p in set(partitions))

    def recovered(self, partitions: Collection[str]) -> tuple[str, ...]:
        """The queries that have all they need in `partitions`, in the problem's order."""
        have = frozenset(partitions)
        return tuple(q for q, needs in self.queries.items() if needs <= have)

    def value(self, queries: Iterable[str]) -> int:
        return sum(self.priority(q) for q in queries)

    @cached_property
    def sharing(self) -> Sharing:
        return Sharing.of(self)


@dataclass(frozen=True)
class Sharing:
    """A problem as arrays: partitions needed by the same queries are one group.

    `users[g]` are the (sorted) indices of the queries that need group g, `costs[g]` what the
    group costs. Merging loses nothing: no planner can gain from half a group.
    """

    names: tuple[str, ...]
    priorities: Ints
    users: tuple[tuple[int, ...], ...]
    costs: Floats

    @classmethod
    def of(cls, problem: RecoveryProblem) -> Sharing:
        users_of: dict[str, list[int]] = {}
        for index, needs in enumerate(problem.queries.values()):
            for partition in sorted(needs):  # sums come out the same in every process
                users_of.setdefault(partition, []).append(index)
        merged: dict[tuple[int, ...], float] = {}
        for partition, users in users_of.items():
            key = tuple(users)
            merged[key] = merged.get(key, 0.0) + problem.costs[partition]
        ordered = sorted(merged)
        return cls(
            names=tuple(problem.queries),
            priorities=np.array([problem.priority(q) for q in problem.queries], dtype=np.int64),
            users=tuple(ordered),
            costs=np.array([merged[u] for u in ordered], dtype=np.float64),
        )

    @cached_property
    def uses(self) -> Floats:
        """uses[q, g] = 1.0 when query q needs group g."""
        matrix = np.zeros((len(self.names), len(self.users)))
        for group, users in enumerate(self.users):
            matrix[list(users), group] = 1.0
        return matrix

    def plan_names(self, chosen: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.names[i] for i in sorted(set(chosen)))


def partition_topology(
    parallelism: Mapping[str, int], streams: Sequence[tuple[str, str, Routing]]
) -> dict[str, tuple[str, ...]]:
    """Expand operators into partitions `name/0 … name/γ-1` and list the upstream of each.

    A stream routed "all" feeds every downstream partition from every upstream one; "keyed" means
    both sides own contiguous ranges of the same keys, so only overlapping ranges are connected.
    """
    for operator, degree in parallelism.items():
        if degree < 1:
            raise PlanningError(
                f"operator {operator!r} has parallelism {degree}; give at least 1",
                operator=operator,
            )
    upstream: dict[str, list[str]] = {
        f"{op}/{i}": [] for op, degree in parallelism.items() for i in range(degree)
    }
    for source, target, routing in streams:
        for end in (source, target):
            if end not in parallelism:
                raise PlanningError(
                    f"stream {source!r} -> {target!r} names unknown operator {end!r}; "
                    f"known: {_some(parallelism)}",
                    operator=end,
                )
        degree, fan = parallelism[source], parallelism[target]
        for j in range(fan):
            for i in range(degree):
                overlap = max(i * fan, j * degree) < min((i + 1) * fan, (j + 1) * degree)
                if routing == "all" or overlap:
                    upstream[f"{target}/{j}"].append(f"{source}/{i}")
    return {name: tuple(ups) for name, ups in upstream.items()}


def topological_depths(upstream: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Longest distance of every partition from a source; refuses cycles and unknown names."""
    depths: dict[str, int] = {}
    waiting: dict[str, int] = {}
    downstream: dict[str, list[str]] = {name: [] for name in upstream}
    for name, ups in upstream.items():
        waiting[name] = len(set(ups))
        for up in set(ups):
            if up not in upstream:
                raise PlanningError(
                    f"partition {name!r} reads unknown partition {up!r}; declare it",
                    partition=name,
                    unknown=up,
                )
            downstream[up].append(name)
    ready = [name for name, count in waiting.items() if count == 0]
    while ready:
        name = ready.pop()
        depths[name] = 1 + max((depths[up] for up in upstream[name]), default=-1)
        for follower in downstream[name]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if len(depths) < len(upstream):
        stuck = sorted(set(upstream) - set(depths))
        raise PlanningError(
            f"the topology has a cycle through {stuck[0]!r}; a topology must be acyclic",
            cycle=stuck,
        )
    return depths


def query_partitions(
    upstream: Mapping[str, Collection[str]], outputs: Iterable[str]
) -> dict[str, frozenset[str]]:
    """The query of every output partition: itself and all that is upstream of it (def. 1)."""
    depths = topological_depths(upstream)
    reach: dict[str, frozenset[str]] = {}
    for name in sorted(upstream, key=lambda p: depths[p]):
        reach[name] = frozenset({name}).union(*(reach[up] for up in upstream[name]))
    queries: dict[str, frozenset[str]] = {}
    for output in outputs:
        if output not in upstream:
            raise PlanningError(
                f"output {output!r} is not a partition; known: {_some(upstream)}", output=output
            )
        queries[output] = reach[output]
    return queries


def failure(
    upstream: Mapping[str, Collection[str]],
    priorities: Mapping[str, int],
    costs: Mapping[str, float],
    failed: Collection[str],
) -> RecoveryProblem:
    """The recovery problem of a topology that lost `failed`; outputs are those of `priorities`.

    Queries that lost nothing are left out: they are still running.
    """
    lost = frozenset(failed)
    for name in sorted(lost):
        if name not in upstream:
            raise PlanningError(
                f"failed partition {name!r} is not in the topology; known: {_some(upstream)}",
                partition=name,
            )
        if name not in costs:
            raise PlanningError(f"failed partition {name!r} has no cost; add it", partition=name)
    depths = topological_depths(upstream)
    queries = {q: p & lost for q, p in query_partitions(upstream, priorities).items() if p & lost}
    return RecoveryProblem(
        costs={p: costs[p] for p in sorted(lost)},
        queries=queries,
        priorities={q: priorities[q] for q in queries},
        depths={p: depths[p] for p in lost},
    )


def random_queries(
    rng: np.random.Generator,
    *,
    queries: int,
    partitions: int,
    max_share: int,
    share_skew: float = 0.0,
    priorities: Literal["random", "linear"] = "random",
    per_topology: int | None = None,
) -> RecoveryProblem:
    """A random failure in the manner of 001, section 6.3.

    Every query has its own output partition; the other partitions are shared by f queries of
    one topology, f in 1..max_share drawn with weight f^-share_skew. Partition costs are 1..10;
    priorities are uniform in 1..10, or rise linearly from 1 to 10 with the query's cost.
    `per_topology` is how many queries one topology has (all of them by default).
    """
    span = per_topology or queries
    if not (1 <= max_share <= span <= queries <= partitions):
        raise PlanningError(
            f"need 1 <= max_share <= per_topology <= queries <= partitions, got {max_share}, "
            f"{span}, {queries}, {partitions}"
        )
    shares = np.arange(1, max_share + 1)
    weights = shares ** -float(share_skew)
    frequency = rng.choice(shares, size=partitions - queries, p=weights / weights.sum())
    needs: list[set[str]] = [{f"out{q}"} for q in range(queries)]
    depths = {f"out{q}": max_share for q in range(queries)}
    for index, f in enumerate(frequency):
        first = int(rng.integers(queries)) // span * span
        size = min(span, queries - first)
        for q in rng.choice(size, size=min(int(f), size), replace=False):
            needs[first + int(q)].add(f"p{index}")
        # What many queries share lies further upstream.
        depths[f"p{index}"] = max_share - int(f)
    costs = {name: float(rng.integers(1, 11)) for name in depths}
    names = [f"q{i}" for i in range(queries)]
    if priorities == "random":
        values = rng.integers(1, 11, size=queries)
    else:
        total = np.array([sum(costs[p] for p in sorted(need)) for need in needs])
        spread = float(np.ptp(total)) or 1.0
        values = 1 + np.rint(9 * (total - total.min()) / spread).astype(int)
    return RecoveryProblem(
        costs=costs,
        queries={n: frozenset(need) for n, need in zip(names, needs, strict=True)},
        priorities={n: int(v) for n, v in zip(names, values, strict=True)},
        depths=depths,
    )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (" …" if len(listed) > 5 else "")
