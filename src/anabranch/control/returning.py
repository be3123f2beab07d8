"""How a group of chains comes back: from which cut, which of its partitions go on with what they
have, which slices come with the next part. Read off the ledgers, nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.capacity import is_short
from anabranch.control.recovery import plan_recovery
from anabranch.control.settings import ControlConfig
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement, partitions_of
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import Cut, SliceRecord

FIRST_PART = 8  # slices, before it is known how long one takes
# For how long a part keeps a node, in slice intervals: one that has a part in slices, too, which
# may wait for it; and one that has not.
SHARED, ALONE = 0.3, 2.0
MAX_PART_SLICES = 64


@dataclass(frozen=True)
class Group:
    """Chains that come back together, from the newest cut that covers them."""

    chains: frozenset[str]
    partitions: tuple[PartitionId, ...]
    cut: Cut | None  # None: the beginning
    going_on: frozenset[PartitionId]  # keep the state that they have
    first: int  # the slice that those begin with that are least far

    @property
    def anew(self) -> frozenset[PartitionId]:
        """Are restored from the cut."""
        return frozenset(self.partitions) - self.going_on


class Returning:
    """What the ledgers say about coming back."""

    def __init__(self, plan: Plan, config: ControlConfig, ledgers: Ledgers) -> None:
        self._plan = plan
        self._config = config
        self._interval_ms = config.slice_interval_ms
        self._ledgers = ledgers
        self._last = frozenset(c.name for c in plan.node_chains if not c.outputs)

    @property
    def is_possible(self) -> bool:
        """Where everything goes back together, or partitions are divided or copied, chains do not
        wait for each other."""
        config = self._config
        plain = config.strategy.is_ours and config.parallel_recovery == 1
        return (
            config.recovery != "eager"
            and plain
            and config.recovery_bound_s is None
            and self._plan.repeatable
        )

    def is_short(self, nodes: Sequence[NodeId], placement: Placement) -> bool:
        costs = self._ledgers.costs
        every = [p for c in self._plan.node_chains for p in partitions_of(placement.groups, c.name)]
        loads = costs.costs(placement).loads
        return is_short(loads, nodes, costs.source_share(max(1, len(nodes))), every)

    @property
    def all_need_older_layout(self) -> bool:
        return self.needs_older_layout(self._plan.above)

    def group(self, chains: frozenset[str], homes: Collection[PartitionId]) -> Group:
        """Of chains that are to come back, the first group: those with the newest cut. Partitions
        that get other `homes` leave behind what they have."""
        placement = self._ledgers.owners.placement
        cuts = {c: self._ledgers.checkpoints.covering(c) for c in sorted(chains)}
        newest = max(cuts.values(), key=_slice_of, default=None)
        mine = frozenset(c for c, cut in cuts.items() if _slice_of(cut) == _slice_of(newest))
        partitions = [p for c in sorted(mine) for p in partitions_of(placement.groups, c)]
        there = [p for p in partitions if p in placement.owners and p not in homes]
        at = _slice_of(newest) + 1
        going_on, first = self._going_on(there, at, len(partitions) - len(there), placement)
        return Group(mine, tuple(partitions), newest, going_on, first)

    def _going_on(
        self, there: Sequence[PartitionId], first: int, others: int, placement: Placement
    ) -> tuple[frozenset[PartitionId], int]:
        """Of those with an owner, the ones that can repeat what is needed again: everything from
        the slice `first` on, after the cut, unless no `others` are restored from there. And where
        that leaves the least far."""
        if there and not others:
            least = min(self._ledgers.owners.frontier[p] for p in there)
            if all(self._repeats(p, least, placement) for p in there):
                return frozenset(there), least
        return frozenset(p for p in there if self._repeats(p, first, placement)), first

    def _repeats(self, partition: PartitionId, first: int, placement: Placement) -> bool:
        """Has it kept, from this slice on, what others may need again?"""
        if partition.chain in self._last or self._ledgers.owners.frontier[partition] == first:
            return True
        return self._ledgers.backups.covers(partition, first, placement)

    def needs_older_layout(self, chains: Collection[str]) -> bool:
        """Would a replay from the cuts of these chains need another layout than today's?"""
        covering, ledgers = self._ledgers.checkpoints.covering, self._ledgers
        first = min((_slice_of(covering(c)) for c in chains), default=ledgers.newest_slice)
        return ledgers.layouts.stage(ledgers.slices.after(first))[2]

    # -- parts -----------------------------------------------------------------------------------

    def first_part(self, group: Group, placement: Placement) -> RecoveryPlan:
        """Who sends, and who is needed as a shadow, is said for all of the replay."""
        planned = self._planned(group, placement, group.first)
        if planned.shadows and planned.cut + 1 < group.first:  # which begin at the cut
            planned = self._planned(group, placement, planned.cut + 1)
        return self._cut_short(planned, self._fitting(planned))

    def last_part(self, before: RecoveryPlan) -> RecoveryPlan:
        """All that is left, or as much as nodes have memory for."""
        return self._cut_short(self._after(before), MAX_PART_SLICES)

    def part_beside(self, before: RecoveryPlan) -> RecoveryPlan:
        """What keeps no node for long; others follow."""
        after = self._after(before)
        return replace(self._cut_short(after, self._fitting(after)), more=True)

    def is_near(self, before: RecoveryPlan, left_ms: float) -> bool:
        """Is so little left that slices may wait for it? They are not kept from what else there
        is to do: that takes at least so long."""
        records = self._ledgers.slices.after(before.next_slice - 1)
        if len(records) > MAX_PART_SLICES:
            return False
        seconds = self._seconds(before, records)
        if not seconds:
            return len(records) <= FIRST_PART
        return max(seconds.values()) <= max(left_ms, SHARED * self._interval_ms) / 1000

    def rows_left(self, before: RecoveryPlan) -> int:
        """Of sources, after this part."""
        records = self._ledgers.slices.after(before.next_slice - 1)
        return sum(sum(r.rows.values()) for r in records)

    def _after(self, before: RecoveryPlan) -> RecoveryPlan:
        """From where the part before has ended."""
        records = self._ledgers.slices.after(before.next_slice - 1)
        slices = tuple(r.plan(before.placement.version) for r in records)
        return replace(before, slices=slices, part=before.part + 1)

    def _planned(self, group: Group, placement: Placement, first: int) -> RecoveryPlan:
        ledgers = self._ledgers
        records = ledgers.slices.after(first - 1) if group.chains else []
        return plan_recovery(
            self._plan,
            placement,
            frozenset(group.partitions),
            group.cut,
            [r.plan(placement.version) for r in records],
            lambda p: ledgers.backups.covers(p, first, placement),
            ledgers.backups.chosen(placement),
        )

    def _cut_short(self, plan: RecoveryPlan, count: int) -> RecoveryPlan:
        """Its first slices."""
        behind = self._ledgers.behind.first
        return replace(
            plan,
            slices=plan.slices[:count],
            more=count < len(plan.slices),
            late={c: behind[c] for c in sorted(plan.chains_restored)},
        )

    def _fitting(self, plan: RecoveryPlan) -> int:
        """How many of its slices there is time for on every node; at least one."""
        records = self._ledgers.slices.after(plan.first - 1) if plan.slices else []
        owners, waiting = plan.placement.owners, self._ledgers.behind.chains
        sharing = {o.node for p, o in owners.items() if p.chain not in waiting}
        for count in range(1, min(len(records), MAX_PART_SLICES)):
            taken = self._seconds(plan, records[: count + 1])
            if not taken and count == FIRST_PART:
                return count
            for node, seconds in taken.items():
                most = SHARED if node in sharing else ALONE
                if seconds > most * self._interval_ms / 1000:
                    return count
        return min(len(records), MAX_PART_SLICES)

    def _seconds(
        self, plan: RecoveryPlan, records: Sequence[SliceRecord]
    ) -> Mapping[NodeId, float]:
        """How long these slices keep each node; empty where that is not known."""
        rows = sum(sum(r.rows.values()) for r in records)
        taken = self._ledgers.costs.node_row_s(plan.placement, plan.chains)
        return {n: rows * row_s for n, row_s in taken.items()}


def _slice_of(cut: Cut | None) -> int:
    return cut.slice if cut is not None else 0
