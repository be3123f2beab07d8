"""A job that scales and balances itself: what is made of a measurement becomes a wish. Keys are
balanced before more partitions or nodes are asked for, which would not help a hot one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from anabranch.control.adjustment import Adjustment
from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.autoscaler import Autoscaler
from anabranch.control.policies.balancer import Balancer
from anabranch.control.policies.load import Load
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.wishes import Wishes
from anabranch.errors import AdjustmentError
from anabranch.model.commands import Command, NoteDecision, RequestNodes
from anabranch.model.plan import Plan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import SlicePlan


class SelfScaling:
    """Measures every job, for drains need to know what it costs; decides where it is asked to."""

    def __init__(
        self,
        plan: Plan,
        config: ControlConfig,
        past: Past,
        ledgers: Ledgers,
        wishes: Wishes,
        adjustment: Adjustment,
    ) -> None:
        self._ledgers = ledgers
        self._wishes = wishes
        self._adjustment = adjustment
        self.load, self._autoscaler = Load(), None
        self._balancer = Balancer(config.balance) if config.balance is not None else None
        if config.autoscale is not None:
            scale = config.autoscale
            self.load = Load(scale.ms("interval"), scale.measurements("drain_after"))
            self._autoscaler = Autoscaler(plan, scale, config.slice_interval_ms, past.autoscaler)

    def observe(
        self, plan: SlicePlan, reports: Sequence[NodeReport], began_ms: int, now_ms: int
    ) -> None:
        """Fold in a slice that has happened."""
        self.load.observe(plan, reports, began_ms, now_ms)
        if self._balancer is not None:
            self._balancer.observe(self._ledgers.owners.placement, reports, now_ms)

    def decide(self, now_ms: int, wall_ms: int, running: bool) -> list[Command]:
        """End a measurement when it is time to, and decide if nothing else is on its way."""
        measured = self.load.measure(now_ms)
        wishing = self._wishes.wanted or self._ledgers.layouts.divided
        if not running or not self._adjustment.settled or wishing:
            return []
        return self._balance(now_ms, wall_ms) or (self._scale(now_ms, wall_ms) if measured else [])

    def _balance(self, now_ms: int, wall_ms: int) -> list[Command]:
        placement = self._ledgers.owners.placement
        found = self._balancer and self._balancer.decide(placement, now_ms, wall_ms)
        if not found:
            return []
        decision, layouts = found
        for chain, groups in layouts.items():
            self._wishes.lay_out(chain, groups, placement)
        return [NoteDecision(decision)]

    def _scale(self, now_ms: int, wall_ms: int) -> list[Command]:
        if self._autoscaler is None:
            return []
        owners = self._ledgers.owners
        nodes = self._wishes.allowed(owners.nodes)
        decision = self._autoscaler.decide(
            self.load.measured, owners.placement, nodes, now_ms, wall_ms
        )
        if decision is None:
            return []
        commands: list[Command] = [NoteDecision(decision, self._autoscaler.memory)]
        if decision.dry_run:
            return commands
        with contextlib.suppress(AdjustmentError):  # refused: the slice has happened all the same
            for chain, parallelism in decision.parallelism.items():
                self._wishes.scale(chain, parallelism, owners.placement)
            if decision.drain is not None:
                self._wishes.drain(decision.drain, owners.nodes, self.load)
                commands += self._adjustment.release()
        if decision.add_nodes:
            commands.append(RequestNodes(decision.add_nodes))
        return commands
