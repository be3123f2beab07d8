"""Rebuilding partitions: after a loss, at a start, at the switch of an adjustment.

A start is the rebuild of all partitions from what the journal says, a loss that of the lost ones.
They get new owners with new epochs under a new placement, which is journalled before it is used;
they are restored from the newest cut that can be read, and replay the slices since then, in parts.
Slices from before a change of the layout are a stage of their own: they are replayed under theirs,
and a cut after them begins the next stage. Then the slice that was cut short runs again: partitions
that had applied it repeat their output, nothing rolls back.

A loss on the way keeps what has been done. A partition whose owner lives keeps its epoch and its
state: it repeats the output that others need again, and goes on where it was. Only what was lost
with that loss is restored.

What is lost is written down here and nowhere else: in every state but WHOLE, `lost` and `promoted`
are the partitions without an owner that is known to have their state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto

from anabranch.control import verdict
from anabranch.control.late import made_up
from anabranch.control.ledgers import Ledgers
from anabranch.control.recovery import in_parts, plan_recovery
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.story import Machine, Story
from anabranch.control.tries import Tries
from anabranch.control.wishes import Wishes
from anabranch.errors import AnabranchError, InvariantError
from anabranch.model.commands import AwaitNodes, Command, FailRun, RecoverPartitions
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import (
    Layout,
    Placement,
    adjust,
    evenly,
    place,
    promote,
    reassign,
    routing,
    split,
)
from anabranch.model.plan import Plan
from anabranch.model.recovery import Cause, RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Cut, SlicePlan, SliceRecord


class RebuildState(Enum):
    """Where a rebuild is."""

    AWAITING = auto()  # a node, for none is left, or none has come yet
    REPLAYING = auto()  # the nodes restore and replay
    SEALING = auto()  # a stage is replayed, its cut is not complete
    WHOLE = auto()  # every partition has an owner with its state


LEGAL = {
    RebuildState.AWAITING: frozenset(
        {RebuildState.AWAITING, RebuildState.REPLAYING, RebuildState.WHOLE}
    ),
    RebuildState.REPLAYING: frozenset(RebuildState),
    RebuildState.SEALING: frozenset({RebuildState.AWAITING, RebuildState.REPLAYING}),
    RebuildState.WHOLE: frozenset({RebuildState.AWAITING, RebuildState.REPLAYING}),
}


class Rebuild(Machine[RebuildState]):
    """One at a time; a loss on the way makes it plan again, with what is lost by then."""

    def __init__(
        self, plan: Plan, config: ControlConfig, ledgers: Ledgers, wishes: Wishes, story: Story
    ) -> None:
        super().__init__("rebuild", RebuildState.AWAITING, LEGAL, story)
        self._plan = plan
        self._config = config
        self._ledgers = ledgers
        self._wishes = wishes
        self._last = frozenset(c.name for c in plan.node_chains if not c.outputs)
        self.lost: frozenset[PartitionId] = frozenset()  # and not rebuilt yet
        self.promoted: frozenset[PartitionId] = frozenset()  # whose copies take over just now
        self.running: RecoveryPlan | None = None  # what the nodes are at, in REPLAYING
        self._cause = Cause.START
        self._parts: list[tuple[SliceRecord, ...]] = []  # still to replay
        self.stage_end: int | None = None  # the replay ends here with a cut, a stage follows
        self._known_ms: int | None = None  # since when the loss is known
        self._first = 0  # the first slice that the recovery in hand replays
        self._begun: frozenset[PartitionId] = frozenset()  # may be ahead of the others
        self.tries = Tries()  # since the last slice

    @property
    def whole(self) -> bool:
        return self.state is RebuildState.WHOLE

    # -- what begins it ------------------------------------------------------------------------

    def start(self, past: Past) -> list[Command]:
        """Give out all partitions for the first time in this run."""
        owners = self._ledgers.owners
        if past.behind:  # all begin together: a newer cut that some are not in is none
            self._ledgers.checkpoints.back_to_all(self._plan.above)
        kept, version = self.groups_of(past), past.placement_version + 1
        placement = place(self._plan, owners.nodes, version, past.epochs, kept, owners.hosts)
        self._ledgers.layouts.placed(placement.groups)
        return self.begin(frozenset(placement.owners), placement, Cause.START)

    def groups_of(self, past: Past) -> Layout:
        """The layout to begin with."""
        kept = {c: g for c, g in past.groups.items() if c not in past.rescaled}
        return routing(self._plan, kept)

    def everything(self, cause: Cause) -> list[Command]:
        """All partitions, from the newest cut that covers them, on whatever nodes they were."""
        owners, layouts = self._ledgers.owners, self._ledgers.layouts
        version, nodes = owners.placement.version + 1, self._wishes.allowed(owners.nodes)
        placement = place(self._plan, nodes, version, owners.epochs, layouts.current, owners.hosts)
        return self.begin(frozenset(placement.owners), placement, cause)

    def give_up(self) -> frozenset[PartitionId]:
        """Others see to it from here on (comeback.py): what was being rebuilt."""
        unfinished = self.lost | self.promoted
        if not self.whole:
            self.running, self._parts, self._known_ms = None, [], None
            self.lost = self.promoted = self._begun = frozenset()
            self._to(RebuildState.WHOLE, "chains wait")
        return unfinished

    def nodes_lost(self, nodes: Collection[NodeId], now_ms: int) -> list[Command]:
        """They are gone, with all they had; [] if that was nothing. The time it takes counts from
        the first loss that is not made good yet."""
        owners = self._ledgers.owners
        self._known_ms = self._known_ms or now_ms
        if owners.in_force is None:
            return []
        owners.forget_processes(nodes)
        commands = self.again(owners.owned_by(nodes), Cause.NODES_LOST)
        if not commands:
            self._known_ms = None
        return commands

    def processes_replaced(self, nodes: Collection[NodeId]) -> list[Command]:
        """The node processes of these nodes are new ones: usable, but empty."""
        owners = self._ledgers.owners
        owners.forget_processes(nodes)
        owners.drop_copies(owners.copied_by(nodes))
        return self.again(owners.owned_by(nodes), Cause.PROCESS_REPLACED)

    def again(self, lost: frozenset[PartitionId], cause: Cause) -> list[Command]:
        """Give every partition that is lost by now to a living node, unless its owner goes on; []
        when there is nothing to do."""
        owners, strategy = self._ledgers.owners, self._config.strategy
        begun = self.lost - lost if self.running is not None else frozenset()
        self.lost |= lost
        if self.running is not None:
            owners.drop_copies(self.running.copied)  # cut short, it may have made them or not
        placement, nodes = owners.placement, self._wishes.allowed(owners.nodes)
        gone = set(placement.nodes) - set(owners.nodes)
        if not self.lost and not gone and not cause.concerns_nodes:
            return []
        # Rows produced once more may be others: what is connected goes back to the cut together.
        back = self._plan.going_back(p.chain for p in self.lost)
        whole = frozenset(p for p in placement.owners if p.chain in back or strategy.rollback)
        self.lost |= whole
        begun = self._going_on(begun - whole, placement)
        if not strategy.rollback:
            placement = self._promote(placement, self.lost - begun, nodes)
        if not nodes:
            self.running = None
            self._to(RebuildState.AWAITING, cause.value)
            return [AwaitNodes()]
        if not self.tries.may_go_on(lost):
            return [FailRun(self.tries.lost_too_often(self.lost))]
        if strategy.behind_scaling:
            before, placement = placement, self._look_behind_scaling(placement, nodes)
            begun = begun if placement is before else frozenset()
        costs = self._ledgers.costs.of(placement)
        if self._config.parallel_recovery > 1:
            costs = {}  # every part is to have a node of its own
            ways = min(self._config.parallel_recovery, len(nodes))
            placement = self._divide(placement, self.lost - begun, ways)
        placement = reassign(placement, self.lost - begun, nodes, owners.hosts, costs)
        return self.begin(self.lost, placement, cause, begun=begun)

    def _going_on(
        self, begun: frozenset[PartitionId], placement: Placement
    ) -> frozenset[PartitionId]:
        """Of the partitions that are being rebuilt, those that need not begin again: their owner
        lives, and what they have produced since the same cut is there for those who need it."""
        owners, backups = self._ledgers.owners, self._ledgers.backups
        cut = self._cut_of(self.lost)
        first = (cut.slice if cut else 0) + 1
        if first != self._first:
            return frozenset()  # from another cut, and so another way
        alive = set(owners.nodes)
        return frozenset(
            p
            for p in begun
            if placement.owners[p].node in alive
            and (p.chain in self._last or backups.covers(p, first, placement))
        )

    def torn(self, error: AnabranchError) -> list[Command]:
        """A torn checkpoint is skipped: the cut before it and a longer replay give the same.

        It may be a shadow's or a copy's, and so a healthy partition's, whose later deltas would be
        of no use: these partitions are taken for lost as well, and begin with full checkpoints.
        """
        checkpoints, plan = self._ledgers.checkpoints, self.expected()
        if not plan.cut:
            return [FailRun(error)]
        checkpoints.fall_back(plan.cut)
        cut = self._cut_of(self.lost)
        if not self._ledgers.slices.reaches(cut.slice if cut else 0):
            return [FailRun(error)]
        healthy = plan.shadows | plan.copied
        return self.again(healthy, Cause.CHECKPOINT_TORN)

    # -- whom the lost partitions are given to ---------------------------------------------------

    def _promote(
        self, placement: Placement, lost: frozenset[PartitionId], nodes: Sequence[NodeId]
    ) -> Placement:
        """Copies take the place of lost partitions: as they are, they have applied every slice."""
        after, found = promote(placement, lost, nodes)
        self._ledgers.backups.promoted(found)
        self.promoted = (self.promoted - self.lost) | found
        self.lost -= found
        return after

    def _look_behind_scaling(self, placement: Placement, nodes: Sequence[NodeId]) -> Placement:
        """As systems do whose checkpoints know nothing of a scaling: from the cut before it and,
        where everything goes back, to the parallelism before it, to scale again afterwards."""
        layouts, owners = self._ledgers.layouts, self._ledgers.owners
        adjusted, layouts.adjusted = layouts.adjusted, None
        if adjusted is None or self._ledgers.checkpoints.cut_slice != adjusted[0]:
            return placement  # a checkpoint has been taken since
        self._ledgers.checkpoints.fall_back()
        if self._config.strategy.rollback:
            now = {c: len(placement.partitions(c)) for c in adjusted[1]}
            then = evenly(placement.groups, adjusted[1])
            placement = adjust(placement, then, nodes, owners.epochs, owners.hosts)
            self.lost = frozenset(placement.owners)
            for chain, count in now.items():
                if count != adjusted[1][chain]:
                    self._wishes.scale(chain, count, placement, instead=True)
        layouts.reset(placement.groups)
        return placement

    def _divide(self, placement: Placement, lost: frozenset[PartitionId], ways: int) -> Placement:
        """Parallel recovery: restore and replay a lost partition as several. The next cut makes
        them one again.

        Only where no other chain sees the order of its output: a slice that was cut short may
        have been applied by a healthy partition, with rows in the order before.
        """
        layouts = self._ledgers.layouts
        if placement.groups != layouts.current:
            return placement  # slices of an older layout are replayed first
        free = self._last - layouts.divided.keys()
        some = [p for p in lost if p.chain in free and not self._wishes.is_scaling(p.chain)]
        after = split(placement, some, ways, self._ledgers.owners.epochs)
        layouts.divide(after.groups)
        self.lost |= after.owners.keys() - placement.owners.keys()
        return after

    # -- one stage, part by part -----------------------------------------------------------------

    def begin(
        self,
        lost: frozenset[PartitionId],
        placement: Placement,
        cause: Cause,
        what: str = "",
        copied: frozenset[PartitionId] = frozenset(),
        begun: frozenset[PartitionId] = frozenset(),
    ) -> list[Command]:
        """Restore `lost` from the newest cut that has not proved unreadable, and replay. Those that
        have `begun` to, under this owner, go on.

        Slices from before a change of the layout, which only the older cut goes back to, are
        replayed first, under theirs and by all partitions; a cut after them begins the rest.
        """
        self._to(RebuildState.REPLAYING, cause.value)
        ledgers, owners = self._ledgers, self._ledgers.owners
        cut = self._cut_of(lost)
        records, layout, more = self._stage(cut)
        if placement.groups != layout:
            cut = self._cut_of(placement.groups)
            records, layout, more = self._stage(cut)
        first = (cut.slice if cut else 0) + 1
        self.stage_end = records[-1].number if more else None
        if placement.groups != layout:
            nodes, version = self._wishes.allowed(owners.nodes), placement.version + 1
            placement = place(self._plan, nodes, version, owners.epochs, layout, owners.hosts)
            lost, begun, self.promoted = frozenset(placement.owners), frozenset(), frozenset()
        self.lost, self._begun, self._first, self._cause = lost, begun, first, cause
        self._parts = list(in_parts(records if lost or more else ()))
        owners.use(placement, lost - begun, first)
        ledgers.layouts.used(placement)
        ledgers.checkpoints.installed(lost | self.promoted, placement)
        planned = plan_recovery(
            self._plan,
            placement,
            lost,
            cut,
            self._replayed(self._parts.pop(0)),
            lambda p: ledgers.backups.covers(p, first, placement),
            ledgers.backups.chosen(placement),
            copied,
            self.promoted,
        )
        behind = ledgers.behind.first
        late = {c: behind[c] for c in planned.chains_restored if c in behind}
        more = bool(self._parts)
        self.running = replace(planned, cause=cause, what=what, more=more, late=late)
        ledgers.backups.begin(lost, first)
        ledgers.backups.copied(copied, first)
        return [ledgers.head(), RecoverPartitions(self.running)]

    def _cut_of(self, lost: Iterable[PartitionId | str]) -> Cut | None:
        """What these partitions, or chains, begin with together."""
        chains = {p if isinstance(p, str) else p.chain for p in lost}
        checkpoints = self._ledgers.checkpoints
        return checkpoints.covering_all(sorted(chains)) if chains else checkpoints.cut

    def _stage(self, cut: Cut | None) -> tuple[Sequence[SliceRecord], Layout, bool]:
        return self._ledgers.layouts.stage(self._ledgers.slices.after(cut.slice if cut else 0))

    def next_stage(self) -> list[Command]:
        """The cut after the stage before is complete."""
        return self.begin(frozenset(), self._ledgers.owners.placement, self._cause)

    def _replayed(self, records: Iterable[SliceRecord]) -> tuple[SlicePlan, ...]:
        plans = [r.plan(self._ledgers.owners.placement.version) for r in records]
        return tuple(replace(p, seal=p.number == self.stage_end) for p in plans)

    # -- what came of it -------------------------------------------------------------------------

    def lacked(self, slice_no: int, reports: Sequence[NodeReport]) -> list[Command]:
        """Some partition could not run a slice, though no node is known to be lost: packets were.
        [] when only the slice has to run again."""
        too_often = self.tries.lacked_too_often(slice_no, reports)
        if too_often is not None:
            return [FailRun(too_often)]
        lost = verdict.not_hosted(reports)
        self._ledgers.owners.drop_copies(lost)  # it may be the copy that is not there
        return self.again(lost, Cause.INPUT_LACKED)

    def recovered(self, reports: Sequence[NodeReport], now_ms: int) -> list[Command]:
        """The nodes are done with a part: what was lacking is shown. Then the next one, or one more
        try, unless the stage is complete, and with the last one everything WHOLE."""
        plan, ledgers = self.expected(), self._ledgers
        when = f"replay of slices {plan.first} to {plan.next_slice - 1}"
        error = verdict.first_failure(reports, when, plan.next_slice - 1)
        silent = verdict.silent(reports, self.lost | self.promoted, plan.placement)
        lacking = verdict.lacking(reports)
        if error is None and (lacking or silent):
            ledgers.owners.drop_copies(lacking)
            return self.again(silent | (lacking.keys() & self.lost), Cause.RECOVERY_LACKED)
        if error is None and plan.reads_log:
            error = ledgers.slices.refuse_incomplete(plan.slices, reports)
        if error is not None:
            return [FailRun(error)]
        ledgers.owners.advance(reports, plan.next_slice, plan.restored, self._begun)
        late = made_up(self._plan, ledgers, plan, reports)
        if self._parts:
            slices = self._replayed(self._parts.pop(0))
            more = bool(self._parts)
            self.running = replace(plan, slices=slices, part=plan.part + 1, more=more)
            return [*late, RecoverPartitions(self.running)]
        self.running, self.lost = None, frozenset()
        if self.stage_end is not None:
            ledgers.checkpoints.sealed(self.stage_end, ledgers.owners.placement, now_ms)
            self._to(RebuildState.SEALING)
            return late
        if self._known_ms is not None:
            ledgers.backups.recovered(plan, now_ms - self._known_ms, reports)
        self._known_ms, self.promoted = None, frozenset()
        self._to(RebuildState.WHOLE)
        return late

    def expected(self) -> RecoveryPlan:
        """What the nodes are at."""
        if self.running is None:
            raise InvariantError(
                "a recovery was reported while none was running", machine=self.name
            )
        return self.running
