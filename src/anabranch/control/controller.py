"""The control plane of one run: events in, commands out.

The controller only routes. What is known is in ledgers/. What happens is up to three machines with
names, states and a table of legal moves each: the slice in hand (schedule.py), the partitions that
are rebuilt (rebuild.py), chains that wait and come back beside slices (comeback.py) and the change
of the placement (adjustment.py). What reports mean is in verdict.py. Every move is told (story.py);
whatever breaks an invariant carries the story, and a run that validates itself checks all of them
after every event (invariants.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import assert_never

from anabranch.control import verdict
from anabranch.control.adjustment import Adjustment
from anabranch.control.comeback import Comeback
from anabranch.control.invariants import check
from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.load import Load
from anabranch.control.rebuild import Rebuild, RebuildState
from anabranch.control.schedule import Schedule, SliceState
from anabranch.control.self_scaling import SelfScaling
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.story import Story, described, entity_of
from anabranch.control.wishes import Wishes
from anabranch.errors import AdjustmentError, InvariantError
from anabranch.model import events
from anabranch.model.commands import (
    AwaitNodes,
    CatchUp,
    Command,
    FailRun,
    FinishRun,
    PollNodes,
    RecoverPartitions,
    TrimStorage,
)
from anabranch.model.events import Event
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan
from anabranch.model.recovery import Cause
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Cut, SliceRecord

Reported = events.SliceRan | events.PartitionsRecovered | events.CaughtUp | events.NodesPolled


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
        self._past = past
        self._validate = validate
        self.story = Story()
        self.ledgers = Ledgers.of(plan, config, past)
        # Where rows may come out differently, a copy would not be one.
        self.wishes = Wishes(plan, config.strategy.copies and plan.repeatable)
        self.rebuild = Rebuild(plan, config, self.ledgers, self.wishes, self.story)
        self.comeback = Comeback(plan, config, self.ledgers, self.wishes, self.rebuild, self.story)
        self.adjustment = Adjustment(plan, self.ledgers, self.wishes, self.rebuild, self.story)
        self.schedule = Schedule(config, self.ledgers, self.adjustment, past.generation, self.story)
        self._scaling = SelfScaling(plan, config, past, self.ledgers, self.wishes, self.adjustment)

    # -- what others may know ------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self.schedule.state is SliceState.ENDED:
            return Phase.ENDED
        if self.rebuild.state is RebuildState.AWAITING or self.comeback.awaiting:
            return Phase.WAITING
        if not self._is_whole:
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
        return self._scaling.load

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event, wall_ms: int | None = None) -> list[Command]:
        """One event in, the commands it causes out. `wall_ms` is what the wall clock says: the
        event's own time goes on evenly, and means nothing but intervals. A world that has only
        that one clock leaves it out."""
        if self.schedule.state is SliceState.ENDED:
            return []
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
        match event:
            case events.NodesJoined():
                return self._on_joined(event)
            case events.NodesLost():
                return self._on_lost(event)
            case events.PartitionsRecovered():
                return self._on_recovered(event)
            case events.CaughtUp():
                return self._on_part(event) if self.comeback.is_at(event) else []
            case events.RestoreFailed():
                if self.comeback.replaying:
                    return self._come_back(self.comeback.torn(event.error), event)
                return self._rebuild(self.rebuild.torn(event.error), event.now_ms)
            case events.BatchArrived():
                self.schedule.waiting_batch = event
            case events.SliceRan():
                return self._on_slice(event)
            case events.PartitionsPrepared():
                self.adjustment.prepared(event.reports)
            case events.ScaleRequested():
                self.adjustment.scale(event.operator, event.parallelism)
            case events.DrainRequested():
                self.adjustment.drain(event.node, self.load)
                return self.adjustment.release() + self._go_on(event.now_ms)
            case events.NodesPolled():
                return self._on_poll(event)
            case events.Idled():
                parts, nothing_else = self._parts(event.now_ms)
                commands = self._scale_itself(event.now_ms) + parts
                return commands if nothing_else else commands + self.schedule.idle(event.now_ms)
            case events.StopRequested():
                self.schedule.stop_asked = self.comeback.stops = True
            case _:
                assert_never(event)
        return self._go_on(event.now_ms)

    def _go_on(self, now_ms: int) -> list[Command]:
        """The next step, whenever there may be one."""
        if self.rebuild.state is RebuildState.SEALING:
            if self.ledgers.checkpoints.in_flight:
                return [PollNodes()]
            return self._rebuild(self.rebuild.next_stage(), now_ms)
        parts, nothing_else = self._parts(now_ms)
        return parts if nothing_else else parts + self.schedule.next(now_ms)

    @property
    def _is_whole(self) -> bool:
        """Is everything that takes part in slices where it belongs, and nothing being replayed?"""
        return self.rebuild.whole and self.comeback.may_rest

    def _parts(self, now_ms: int) -> tuple[list[Command], bool]:
        """Of what comes back beside slices, after one that was cut short; and must slices wait?"""
        self.schedule.beside, self.schedule.busy = self.comeback.beside, self.comeback.busy
        if not self._is_whole:
            return [], True
        if self.schedule.state is not SliceState.FREE:
            return [], False
        commands = self.comeback.step(now_ms, self.schedule.began_ms)
        if not commands:
            return [], False
        return self._come_back(commands), not isinstance(commands[-1], CatchUp)

    def _come_back(self, commands: list[Command], event: Event | None = None) -> list[Command]:
        """Go on, after an event, where there is nothing to do for those that wait."""
        if not commands:
            return self._go_on(event.now_ms) if event is not None else []
        self.adjustment.rebuilding()
        return commands

    def _rebuild(self, commands: list[Command], now_ms: int) -> list[Command]:
        """Go on where there is nothing to rebuild. A change of the placement waits for a rebuild
        that is not its own switch."""
        if not commands:
            return self._go_on(now_ms)
        plan = self.rebuild.running
        if plan is None or not plan.adjusts:
            self.adjustment.rebuilding()
        return commands

    def _on_joined(self, event: events.NodesJoined) -> list[Command]:
        owners = self.ledgers.owners
        owners.join(event.nodes, event.hosts)
        if not self.comeback.absent:
            return self._come_back(self.comeback.joined(), event)
        if self.rebuild.state is not RebuildState.AWAITING or not owners.nodes:
            self.adjustment.spread()
            return self._go_on(event.now_ms)
        if owners.in_force is None:
            if self.comeback.starts(self._past):
                return self._come_back(self.comeback.start(self._past))
            return self._rebuild(self.rebuild.start(self._past), event.now_ms)
        if self.comeback.takes(self.rebuild.lost):
            return self._come_back(self.comeback.lost((), Cause.NODES_CAME))
        return self._rebuild(self.rebuild.again(frozenset(), Cause.NODES_CAME), event.now_ms)

    def _on_lost(self, event: events.NodesLost) -> list[Command]:
        owners = self.ledgers.owners
        noted = self._backups_for([n for n in event.nodes if n in owners.nodes])
        owners.leave(event.nodes)
        self.adjustment.nodes_lost(event.nodes)
        self.schedule.interrupt(event.logged)
        gone = owners.owned_by(event.nodes) if owners.in_force else frozenset()
        if self.comeback.takes(gone):
            owners.forget_processes(event.nodes)
            commands = self.comeback.lost(gone, Cause.NODES_LOST)
            return noted + self._come_back(commands, event)
        commands = self.rebuild.nodes_lost(event.nodes, event.now_ms)
        return noted + self._rebuild(commands, event.now_ms)

    def _backups_for(self, lost: Sequence[NodeId]) -> list[Command]:
        """These nodes, or all that they had, are gone; who backs up from now on, if others do."""
        placement = self.ledgers.owners.in_force
        if placement is None:
            return []
        backups, next_slice = self.ledgers.backups, self.ledgers.slices.next_slice
        noted = backups.nodes_lost(len(lost), placement, next_slice)
        return [noted] if noted else []

    def _on_recovered(self, event: events.PartitionsRecovered) -> list[Command]:
        if self.comeback.replaying:
            return self._on_part(event)
        replaced = self._if_replaced(event, None, self.rebuild.expected().nodes)
        if replaced:
            return replaced
        commands = self.rebuild.recovered(event.reports, event.now_ms)
        if self.rebuild.state in (RebuildState.REPLAYING, RebuildState.AWAITING):
            return self._rebuild(commands, event.now_ms)
        commands += self._on_reports(event.reports)
        if self.rebuild.whole:
            self.adjustment.rebuilt()
            self.schedule.reopen()
            commands += self.adjustment.release()
        return commands + self._go_on(event.now_ms)

    def _on_part(self, event: events.PartitionsRecovered | events.CaughtUp) -> list[Command]:
        """Something has made up for a part of what it lacks."""
        if isinstance(event, events.CaughtUp) and event.error is not None:
            return [FailRun(event.error)]
        replaced = self._if_replaced(event, None, self.comeback.expected().nodes)
        if replaced:
            return replaced
        commands = self.comeback.recovered(event.reports)
        if commands and isinstance(commands[-1], RecoverPartitions | AwaitNodes | FailRun):
            return self._come_back(commands)
        if self.comeback.absent:
            self.schedule.reopen()
            self.adjustment.spread()
            commands += self.adjustment.release()
        return commands + self._on_reports(event.reports) + self._go_on(event.now_ms)

    def _on_slice(self, event: events.SliceRan) -> list[Command]:
        plan = self.schedule.reported(event.number)
        logged = event.source_tasks if event.logged else None
        replaced = self._if_replaced(event, logged, self.schedule.nodes)
        if replaced:
            return replaced
        error = verdict.first_failure(event.reports, f"slice {plan.number}", plan.number)
        if error is not None:
            return [FailRun(error)]
        if verdict.lacking(event.reports):
            self.schedule.interrupt(logged)
            return self._on_lacking(plan.number, event)
        self.rebuild.tries.progress()
        self.comeback.slice_ran(self.schedule.began_ms)
        commands = self.schedule.happened(plan, event)
        placement, took = self.ledgers.owners.placement, (self.schedule.began_ms, event.now_ms)
        choice = self.ledgers.backups.choose(event.reports, plan, placement, *took)
        commands += [choice] if choice else []
        self._scaling.observe(plan, event.reports, *took)
        self.ledgers.costs.observe(placement, event.reports, *took, self.comeback.absent)
        commands += self._scale_itself(event.now_ms)
        if plan.seal:
            began_ms = self.schedule.began_ms
            self.ledgers.checkpoints.sealed(plan.number, placement, began_ms, plan.paused)
        commands += self._on_reports(event.reports)
        if self.schedule.waiting_batch is not None and not self.schedule.stop_asked:
            return commands  # it is offered again: between two slices, others have their turn
        return commands + self._go_on(event.now_ms)

    def _on_lacking(self, slice_no: int, event: events.SliceRan) -> list[Command]:
        if self.comeback.absent:
            return self._rebuild(self.rebuild.lacked(slice_no, event.reports), event.now_ms)
        lost = verdict.not_hosted(event.reports)
        too_often = self.rebuild.tries.lacked_too_often(slice_no, event.reports)
        if too_often is not None:
            return [FailRun(too_often)]
        return self._come_back(self.comeback.lost(lost, Cause.INPUT_LACKED) if lost else [], event)

    def _on_poll(self, event: events.NodesPolled) -> list[Command]:
        """What goes wrong between slices (a full disk, a lost node) must end the waiting too."""
        replaced = self._if_replaced(event, None)
        if replaced:
            return replaced
        newest = self.ledgers.newest_slice
        error = verdict.first_failure(event.reports, f"after slice {newest}", newest)
        if error is not None:
            return [FailRun(error)]
        return self._on_reports(event.reports) + self._go_on(event.now_ms)

    def _if_replaced(
        self, event: Reported, logged: int | None, asked: Sequence[NodeId] | None = None
    ) -> list[Command]:
        """[] unless reports come from another node process than before."""
        nodes = self.ledgers.owners.replaced(event.reports, asked)
        if not nodes:
            return []
        self.schedule.interrupt(logged)
        noted = self._backups_for(nodes)
        if self.comeback.absent:
            return noted + self._rebuild(self.rebuild.processes_replaced(nodes), event.now_ms)
        owners = self.ledgers.owners
        owners.forget_processes(nodes)
        lost = owners.owned_by(nodes)
        return noted + self._come_back(self.comeback.lost(lost, Cause.PROCESS_REPLACED))

    def _scale_itself(self, now_ms: int) -> list[Command]:
        running = self.phase is Phase.RUNNING and self.comeback.absent
        return self._scaling.decide(now_ms, self.schedule.wall_ms, running)

    def _on_reports(self, reports: Sequence[NodeReport]) -> list[Command]:
        """Checkpoint files that became durable; a completed cut moves the restart point."""
        checkpoints = self.ledgers.checkpoints
        full = any(r.disk_full for r in reports)
        heard = {r.node for r in reports} >= set(self.ledgers.owners.placement.nodes)
        self.schedule.disk_full = full or (self.schedule.disk_full and not heard)
        cut = checkpoints.written(c for r in reports for c in r.checkpoints)
        if checkpoints.broken:
            self.adjustment.start_over("full files will take the place of those it loads ahead")
        if cut is None:
            return []
        self.ledgers.slices.trim(checkpoints.replay_from)
        self.adjustment.unite()
        trimmed = TrimStorage(checkpoints.replay_from, checkpoints.keep_files)
        commands: list[Command] = [self.ledgers.head(), trimmed]
        covers_all = cut.groups.keys() >= self.ledgers.owners.placement.groups.keys()
        if covers_all and self.rebuild.whole and self.comeback.absent:
            noted = self.ledgers.backups.all_in_a_cut()
            commands += [noted] if noted else []
        return commands
