"""Chains that wait and come back: nodes are lost, and what is left is not enough for all queries.

A chain waits from the slice on in which a partition of it was lost, and so do all chains below it:
every partition of a chain takes rows from all of those above. Slices go on without them, for
queries that lost nothing. Source tasks log all rows as ever, so what a waiting chain misses is
there when it comes back: from the newest cut that covers it, by a replay of the slices since then,
with the time each of them had. That is the recovery of rebuild.py, in parts with slices between
them; once a chain has made up for the newest slice, it is in the next one.

Which chains come back, and where, is up to policies/capacity.py, asked again with every loss, every
node that joins and everything that has come back. Chains with the same cut come back together,
those with the newest cut first: they have the least to make up for, and what is above a chain is
covered by whatever covers it.

Partitions that were not lost keep what they have. Nothing is decided here but what can be read off
the ledgers: which chains lack slices, which partitions have an owner, how far these are. So a
driver that starts in the middle goes on with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum, auto

from anabranch.control import verdict
from anabranch.control.late import made_up
from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.capacity import Return, choose, is_short
from anabranch.control.policies.strategies import Strategy
from anabranch.control.rebuild import MAX_TRIES, Rebuild
from anabranch.control.recovery import plan_recovery
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.story import Machine, Story
from anabranch.control.wishes import Wishes
from anabranch.errors import AnabranchError, ClusterError, InvariantError
from anabranch.model.commands import AwaitNodes, Command, FailRun, RecoverPartitions
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement, partitions_of
from anabranch.model.plan import Plan
from anabranch.model.recovery import Cause, RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Cut, SliceRecord

FIRST_PART = 8  # slices, before it is known how long one takes
LEAST_SHARE = 0.3  # of the slice interval is for a part, however long slices take
MAX_PART_SLICES = 64
LOOK_AGAIN = 10  # slices later, what partitions cost may be another


class ComebackState(Enum):
    """What there is of chains that wait."""

    ABSENT = auto()  # none waits
    WAITING = auto()  # nothing is in hand
    REPLAYING = auto()  # the nodes restore and replay a part
    BETWEEN = auto()  # two parts: slices may run


LEGAL = {
    ComebackState.ABSENT: frozenset({ComebackState.WAITING}),
    ComebackState.WAITING: frozenset(
        {ComebackState.WAITING, ComebackState.REPLAYING, ComebackState.ABSENT}
    ),
    ComebackState.REPLAYING: frozenset(
        {ComebackState.WAITING, ComebackState.BETWEEN, ComebackState.ABSENT}
    ),
    ComebackState.BETWEEN: frozenset({ComebackState.WAITING, ComebackState.REPLAYING}),
}


class Comeback(Machine[ComebackState]):
    """One group of chains at a time; a loss on the way keeps what others have."""

    def __init__(
        self,
        plan: Plan,
        config: ControlConfig,
        ledgers: Ledgers,
        wishes: Wishes,
        rebuild: Rebuild,
        story: Story,
    ) -> None:
        super().__init__("comeback", ComebackState.ABSENT, LEGAL, story)
        self._plan = plan
        self._config = config
        self._ledgers = ledgers
        self._wishes = wishes
        self._rebuild = rebuild
        self._last = frozenset(c.name for c in plan.node_chains if not c.outputs)
        self.running: RecoveryPlan | None = None  # what the nodes are at, or the part before
        self.choice: Return | None = None  # the newest
        self.stops = False  # the job is to end: all comes back, fast or slow
        self._ahead: frozenset[PartitionId] = frozenset()  # may be, of those that come back
        self._look_at: int | None = None  # slice at which to choose again; None: at once
        self._rested = True  # has a slice run since the part before?
        self._tries = 0  # without a part that was done

    @property
    def absent(self) -> bool:
        return self.state is ComebackState.ABSENT

    @property
    def replaying(self) -> bool:
        return self.state is ComebackState.REPLAYING

    @property
    def may_rest(self) -> bool:
        """May a slice run?"""
        return not self.replaying and not self.awaiting

    @property
    def awaiting(self) -> bool:
        """Is there no node at all?"""
        return not self.absent and not self._ledgers.owners.nodes

    @property
    def coming(self) -> frozenset[str]:
        """The chains that make up for what they lack just now."""
        return self.running.chains_restored if self.running is not None else frozenset()

    # -- when chains wait ------------------------------------------------------------------------

    @property
    def _possible(self) -> bool:
        """Where everything goes back together, or partitions are divided or copied, chains do not
        wait for each other."""
        config = self._config
        plain = config.strategy == Strategy() and config.parallel_recovery == 1
        return (
            config.recovery != "eager"
            and plain
            and config.recovery_bound_s is None
            and self._plan.repeatable
        )

    def takes(self, lost: Collection[PartitionId]) -> bool:
        """Is a loss its affair, and not the rebuild's? The nodes are those that are left."""
        if not self.absent:
            return True
        owners, layouts = self._ledgers.owners, self._ledgers.layouts
        if not self._possible or not lost or self._rebuild.stage_end is not None:
            return False
        placement = owners.placement
        if placement.groups != layouts.current or self._of_older_layouts():
            return False
        return self._is_short(placement)

    def _is_short(self, placement: Placement) -> bool:
        nodes, costs = self._nodes, self._ledgers.costs
        every = [p for c in self._plan.node_chains for p in partitions_of(placement.groups, c.name)]
        loads = costs.costs(placement).loads
        return is_short(loads, nodes, costs.source_share(max(1, len(nodes))), every)

    def _of_older_layouts(self) -> bool:
        """Would a replay from the cuts in hand need another layout than today's?"""
        checkpoints, ledgers = self._ledgers.checkpoints, self._ledgers
        cuts = [checkpoints.covering(c.name) for c in self._plan.node_chains]
        first = min((c.slice if c else 0 for c in cuts), default=0)
        return ledgers.layouts.stage(ledgers.slices.after(first))[2]

    @property
    def _nodes(self) -> list[NodeId]:
        owners = self._ledgers.owners
        return self._wishes.allowed(owners.nodes) if owners.nodes else []

    def starts(self, past: Past) -> bool:
        """Does a run begin with chains that wait: still, or because they do not all fit?"""
        if not self._possible or past.rescaled:
            return False
        placement = self._begun_with(past)
        if self._of_older_layouts():
            return False
        return bool(past.behind) or self._is_short(placement)

    def _begun_with(self, past: Past) -> Placement:
        """A placement without owners."""
        groups = self._rebuild.groups_of(past)
        self._ledgers.layouts.placed(groups)
        return Placement(past.placement_version + 1, groups, {}, tuple(self._nodes[:1]))

    def start(self, past: Past) -> list[Command]:
        """Nobody has any state: all chains come back, those that fit first."""
        ledgers = self._ledgers
        ledgers.owners.use(self._begun_with(past), frozenset(), 0)
        ledgers.behind.pause(self._plan.by_name, ledgers.slices.next_slice)
        self._to(ComebackState.WAITING, Cause.START.value)
        return self._begin(Cause.START)

    def lost(self, partitions: Collection[PartitionId], cause: Cause) -> list[Command]:
        """These have no owner with their state any more, nor has what lived on nodes that are gone.
        What is in hand is planned anew; [] where nothing has to be."""
        ledgers, owners = self._ledgers, self._ledgers.owners
        there, placement = set(owners.nodes), owners.placement
        abandoned = self._rebuild.give_up()
        partitions = {
            *partitions,
            *(p for p, o in placement.owners.items() if o.node not in there),
        }
        if not (partitions or abandoned or self.replaying or set(placement.nodes) - there):
            return []
        if self.replaying:
            self._tries += 1
        if self._tries > MAX_TRIES:
            return [FailRun(self._too_often())]
        hit = {p.chain for p in partitions} | {p.chain for p in abandoned}
        ledgers.behind.pause(hit, ledgers.slices.next_slice)
        begun = self.running.restored if self.replaying and self.running else abandoned
        self._ahead = frozenset(p for p in (self._ahead | begun) if p not in partitions)
        left = {p: o for p, o in placement.owners.items() if p not in partitions}
        owners.use(placement.owned(left, self._nodes), frozenset(), 0)
        self.running = None
        if ledgers.behind.first or not self.absent:
            self._to(ComebackState.WAITING, cause.value)
        return self._begin(cause)

    def _too_often(self) -> AnabranchError:
        names = ", ".join(sorted(self.coming))
        return ClusterError(
            f"{names} was lost {MAX_TRIES} times in a row before a part of its replay was done; "
            "look at the executors' logs (out of memory?), then start the job again with the same "
            "checkpoint directory"
        )

    def torn(self, error: AnabranchError) -> list[Command]:
        """A checkpoint cannot be read: the one before it, and a longer replay, give the same."""
        plan, checkpoints = self.expected(), self._ledgers.checkpoints
        if not plan.cut:
            return [FailRun(error)]
        checkpoints.fall_back(plan.cut)
        cuts = [checkpoints.covering(c) for c in plan.chains_restored]
        if not all(self._ledgers.slices.reaches(c.slice if c else 0) for c in cuts):
            return [FailRun(error)]
        # What was to be restored has no state; of shadows, later files would be of no use.
        restored = {p for p in plan.restored if p not in self._ahead}
        return self.lost(plan.shadows | restored, Cause.CHECKPOINT_TORN)

    # -- who comes back --------------------------------------------------------------------------

    def joined(self) -> list[Command]:
        """Nodes came: more may fit. Where there was none, they are waited for."""
        self._look_at = None
        if self._ledgers.owners.placement.nodes or self.replaying:
            return []
        return self._begin(Cause.NODES_CAME)

    def slice_ran(self) -> None:
        self._rested = True

    def step(self, now_ms: int, began_ms: int) -> list[Command]:
        """The next part, where there is time for one: at least one after every slice, and others
        as long as the next slice, an interval after the one that `began_ms`, need not wait."""
        if self.absent or self.replaying or not self._ledgers.owners.nodes:
            return []
        left_ms = began_ms + self._config.slice_interval_ms - now_ms
        if not self._rested and left_ms <= 0 and not self.stops:
            return []
        if self.state is ComebackState.BETWEEN:
            return self._next_part(left_ms)
        newest = self._ledgers.newest_slice
        if self._look_at is not None and newest < self._look_at and not self.stops:
            return []
        choice = self._choose()
        return self._begin(Cause.ROOM, choice) if choice.chains else []

    def _choose(self) -> Return:
        ledgers, placement = self._ledgers, self._ledgers.owners.placement
        nodes, down = self._nodes, self._ledgers.behind.chains
        missing = [p for c in sorted(down) for p in partitions_of(placement.groups, c)]
        loads = {} if self.stops else ledgers.costs.costs(placement).loads
        self._look_at = ledgers.newest_slice + LOOK_AGAIN
        self.choice = choose(
            self._plan.queries,
            down,
            {p: o.node for p, o in placement.owners.items()},
            [p for p in missing if p not in placement.owners],
            loads,
            nodes,
            source_share=ledgers.costs.source_share(max(1, len(nodes))),
            blocking=self._config.recovery == "blocking",
        )
        return self.choice

    def _begin(self, cause: Cause, choice: Return | None = None) -> list[Command]:
        """Under a new placement, with the first of those that are to come back."""
        if not self._nodes:
            return [AwaitNodes()]
        choice = choice or self._choose()
        cohort, cut = self._first_of(choice.chains)
        since = self._ledgers.slices.after(cut.slice if cut else 0)
        if cohort and self._ledgers.layouts.stage(since)[2]:
            return self._all_at_once(cause)
        return self._install(cohort, cut, choice, cause)

    def _first_of(self, chains: frozenset[str]) -> tuple[frozenset[str], Cut | None]:
        """Those with the newest cut, and the cut."""
        covering = self._ledgers.checkpoints.covering
        cuts = {c: covering(c) for c in sorted(chains)}
        newest = max(cuts.values(), key=lambda c: c.slice if c else 0, default=None)
        at = newest.slice if newest else 0
        return frozenset(c for c, x in cuts.items() if (x.slice if x else 0) == at), newest

    def _all_at_once(self, cause: Cause) -> list[Command]:
        """Back to before the layout changed: nobody goes on from there alone."""
        self._ledgers.checkpoints.back_to_all(self._plan.above)
        self._ahead, self.running = frozenset(), None
        if not self.absent:
            self._to(ComebackState.ABSENT, "all partitions go back")
        return self._rebuild.everything(cause)

    def _install(
        self, cohort: frozenset[str], cut: Cut | None, choice: Return, cause: Cause
    ) -> list[Command]:
        ledgers, owners = self._ledgers, self._ledgers.owners
        first, before = (cut.slice if cut else 0) + 1, owners.placement
        mine = [p for c in sorted(cohort) for p in partitions_of(before.groups, c)]
        going_on = self._going_on(mine, first, before)
        if len(going_on) == len(mine) > 0:
            first = min(owners.frontier[p] for p in mine)
        anew = frozenset(mine) - going_on
        homes = {p: choice.homes.get(p) or before.owners[p].node for p in anew}
        fresh = {p: Ownership(homes[p], owners.epochs.get(p, 0) + 1) for p in anew}
        kept = {p: o for p, o in before.owners.items() if p not in anew}
        placement = before.owned({**kept, **fresh}, self._nodes)
        self._ahead = (self._ahead - frozenset(mine)) | going_on
        owners.use(placement, anew, first)
        ledgers.layouts.used(placement)
        ledgers.checkpoints.installed(anew, placement)
        ledgers.backups.begin(anew, first)
        planned = self._planned(placement, frozenset(mine), cut, first)
        if planned.shadows and planned.cut + 1 < first:
            planned = self._planned(placement, frozenset(mine), cut, planned.cut + 1)
        self.running = replace(planned, cause=cause)
        self._rested = False
        self._to(ComebackState.REPLAYING, ", ".join(sorted(cohort)) or "nothing fits")
        return [ledgers.head(), RecoverPartitions(self.running)]

    def _going_on(
        self, mine: Sequence[PartitionId], first: int, placement: Placement
    ) -> frozenset[PartitionId]:
        """Those with an owner, if they can repeat what others need again: everything since the cut,
        unless none is restored from it."""
        there = [p for p in mine if p in placement.owners]
        frontier = self._ledgers.owners.frontier
        if len(there) == len(mine) > 0:
            least = min(frontier[p] for p in mine)
            if all(self._repeats(p, least, placement) for p in mine):
                return frozenset(mine)
        return frozenset(p for p in there if self._repeats(p, first, placement))

    def _repeats(self, partition: PartitionId, first: int, placement: Placement) -> bool:
        """Has it kept, from this slice on, what others may need again?"""
        if partition.chain in self._last or self._ledgers.owners.frontier[partition] == first:
            return True
        return self._ledgers.backups.covers(partition, first, placement)

    def _planned(
        self, placement: Placement, mine: frozenset[PartitionId], cut: Cut | None, first: int
    ) -> RecoveryPlan:
        """Its first part; who sends, and who is needed as a shadow, is said for all of it."""
        ledgers = self._ledgers
        left = ledgers.slices.after(first - 1) if mine else []
        planned = plan_recovery(
            self._plan,
            placement,
            mine,
            cut,
            [r.plan(placement.version) for r in left],
            lambda p: ledgers.backups.covers(p, first, placement),
            ledgers.backups.chosen(placement),
        )
        some = self._part_of(left, planned.chains, placement, self._config.slice_interval_ms)
        return replace(
            planned,
            slices=tuple(r.plan(placement.version) for r in some),
            more=len(some) < len(left),
            late={c: ledgers.behind.first[c] for c in planned.chains_restored},
        )

    # -- part by part ----------------------------------------------------------------------------

    def _part_of(
        self,
        left: Sequence[SliceRecord],
        chains: Collection[str],
        placement: Placement,
        left_ms: float,
    ) -> list[SliceRecord]:
        """As many of the slices that are left as there is time for; at least one."""
        row_s = self._ledgers.costs.row_s(placement, chains)
        most_s = max(left_ms, LEAST_SHARE * self._config.slice_interval_ms) / 1000
        taken: list[SliceRecord] = []
        took_s = 0.0
        for record in left[:MAX_PART_SLICES]:
            took_s += row_s * sum(record.rows.values())
            if taken and (took_s > most_s or (not row_s and len(taken) == FIRST_PART)):
                break
            taken.append(record)
        return taken

    def _next_part(self, left_ms: float) -> list[Command]:
        before, ledgers = self.expected(), self._ledgers
        left = ledgers.slices.after(before.next_slice - 1)
        some = self._part_of(left, before.chains, before.placement, left_ms)
        self.running = replace(
            before,
            slices=tuple(r.plan(before.placement.version) for r in some),
            part=before.part + 1,
            more=len(some) < len(left),
            late={c: ledgers.behind.first[c] for c in before.chains_restored},
        )
        self._rested = False
        self._to(ComebackState.REPLAYING)
        return [RecoverPartitions(self.running)]

    def recovered(self, reports: Sequence[NodeReport]) -> list[Command]:
        """The nodes are done with a part: what it made up for is shown; or one more try."""
        plan, ledgers = self.expected(), self._ledgers
        when = f"replay of slices {plan.first} to {plan.next_slice - 1}"
        error = verdict.first_failure(reports, when, plan.next_slice - 1)
        silent = verdict.silent(reports, plan.restored, plan.placement)
        lacking = verdict.lacking(reports)
        if error is None and (lacking or silent):
            gone = silent | (lacking.keys() & plan.restored)
            return self.lost(gone, Cause.RECOVERY_LACKED)
        if error is None and plan.reads_log:
            error = ledgers.slices.refuse_incomplete(plan.slices, reports)
        if error is not None:
            return [FailRun(error)]
        upto = plan.next_slice if plan.slices else ledgers.slices.next_slice
        ledgers.owners.advance(reports, upto, plan.restored, self._ahead)
        self._tries = 0
        commands = made_up(self._plan, ledgers, plan, reports, upto)
        if plan.more:
            self._to(ComebackState.BETWEEN)
            return commands
        self._ahead -= plan.restored
        self.running, self._look_at = None, None
        if ledgers.behind.first:
            self._to(ComebackState.WAITING, "others wait")
        else:
            self._to(ComebackState.ABSENT, "everything is back")
        return commands

    def expected(self) -> RecoveryPlan:
        """What the nodes are at, or were at last."""
        if self.running is None:
            raise InvariantError(
                "a recovery was reported while none was running", machine=self.name
            )
        return self.running
