"""Chains that wait and come back: nodes are lost, and what is left is not enough for all queries.

A chain waits from the slice on in which a partition of it was lost, and so do all chains below it:
every partition of a chain takes rows from all of those above. Slices go on without them, for
queries that lost nothing. Source tasks log all rows as ever, so what a waiting chain misses is
there when it comes back: from the newest cut that covers it, by a replay of the slices since then,
with the time each of them had. That is the recovery of rebuild.py, in parts. The first one installs
partitions, between two slices; later ones go on beside slices, which do not wait for them. What is
left of a chain in the end is made up for between two slices again; it is in the next one.

Which chains come back, and where, is asked again and again (choosing.py). Chains with the same cut
begin together, those with the newest cut first: what is above a chain is covered by every cut that
covers it. Others join them, between two parts, and each goes at the pace of its nodes.

Partitions that were not lost keep what they have. Nothing is decided here but what can be read off
the ledgers: which chains lack slices, which partitions have an owner, how far these are. So a
driver that starts in the middle goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum, auto

from anabranch.control import verdict
from anabranch.control.choosing import Choosing
from anabranch.control.late import made_up
from anabranch.control.ledgers import Ledgers
from anabranch.control.pace import MOST_WAITED_FOR, Pace
from anabranch.control.policies.capacity import Return
from anabranch.control.rebuild import Rebuild
from anabranch.control.returning import Group, Returning
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.story import Machine, Story
from anabranch.control.tries import Tries
from anabranch.control.wishes import Wishes
from anabranch.errors import AnabranchError, InvariantError
from anabranch.model.commands import (
    AwaitCatchUp,
    AwaitNodes,
    CatchUp,
    Command,
    FailRun,
    RecoverPartitions,
)
from anabranch.model.events import CaughtUp
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement
from anabranch.model.plan import Plan
from anabranch.model.recovery import Cause, RecoveryPlan
from anabranch.model.reports import NodeReport


class ComebackState(Enum):
    """What there is of chains that wait."""

    ABSENT = auto()  # none waits
    WAITING = auto()  # nothing is in hand
    REPLAYING = auto()  # the nodes restore and replay a part, and nothing else
    BESIDE = auto()  # the nodes replay a part beside slices
    BETWEEN = auto()  # two parts


_DONE = frozenset({ComebackState.WAITING, ComebackState.BETWEEN, ComebackState.ABSENT})
LEGAL = {
    ComebackState.ABSENT: frozenset({ComebackState.WAITING}),
    ComebackState.WAITING: _DONE - {ComebackState.BETWEEN} | {ComebackState.REPLAYING},
    ComebackState.REPLAYING: _DONE,
    ComebackState.BESIDE: _DONE,
    ComebackState.BETWEEN: frozenset(ComebackState) - {ComebackState.BETWEEN},
}


class Comeback(Machine[ComebackState]):
    """A loss on the way keeps what others have."""

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
        self._rebuild = rebuild
        self._returning = Returning(plan, config, ledgers)
        self._choosing = Choosing(plan, config, ledgers, wishes, self._returning)
        self.running: RecoveryPlan | None = None  # what the nodes are at, or the part before
        self.stops = False  # the job is to end: all comes back, fast or slow
        self.coming: frozenset[str] = frozenset()  # chains that make up for what they lack just now
        self._ahead: frozenset[PartitionId] = frozenset()  # may be, of those that come back
        self._anew: frozenset[PartitionId] = frozenset()  # restored by the first part
        self._held = 0  # parts that slices have waited for, since one ran
        self._tries = Tries()  # since it came further than ever
        self._pace = Pace(config.slice_interval_ms)

    @property
    def choice(self) -> Return | None:
        """The newest, of who comes back."""
        return self._choosing.newest

    @property
    def absent(self) -> bool:
        return self.state is ComebackState.ABSENT

    @property
    def replaying(self) -> bool:
        return self.state is ComebackState.REPLAYING

    @property
    def beside(self) -> bool:
        """Is something in hand that goes on beside slices, or between them?"""
        return self.state in (ComebackState.BESIDE, ComebackState.BETWEEN)

    @property
    def may_rest(self) -> bool:
        """May a slice run?"""
        return not self.replaying and not self.awaiting

    @property
    def awaiting(self) -> bool:
        """Is there no node at all?"""
        return not self.absent and not self._ledgers.owners.nodes

    @property
    def busy(self) -> frozenset[NodeId]:
        """Nodes that slices go without."""
        return self._returning.busy(self.coming) if self.coming else frozenset()

    # -- when chains wait ------------------------------------------------------------------------

    def takes(self, lost: Collection[PartitionId]) -> bool:
        """Is a loss its affair, and not the rebuild's? The nodes are those that are left."""
        if not self.absent:
            return True
        owners, layouts = self._ledgers.owners, self._ledgers.layouts
        if not self._returning.is_possible or not lost or self._rebuild.stage_end is not None:
            return False
        placement = owners.placement
        if placement.groups != layouts.current or self._returning.all_need_older_layout:
            return False
        return self.is_short(placement)

    def is_short(self, placement: Placement) -> bool:
        """Is there less than all partitions take?"""
        return self._returning.is_short(self._choosing.nodes, placement)

    def starts(self, past: Past) -> bool:
        """Does a run begin with chains that wait: still, or because they do not all fit?"""
        if not self._returning.is_possible or past.rescaled:
            return False
        placement = self._begun_with(past)
        if self._returning.all_need_older_layout:
            return False
        blocking = self._config.recovery == "blocking"
        return bool(past.behind) or (not blocking and self.is_short(placement))

    def _begun_with(self, past: Past) -> Placement:
        """A placement without owners."""
        groups = self._rebuild.groups_of(past)
        self._ledgers.layouts.placed(groups)
        return Placement(past.placement_version + 1, groups, {}, tuple(self._choosing.nodes[:1]))

    def start(self, past: Past) -> list[Command]:
        """Nobody has any state: all chains come back, those that fit first."""
        ledgers = self._ledgers
        self._rebuild.give_up()
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
        partitions = {*partitions} | {p for p, o in placement.owners.items() if o.node not in there}
        back = self._plan.going_back(p.chain for p in (*partitions, *abandoned))
        partitions |= {p for p in placement.owners if p.chain in back}
        told = partitions or abandoned or cause.concerns_nodes
        in_hand = self.state in (ComebackState.REPLAYING, ComebackState.BESIDE)
        if not (told or self.replaying or set(placement.nodes) - there):
            return []
        if in_hand and not self._tries.may_go_on(partitions):
            return [FailRun(self._tries.lost_too_often(partitions))]
        ledgers.behind.pause({p.chain for p in partitions | abandoned}, ledgers.slices.next_slice)
        begun = self.running.restored if in_hand and self.running else abandoned
        self._ahead = frozenset(p for p in (self._ahead | begun) if p not in partitions)
        left = {p: o for p, o in placement.owners.items() if p not in partitions}
        owners.use(placement.owned(left, self._choosing.nodes), frozenset(), 0)
        self.running, self.coming = None, frozenset()
        if ledgers.behind.first or not self.absent:
            self._to(ComebackState.WAITING, cause.value)
        return self._begin(cause)

    def torn(self, error: AnabranchError) -> list[Command]:
        """A checkpoint cannot be read: the one before it, and a longer replay, give the same."""
        plan, checkpoints = self.expected(), self._ledgers.checkpoints
        if not plan.cut:
            return [FailRun(error)]
        checkpoints.fall_back(plan.cut)
        cuts = (checkpoints.covering(c) for c in plan.chains_restored)
        if not all(self._ledgers.slices.reaches(c.slice if c else 0) for c in cuts):
            return [FailRun(error)]
        # What was to be restored from it has no state, nor has what an earlier recovery was to, of
        # which nothing was heard; of shadows, later files would be of no use.
        begun = {p for p, n in self._ledgers.owners.frontier.items() if n <= plan.cut + 1}
        gone = plan.shadows | self._anew | (plan.restored | self._ahead) & begun
        return self.lost(gone, Cause.CHECKPOINT_TORN)

    # -- who comes back --------------------------------------------------------------------------

    def joined(self) -> list[Command]:
        """Nodes came: more may fit. Where there was none, they are waited for."""
        self._choosing.nodes_came()
        if self._ledgers.owners.placement.nodes or self.replaying:
            return []
        return self._begin(Cause.NODES_CAME)

    def slice_ran(self, began_ms: int) -> None:
        self._held = 0
        if self.absent:
            self._choosing.all_are_live()
        self._pace.slice_ran(began_ms)

    def step(self, now_ms: int, began_ms: int) -> list[Command]:
        """The next part: of chains that are near the newest slice, and slices wait for them (the
        next is due an interval after the one that `began_ms`), or beside slices. What others there
        is room for comes first: they come back beside those that do already."""
        if self.absent or self.replaying or not self._ledgers.owners.nodes:
            return []
        if self.state is ComebackState.BESIDE:
            return [AwaitCatchUp()] if self.stops else []
        left_ms = began_ms + self._config.slice_interval_ms - now_ms
        late = self._held and left_ms <= 0 and not self.stops
        self.coming -= frozenset() if late else self._choosing.released(self.coming)
        if self._choosing.is_due(self.coming, self.stops) and not late:
            choice = self._choosing.choose(self.coming, self.stops)
            if choice.chains:
                return self._begin(Cause.ROOM, choice)
        go_on = self.coming if self.state is ComebackState.BETWEEN else ()
        return self._next_part(left_ms) if go_on else []

    def _begin(self, cause: Cause, choice: Return | None = None) -> list[Command]:
        """Under a new placement, with the first of those that are to come back."""
        if not self._choosing.nodes:
            return [AwaitNodes()]
        choice = choice or self._choosing.choose(self.coming, self.stops)
        group = self._returning.group(choice.chains, choice.homes, self.coming, self._ahead)
        if self._returning.needs_older_layout(group.chains):
            return self._all_at_once(cause)
        return self._install(group, choice, cause)

    def _all_at_once(self, cause: Cause) -> list[Command]:
        """Back to before the layout changed: nobody goes on from there alone."""
        self._ledgers.checkpoints.back_to_all(self._plan.above)
        self._ahead, self.running, self.coming = frozenset(), None, frozenset()
        if not self.absent:
            self._to(ComebackState.ABSENT, "all partitions go back")
        return self._rebuild.everything(cause)

    def _install(self, group: Group, choice: Return, cause: Cause) -> list[Command]:
        ledgers, owners, anew = self._ledgers, self._ledgers.owners, group.anew
        before = owners.placement
        fresh = {
            p: Ownership(self._home(p, choice, before), owners.epochs.get(p, 0) + 1)
            for p in sorted(anew)
        }
        kept = {p: o for p, o in before.owners.items() if p not in anew}
        placement = before.owned({**kept, **fresh}, self._choosing.nodes)
        self._ahead, self._anew = (self._ahead - anew) | group.going_on, anew
        if group.chains < choice.chains:
            self._choosing.again()  # the others begin with another cut
        self._pace.begin()
        begin = (group.cut.slice if group.cut else 0) + 1
        owners.use(placement, anew, begin)
        ledgers.layouts.used(placement)
        ledgers.checkpoints.installed(anew, placement)
        ledgers.backups.begin(anew, begin)
        self.coming |= group.chains
        plan = self._returning.beginning(self.coming, group.cut, placement)
        near = self._returning.near(plan, self.coming, self._pace.least_s, MOST_WAITED_FOR)
        if near.keys() == self.coming:  # at once
            shadows_at = plan.next_slice if plan.shadows else None
            plan = self._returning.replaying(plan, near, False, shadows_at)
        self.running = replace(plan, cause=cause)
        return self._replay([ledgers.head()], ", ".join(sorted(group.chains)) or "nothing fits")

    def _home(self, partition: PartitionId, choice: Return, before: Placement) -> NodeId:
        """What begins again stays where it is, unless that node is drained."""
        nodes = self._choosing.nodes
        home = choice.homes.get(partition) or before.owners[partition].node
        return home if home in nodes else min(nodes, key=lambda n: len(before.hosted_by(n)))

    def _next_part(self, left_ms: float) -> list[Command]:
        before, returning = self.expected(), self._returning
        limit_s = max(left_ms / 1000, self._pace.least_s)
        near = returning.near(before, self.coming, limit_s, self._pace.waited_for)
        self._pace.nearly(
            not near and returning.near(before, self.coming, limit_s, MOST_WAITED_FOR)
        )
        shared_s = math.inf if self.stops else self._pace.shared_s
        spans = returning.spans(before, self.coming, shared_s)
        if near and (self._held <= 1 or not spans):
            more = near.keys() != self.coming
            self.running = returning.part(before, self.coming, near, more)
            return self._replay([], ", ".join(sorted(near)))
        self._pace.left(returning.rows_left(self.coming, before.placement))
        self.running = returning.part(before, self.coming, spans, more=True)
        none_live = self._ledgers.behind.chains >= self._plan.above.keys()
        if self.stops or (none_live and self._pace.is_highest):
            return self._replay([])
        self._to(ComebackState.BESIDE)
        return [CatchUp(self.running)]

    def is_at(self, event: CaughtUp) -> bool:
        """Is it the part in hand that has ended? Another one was given up."""
        beside = self.state is ComebackState.BESIDE
        return beside and self.expected().at == (event.version, event.part)

    def _replay(self, first: list[Command], why: str = "") -> list[Command]:
        self._held += 1
        self._to(ComebackState.REPLAYING, why)
        return [*first, RecoverPartitions(self.expected())]

    def recovered(self, reports: Sequence[NodeReport]) -> list[Command]:
        """The nodes are done with a part: what it made up for is shown; or one more try."""
        plan, ledgers = self.expected(), self._ledgers
        self._held = min(1, self._held) if self.state is ComebackState.BESIDE else self._held
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
        ends = {c: plan.span(c)[1] for c in sorted(plan.chains_restored)}
        for chain, end in ends.items():
            mine = [p for p in plan.restored if p.chain == chain]
            further = {p for p in mine if ledgers.owners.frontier[p] > end}
            ledgers.owners.advance(reports, end, mine, self._ahead | further)
        if self._pace.came_to(ends):
            self._tries.progress()  # else the nodes were told, and that is all
        commands = made_up(self._plan, ledgers, plan, reports)
        back = self.coming - ledgers.behind.chains
        self.coming -= back
        self._ahead = frozenset(p for p in self._ahead if p.chain not in back)
        self._pace.back(back)
        if back or not self.coming:
            self._choosing.again()  # for more there may be room now
        if self.coming:
            self._to(ComebackState.BETWEEN)
            return commands
        self.running = None
        self._to(ComebackState.WAITING if ledgers.behind.first else ComebackState.ABSENT)
        return commands

    def expected(self) -> RecoveryPlan:
        """What the nodes are at, or were at last."""
        if self.running is None:
            raise InvariantError("a recovery was reported while none ran", machine=self.name)
        return self.running
