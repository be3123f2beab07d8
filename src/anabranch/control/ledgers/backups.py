"""Who keeps its output, and from which slice on: what a recovery may ask for.

Which chains back up is given to the run, or chosen again and again under a recovery bound, or it
is all or none, by how many nodes were lost. A partition that begins to has nothing of the slices
before; of one that has ended, nothing is asked, however much it may still have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.control.policies.adaptive import ENOUGH_LOST, AdaptiveBackups
from anabranch.control.policies.recovery_bound import RecoveryBound
from anabranch.model.commands import NoteBackups
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import SlicePlan


class BackupLedger:
    """`chains` back up, None: all of them; a `bound` chooses partitions instead, or `adaptive` all
    of them or none."""

    def __init__(
        self,
        chains: frozenset[str] | None,
        bound: RecoveryBound | None,
        adaptive: AdaptiveBackups | None = None,
    ) -> None:
        self._chains = chains
        self.bound = bound
        self._adaptive = adaptive
        self.first_kept: dict[PartitionId, int] = {}  # the first slice whose output is kept
        self._copied_from: dict[PartitionId, int] = {}  # first slice that the copy applied

    def chosen(self, placement: Placement) -> frozenset[PartitionId] | None:
        """The partitions that back up; None: all of them."""
        if self.bound is not None:
            return self.bound.choice.backups if self.bound.choice else None
        if self._adaptive is not None:
            return None if self._adaptive.on else frozenset()
        if self._chains is None:
            return None
        return frozenset(p for p in placement.owners if p.chain in self._chains)

    def covers(self, partition: PartitionId, first: int, placement: Placement) -> bool:
        """Has it kept its output since this slice?"""
        chosen = self.chosen(placement)
        return (chosen is None or partition in chosen) and self.first_kept[partition] <= first

    def begin(self, partitions: Iterable[PartitionId], first: int) -> None:
        """Their output is kept from this slice on."""
        self.first_kept |= dict.fromkeys(partitions, first)

    def copied(self, partitions: Iterable[PartitionId], first: int) -> None:
        """Copies of these apply slices from this one on."""
        self._copied_from |= dict.fromkeys(partitions, first)

    def promoted(self, partitions: Iterable[PartitionId]) -> None:
        """Copies take the place of these: what they kept is what there is."""
        self.first_kept |= {p: self._copied_from[p] for p in partitions}

    def choose(
        self,
        reports: Sequence[NodeReport],
        plan: SlicePlan,
        placement: Placement,
        began_ms: int,
        now_ms: int,
    ) -> NoteBackups | None:
        """Measure a slice; from time to time, choose anew."""
        if self.bound is None:
            return None
        before = self.chosen(placement)
        self.bound.observe(reports, began_ms, (now_ms - began_ms) / 1000)
        choice = self.bound.plan(placement)
        if choice is None:
            return None
        begin = choice.backups - before if before is not None else frozenset()
        self.begin(begin, plan.number + 1)
        self.copied(begin & self._copied_from.keys(), plan.number + 1)
        return NoteBackups(choice.backups, choice.predicted_s, choice.problem)

    def nodes_lost(self, count: int, placement: Placement, next_slice: int) -> NoteBackups | None:
        """Where that is one too many, all partitions back up from the next slice on. Those that are
        rebuilt now begin with what they replay: that is said by who rebuilds them."""
        if self._adaptive is None or not self._adaptive.nodes_lost(count):
            return None
        self.begin({*self.first_kept, *placement.owners}, next_slice)
        self.copied(self._copied_from, next_slice)
        why = f"{ENOUGH_LOST} nodes were lost since the newest checkpoint of everything"
        return NoteBackups(frozenset(placement.owners), {}, why=why)

    def all_in_a_cut(self) -> NoteBackups | None:
        """Everything runs and is in a checkpoint: there is nothing to be prepared for any more."""
        if self._adaptive is None or not self._adaptive.all_in_a_cut():
            return None
        return NoteBackups(frozenset(), {}, why="everything runs and is in a checkpoint")

    def recovered(self, plan: RecoveryPlan, took_ms: int, reports: Sequence[NodeReport]) -> None:
        """The prediction learns from a recovery."""
        if self.bound is not None:
            replayed = plan.next_slice - 1 - plan.cut
            self.bound.recovered(took_ms / 1000, plan.restored, replayed, reports)
