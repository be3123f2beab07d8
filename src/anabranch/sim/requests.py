"""The user of a simulated run: asks for scalings and drains, also for impossible ones.

A request is judged by a rule of its own: what can be done must be accepted, the rest refused. What
was accepted stays pending until the journal has a mapping that fulfils it, or the node is released;
requests are forgotten with the driver that took them.
"""

from __future__ import annotations

from anabranch.model.events import DrainRequested, ScaleRequested
from anabranch.model.ids import NodeId
from anabranch.model.mapping import Mapping, even_groups
from anabranch.sim.workload import Workload
from anabranch.sim.world import World

Request = ScaleRequested | DrainRequested


class Requests:
    """What one driver was asked for and has not done yet."""

    def __init__(self, world: World, job: Workload) -> None:
        self._world = world
        self._job = job
        self.scalings: dict[str, int] = {}  # by chain
        self.drains: set[NodeId] = set()

    def pending(self, nodes: list[NodeId]) -> bool:
        """Is there anything that can be done? The last nodes stay, drained or not."""
        others = [n for n in nodes if n not in self.drains]
        return bool(self.scalings or (self.drains and others))

    def drawn(self, nodes: list[NodeId]) -> Request:
        """One in five is impossible, more or less."""
        dice, now_ms = self._world.dice, self._world.now_ms
        if self._world.chance(0.35):
            return DrainRequested(dice.choice([*nodes, NodeId("nobody")]), now_ms)
        groups = self._job.plan.topology.key_groups
        chains = self._job.plan.chains if self._world.chance(0.1) else self._job.plan.node_chains
        names = [n for c in chains for n in c.operators] or [c.name for c in self._job.plan.chains]
        operator = dice.choice(["nobody", *names] if self._world.chance(0.1) else names)
        return ScaleRequested(operator, dice.randint(0, groups + 1), now_ms)

    def may(self, request: Request, nodes: list[NodeId]) -> bool:
        """Can it be done?"""
        if isinstance(request, DrainRequested):
            others = [n for n in nodes if n != request.node and n not in self.drains]
            return request.node in nodes and bool(others)
        chain = self._chain(request.operator)
        if chain is None or not 1 <= request.parallelism <= self._job.plan.topology.key_groups:
            return False
        return self.scalings.get(chain, request.parallelism) == request.parallelism

    def accepted(self, request: Request, mapping: Mapping) -> None:
        self._world.counts["requests accepted"] += 1
        if isinstance(request, DrainRequested):
            self.drains.add(request.node)
            return
        chain = self._chain(request.operator)
        assert chain is not None
        self.scalings[chain] = request.parallelism
        self.journalled(mapping)

    def journalled(self, mapping: Mapping) -> None:
        """What the mapping fulfils is done."""
        self.scalings = {c: n for c, n in self.scalings.items() if not _evenly(mapping, c, n)}

    def gone(self, nodes: tuple[NodeId, ...]) -> None:
        self.drains -= set(nodes)

    def _chain(self, operator: str) -> str | None:
        found = [c.name for c in self._job.plan.node_chains if operator in c.operators]
        return found[0] if found else None


def _evenly(mapping: Mapping, chain: str, parallelism: int) -> bool:
    """Not as a recovery divided it."""
    groups = mapping.groups[chain]
    return groups == even_groups(len(groups), parallelism)
