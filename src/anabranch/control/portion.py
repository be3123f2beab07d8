"""How much of what chains lack the next part of a replay makes up for.

A part goes wave after wave, like a slice: each takes as long as the node with most to do in it. So
what counts is not what a node has to do in all, but what the part gets longer by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from anabranch.model.ids import NodeId
from anabranch.model.recovery import Span

FIRST_PART = 8  # slices, before it is known how long one takes
MAX_PART_SLICES = 64


@dataclass(frozen=True)
class Limits:
    """In seconds: for what nodes give that have a part in slices, too; for all waves together."""

    nodes: Mapping[NodeId, float]
    part_s: float


@dataclass(frozen=True)
class Work:
    """What chains have to make up for, and what that takes of their nodes."""

    order: tuple[str, ...]  # those above first
    above: Mapping[str, Collection[str]]  # of them, right above each
    nodes: Mapping[str, set[NodeId]]
    row_s: Mapping[str, Mapping[NodeId, float]]
    depth: Mapping[str, int]  # the wave of each
    rows: Mapping[int, int]  # of sources, by slice
    end: int  # the next slice

    @property
    def known(self) -> bool:
        """Is it known how long anything takes?"""
        return any(any(s.values()) for s in self.row_s.values())

    @property
    def most(self) -> int:
        """Slices in a part."""
        return MAX_PART_SLICES if self.known else FIRST_PART

    def costs(self, spans: Mapping[str, Span]) -> Counter[NodeId]:
        """For how long these keep each node, in seconds."""
        taken = Counter[NodeId]()
        for chain, span in spans.items():
            rows = sum(self.rows.get(n, 0) for n in range(*span))
            for node, row_s in self.row_s[chain].items():
                taken[node] += rows * row_s  # type: ignore[assignment]
        return taken

    def portion(
        self, starts: Mapping[str, int], limits: Limits, together: bool = False
    ) -> Mapping[str, int]:
        """How far each chain gets, one slice at least. `together`: all go through a slice, or
        none does."""
        ends, taken = dict(starts), _Taken(limits, {}, {}, Counter())
        for turn in range(self.most):
            then = taken.copy()
            at = min(ends.values()) if together else None
            takes: list[str] = []
            for chain in self.order:
                if self.may_go_on(chain, ends, takes) and at in (None, ends[chain]):
                    costs = self.costs({chain: (ends[chain], ends[chain] + 1)})
                    if then.fits(self.depth[chain], costs) or not turn:
                        then.add(self.depth[chain], costs)
                        takes.append(chain)
                    elif together:
                        return ends
            if not takes:
                break
            ends |= {c: ends[c] + 1 for c in takes}
            taken = then
        return ends

    def may_go_on(self, chain: str, ends: Mapping[str, int], takes: Collection[str]) -> bool:
        """By one slice? Those above it that it `takes` after are further, then."""
        ahead = all(ends[chain] < ends[u] + (u in takes) for u in self.above[chain])
        return ahead and ends[chain] < self.end


@dataclass
class _Taken:
    """By a part, as it grows: seconds."""

    limits: Limits
    waves: dict[tuple[int, NodeId], float]
    longest: dict[int, float]  # of each wave
    nodes: Counter[NodeId]

    def copy(self) -> _Taken:
        return _Taken(self.limits, dict(self.waves), dict(self.longest), self.nodes.copy())

    def fits(self, depth: int, costs: Mapping[NodeId, float]) -> bool:
        for node, limit_s in self.limits.nodes.items():
            if costs.get(node, 0.0) and self.nodes[node] + costs[node] > limit_s:
                return False
        after = max((self.waves.get((depth, n), 0.0) + s for n, s in costs.items()), default=0.0)
        longer = max(0.0, after - self.longest.get(depth, 0.0))
        return not longer or sum(self.longest.values()) + longer <= self.limits.part_s

    def add(self, depth: int, costs: Mapping[NodeId, float]) -> None:
        self.nodes.update(costs)
        for node, seconds in costs.items():
            after = self.waves.get((depth, node), 0.0) + seconds
            self.waves[depth, node] = after
            self.longest[depth] = max(after, self.longest.get(depth, 0.0))
