"""The user of a simulated run: asks for scalings and drains, also for impossible ones.

A request is judged by a rule of its own: what can be done must be accepted, the rest refused. What
was accepted stays pending until the journal has a placement that fulfils it, or the node is
released; requests are forgotten with the driver that took them.
"""

from __future__ import annotations

from anabranch.model.events import DrainRequested, Event, ScaleRequested
from anabranch.model.ids import NodeId
from anabranch.model.placement import Placement, even_groups
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
        # A recovery had divided these as they were then asked to be: done already, or still to do.
        self._either: set[str] = set()
        self._asked: tuple[Request, Placement] | None = None

    def pending(self, nodes: list[NodeId]) -> bool:
        """Is there anything that can be done? The last nodes stay, drained or not."""
        others = [n for n in nodes if n not in self.drains]
        return bool(self.scalings or (self.drains and others))

    def drawn(self, nodes: list[NodeId]) -> Request:
        """One in five is impossible, more or less."""
        dice, now_ms = self._world.dice, self._world.now_ms
        if self._world.chance(0.35):
            return DrainRequested(dice.choice([*nodes, NodeId("nobody")]), now_ms)
        groups = self._job.plan.graph.key_groups
        chains = self._job.plan.chains if self._world.chance(0.1) else self._job.plan.node_chains
        names = [n for c in chains for n in c.operators] or [c.name for c in self._job.plan.chains]
        operator = dice.choice(["nobody", *names] if self._world.chance(0.1) else names)
        return ScaleRequested(operator, dice.randint(0, groups + 1), now_ms)

    def may(self, request: Request, nodes: list[NodeId]) -> bool | None:
        """Can it be done? None: nobody outside can tell."""
        if isinstance(request, DrainRequested):
            others = [n for n in nodes if n != request.node and n not in self.drains]
            return request.node in nodes and bool(others)
        chain = self._chain(request.operator)
        if chain is None or not 1 <= request.parallelism <= self._job.plan.graph.key_groups:
            return False
        if chain in self._either or self._job.config.autoscale is not None:
            return None
        return self.scalings.get(chain, request.parallelism) == request.parallelism

    def ask(self, request: Request, placement: Placement) -> None:
        """It is about to be asked for: accepted, unless it is `refused`."""
        self._asked = (request, placement)

    def refused(self) -> None:
        self._asked = None

    def handled(self, event: Event) -> None:
        """The controller has taken an event; if that was asked for last, it was accepted."""
        if self._asked is not None and event is self._asked[0]:
            asked, self._asked = self._asked, None
            self._accepted(*asked)

    def _accepted(self, request: Request, placement: Placement) -> None:
        self._world.counts["requests accepted"] += 1
        if isinstance(request, DrainRequested):
            self.drains.add(request.node)
            return
        chain = self._chain(request.operator)
        assert chain is not None
        if _evenly(placement, chain, request.parallelism):
            self._either.add(chain)
        else:
            self.scalings[chain] = request.parallelism

    def journalled(self, placement: Placement, sure: bool = True) -> None:
        """What the placement fulfils is done; if that is not `sure`, nobody outside can tell."""
        done = {c for c, n in self.scalings.items() if _evenly(placement, c, n)}
        self.scalings = {c: n for c, n in self.scalings.items() if c not in done}
        if not sure:
            self._either |= done

    def gone(self, nodes: tuple[NodeId, ...]) -> None:
        self.drains -= set(nodes)

    def _chain(self, operator: str) -> str | None:
        found = [c.name for c in self._job.plan.node_chains if operator in c.operators]
        return found[0] if found else None


def _evenly(placement: Placement, chain: str, parallelism: int) -> bool:
    """Not as a recovery divided it."""
    groups = placement.groups[chain]
    return groups == even_groups(len(groups), parallelism)
