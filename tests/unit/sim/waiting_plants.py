"""Bugs to plant in what chains that wait miss, keep and make up for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from plants import plant
from store_plants import PLANTS

from anabranch.control import comeback as comeback_module
from anabranch.control import rebuild as rebuild_module
from anabranch.control.comeback import Comeback
from anabranch.control.controller import Controller
from anabranch.control.ledgers.backups import BackupLedger
from anabranch.control.ledgers.behind import BehindLedger
from anabranch.control.ledgers.checkpoints import CheckpointLedger
from anabranch.control.ledgers.slices import SliceLedger
from anabranch.control.outcomes import Outcomes
from anabranch.control.portion import Work
from anabranch.control.returning import Returning
from anabranch.control.settings import Past
from anabranch.driver import showing
from anabranch.model.commands import Command, ExposeLate, NoteBackups, TrimStorage, WriteLate
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import CheckpointWritten, Staged
from anabranch.model.slices import Cut, Late, SlicePlan, SliceRecord
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import WaveRequest

__all__ = ["PLANTS"]


# -- what is kept ----------------------------------------------------------------------------------


@plant
def trimmed_at_the_cuts_of_live_chains(patch: pytest.MonkeyPatch) -> None:
    newest = property(lambda self: self.cuts[1].slice + 1 if len(self.cuts) > 1 else 1)
    patch.setattr(CheckpointLedger, "replay_from", newest)


@plant
def cut_of_a_waiting_chain_dropped(patch: pytest.MonkeyPatch) -> None:
    real = CheckpointLedger.written

    def written(self: CheckpointLedger, reports: Iterable[CheckpointWritten]) -> Cut | None:
        found = real(self, reports)
        del self.cuts[2:]
        return found

    patch.setattr(CheckpointLedger, "written", written)


@plant
def restored_from_a_cut_that_does_not_cover_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointLedger, "_covering", lambda self, chain: list(self.cuts))


@plant
def a_chain_that_has_come_back_taken_for_covered(patch: pytest.MonkeyPatch) -> None:
    """… by a cut that was taken while it waited."""
    patch.setattr(CheckpointLedger, "covering_all", lambda self, chains: self.cut)


@plant
def what_a_start_is_told_of_waiting_chains_ignored(patch: pytest.MonkeyPatch) -> None:
    real = Controller.__init__

    def init(self: Controller, plan: Any, config: Any, past: Past, *args: Any) -> None:
        real(self, plan, config, replace(past, behind={}), *args)

    patch.setattr(Controller, "__init__", init)


# -- who backs up ----------------------------------------------------------------------------------


@plant
def adaptive_backups_off_too_early(patch: pytest.MonkeyPatch) -> None:
    """With any cut, though chains wait; what they were to keep is asked for all the same."""
    real, covers = Outcomes._durable, BackupLedger.covers
    begun: set[BackupLedger] = set()

    def durable(self: Outcomes, reports: Any) -> list[Command]:
        machines, commands = self._machines, real(self, reports)
        backups = machines.ledgers.backups
        cut = any(isinstance(c, TrimStorage) for c in commands)
        noted = backups.all_in_a_cut() if cut and not machines.comeback.absent else None
        begun.update([backups] if noted else [])
        return [*commands, *([noted] if noted else [])]

    def taken(self: BackupLedger, partition: PartitionId, first: int, placement: Placement) -> bool:
        kept = self in begun and self.first_kept[partition] <= first
        return kept or covers(self, partition, first, placement)

    patch.setattr(Outcomes, "_durable", durable)
    patch.setattr(BackupLedger, "covers", taken)


@plant
def backups_taken_as_kept_from_before_they_began(patch: pytest.MonkeyPatch) -> None:
    real = BackupLedger.nodes_lost

    def nodes_lost(self: BackupLedger, *args: Any) -> NoteBackups | None:
        before = dict(self.first_kept)
        noted = real(self, *args)
        self.first_kept = before
        return noted

    patch.setattr(BackupLedger, "nodes_lost", nodes_lost)


# -- what is shown ---------------------------------------------------------------------------------


def patch_made_up(
    patch: pytest.MonkeyPatch, change: Callable[[list[Command]], list[Command]]
) -> None:
    for module in (comeback_module, rebuild_module):
        real = module.made_up
        patch.setattr(module, "made_up", lambda *args, real=real: change(real(*args)))


def patch_replaying(
    patch: pytest.MonkeyPatch, change: Callable[[RecoveryPlan], RecoveryPlan]
) -> None:
    real = Returning.replaying
    patch.setattr(Returning, "replaying", lambda *args, **more: change(real(*args, **more)))


@plant
def late_rows_not_staged(patch: pytest.MonkeyPatch) -> None:
    patch_replaying(patch, lambda plan: replace(plan, late={}))


@plant
def late_slices_shown_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def turned(commands: list[Command]) -> list[Command]:
        pairs = [commands[i : i + 2] for i in range(0, len(commands), 2)]
        return [c for pair in reversed(pairs) for c in pair]

    patch_made_up(patch, turned)


@plant
def late_slices_shown_before_the_journal_has_them(patch: pytest.MonkeyPatch) -> None:
    def turned(commands: list[Command]) -> list[Command]:
        shown = [c for c in commands if isinstance(c, ExposeLate)]
        return [*shown, *(c for c in commands if isinstance(c, WriteLate))]

    patch_made_up(patch, turned)


@plant
def late_slice_shown_though_a_chain_still_lacks_it(patch: pytest.MonkeyPatch) -> None:
    """A sink of several chains, one of which has come back."""
    real = showing.Showing.show_late

    def show_late(
        self: Any, record: SliceRecord, sinks: Collection[str], staged: Sequence[Staged]
    ) -> Any:
        return real(self, record, {*sinks, *record.staged}, staged)

    patch.setattr(showing.Showing, "show_late", show_late)


@plant
def late_files_take_the_place_of_those_in_time(patch: pytest.MonkeyPatch) -> None:
    real = SliceRecord.with_late

    def with_late(self: SliceRecord, late: Late) -> SliceRecord:
        return real(replace(self, staged={}), late)

    patch.setattr(SliceRecord, "with_late", with_late)


# -- what is replayed ------------------------------------------------------------------------------


@plant
def late_slices_under_the_newest_watermark(patch: pytest.MonkeyPatch) -> None:
    def timed(plan: RecoveryPlan) -> RecoveryPlan:
        mark = plan.slices[-1].watermark_us if plan.slices else None
        return replace(plan, slices=tuple(replace(s, watermark_us=mark) for s in plan.slices))

    patch_replaying(patch, timed)


@plant
def chains_below_a_waiting_one_go_on(patch: pytest.MonkeyPatch) -> None:
    def pause(self: BehindLedger, chains: Iterable[str], next_slice: int) -> None:
        for chain in chains:
            if chain in self._plan.above:
                self.first.setdefault(chain, next_slice)

    patch.setattr(BehindLedger, "pause", pause)


@plant
def chains_that_lost_nothing_wait_too(patch: pytest.MonkeyPatch) -> None:
    real = BehindLedger.pause

    def pause(self: BehindLedger, chains: Iterable[str], next_slice: int) -> None:
        real(self, self._plan.above if list(chains) else (), next_slice)

    patch.setattr(BehindLedger, "pause", pause)
    patch.setattr(BehindLedger, "return_to_slices", lambda self, chains: None)  # not at once


@plant
def chain_goes_on_though_one_above_it_waits(patch: pytest.MonkeyPatch) -> None:
    """It lost nothing itself."""
    for module in (comeback_module, rebuild_module):
        real = module.made_up

        def made_up(plan: Plan, ledgers: Any, done: RecoveryPlan, *args: Any, real: Any = real):
            commands = real(plan, ledgers, done, *args)
            newest = ledgers.newest_slice
            at = [c for c in done.chains_restored if done.span(c)[1] > newest]
            ledgers.behind.return_to_slices(at)
            return commands

        patch.setattr(module, "made_up", made_up)


@plant
def a_part_ends_the_comeback(patch: pytest.MonkeyPatch) -> None:
    """Chains take part in slices again after the first part of their replay."""
    for module in (comeback_module, rebuild_module):
        real = module.made_up

        def made_up(plan: Plan, ledgers: Any, done: RecoveryPlan, *args: Any, real: Any = real):
            commands = real(plan, ledgers, done, *args)
            ledgers.behind.return_to_slices(done.chains_restored if done.slices else ())
            return commands

        patch.setattr(module, "made_up", made_up)


@plant
def chain_gets_further_than_those_above(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Work, "may_go_on", lambda self, chain, ends, takes: ends[chain] < self.end)


@plant
def chains_replay_what_others_replay(patch: pytest.MonkeyPatch) -> None:
    """Of those that are not as far as each other."""
    patch.setattr(RecoveryPlan, "takes", lambda self, chain, number: True)


@plant
def node_that_others_need_left_out(patch: pytest.MonkeyPatch) -> None:
    """It has more than what comes back."""

    def busy(self: Comeback) -> frozenset[NodeId]:
        placement = self._ledgers.owners.in_force
        nodes = placement.nodes if placement is not None and self.coming else ()
        return frozenset(nodes[1:])

    patch.setattr(Comeback, "busy", property(busy))


@plant
def chain_that_others_need_goes_on_without_them(patch: pytest.MonkeyPatch) -> None:
    """… and what they need of it is let go of."""
    patch.setattr(Returning, "_serves", lambda *args: True)
    patch.setattr(BackupLedger, "covers", lambda *args: True)


@plant
def slice_that_chains_waited_in_counted_as_theirs(patch: pytest.MonkeyPatch) -> None:
    real = SliceLedger.commit

    def commit(self: SliceLedger, plan: SlicePlan, *args: Any) -> Any:
        return real(self, replace(plan, paused=frozenset()), *args)

    patch.setattr(SliceLedger, "commit", commit)


@plant
def shadows_dropped_between_parts(patch: pytest.MonkeyPatch) -> None:
    real = Host.wave

    def wave(self: Host[Any], request: WaveRequest, parcels: Any) -> Any:
        self.shadows.clear()
        return real(self, request, parcels)

    patch.setattr(Host, "wave", wave)


@plant
def what_is_not_deterministic_taken_for_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Plan, "going_back", lambda self, chains: frozenset())
