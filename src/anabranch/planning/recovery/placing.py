"""Where partitions go: on nodes with room for them, each query whole or not at all.

Room is split over nodes, so what fits in sum may not fit node by node. Invariant: unless it is
forced, nothing is placed where it does not fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

#: Sums of floats may exceed a limit by this share without breaking it.
SLACK = 1e-9

#: Of the nodes that a partition fits on: with fewest of its group, then with most room; with most
#: room; with least room.
How = Literal["spread", "room", "tight"]


class Placing:
    """Partitions that are being placed, and what is left of every node meanwhile.

    `rooms` is kept up to date. `stays` are partitions that can only go where they are or, with
    `moves`, go elsewhere only if they do not fit there; `groups` and `hosts`, of partitions and of
    nodes, are for spreading.
    """

    def __init__(
        self,
        rooms: dict[str, float],
        costs: Mapping[str, float],
        *,
        stays: Mapping[str, str] | None = None,
        moves: bool = False,
        groups: Mapping[str, str] | None = None,
        hosts: Mapping[str, str] | None = None,
    ) -> None:
        self.rooms = rooms
        self.placed: dict[str, str] = {}
        self._costs, self._moves = costs, moves
        self._stays, self._groups, self._hosts = stays or {}, groups or {}, hosts or {}
        self._order = {node: i for i, node in enumerate(rooms)}
        self._here: Counter[tuple[str, str, str]] = Counter()  # of a group, by node and by host

    @property
    def load(self) -> float:
        """Of all that is placed."""
        return math.fsum(self._costs[name] for name in self.placed)

    def place_whole(self, partitions: Iterable[str], ways: Sequence[How] = ("room",)) -> bool:
        """Place all of these that are not placed yet, in the first of these ways that they fit in;
        or none."""
        missing = self.largest_first(partitions)
        before = dict(self.rooms), dict(self.placed), self._here.copy()
        for how in ways:
            if all(self.place(name, how) for name in missing):
                return True
            self.rooms.update(before[0])
            self.placed, self._here = dict(before[1]), before[2].copy()
        return False

    def place(self, name: str, how: How = "room") -> bool:
        """Put a partition on the best node that it fits on, if there is one."""
        nodes = [n for n in self._candidates(name) if self._fits(name, n)]
        if nodes:
            self._put(name, self._best(name, nodes, how))
        return bool(nodes)

    def force(self, partitions: Iterable[str]) -> None:
        """Place all of these, where most room is if they fit nowhere."""
        for name in self.largest_first(partitions):
            if not self.place(name, "spread"):
                self._put(name, self._best(name, self._candidates(name), "room"))

    def largest_first(self, partitions: Iterable[str]) -> list[str]:
        """Those that are not placed yet, in the order to place them in: those that stay before."""
        missing = [p for p in partitions if p not in self.placed]
        return sorted(missing, key=lambda p: (p not in self._stays, -self._costs[p], p))

    def _candidates(self, name: str) -> list[str]:
        home = self._stays.get(name)
        if home is not None and (not self._moves or self._fits(name, home)):
            return [home]
        return list(self.rooms)

    def _fits(self, name: str, node: str) -> bool:
        return self._costs[name] <= self.rooms[node] + SLACK

    def _best(self, name: str, nodes: list[str], how: How) -> str:
        def rank(node: str) -> tuple[float, ...]:
            room, order = self.rooms[node], self._order[node]
            if how == "spread":
                return (*(self._here[k] for k in self._keys(name, node)), -room, order)
            return (room if how == "tight" else -room, order)

        return min(nodes, key=rank)

    def _put(self, name: str, node: str) -> None:
        self.placed[name] = node
        self.rooms[node] -= self._costs[name]
        self._here.update(self._keys(name, node))

    def _keys(self, name: str, node: str) -> list[tuple[str, str, str]]:
        group = self._groups.get(name, name)
        return [("node", node, group), ("host", self._hosts.get(node, ""), group)]
