"""What is known: each ledger owns one kind of facts and changes it in one place."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.control.ledgers.backups import BackupLedger
from anabranch.control.ledgers.behind import BehindLedger
from anabranch.control.ledgers.checkpoints import CheckpointLedger
from anabranch.control.ledgers.costs import CostLedger
from anabranch.control.ledgers.layouts import LayoutLedger
from anabranch.control.ledgers.owners import OwnerLedger
from anabranch.control.ledgers.slices import SliceLedger
from anabranch.control.policies.adaptive import AdaptiveBackups
from anabranch.control.policies.recovery_bound import RecoveryBound
from anabranch.control.settings import ControlConfig, Past
from anabranch.model.commands import WriteHead
from anabranch.model.plan import Plan

NEVER_MS = 10**15  # as good as never


@dataclass(frozen=True, slots=True)
class Ledgers:
    """The ledgers of one run."""

    owners: OwnerLedger
    slices: SliceLedger
    checkpoints: CheckpointLedger
    layouts: LayoutLedger
    backups: BackupLedger
    costs: CostLedger
    behind: BehindLedger

    @staticmethod
    def of(plan: Plan, config: ControlConfig, past: Past) -> Ledgers:
        strategy, bound = config.strategy, None
        if config.recovery_bound_s is not None:
            interval_s = config.checkpoint_interval_ms / 1000
            bound = RecoveryBound(plan, config.recovery_bound_s, interval_s)
        layouts = {r.placement: past.layouts.get(r.placement, past.groups) for r in past.slices}
        return Ledgers(
            OwnerLedger(past.epochs),
            SliceLedger(
                config.watermark_delays_us, past.slices, config.idle_timeouts_ms, plan.clocks
            ),
            CheckpointLedger(
                config.checkpoint_interval_ms if strategy.checkpoints else NEVER_MS,
                past.cut,
                past.previous,
                past.older,
            ),
            LayoutLedger(plan, layouts),
            BackupLedger(
                config.backups if strategy.backups else frozenset(),
                bound,
                AdaptiveBackups() if config.adaptive_backups else None,
            ),
            CostLedger(plan, past.costs, layout=past.groups, interval_ms=config.slice_interval_ms),
            BehindLedger(plan, past.behind),
        )

    @property
    def newest_slice(self) -> int:
        """The newest one that has happened; 0: none has."""
        return self.slices.newest.number if self.slices.newest else 0

    @property
    def uncut(self) -> bool:
        """Are there slices, or chains that do not wait, that the newest checkpoint lacks?"""
        checkpoints = self.checkpoints
        live = [c for c in self.owners.chains if c not in self.behind.first]
        lacking = any(checkpoints.covering(c) is not checkpoints.cut for c in live)
        return lacking or self.newest_slice > checkpoints.cut_slice

    def head(self) -> WriteHead:
        """What a restart has to know, as of now."""
        placement, records = self.owners.placement, tuple(self.slices.records)
        return WriteHead(
            self.checkpoints.cut,
            self.checkpoints.previous,
            records,
            placement,
            dict(self.owners.epochs),
            *self.layouts.journalled(records, placement),
            older=tuple(self.checkpoints.cuts[2:]),
            behind=self.behind.journalled(self.newest_slice),
            costs=self.costs.costs(placement),
        )
