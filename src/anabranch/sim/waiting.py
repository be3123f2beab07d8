"""What must hold of chains that wait and come back, judged from outside.

- What is below a chain that waits, waits; none waits unless it, or one above it, has lost
  something.
- Where a node lives that has all that is needed of a partition, nobody restores it once more.
- Nobody waits for long where there is room for all.
"""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.control.comeback import LOOK_AGAIN, ComebackState
from anabranch.control.controller import Controller
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement
from anabranch.model.recovery import Cause, RecoveryPlan
from anabranch.model.slices import SliceRecord
from anabranch.sim.cluster import SimCluster
from anabranch.sim.world import violated

IN_VAIN = 2 * LOOK_AGAIN  # slices


class WaitingChecks:
    """Told of slices and recoveries; raises ViolationError."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._plan = cluster.job.plan
        self._waited = 0  # slices, though there was room

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

    def recovers(self, plan: RecoveryPlan, before: Placement) -> None:
        """A recovery is about to begin, with another placement than `before`."""
        if plan.part or plan.adjusts or plan.cause is not Cause.NODES_LOST:
            return
        for partition in sorted(plan.restored):
            now, then = plan.placement.owners[partition], before.owners.get(partition)
            if then is None or now.epoch == then.epoch or now.node != then.node:
                continue
            if self._has_all_of(partition, then.node, then.epoch, plan.cut):
                violated(f"{partition} is restored from cut {plan.cut}, and {then.node} has it")

    def _has_all_of(self, partition: PartitionId, node: str, epoch: int, cut: int) -> bool:
        """… and what it has sent since the cut."""
        machine = next((m for n, m in self._cluster.machines.items() if n == node), None)
        found = machine.process.partitions.get(partition) if machine else None
        if found is None or found.epoch != epoch or found.next_slice <= cut:
            return False
        kept = set(range(cut + 1, found.next_slice)) <= found.outputs.keys()
        return kept or not found.chain.outputs

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
