"""Where partitions go: on nodes with room for them, each query whole or not at all.

Room is split over nodes, so what fits in sum may not fit node by node. It is split over time, too:
a slice runs wave after wave, and every wave is as long as its fullest node. So two nodes that are
half full may take a whole interval, one in the first wave, the other in the second; where waves are
given, the slice must fit. Invariant: unless it is forced, nothing is placed where it does not fit.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Literal

#: Sums of floats may exceed a limit by this share without breaking it.
SLACK = 1e-9
DIGITS = 9  # that count where nodes are compared: others come from the order of sums

#: The wave of partitions of which nobody says where they run: sources are at 0, nodes from 1 on.
UNKNOWN_DEPTH = 0

#: Of the nodes that a partition fits on: with nothing that runs already, then as the next; with
#: fewest of its group, then with most room; with most room; with least room.
How = Literal["apart", "spread", "room", "tight"]


class Waves:
    """How long a slice is, in shares of an interval: the sum of its waves.

    `depths` says in which wave a partition runs; those that it lacks are a wave together. `taken`
    is what runs already, by wave and node. Beyond the `limit`, the slice gets no longer.
    """

    def __init__(
        self,
        depths: Mapping[str, int],
        limit: float,
        taken: Mapping[tuple[int, str], float] | None = None,
    ) -> None:
        self.limit = limit
        self._depths = depths
        self._taken: dict[tuple[int, str], float] = {}
        self._longest: dict[int, float] = {}
        for (depth, node), load in (taken or {}).items():
            self._add(depth, node, load)

    @property
    def slice(self) -> float:
        return math.fsum(self._longest.values())

    @property
    def longest(self) -> float:
        """Of all waves."""
        return max(self._longest.values(), default=0.0)

    @property
    def nodes(self) -> frozenset[str]:
        """That something runs on."""
        return frozenset(node for _, node in self._taken)

    def copy(self) -> Waves:
        return Waves(self._depths, self.limit, self._taken)

    def longer_by(self, name: str, load: float, node: str) -> float:
        """What a slice gets longer by, if this partition is put there."""
        depth = self._depths.get(name, UNKNOWN_DEPTH)
        after = self._taken.get((depth, node), 0.0) + load
        return max(0.0, after - self._longest.get(depth, 0.0))

    def fits(self, name: str, load: float, node: str) -> bool:
        more = self.longer_by(name, load, node)
        return more <= SLACK or self.slice + more <= self.limit + SLACK

    def put(self, name: str, load: float, node: str) -> None:
        self._add(self._depths.get(name, UNKNOWN_DEPTH), node, load)

    def _add(self, depth: int, node: str, load: float) -> None:
        after = self._taken.get((depth, node), 0.0) + load
        self._taken[depth, node] = after
        self._longest[depth] = max(after, self._longest.get(depth, 0.0))


class Placing:
    """Partitions that are being placed, and what is left of every node meanwhile.

    `rooms` is kept up to date. `stays` are partitions that can only go where they are or, with
    `moves`, go elsewhere only if they do not fit there, or are `free` to; `groups` and `hosts`, of
    partitions and of nodes, are for spreading. Without `waves`, the time of a slice has no limit
    but that of every node.
    """

    def __init__(
        self,
        rooms: dict[str, float],
        costs: Mapping[str, float],
        *,
        stays: Mapping[str, str] | None = None,
        moves: bool = False,
        free: Collection[str] = (),
        groups: Mapping[str, str] | None = None,
        hosts: Mapping[str, str] | None = None,
        waves: Waves | None = None,
    ) -> None:
        self.rooms = rooms
        self.waves = waves
        self.placed: dict[str, str] = {}
        self._costs, self._moves, self._free = costs, moves, free
        self._stays, self._groups, self._hosts = stays or {}, groups or {}, hosts or {}
        self._order = {node: i for i, node in enumerate(rooms)}
        self._taken = waves.nodes if waves else frozenset[str]()
        self._here: Counter[tuple[str, str, str]] = Counter()  # of a group, by node and by host

    @property
    def load(self) -> float:
        """Of all that is placed."""
        return math.fsum(self._costs[name] for name in self.placed)

    @property
    def length(self) -> float:
        """Of a slice; 0 where waves are not known."""
        return self.waves.slice if self.waves else 0.0

    @property
    def longest(self) -> float:
        """The length of its longest wave, likewise."""
        return self.waves.longest if self.waves else 0.0

    def copy(self) -> Placing:
        """One that goes on from here by itself."""
        other = copy(self)
        other.rooms, other.placed = dict(self.rooms), dict(self.placed)
        other._here, other.waves = self._here.copy(), self.waves and self.waves.copy()
        return other

    def place_whole(self, partitions: Iterable[str], ways: Sequence[How] = ("room",)) -> bool:
        """Place all of these that are not placed yet, in the first of these ways that they fit in;
        or none. If they do not fit beside those that stay, these go elsewhere, if they may."""
        missing, before = self.largest_first(partitions), self.copy()
        may_leave = self.waves and self._moves and any(p in self._stays for p in missing)
        for leaves, how in itertools.product((False, True) if may_leave else (False,), ways):
            if all(self.place(name, how, leaves=leaves) for name in missing):
                return True
            again = before.copy()
            self.rooms.update(again.rooms)
            self.placed, self._here, self.waves = again.placed, again._here, again.waves
        return False

    def place(self, name: str, how: How = "room", *, leaves: bool = False) -> bool:
        """Put a partition on the best node that it fits on, if there is one. It `leaves` the node
        that it is on if another one is better."""
        every = list(self.rooms) if leaves else self._candidates(name)
        nodes = [n for n in every if self._fits(name, n)]
        if nodes:
            self._put(name, self._best(name, nodes, how))
        return bool(nodes)

    def force(self, partitions: Iterable[str]) -> None:
        """Place all of these; if they fit nowhere, where the slice gets longer by least, and most
        room is."""
        for name in self.largest_first(partitions):
            if not self.place(name, "spread"):
                self._put(name, self._best(name, self._candidates(name), "room"))

    def largest_first(self, partitions: Iterable[str]) -> list[str]:
        """Those that are not placed yet, in the order to place them in: those that stay before."""
        missing = [p for p in partitions if p not in self.placed]
        return sorted(missing, key=lambda p: (p not in self._stays, -self._costs[p], p))

    def _candidates(self, name: str) -> list[str]:
        home = self._stays.get(name)
        if home is None or name in self._free or (self._moves and not self._fits(name, home)):
            return list(self.rooms)
        return [home]

    def _fits(self, name: str, node: str) -> bool:
        cost = self._costs[name]
        fits = cost <= self.rooms[node] + SLACK
        return fits and (self.waves is None or self.waves.fits(name, cost, node))

    def _best(self, name: str, nodes: list[str], how: How) -> str:
        def rank(node: str) -> tuple[float, ...]:
            room, order = self.rooms[node], self._order[node]
            first: tuple[float, ...] = (0.0, False)
            if self.waves is not None:
                longer = self.waves.longer_by(name, self._costs[name], node)
                first = (round(longer, DIGITS), self._stays.get(name) != node)
            if how == "apart":
                first = (node in self._taken, *first)
            if how in ("apart", "spread"):
                return (*first, *(self._here[k] for k in self._keys(name, node)), -room, order)
            return (*first, room if how == "tight" else -room, order)

        return min(nodes, key=rank)

    def _put(self, name: str, node: str) -> None:
        self.placed[name] = node
        self.rooms[node] -= self._costs[name]
        self._here.update(self._keys(name, node))
        if self.waves is not None:
            self.waves.put(name, self._costs[name], node)

    def _keys(self, name: str, node: str) -> list[tuple[str, str, str]]:
        group = self._groups.get(name, name)
        return [("node", node, group), ("host", self._hosts.get(node, ""), group)]
