"""The control plane of one run: events in, commands out.

The controller only routes. What is known is in ledgers/. What happens is up to four machines with
names, states and a table of legal moves each: the slice in hand (schedule.py), the partitions that
are rebuilt (rebuild.py), chains that wait and come back beside slices (comeback.py) and the change
of the placement (adjustment.py). Whose turn it is says machines.py, what nodes that come and go
cause membership.py, what reports cause outcomes.py. Every move is told (story.py); whatever breaks
an invariant carries the story, and a run that validates itself checks all of them after every event
(invariants.py).
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import assert_never

from anabranch.control.invariants import check
from anabranch.control.machines import Machines
from anabranch.control.membership import Membership
from anabranch.control.outcomes import Outcomes
from anabranch.control.policies.load import Load
from anabranch.control.rebuild import RebuildState
from anabranch.control.schedule import SliceState
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.story import Story, described, entity_of
from anabranch.errors import AdjustmentError, InvariantError
from anabranch.model import events
from anabranch.model.commands import Command, FailRun, FinishRun
from anabranch.model.events import Event
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan
from anabranch.model.slices import Cut, SliceRecord


class Phase(Enum):
    """What the run is doing."""

    WAITING = auto()  # for a node
    RECOVERING = auto()
    RUNNING = auto()
    STOPPING = auto()  # a last slice seals a checkpoint
    ENDED = auto()


class Controller:
    """Feed it events in order; execute the commands it returns in order. To `validate` is to
    check all invariants after every event."""

    def __init__(
        self, plan: Plan, config: ControlConfig, past: Past, validate: bool = False
    ) -> None:
        self.plan = plan
        self._validate = validate
        self._now_ms = 0  # with the newest event
        self.story = Story()
        self.machines = machines = Machines(plan, config, past, self.story)
        self.ledgers, self.wishes = machines.ledgers, machines.wishes
        self.schedule, self.rebuild = machines.schedule, machines.rebuild
        self.comeback, self.adjustment = machines.comeback, machines.adjustment
        self._membership = Membership(machines, past)
        self._outcomes = Outcomes(machines, self._membership)

    # -- what others may know ------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self.schedule.state is SliceState.ENDED:
            return Phase.ENDED
        if self.rebuild.state is RebuildState.AWAITING or self.comeback.awaiting:
            return Phase.WAITING
        if not self.machines.are_whole:
            return Phase.RECOVERING
        return Phase.STOPPING if self.schedule.stopping else Phase.RUNNING

    @property
    def placement(self) -> Placement | None:
        """Who owns what; None before the first node has come."""
        return self.ledgers.owners.in_force

    @property
    def frontier(self) -> dict[PartitionId, int]:
        """The next slice of every partition."""
        return self.ledgers.owners.frontier

    @property
    def waiting(self) -> frozenset[str]:
        """Chains that are in no slice for now."""
        return self.ledgers.behind.chains

    @property
    def newest(self) -> SliceRecord | None:
        """The newest slice that has happened."""
        return self.ledgers.slices.newest

    @property
    def cut(self) -> Cut | None:
        """What a restart begins with."""
        return self.ledgers.checkpoints.cut

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self.ledgers.owners.nodes)

    @property
    def draining(self) -> frozenset[NodeId]:
        """Nodes that are being emptied."""
        return frozenset(self.wishes.drained)

    @property
    def adjusting(self) -> bool:
        """Is a change of the placement wanted or on its way?"""
        return not self.adjustment.settled or self.phase is Phase.RECOVERING

    @property
    def load(self) -> Load:
        return self.machines.scaling.load

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event, wall_ms: int | None = None) -> list[Command]:
        """One event in, the commands it causes out. `wall_ms` is what the wall clock says: the
        event's own time goes on evenly, and means nothing but intervals. A world that has only
        that one clock leaves it out."""
        if self.schedule.state is SliceState.ENDED:
            return []
        if event.now_ms < self._now_ms:  # it has waited for its turn
            event = replace(event, now_ms=self._now_ms)
        self._now_ms = event.now_ms
        self.schedule.wall_ms = event.now_ms if wall_ms is None else wall_ms
        self.story.begin(event)
        try:
            commands = self._route(event)
            if any(isinstance(c, FailRun | FinishRun) for c in commands):
                self.schedule.end()
            if self._validate:
                check(self, commands)
        except InvariantError as e:
            raise e.told(self.story.told(entity_of(e))) from e.__cause__
        except AdjustmentError:
            self.story.end(["refused"])
            raise
        self.story.end(described(commands))
        return commands

    def _route(self, event: Event) -> list[Command]:
        now_ms = event.now_ms
        match event:
            case events.NodesJoined():
                return self._membership.joined(event)
            case events.NodesLost():
                return self._membership.lost(event)
            case events.SliceRan():
                return self._outcomes.slice_ran(event)
            case events.PartitionsRecovered():
                return self._outcomes.recovered(event)
            case events.CaughtUp():
                return self._outcomes.part_done(event) if self.comeback.is_at(event) else []
            case events.RestoreFailed():
                return self._outcomes.unreadable(event)
            case events.NodesPolled():
                return self._outcomes.polled(event)
            case events.Idled():
                return self.machines.idle(now_ms)
            case events.DrainRequested():
                self.adjustment.drain(event.node, self.load)
                return self.adjustment.release() + self.machines.go_on(now_ms)
            case events.BatchArrived():
                self.schedule.waiting_batch = event
            case events.PartitionsPrepared():
                self.adjustment.prepared(event.reports)
            case events.ScaleRequested():
                self.adjustment.scale(event.operator, event.parallelism)
            case events.StopRequested():
                self.schedule.stop_asked = self.comeback.stops = True
            case _:
                assert_never(event)
        return self.machines.go_on(now_ms)
