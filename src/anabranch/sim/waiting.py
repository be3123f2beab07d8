"""What must hold of chains that wait and come back, judged from outside.

- What is below a chain that waits, waits; none waits unless it, or one above it, has lost
  something.
- Nobody waits for long where there is room for all.
- What an operator that is not deterministic has to do with goes back to a checkpoint as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.control.choosing import LOOK_AGAIN
from anabranch.control.comeback import ComebackState
from anabranch.control.controller import Controller
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import SliceRecord
from anabranch.sim.world import violated

IN_VAIN = 2 * LOOK_AGAIN  # slices


class WaitingChecks:
    """Told of slices and recoveries; raises ViolationError."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._waited = 0  # slices, though there was room
        self._epochs: dict[PartitionId, int] = {}  # of the newest recovery's placement

    def paused(
        self, record: SliceRecord, before: SliceRecord | None, placements: Mapping[int, Placement]
    ) -> None:
        """Of a slice that has happened, after the one before."""
        paused = set(record.paused)
        if self._plan.below(paused) != paused:
            violated(f"slice {record.number} ran without {sorted(paused)}, but with one below")
        if before is None or before.placement not in placements:
            return
        then, now = (placements[r.placement].owners for r in (before, record))
        for chain in paused - set(before.paused):
            above = self._plan.above[chain]
            had = {p: o for p, o in then.items() if p.chain in above}
            if all(now.get(p) == o for p, o in had.items()):
                violated(f"{chain} waits in slice {record.number}, and nothing of it was lost")

    def recovers(self, plan: RecoveryPlan) -> None:
        """Partitions with new epochs are restored, others go on with what they have."""
        before, self._epochs = self._epochs, {p: o.epoch for p, o in plan.placement.owners.items()}
        if plan.part or plan.adjusts or not before:
            return
        kept = {p.chain for p, epoch in self._epochs.items() if before.get(p) == epoch}
        restored = {p.chain for p, epoch in self._epochs.items() if before.get(p) != epoch}
        back = frozenset[str]().union(*(self._plan.together[c] for c in restored))
        if back & kept:
            violated(f"{sorted(back & kept)} go on, and what depends on them goes back")

    def in_vain(self, controller: Controller) -> None:
        """A slice has run."""
        comeback = controller.comeback
        idle = comeback.state is ComebackState.WAITING and not comeback.stops
        placement = controller.placement
        if not idle or placement is None or comeback.is_short(placement):
            self._waited = 0
            return
        self._waited += 1
        if self._waited > IN_VAIN:
            violated(f"{sorted(controller.waiting)} wait, and there is room for all")
