"""Who backs up, by dice."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.control.policies.recovery_bound import BackupChoice, RecoveryBound
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement
from anabranch.model.reports import NodeReport
from anabranch.sim.world import World


class DicedBackups(RecoveryBound):
    """Takes the place of the plan that keeps a recovery bound: whatever it chooses, and however
    often, recoveries must be right."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.choice: BackupChoice | None = None

    def observe(self, reports: Sequence[NodeReport], began_ms: int, seconds: float = 0.0) -> None:
        pass

    def recovered(
        self,
        seconds: float,
        partitions: frozenset[PartitionId],
        slices: int,
        reports: Sequence[NodeReport],
    ) -> None:
        pass

    def plan(self, placement: Placement) -> BackupChoice | None:
        if not self._world.chance(0.3):
            return None
        share = self._world.dice.random()
        chosen = frozenset(p for p in placement.owners if self._world.chance(share))
        self.choice = BackupChoice(chosen, {})
        return self.choice
