"""Online adjustment (paper 000, OAP): another placement for a job that runs.

What is wanted (wishes.py) becomes one change of the placement, in four steps. WANTED: the change is
known; it waits for a checkpoint that has all partitions, to load from. PREPARING: while slices go
on, the nodes load the state of every partition that changes hands from the newest cut. SEALING:
one slice seals a checkpoint. SWITCHING: that is durable, so the placement changes; what is left to
load is the checkpoint's delta, nothing is replayed, and no later recovery has to look behind the
change. Until the journal has the new placement the old one holds, and a loss on the way, or another
wish, only makes the change begin again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum, auto

from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.load import Load
from anabranch.control.rebuild import Rebuild
from anabranch.control.recovery import plan_recovery
from anabranch.control.story import Machine, Story
from anabranch.control.wishes import Change, Wishes
from anabranch.errors import AdjustmentError, InvariantError
from anabranch.model.commands import Command, PollNodes, PreparePartitions, ReleaseNodes
from anabranch.model.ids import NodeId
from anabranch.model.plan import Plan
from anabranch.model.recovery import Cause, RecoveryPlan
from anabranch.model.reports import NodeReport

NEVER = -1


class AdjustmentState(Enum):
    """How far a change of the placement is."""

    SETTLED = auto()  # there is none
    WANTED = auto()
    PREPARING = auto()
    SEALING = auto()
    SWITCHING = auto()


LEGAL = {
    AdjustmentState.SETTLED: frozenset({AdjustmentState.WANTED}),
    AdjustmentState.WANTED: frozenset({AdjustmentState.PREPARING, AdjustmentState.SETTLED}),
    AdjustmentState.PREPARING: frozenset(
        {AdjustmentState.WANTED, AdjustmentState.SEALING, AdjustmentState.SETTLED}
    ),
    AdjustmentState.SEALING: frozenset({AdjustmentState.SWITCHING, AdjustmentState.SETTLED}),
    AdjustmentState.SWITCHING: frozenset({AdjustmentState.SETTLED}),
}


class Adjustment(Machine[AdjustmentState]):
    """One change at a time, from a wish to another placement."""

    def __init__(
        self, plan: Plan, ledgers: Ledgers, wishes: Wishes, rebuild: Rebuild, story: Story
    ) -> None:
        super().__init__("adjustment", AdjustmentState.SETTLED, LEGAL, story)
        self._plan = plan
        self._ledgers = ledgers
        self._wishes = wishes
        self._rebuild = rebuild
        self.change: Change | None = None  # from WANTED to SEALING
        self._asked = NEVER  # the slice after which the nodes were asked last how far they are

    @property
    def settled(self) -> bool:
        return self.state is AdjustmentState.SETTLED

    @property
    def needs_cut(self) -> bool:
        """Is a change waiting for a checkpoint: to prepare from, or to be made at?"""
        if self.change is None or self._ledgers.slices.newest is None:
            return False
        return self.state is AdjustmentState.SEALING or not self._ledgers.checkpoints.whole

    # -- what is wanted --------------------------------------------------------------------------

    def scale(self, operator: str, parallelism: int) -> None:
        """Another parallelism is asked for; AdjustmentError where that cannot be."""
        self._refuse_while_chains_wait()
        placement, divided = self._ledgers.owners.placement, self._ledgers.layouts.divided
        chain = self._wishes.chain_of(operator)
        # What a recovery has divided is put together first.
        self._wishes.scale(operator, parallelism, placement, instead=chain in divided)
        divided.pop(chain, None)
        self.start_over("another parallelism is wanted")

    def drain(self, node: NodeId, load: Load) -> None:
        """Have a node emptied; AdjustmentError where that cannot be."""
        self._refuse_while_chains_wait()
        self._wishes.drain(node, self._ledgers.owners.nodes, load)
        self.start_over(f"node {node} is drained")

    def _refuse_while_chains_wait(self) -> None:
        waiting = self._ledgers.behind.chains
        if waiting:
            raise AdjustmentError(
                f"nothing can be moved while {', '.join(sorted(waiting))} wait to come back after "
                "a loss; add nodes, or ask again when everything is back"
            )

    def spread(self) -> None:
        """Nodes joined."""
        self._wishes.spread()
        self.start_over("nodes joined")

    def nodes_lost(self, nodes: Collection[NodeId]) -> None:
        """They need not be emptied any more, and a change must not count on them."""
        self._wishes.drained -= set(nodes)
        self.start_over(f"node {', '.join(nodes)} is lost")

    def unite(self) -> None:
        """After a cut, partitions that a recovery divided are to be put together."""
        placement = self._ledgers.owners.placement
        for chain, groups in self._ledgers.layouts.divided.items():
            self._wishes.lay_out(chain, groups, placement)

    def release(self) -> list[Command]:
        """Let go of drained nodes that have nothing any more."""
        owners = self._ledgers.owners
        if owners.in_force is None:
            return []
        empty = self._wishes.empty(owners.in_force, owners.nodes)
        owners.leave(empty)
        return [ReleaseNodes(empty)] if empty else []

    # -- the steps -------------------------------------------------------------------------------

    def start_over(self, why: str) -> None:
        """Another change takes the place of the one on its way, if there is one. A switch that has
        begun is none: the placement is the new one already."""
        if self.change is not None:
            self.change = None
            self._to(AdjustmentState.SETTLED, why)

    def step(self) -> list[Command]:
        """The next step, between two slices; [] when they may go on."""
        newest, checkpoints = self._ledgers.newest_slice, self._ledgers.checkpoints
        if self._ledgers.behind.first:
            return []  # the placement changes with what comes back
        change = self.change or self._next_change()
        if change is None:
            return []
        if self.state is AdjustmentState.SEALING:
            if checkpoints.cut_slice == newest:
                return self._switch(change)
            return [PollNodes()] if checkpoints.sealed_slice == newest else []
        if self.needs_cut:
            if self.state is AdjustmentState.PREPARING:
                self._to(AdjustmentState.WANTED, "no checkpoint has every partition")
            return []
        if self._asked == newest:
            return []
        self._asked = newest
        if self.state is AdjustmentState.WANTED:
            self._to(AdjustmentState.PREPARING)
        return [PreparePartitions(self._installing(change))]

    def _next_change(self) -> Change | None:
        owners = self._ledgers.owners
        change = self._wishes.change(owners.placement, owners.nodes, owners.epochs, owners.hosts)
        if change is not None:
            self.change, self._asked = change, NEVER
            self._to(AdjustmentState.WANTED, change.what)
        return change

    def ask_again(self) -> None:
        """No slice runs after which the nodes would be asked."""
        self._asked = NEVER

    def prepared(self, reports: Sequence[NodeReport]) -> None:
        """The nodes say what they have loaded."""
        ready = {(r.node, p) for r in reports for p in r.prepared}
        change = self.change if self.state is AdjustmentState.PREPARING else None
        if change is not None and change.loaded <= ready:
            self._to(AdjustmentState.SEALING, "all is loaded")

    def _switch(self, change: Change) -> list[Command]:
        self.change = None
        self._to(AdjustmentState.SWITCHING, change.what)
        self._wishes.done()
        self._ledgers.layouts.adjust(change.placement.groups, self._ledgers.newest_slice)
        return self._rebuild.begin(
            change.moved, change.placement, Cause.ADJUSTMENT, change.what, change.copied
        )

    def rebuilding(self) -> None:
        """Partitions are rebuilt, not by a switch: a change begins again, if it is still wanted; a
        switch that was cut short is a part of that rebuild."""
        self.change = None
        if not self.settled:
            self._to(AdjustmentState.SETTLED, "partitions are rebuilt")

    def rebuilt(self) -> None:
        """Everything is whole: so is a switch."""
        if not self.settled:
            if self.state is not AdjustmentState.SWITCHING:
                raise InvariantError(
                    f"partitions were rebuilt while a change was {self.state.name}",
                    machine=self.name,
                )
            self._to(AdjustmentState.SETTLED, "the placement is in force")

    def _installing(self, change: Change) -> RecoveryPlan:
        nothing_kept = lambda _: False  # noqa: E731 - and nothing is replayed either
        cut = self._ledgers.checkpoints.cut
        plan = plan_recovery(
            self._plan, change.placement, change.moved, cut, (), nothing_kept, copied=change.copied
        )
        return replace(plan, cause=Cause.ADJUSTMENT, what=change.what)
