"""The control plane of one run: a state machine from events to commands.

It decides which slice runs next and with which time and mapping, when a slice has happened, when
to checkpoint, and what is restored and replayed when partitions are lost. It owns the frontier of
every partition (its next slice, its epoch) and refuses, as a broken invariant, any report that
contradicts it.

A start is the recovery of all partitions from what the journal says. A loss is the recovery of
the lost ones, after which the slice that was cut short runs again: partitions that had applied it
repeat their output, nothing rolls back. An online adjustment (elasticity.py) installs partitions
in the same way at a cut, so that there is nothing to replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from anabranch.control.autoscaler import Autoscale, Autoscaler
from anabranch.control.backups import BackupLedger
from anabranch.control.checkpoints import CheckpointLedger
from anabranch.control.elasticity import Change, Wishes
from anabranch.control.layouts import LayoutLedger
from anabranch.control.ledger import SliceLedger
from anabranch.control.load import Load
from anabranch.control.processing_time import ProcessingTime
from anabranch.control.recovery import in_parts, plan_recovery
from anabranch.control.recovery_bound import RecoveryBound
from anabranch.errors import (
    AdjustmentError,
    AnabranchError,
    ClusterError,
    InvariantError,
    OperatorError,
    StorageError,
)
from anabranch.model.commands import (
    AwaitNodes,
    Command,
    ExposeSlice,
    FailRun,
    FinishBatch,
    FinishRun,
    NoteDecision,
    PollNodes,
    PreparePartitions,
    RecoverPartitions,
    ReleaseNodes,
    RequestNodes,
    RunSlice,
    TrimStorage,
    WriteHead,
    WriteSlice,
)
from anabranch.model.events import (
    BatchArrived,
    DrainRequested,
    Event,
    Idled,
    NodesJoined,
    NodesLost,
    NodesPolled,
    PartitionsPrepared,
    PartitionsRecovered,
    RestoreFailed,
    ScaleRequested,
    SliceRan,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Layout, Mapping, adjust, place, promote, reassign, split
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Cut, Feed, SlicePlan, SliceRecord, Writes

# Tries in a row without a slice between them: a state that kills every node it meets.
MAX_TRIES = 10


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The run's settings that decisions depend on."""

    checkpoint_interval_ms: int = 10_000
    # Event-time delay per source that declares an event time.
    watermark_delays_us: MappingOf[str, int] = field(default_factory=dict)
    # Of those, sources that hold the watermark back only for so long without rows.
    idle_timeouts_ms: MappingOf[str, int] = field(default_factory=dict)
    # Chains that keep their output until no recovery needs it; None: all of them.
    backups: frozenset[str] | None = None
    # Instead of a fixed choice: back up what brings any lost node back within so many seconds.
    recovery_bound_s: float | None = None
    slice_interval_ms: int = 1_000
    autoscale: Autoscale | None = None
    # A lost partition whose output goes to sinks only is rebuilt as so many, on as many nodes.
    parallel_recovery: int = 1
    # For comparison with other systems: a slice that seals waits for its files; those have the
    # whole state; a loss takes every partition back to the cut; it looks behind a scaling, which a
    # rollback undoes.
    synchronous: bool = False
    whole: bool = False
    rollback: bool = False
    behind_scaling: bool = False
    copies: bool = False  # of every partition, on another node


@dataclass(frozen=True, slots=True)
class Past:
    """What the journal of earlier runs on the same directory says; empty for a new one."""

    cut: Cut | None = None
    previous: Cut | None = None
    slices: tuple[SliceRecord, ...] = ()  # after the previous cut, in order
    epochs: MappingOf[PartitionId, int] = field(default_factory=dict)
    groups: Layout = field(default_factory=dict)
    layouts: MappingOf[int, Layout] = field(default_factory=dict)  # of slices that had another
    rescaled: frozenset[str] = frozenset()  # chains whose declared parallelism is another now
    mapping_version: int = 0
    generation: int = 1  # of the driver that begins: no other one has it
    autoscaler: MappingOf[str, Any] = field(default_factory=dict)  # its memory


class Phase(Enum):
    """What the run is doing."""

    WAITING = auto()  # for a node
    RECOVERING = auto()
    RUNNING = auto()
    STOPPING = auto()  # a last slice seals a checkpoint
    ENDED = auto()


class Controller:
    """Feed it events in order; execute the commands it returns in order."""

    def __init__(self, plan: Plan, config: ControlConfig, past: Past) -> None:
        self.phase = Phase.WAITING
        self.frontier: dict[PartitionId, int] = {}
        self.mapping: Mapping | None = None
        self._plan = plan
        self._config = config
        self._past = past
        self._generation = past.generation
        self._checkpoints = CheckpointLedger(config.checkpoint_interval_ms, past.cut, past.previous)
        self._slices = SliceLedger(
            config.watermark_delays_us, past.slices, config.idle_timeouts_ms, plan.clocks
        )
        self._nodes: list[NodeId] = []
        self._hosts: dict[NodeId, str] = {}
        self._epochs = dict(past.epochs)  # every one ever given out: none comes again
        self._layouts = LayoutLedger(
            plan, {r.mapping: past.layouts.get(r.mapping, past.groups) for r in past.slices}
        )
        # Where rows may come out differently, a copy would not be one.
        self._wishes = Wishes(plan, config.copies and plan.repeatable)
        self._promoted: frozenset[PartitionId] = frozenset()  # copies that take over just now
        self._change: Change | None = None  # of the mapping, on its way
        self._scaled: tuple[int, dict[str, int]] | None = None  # the cut of the last one, before it
        self._last = frozenset(c.name for c in plan.node_chains if not c.outputs)
        self._incarnations: dict[NodeId, str] = {}
        bound = None
        if config.recovery_bound_s is not None:
            interval_s = config.checkpoint_interval_ms / 1000
            bound = RecoveryBound(plan, config.recovery_bound_s, interval_s)
        self.backups = BackupLedger(config.backups, bound)
        self.load, self._autoscaler = Load(), None
        if config.autoscale is not None:
            scale = config.autoscale
            self.load = Load(scale.ms("interval"), scale.measurements("drain_after"))
            self._autoscaler = Autoscaler(plan, scale, config.slice_interval_ms, past.autoscaler)
        newest = self._slices.newest
        self._time = ProcessingTime(newest.processing_ms if newest else None)
        self._wall_ms = 0  # with the event in hand
        self._began_ms = 0  # the slice in hand, or the one before
        self._due_ms: dict[PartitionId, int] = {}  # when a partition's next timer comes
        self._lost_ms: int | None = None  # when the loss that is being recovered was known
        self._running: SlicePlan | None = None
        self._again: SlicePlan | None = None  # was cut short, runs next
        self._lost: frozenset[PartitionId] = frozenset()  # not recovered yet
        self._recovery: RecoveryPlan | None = None
        self._parts: list[tuple[SliceRecord, ...]] = []  # of the recovery, still to replay
        self._stage_end: int | None = None  # the recovery ends here with a cut, another follows
        self._attempts = 0  # to read a batch
        self._tries = 0  # to recover or to run, since the last slice
        self._waiting_batch: int | None = None
        self._stop_asked = False
        self._disk_full = False  # of a node that keeps backups

    @property
    def newest(self) -> SliceRecord | None:
        """The newest slice that has happened."""
        return self._slices.newest

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self._nodes)

    @property
    def draining(self) -> frozenset[NodeId]:
        """Nodes that are being emptied."""
        return frozenset(self._wishes.drained)

    @property
    def adjusting(self) -> bool:
        """Is a change of the mapping wanted or on its way?"""
        return self._change is not None or self.phase is Phase.RECOVERING

    @property
    def cut(self) -> Cut | None:
        """What a restart begins with."""
        return self._checkpoints.cut

    def handle(self, event: Event, wall_ms: int | None = None) -> list[Command]:
        """One event in, the commands it causes out. `wall_ms` is what the wall clock says: the
        event's own time goes on evenly, and means nothing but intervals. A world that has only
        that one clock leaves it out."""
        if self.phase is Phase.ENDED:
            return []
        self._wall_ms = event.now_ms if wall_ms is None else wall_ms
        match event:
            case NodesJoined():
                return self._on_joined(event)
            case NodesLost():
                return self._on_lost(event)
            case PartitionsRecovered():
                return self._on_recovered(event)
            case RestoreFailed():
                return self._on_restore_failed(event)
            case BatchArrived():
                self._waiting_batch = event.batch
                return self._go_on(event.now_ms)
            case SliceRan():
                return self._on_slice(event)
            case PartitionsPrepared():
                return self._on_prepared(event)
            case ScaleRequested():
                assert self.mapping is not None  # requests come to a job that runs
                chain = self._wishes.chain_of(event.operator)
                divided = chain in self._layouts.divided  # and shall be one again: this comes first
                self._wishes.scale(event.operator, event.parallelism, self.mapping, anyway=divided)
                self._layouts.divided.pop(chain, None)
                self._change = None  # another one fulfils this, too
                return self._go_on(event.now_ms)
            case DrainRequested():
                self._wishes.drain(event.node, self._nodes, self.load)
                self._change = None
                return self._released() + self._go_on(event.now_ms)
            case NodesPolled():
                return self._on_poll(event)
            case Idled():
                return self._autoscale(event.now_ms) + self._on_idle(event.now_ms)
            case StopRequested():
                self._stop_asked = True
                return self._go_on(event.now_ms)

    # -- start and recovery --------------------------------------------------------------------

    def _on_joined(self, event: NodesJoined) -> list[Command]:
        self._nodes += [n for n in event.nodes if n not in self._nodes]
        self._hosts |= event.hosts
        if self.phase is not Phase.WAITING or not self._nodes:
            self._wishes.spread()
            self._change = None
            return self._go_on(event.now_ms)
        if self.mapping is None:
            past = self._past
            kept = {c: g for c, g in past.groups.items() if c not in past.rescaled}
            version = past.mapping_version + 1
            self.mapping = place(self._plan, self._nodes, version, past.epochs, kept, self._hosts)
            self._layouts.changed(self.mapping.groups)
            return self._recover(frozenset(self.mapping.owners), self.mapping)
        return self._reassign(frozenset(), anyway=True)

    def _on_lost(self, event: NodesLost) -> list[Command]:
        self._nodes = [n for n in self._nodes if n not in event.nodes]
        self._wishes.drained -= set(event.nodes)
        self._change = None  # it may count on them
        self._lost_ms = self._lost_ms or event.now_ms
        self._interrupt(event.logged)
        if self.mapping is None:
            return []
        hosted = (p for p, o in self.mapping.owners.items() if o.node in event.nodes)
        for node in event.nodes:
            self._incarnations.pop(node, None)
        commands = self._reassign(frozenset(hosted))
        if not commands:
            self._lost_ms = None  # it had nothing
        return commands or self._go_on(event.now_ms)

    def _on_replaced(self, nodes: Iterable[NodeId], logged: int | None) -> list[Command]:
        """The node processes of these nodes are new ones: usable, but empty."""
        assert self.mapping is not None
        found = frozenset(nodes)
        self._interrupt(logged)
        for node in found:
            self._incarnations.pop(node, None)
        lost = frozenset(p for p, o in self.mapping.owners.items() if o.node in found)
        self._drop_copies(p for p, n in self.mapping.copies.items() if n in found)
        return self._reassign(lost, anyway=True)

    def _drop_copies(self, partitions: Iterable[PartitionId]) -> None:
        assert self.mapping is not None
        gone = frozenset(partitions)
        copies = {p: n for p, n in self.mapping.copies.items() if p not in gone}
        self.mapping = replace(self.mapping, copies=copies)

    def _interrupt(self, logged: int | None) -> None:
        """The slice in hand did not happen; it runs again after the recovery.

        With all its rows in the log, some node may have applied it: exactly these rows come
        again. Otherwise none has seen any, and the batch is read anew into another log.
        """
        plan, self._running = self._running, None
        if plan is None:
            return
        if plan.feed is Feed.LIVE and logged is not None:
            plan = replace(plan, feed=Feed.LOG, source_tasks=logged)
        elif plan.feed is Feed.LIVE:
            plan = replace(plan, attempt=self._next_attempt())
        self._again = plan

    def _next_attempt(self) -> int:
        """Of reading a batch, by this driver: no two write to the same log. A source task that
        nobody waits for any more cannot touch a later slice's, whatever its batch is cut into."""
        self._attempts += 1
        return self._attempts - 1

    def _reassign(self, lost: frozenset[PartitionId], anyway: bool = False) -> list[Command]:
        """Give every partition that is lost by now to a living node; [] when none is, unless the
        nodes must hear of the job `anyway`."""
        assert self.mapping is not None
        self._lost |= lost
        if self._recovery is not None:
            self._drop_copies(self._recovery.copied)  # cut short, it may have made them or not
        if not self._lost and not anyway and set(self.mapping.nodes) <= set(self._nodes):
            return []
        if self._config.rollback or not self._plan.repeatable:
            # Rows produced once more may be others: everything goes back to the cut together.
            self._lost = frozenset(self.mapping.owners)
        else:
            self._promote(self._wishes.allowed(self._nodes))
        if not self._nodes:
            self.phase = Phase.WAITING
            return [AwaitNodes()]
        if not self._may_try_again():
            names = ", ".join(map(str, sorted(self._lost))) or "a node process"
            return self._fail(
                ClusterError(
                    f"{names} was lost {MAX_TRIES} times in a row before another slice could "
                    "run; look at the executors' logs (out of memory?), then start the job again "
                    "with the same checkpoint directory"
                )
            )
        nodes = self._wishes.allowed(self._nodes)
        if self._config.behind_scaling:
            self._look_behind_scaling(nodes)
        if self._config.parallel_recovery > 1:
            self._divide(min(self._config.parallel_recovery, len(nodes)))
        return self._recover(self._lost, reassign(self.mapping, self._lost, nodes, self._hosts))

    def _promote(self, nodes: Sequence[NodeId]) -> None:
        """Copies take the place of lost partitions: as they are, they have applied every slice."""
        assert self.mapping is not None
        self.mapping, found = promote(self.mapping, self._lost, nodes)
        self.backups.promoted(found)
        self._promoted = (self._promoted - self._lost) | found
        self._lost -= found

    def _look_behind_scaling(self, nodes: Sequence[NodeId]) -> None:
        """As systems do whose checkpoints know nothing of a scaling: from the cut before it and,
        where everything goes back, to the parallelism before it, to scale again afterwards."""
        assert self.mapping is not None
        scaled, self._scaled = self._scaled, None
        if scaled is None or self._checkpoints.cut_slice != scaled[0]:
            return  # a checkpoint has been taken since
        self._checkpoints.fall_back()
        if self._config.rollback:
            now = {c: len(self.mapping.partitions(c)) for c in scaled[1]}
            self.mapping = adjust(self.mapping, scaled[1], nodes, self._epochs, self._hosts)
            self._lost = frozenset(self.mapping.owners)
            for chain, count in now.items():
                if count != scaled[1][chain]:
                    self._wishes.scale(chain, count, self.mapping, anyway=True)
        self._layouts.reset(self.mapping.groups)

    def _divide(self, ways: int) -> None:
        """Parallel recovery: restore and replay a lost partition as several. The next cut makes
        them one again.

        Only where no other chain sees the order of its output: a slice that was cut short may
        have been applied by a healthy partition, with rows in the order before.
        """
        assert self.mapping is not None
        if self.mapping.groups != self._layouts.current:
            return  # slices of an older layout are replayed first
        free = self._last - self._layouts.divided.keys()
        lost = [p for p in self._lost if p.chain in free and not self._wishes.is_scaling(p.chain)]
        before, self.mapping = self.mapping, split(self.mapping, lost, ways, self._epochs)
        self._layouts.divide(self.mapping.groups)
        self._lost |= self.mapping.owners.keys() - before.owners.keys()

    def _unite(self) -> None:
        """After a cut, partitions that a recovery divided shall be one again."""
        assert self.mapping is not None
        for chain, groups in self._layouts.divided.items():
            self._wishes.scale(chain, max(groups) + 1, self.mapping)

    def _may_try_again(self) -> bool:
        self._tries += 1
        return self._tries <= MAX_TRIES

    def _recover(
        self,
        lost: frozenset[PartitionId],
        mapping: Mapping,
        adjustment: str = "",
        copied: frozenset[PartitionId] = frozenset(),
    ) -> list[Command]:
        """Restore `lost` from the newest cut that has not proved unreadable, and replay.

        Slices from before a change of the layout, which only the older cut goes back to, are
        replayed first, under theirs and by all partitions; a cut after them begins the rest.
        """
        self.phase = Phase.RECOVERING
        cut = self._checkpoints.cut
        start = self._checkpoints.cut_slice + 1
        records, layout, more = self._layouts.stage(self._slices.after(start - 1))
        self._stage_end = records[-1].number if more else None
        if mapping.groups != layout:
            nodes, version = self._wishes.allowed(self._nodes), mapping.version + 1
            mapping = place(self._plan, nodes, version, self._epochs, layout, self._hosts)
            lost, self._promoted = frozenset(mapping.owners), frozenset()
        if not lost and not more:
            records = ()
        self.mapping, self._lost = mapping, lost
        self._layouts.used(mapping)
        self._change = None  # begins again, if it is still wanted
        self._epochs |= {p: o.epoch for p, o in mapping.owners.items()}
        self.frontier |= dict.fromkeys(lost, start)
        self.frontier = {p: n for p, n in self.frontier.items() if p in mapping.owners}
        self._checkpoints.installed(lost | self._promoted, mapping)
        self._parts = list(in_parts(records))
        first = self._replayed(self._parts.pop(0))
        self._recovery = plan_recovery(
            self._plan,
            mapping,
            lost,
            cut,
            first,
            lambda p: self.backups.covers(p, start, mapping),
            self.backups.chosen(mapping),
            copied,
            self._promoted,
        )
        more = bool(self._parts)
        self._recovery = replace(self._recovery, adjustment=adjustment, more=more)
        self.backups.begin(lost, start)
        self.backups.copied(copied, start)
        return [self._head(), RecoverPartitions(self._recovery)]

    def _replayed(self, records: Iterable[SliceRecord]) -> tuple[SlicePlan, ...]:
        assert self.mapping is not None
        plans = [r.plan(self.mapping.version) for r in records]
        return tuple(replace(p, seal=p.number == self._stage_end) for p in plans)

    def _head(self) -> WriteHead:
        assert self.mapping is not None
        ledger = self._checkpoints
        records = tuple(self._slices.records)
        return WriteHead(
            ledger.cut,
            ledger.previous,
            records,
            self.mapping,
            dict(self._epochs),
            *self._layouts.journalled(records, self.mapping),
        )

    def _on_restore_failed(self, event: RestoreFailed) -> list[Command]:
        """A torn checkpoint is skipped: the cut before it and a longer replay give the same.

        It may be a shadow's or a copy's, and so a healthy partition's, whose later deltas would be
        of no use: these partitions are taken for lost as well, and begin with full checkpoints.
        """
        if self._checkpoints.cut is not None:
            self._checkpoints.fall_back()
            if self._slices.reaches(self._checkpoints.cut_slice):
                plan = self._recovery
                healthy = plan.shadows | plan.copied if plan else frozenset()
                return self._reassign(healthy, anyway=True)
        return self._fail(event.error)

    def _on_recovered(self, event: PartitionsRecovered) -> list[Command]:
        plan = self._recovery
        if plan is None or self.mapping is None:
            raise InvariantError("a recovery was reported while none was running")
        replaced = self._replaced(event.reports)
        if replaced:
            return self._on_replaced(replaced, None)
        when = f"replay of slices {plan.first} to {plan.next_slice - 1}"
        error = _first_failure(event.reports, when, plan.next_slice - 1)
        silent = self._silent(event.reports)
        lacking = _lacking(event.reports)
        if error is None and (lacking or silent):
            self._drop_copies(lacking)
            return self._reassign(silent, anyway=True)
        if error is None and plan.reads_log:
            error = self._slices.refuse_incomplete(plan.slices, event.reports)
        if error is not None:
            return self._fail(error)
        self._advance(event.reports, plan.next_slice, plan.restored)
        if self._parts:
            slices = self._replayed(self._parts.pop(0))
            more = bool(self._parts)
            self._recovery = replace(plan, slices=slices, part=plan.part + 1, more=more)
            return [RecoverPartitions(self._recovery)]
        if self._stage_end is not None:
            self._recovery, self._lost = None, frozenset()
            self._checkpoints.sealed(self._stage_end, self.mapping, event.now_ms)
            return self._on_reports(event.reports) + self._go_on(event.now_ms)
        if self._lost_ms is not None:
            self.backups.recovered(plan, event.now_ms - self._lost_ms, event.reports)
        self._recovery, self._lost, self._lost_ms = None, frozenset(), None
        self._promoted = frozenset()
        self.phase = Phase.RUNNING
        commands = self._on_reports(event.reports) + self._released()
        return commands + self._go_on(event.now_ms)

    def _silent(self, reports: Sequence[NodeReport]) -> frozenset[PartitionId]:
        """Partitions that were to be restored and are not spoken of. A process may be replaced
        between two waves of the first recovery it takes part in: nobody knows the one before."""
        assert self._recovery is not None
        epochs = {p: x.epoch for r in reports for p, x in r.partitions.items()}
        owners = self._recovery.mapping.owners
        expected = self._lost | self._promoted
        return frozenset(p for p in expected if epochs.get(p) != owners[p].epoch)

    def _replaced(self, reports: Sequence[NodeReport]) -> list[NodeId]:
        """Nodes whose process is another one than before: it has lost its partitions."""
        assert self.mapping is not None
        found = {r.node: r.incarnation for r in reports}
        return [
            n
            for n in self.mapping.nodes
            if found.get(n) != self._incarnations.setdefault(n, found.get(n, ""))
        ]

    # -- online adjustment ---------------------------------------------------------------------

    def _adjust(self) -> list[Command]:
        """The next step of a change of the mapping, between two slices; [] when they may go on."""
        assert self.mapping is not None
        wishes, ledger = self._wishes, self._checkpoints
        if self._change is None:
            self._change = wishes.change(self.mapping, self._nodes, self._epochs, self._hosts)
        change = self._change
        if change is None:
            return []
        newest = self.newest.number if self.newest else 0
        if not change.prepared and change.asked != newest and not self._needs_cut:
            change.asked = newest
            return [PreparePartitions(self._installing(change))]
        if change.prepared and ledger.cut_slice == newest:
            wishes.done()
            before = self.mapping
            self._scaled = newest, {c: len(before.partitions(c)) for c in before.groups}
            self._layouts.changed(change.mapping.groups)
            return self._recover(change.moved, change.mapping, change.what, change.copied)
        if change.prepared and ledger.sealed_slice == newest:
            return [PollNodes()]
        return []

    def _autoscale(self, now_ms: int) -> list[Command]:
        """End a measurement when it is time to; what the autoscaler makes of it becomes a wish."""
        measured = self.load.measure(now_ms)
        settled = self._change is None and not self._wishes.wanted and not self._layouts.divided
        ready = self.phase is Phase.RUNNING and settled
        if not measured or not ready or self._autoscaler is None or self.mapping is None:
            return []
        nodes = self._wishes.allowed(self._nodes)
        decision = self._autoscaler.decide(
            self.load.measured, self.mapping, nodes, now_ms, self._wall_ms
        )
        if decision is None:
            return []
        commands: list[Command] = [NoteDecision(decision, self._autoscaler.memory)]
        if decision.dry_run:
            return commands
        with contextlib.suppress(AdjustmentError):  # refused: the slice has happened all the same
            for chain, parallelism in decision.parallelism.items():
                self._wishes.scale(chain, parallelism, self.mapping)
            if decision.drain is not None:
                self._wishes.drain(decision.drain, self._nodes, self.load)
                commands += self._released()
        if decision.add_nodes:
            commands.append(RequestNodes(decision.add_nodes))
        return commands

    def _released(self) -> list[Command]:
        """Let go of drained nodes that have nothing any more."""
        empty = self._wishes.empty(self.mapping, self._nodes) if self.mapping else ()
        self._nodes = [n for n in self._nodes if n not in empty]
        return [ReleaseNodes(empty)] if empty else []

    def _installing(self, change: Change) -> RecoveryPlan:
        nothing_kept = lambda _: False  # noqa: E731 - and nothing is replayed either
        return plan_recovery(
            self._plan,
            change.mapping,
            change.moved,
            self._checkpoints.cut,
            (),
            nothing_kept,
            copied=change.copied,
        )

    def _on_prepared(self, event: PartitionsPrepared) -> list[Command]:
        if self._change is not None:
            ready = {(r.node, p) for r in event.reports for p in r.prepared}
            self._change.prepared = self._change.loaded <= ready
        return self._go_on(event.now_ms)

    @property
    def _needs_cut(self) -> bool:
        """Is a change waiting for a checkpoint: to prepare from, or to be made at?"""
        if self._change is None or self.newest is None:
            return False
        return self._change.prepared or not self._checkpoints.whole

    # -- choosing the next slice ---------------------------------------------------------------

    def _go_on(self, now_ms: int) -> list[Command]:
        """The next step whenever no slice is running."""
        if self.phase is Phase.RECOVERING and self._recovery is None:
            assert self.mapping is not None
            if self._checkpoints.in_flight:
                return [PollNodes()]
            return self._recover(frozenset(), self.mapping)  # the next stage
        if self._running is not None or self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        if self._again is not None:
            plan, self._again = self._again, None
            return self._run(plan)
        if self._disk_full and self._checkpoints.in_flight:
            return [PollNodes()]
        if self.phase is Phase.STOPPING:
            return self._stop_step(now_ms)
        step = self._adjust()
        if step:
            return step
        if self._stop_asked:
            self.phase = Phase.STOPPING
            return self._stop_step(now_ms)
        batch, newest = self._waiting_batch, self.newest
        if batch is not None:
            if newest and newest.chunks_left:
                return self._start(Feed.LOG, newest.batch, newest.source_tasks, now_ms)
            if newest and newest.batch is not None and batch <= newest.batch:
                self._waiting_batch = None  # journalled before a crash; Spark offers it again
                return [FinishBatch(batch)]
            return self._start(Feed.LIVE, batch, 0, now_ms)
        idle = newest and newest.feed == Feed.NONE.value
        if idle and self._slices.time_has_moved:
            # Nothing comes: time need not wait for the next look to reach the last operator.
            return self._start(Feed.NONE, None, 0, now_ms)
        return []

    def _on_idle(self, now_ms: int) -> list[Command]:
        """Without rows, time may still have to move, or a checkpoint be taken or waited for."""
        if self._running is not None or self.phase is not Phase.RUNNING:
            return []
        if self._waiting_batch is not None or (self.newest and self.newest.chunks_left):
            return []  # a batch comes first, also one that an earlier run did not finish
        if self._change is not None:
            self._change.asked = -1  # no slice runs: ask again
        step = self._adjust()
        if step:
            return step
        due = self._slices.look_is_due(now_ms) or self._timer_is_due(now_ms)
        if due or self._slices.time_has_moved:
            return self._start(Feed.NONE, None, 0, now_ms)
        if self._needs_cut and not self._checkpoints.in_flight:
            return self._start(Feed.NONE, None, 0, now_ms)
        if self._checkpoints.in_flight:
            return [PollNodes()]
        if self._uncut and self._checkpoints.is_due(now_ms):
            return self._start(Feed.NONE, None, 0, now_ms)
        return []

    def _timer_is_due(self, now_ms: int) -> bool:
        """Has a timer of processing time come, or a time to live ended?"""
        owners = self.mapping.owners if self.mapping is not None else {}
        time_ms = self._time.at(now_ms, self._wall_ms)
        return any(ms <= time_ms for p, ms in self._due_ms.items() if p in owners)

    @property
    def _uncut(self) -> bool:
        """Are there slices that no checkpoint covers?"""
        return self.newest is not None and self.newest.number > self._checkpoints.cut_slice

    def _stop_step(self, now_ms: int) -> list[Command]:
        """Close what the watermark allows, seal the last slice, wait for its files, end. The rest
        of a batch that is cut into slices stays in the log; the next of them is the one to seal,
        because their numbers are given."""
        newest = self.newest
        if self._checkpoints.in_flight:
            return [PollNodes()]
        if newest is not None and newest.chunks_left:
            if self._uncut:
                return self._start(Feed.LOG, newest.batch, newest.source_tasks, now_ms, seal=True)
        elif newest is not None and (self._uncut or self._slices.time_has_moved):
            return self._start(Feed.NONE, None, 0, now_ms, seal=self._slices.time_will_rest)
        self.phase = Phase.ENDED
        return [FinishRun()]

    def _start(
        self, feed: Feed, batch: int | None, source_tasks: int, now_ms: int, seal: bool = False
    ) -> list[Command]:
        newest = self.newest
        logged = newest if feed is Feed.LOG else None  # a further slice of the same batch
        self._began_ms = now_ms
        return self._run(
            SlicePlan(
                number=self._slices.next_slice,
                feed=feed,
                batch=batch,
                source_tasks=source_tasks,
                watermark_us=self._slices.watermark_us,
                watermarks=self._slices.watermarks,
                processing_ms=self._time.at(now_ms, self._wall_ms),
                mapping=0,
                seal=self._shall_seal(now_ms, seal) and not self._checkpoints.in_flight,
                writes=self._seal_writes,
                waits=self._config.synchronous,
                generation=logged.generation if logged else self._generation,
                attempt=self._attempt_of(feed, logged),
                without_log=logged.without_log(1) if logged else (),
            )
        )

    def _shall_seal(self, now_ms: int, asked: bool) -> bool:
        # Backups that find no room on disk are trimmed by checkpoints: until then the stream waits.
        if asked or self._disk_full or self._needs_cut:
            return True
        # While state is loaded from a cut, that cut stays the newest.
        return self._checkpoints.is_due(now_ms) and self._change is None

    @property
    def _seal_writes(self) -> Writes:
        if self._config.whole or self._checkpoints.broken:
            return Writes.WHOLE
        # State that is loaded ahead must stay a part of the files.
        return Writes.FOLDED if self._change is None else Writes.CHANGES

    def _attempt_of(self, feed: Feed, logged: SliceRecord | None) -> int:
        if feed is Feed.LIVE:
            return self._next_attempt()
        return logged.attempt if logged else 0

    def _run(self, plan: SlicePlan) -> list[Command]:
        assert self.mapping is not None
        self._running = replace(plan, mapping=self.mapping.version)
        backups = self.backups.chosen(self.mapping)
        return [RunSlice(self._running, self._checkpoints.replay_from - 1, backups)]

    # -- after a slice -------------------------------------------------------------------------

    def _on_slice(self, event: SliceRan) -> list[Command]:
        plan = self._running
        if plan is None or plan.number != event.number:
            raise InvariantError(
                f"slice {event.number} was reported while {plan and plan.number} was running",
                slice=event.number,
            )
        replaced = self._replaced(event.reports)
        if replaced:
            return self._on_replaced(replaced, event.source_tasks)
        error = _first_failure(event.reports, f"slice {plan.number}", plan.number)
        if error is not None:
            return self._fail(error)
        lacking = _lacking(event.reports)
        if lacking:
            return self._run_again(plan, event, lacking)
        self._running = None
        self._tries = 0
        assert self.mapping is not None
        self._advance(event.reports, plan.number + 1, frozenset(self.mapping.owners))
        commands = self._commit(plan, event)
        took = self._began_ms, event.now_ms
        choice = self.backups.choose(event.reports, plan, self.mapping, *took)
        commands += [choice] if choice else []
        self.load.observe(plan, event.reports, *took)
        commands += self._autoscale(event.now_ms)
        if plan.seal:
            self._checkpoints.sealed(plan.number, self.mapping, self._began_ms)
        commands += self._on_reports(event.reports)
        if self._waiting_batch is not None and not self._stop_asked:
            return commands  # it is offered again: between two slices, others have their turn
        return commands + self._go_on(event.now_ms)

    def _run_again(
        self, plan: SlicePlan, event: SliceRan, lacking: MappingOf[PartitionId, str]
    ) -> list[Command]:
        """Some partition could not run, though no node is known to be lost: packets were."""
        if not self._may_try_again():
            partition, why = next(iter(lacking.items()))
            return self._fail(
                ClusterError(
                    f"slice {plan.number}: {partition} lacked input {MAX_TRIES} times ({why}); "
                    "start the job again with the same checkpoint directory, nothing committed "
                    "is lost",
                    slice=plan.number,
                )
            )
        self._interrupt(event.source_tasks)
        lost = frozenset(p for r in event.reports for p in r.not_hosted)
        self._drop_copies(lost)  # it may be the copy that is not there
        return self._reassign(lost) or self._go_on(event.now_ms)

    def _on_poll(self, event: NodesPolled) -> list[Command]:
        """What goes wrong between slices (a full disk, a lost node) must end the waiting too."""
        replaced = self._replaced(event.reports)
        if replaced:
            return self._on_replaced(replaced, None)
        newest = self.newest.number if self.newest else 0
        error = _first_failure(event.reports, f"after slice {newest}", newest)
        if error is not None:
            return self._fail(error)
        return self._on_reports(event.reports) + self._go_on(event.now_ms)

    def _advance(
        self, reports: Sequence[NodeReport], upto: int, partitions: frozenset[PartitionId]
    ) -> None:
        """Move the frontier of these partitions; each must be exactly there."""
        assert self.mapping is not None
        behind = set(partitions)
        for report in reports:
            for partition, state in report.partitions.items():
                if partition not in behind:
                    continue
                if state.epoch != self.mapping.owners[partition].epoch:
                    continue  # an owner that was replaced
                if state.next_slice != upto or self.frontier[partition] > upto:
                    raise InvariantError(
                        f"{partition} reports next slice {state.next_slice} instead of {upto}; "
                        f"its frontier was {self.frontier[partition]}",
                        partition=str(partition),
                    )
                self.frontier[partition] = upto
                behind.discard(partition)
                self._due_ms.pop(partition, None)
                if state.due_ms is not None:
                    self._due_ms[partition] = state.due_ms
        if behind:
            names = ", ".join(map(str, sorted(behind)))
            raise InvariantError(f"before slice {upto} no report came from {names}")

    def _commit(self, plan: SlicePlan, event: SliceRan) -> list[Command]:
        record, staged = self._slices.commit(
            plan, event.source_tasks, event.reports, self._began_ms
        )
        commands: list[Command] = [WriteSlice(record), ExposeSlice(record, staged)]
        if plan.batch is not None and record.batch_end:
            commands.append(FinishBatch(plan.batch))
            self._waiting_batch = None
        return commands

    def _on_reports(self, reports: Sequence[NodeReport]) -> list[Command]:
        """Checkpoint files that became durable; a completed cut moves the restart point."""
        self._disk_full = any(r.disk_full for r in reports)
        cut = self._checkpoints.written(c for r in reports for c in r.checkpoints)
        if self._checkpoints.broken:
            self._change = None  # full files will take the place of those it loads ahead
        if cut is None:
            return []
        start = self._checkpoints.replay_from
        self._slices.trim(start)
        self._unite()
        return [self._head(), TrimStorage(start, self._checkpoints.keep_files)]

    def _fail(self, error: AnabranchError) -> list[Command]:
        self.phase = Phase.ENDED
        return [FailRun(error)]


def _first_failure(reports: Sequence[NodeReport], when: str, number: int) -> AnabranchError | None:
    """The one error to show for a slice that was not applied everywhere, causes first."""
    failures = [f for r in reports for f in r.failures]
    if failures:
        first = failures[0]
        cls = OperatorError if first.kind == "operator" else StorageError
        operator = f", operator {first.operator!r}" if first.operator else ""
        return cls(
            f"{when}{operator} ({first.where}): {first.message}",
            operator=first.operator,
            slice=number,
            detail=first.detail,
        )
    return None


def _lacking(reports: Sequence[NodeReport]) -> dict[PartitionId, str]:
    """Partitions that could not run, and why."""
    found: dict[PartitionId, str] = {}
    for report in reports:
        found |= report.incomplete
        found |= dict.fromkeys(report.not_hosted, "it is not there")
    return found
