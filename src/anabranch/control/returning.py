"""How a group of chains comes back: from which cut, which of its partitions go on with what they
have, which slices come with the next part. Read off the ledgers, nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from anabranch.control.ledgers import Ledgers
from anabranch.control.recovery import plan_recovery
from anabranch.control.settings import ControlConfig
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement, partitions_of
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import Cut, SliceRecord

FIRST_PART = 8  # slices, before it is known how long one takes
LEAST_SHARE = 0.3  # of the slice interval is for a part, however long slices take
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
        self._interval_ms = config.slice_interval_ms
        self._ledgers = ledgers
        self._last = frozenset(c.name for c in plan.node_chains if not c.outputs)

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
        return self._part(planned, self._interval_ms)

    def next_part(self, before: RecoveryPlan, left_ms: float) -> RecoveryPlan:
        """From where the part before has ended."""
        records = self._ledgers.slices.after(before.next_slice - 1)
        slices = tuple(r.plan(before.placement.version) for r in records)
        return self._part(replace(before, slices=slices, part=before.part + 1), left_ms)

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

    def _part(self, plan: RecoveryPlan, left_ms: float) -> RecoveryPlan:
        behind, records = self._ledgers.behind.first, self._ledgers.slices.after(plan.first - 1)
        count = self._fitting(records, plan, left_ms) if plan.slices else 0
        return replace(
            plan,
            slices=plan.slices[:count],
            more=count < len(plan.slices),
            late={c: behind[c] for c in sorted(plan.chains_restored)},
        )

    def _fitting(self, left: Sequence[SliceRecord], plan: RecoveryPlan, left_ms: float) -> int:
        """How many of the slices that are left there is time for; at least one."""
        row_s = self._ledgers.costs.row_s(plan.placement, plan.chains)
        most_s = max(left_ms, LEAST_SHARE * self._interval_ms) / 1000
        took_s = 0.0
        for count, record in enumerate(left[:MAX_PART_SLICES]):
            took_s += row_s * sum(record.rows.values())
            if count and (took_s > most_s or (not row_s and count == FIRST_PART)):
                return count
        return min(len(left), MAX_PART_SLICES)


def _slice_of(cut: Cut | None) -> int:
    return cut.slice if cut is not None else 0
