"""A job of which some chains wait, as those see it who choose what comes back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from anabranch.errors import InvariantError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.plan import Query
from anabranch.planning.recovery.order import CPU_CAP
from anabranch.planning.recovery.placing import SLACK, UNKNOWN_DEPTH, How, Placing, Waves
from anabranch.planning.recovery.queries import RecoveryProblem

FILL = CPU_CAP  # share of a node that what comes back may fill
FULL = 1.0  # share of a node that all may fill together, when all of it comes back
LONGEST = 0.8  # share of an interval that a slice may take, with all that it takes by itself …
LEAST = 0.5  # … which takes at most this share of the room: slices may have been late before, too
WAYS: tuple[How, ...] = ("spread", "room", "tight")
APART: tuple[How, ...] = ("apart", *WAYS)  # on nodes of its own, what comes back is faster


class KnownLoads:
    """Loads, and what those count for that are not known."""

    def __init__(self, loads: Mapping[PartitionId, float]) -> None:
        for partition, load in loads.items():
            if not (math.isfinite(load) and load >= 0):
                raise InvariantError(
                    f"partition {partition} has a load of {load}", partition=str(partition)
                )
        self._loads = loads
        self.mean = math.fsum(loads.values()) / len(loads) if loads else 0.0

    def of(self, partition: PartitionId) -> float:
        return self._loads.get(partition, self.mean)


@dataclass(frozen=True)
class Shortage:
    """A job of which some chains wait. Partitions go by their names where they are placed."""

    queries: tuple[Query, ...]
    down: frozenset[str]
    homes: Mapping[PartitionId, NodeId]
    unplaced: tuple[PartitionId, ...]
    known: KnownLoads
    nodes: tuple[NodeId, ...]
    source_share: float
    fixed_share: float
    hosts: Mapping[NodeId, str]
    moves: bool
    free: frozenset[str]
    depths: Mapping[str, int]

    def check(self) -> None:
        """Refuse what a controller can only ask for by mistake."""
        for partition in self.unplaced:
            if partition in self.homes:
                raise InvariantError(f"partition {partition} has a home and has none")
            if partition.chain not in self.down:
                raise InvariantError(f"partition {partition} has no home, and nobody waits for it")
        for partition, node in self.homes.items():
            if node not in self.nodes:
                raise InvariantError(f"partition {partition} is on node {node}, which is not there")
        known = {p.chain for p in (*self.homes, *self.unplaced)}
        if not self.down <= known:
            chain = min(self.down - known)
            raise InvariantError(f"chain {chain!r} waits, but none of its partitions is named")

    @cached_property
    def waiting(self) -> tuple[Query, ...]:
        return tuple(q for q in self.queries if q.chains & self.down)

    @cached_property
    def live(self) -> tuple[Query, ...]:
        return tuple(q for q in self.queries if not q.chains & self.down)

    @cached_property
    def needs(self) -> Mapping[str, frozenset[str]]:
        """Per query that waits, the chains that it lacks."""
        return {q.sink: q.chains & self.down for q in self.waiting}

    @cached_property
    def last_chains(self) -> frozenset[str]:
        """Chains that no query needs, and what they need: they come back together, the last."""
        return self.down.difference(*(q.chains for q in self.queries))

    @cached_property
    def by_chain(self) -> Mapping[str, tuple[PartitionId, ...]]:
        """Of chains that wait."""
        found: dict[str, list[PartitionId]] = {c: [] for c in sorted(self.down)}
        for partition in sorted((*self.homes, *self.unplaced)):
            if partition.chain in found:
                found[partition.chain].append(partition)
        return {c: tuple(p) for c, p in found.items()}

    @cached_property
    def names(self) -> Mapping[str, PartitionId]:
        return {str(p): p for some in self.by_chain.values() for p in some}

    @cached_property
    def costs(self) -> Mapping[str, float]:
        """Of partitions that wait; where nothing is known, all are alike."""
        alike = 0.0 if self.known.mean else 1.0
        return {name: alike or self.known.of(p) for name, p in self.names.items()}

    def partitions(self, chains: Iterable[str]) -> list[str]:
        return [str(p) for c in sorted(chains) for p in self.by_chain[c]]

    @cached_property
    def running(self) -> Mapping[NodeId, float]:
        """What live chains take of each node."""
        taken: dict[NodeId, list[float]] = {n: [] for n in self.nodes}
        for partition, node in self.homes.items():
            if partition.chain not in self.down:
                taken[node].append(self.known.of(partition))
        return {n: math.fsum(some) for n, some in taken.items()}

    @cached_property
    def running_by_wave(self) -> Mapping[tuple[int, str], float]:
        """The same for each wave, by its depth and the name of a node."""
        taken: dict[tuple[int, str], list[float]] = {}
        for partition, node in sorted(self.homes.items()):
            if partition.chain not in self.down:
                at = self.depth(partition.chain), str(node)
                taken.setdefault(at, []).append(self.known.of(partition))
        return {at: math.fsum(some) for at, some in taken.items()}

    def depth(self, chain: str) -> int:
        return self.depths.get(chain, UNKNOWN_DEPTH)

    @cached_property
    def live_load(self) -> float:
        return math.fsum(self.running.values())

    @cached_property
    def demand(self) -> float:
        """Of all chains, whether they wait or not."""
        return math.fsum((*map(self.known.of, self.homes), *map(self.known.of, self.unplaced)))

    def capacity(self, share: float) -> float:
        return len(self.nodes) * max(0.0, share - self.source_share)

    @property
    def fits_in_full(self) -> bool:
        return not self.known.mean or self.demand <= self.capacity(FULL) + SLACK

    def placing(self, full: bool = False) -> Placing:
        """Nothing that waits is placed yet; the nodes, and the time of a slice, are filled up to
        FILL, or FULL."""
        share = FULL if full else FILL
        depths = {name: self.depth(p.chain) for name, p in self.names.items()}
        waves = Waves(depths, self.longest(share), self.running_by_wave)
        rooms = {str(n): share - self.source_share - self.running[n] for n in self.nodes}
        return Placing(
            {n: max(0.0, room) for n, room in rooms.items()} if not full else rooms,
            self.costs,
            stays={n: str(self.homes[p]) for n, p in self.names.items() if p in self.homes},
            moves=self.moves,
            free={name for name, p in self.names.items() if p.chain in self.free},
            groups={name: p.chain for name, p in self.names.items()},
            hosts={str(n): host for n, host in self.hosts.items()},
            waves=waves if self.depths else None,
        )

    def longest(self, share: float) -> float:
        """What nodes may do in a slice, wave after wave."""
        room = max(LEAST * share, LONGEST - self.fixed_share)
        return max(0.0, min(share, room) - self.source_share)

    @cached_property
    def whole(self) -> RecoveryProblem:
        """Of all queries that wait."""
        return self.problem_of(self.needs)

    @cached_property
    def problem(self) -> RecoveryProblem:
        """Of the queries that could come back if they were alone."""
        alone = {
            name: chains
            for name, chains in self.needs.items()
            if self.placing().place_whole(self.partitions(chains), WAYS)
        }
        return self.problem_of(alone)

    def problem_of(self, needs: Mapping[str, frozenset[str]]) -> RecoveryProblem:
        priorities = {q.sink: q.priority for q in self.waiting if q.sink in needs}
        chains: frozenset[str] = frozenset().union(*needs.values())
        costs = {c: math.fsum(self.costs[p] for p in self.partitions([c])) for c in sorted(chains)}
        return RecoveryProblem(costs, needs, priorities, self.depths)

    def complete(self, chains: frozenset[str]) -> tuple[Query, ...]:
        """Queries that waited and need nothing else."""
        return tuple(q for q in self.waiting if self.needs[q.sink] <= chains)

    def last(self, placing: Placing) -> frozenset[str]:
        """What no query needs, if there is room for it, too."""
        fits = placing.place_whole(self.partitions(self.last_chains), WAYS)
        return self.last_chains if fits else frozenset()

    # -- in words --------------------------------------------------------------------------------

    @property
    def on(self) -> str:
        return f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"

    def taken(self, placing: Placing) -> str:
        return f"{self.live_load + placing.load:.2f} of {self.capacity(FILL):.2f}"

    def fitting(self, placing: Placing, number: int) -> str:
        every, most = queries_of(len(self.queries)), self.longest(FILL)
        waves = f", a slice takes {placing.length:.2f} of {most:.2f}"
        same = len(self.nodes) == 1 and most == self.capacity(FILL)
        said = self.taken(placing) + (waves if self.depths and not same else "")
        return f"{number} of {every} fit on {self.on}: {said}"


def queries_of(number: int) -> str:
    return f"{number} quer{'y' if number == 1 else 'ies'}"
