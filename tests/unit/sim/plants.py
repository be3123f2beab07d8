"""Bugs to plant: each breaks one rule of the protocol, in the controller, in what it plans, or in
the simulated node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from anabranch.control import controller as controller_module
from anabranch.control import elasticity
from anabranch.control.backups import BackupLedger
from anabranch.control.checkpoints import CheckpointLedger
from anabranch.control.controller import Controller, Past
from anabranch.control.elasticity import Wishes
from anabranch.control.layouts import LayoutLedger
from anabranch.control.ledger import SliceLedger
from anabranch.control.processing_time import ProcessingTime
from anabranch.model import mapping as mapping_module
from anabranch.model.commands import Command, NoteBackups, TrimStorage, WriteSlice
from anabranch.model.events import DrainRequested, NodesLost, ScaleRequested
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import CheckpointWritten
from anabranch.model.slices import Cut, Feed, SlicePlan, SliceRecord
from anabranch.sim.disk import Disk
from anabranch.sim.node import SimNode
from anabranch.sim.packets import Bundle, Recover
from anabranch.sim.partition import Output, SimPartition
from anabranch.sim.preparation import SimPreparations

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


# -- trimming and acknowledging -------------------------------------------------------------------


@plant
def backups_trimmed_one_slice_early(patch: pytest.MonkeyPatch) -> None:
    real = Controller._run

    def run(self: Controller, plan: SlicePlan) -> list[Command]:
        return [replace(c, trim=c.trim + 1) for c in real(self, plan)]  # type: ignore[union-attr]

    patch.setattr(Controller, "_run", run)


@plant
def log_trimmed_one_slice_early(patch: pytest.MonkeyPatch) -> None:
    real = Disk.trim

    def trim(self: Disk, command: TrimStorage) -> None:
        real(self, replace(command, log_below=command.log_below + 1))

    patch.setattr(Disk, "trim", trim)


@plant
def files_of_the_older_cut_deleted(patch: pytest.MonkeyPatch) -> None:
    def keep(self: CheckpointLedger) -> frozenset[str]:
        return (
            frozenset(f for fs in self.cut.files.values() for f in fs) if self.cut else frozenset()
        )

    patch.setattr(CheckpointLedger, "keep_files", property(keep))


@plant
def backups_never_trimmed(patch: pytest.MonkeyPatch) -> None:
    real = Controller._run

    def run(self: Controller, plan: SlicePlan) -> list[Command]:
        return [replace(c, trim=0) for c in real(self, plan)]  # type: ignore[union-attr]

    patch.setattr(Controller, "_run", run)


@plant
def checkpoint_acknowledged_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    real = SimNode._seal

    def seal(self: SimNode, plan: SlicePlan) -> None:
        real(self, plan)
        for _, epoch, snapshot in self._unwritten:
            pid = snapshot.partition
            path = f"{pid.chain}/{pid.index}/{snapshot.slice}-{epoch}.ckpt"
            self._written[(pid, snapshot.slice)] = CheckpointWritten(
                pid, snapshot.slice, epoch, path, snapshot.full, 0, snapshot.after
            )

    patch.setattr(SimNode, "_seal", seal)


@plant
def last_output_dropped_before_its_slice_is_journalled(patch: pytest.MonkeyPatch) -> None:
    real = SimPartition.confirm

    def confirm(self: SimPartition, slice_no: int, trim: int) -> None:
        real(self, slice_no if self.backs_up else slice_no + 1, trim)

    patch.setattr(SimPartition, "confirm", confirm)


@plant
def slice_exposed_before_it_is_journalled(patch: pytest.MonkeyPatch) -> None:
    real = Controller._commit

    def commit(self: Controller, *args: Any) -> list[Command]:
        write, expose, *rest = real(self, *args)
        assert isinstance(write, WriteSlice)
        return [expose, write, *rest]

    patch.setattr(Controller, "_commit", commit)


@plant
def batch_finished_before_its_last_slice(patch: pytest.MonkeyPatch) -> None:
    real = SliceLedger._chunks_left
    patch.setattr(SliceLedger, "_chunks_left", lambda self, *args: max(0, real(self, *args) - 1))


@plant
def processing_time_is_whatever_the_clock_says(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProcessingTime, "at", lambda self, now_ms, wall_ms: wall_ms)


# -- duplicates and completeness ------------------------------------------------------------------


@plant
def repeated_slice_applied_again(patch: pytest.MonkeyPatch) -> None:
    real = SimPartition.apply

    def apply(self: SimPartition, plan: SlicePlan, inputs: Sequence[Any]) -> Output:
        self.outputs.pop(plan.number, None)
        return real(self, plan, inputs)

    patch.setattr(SimPartition, "apply", apply)


@plant
def repeated_packets_added_up(patch: pytest.MonkeyPatch) -> None:
    real = SimNode._deliver

    def deliver(self: SimNode, bundle: Bundle) -> None:
        kept = self.inbox.get((bundle.slice, bundle.edge), {}).get(bundle.source)
        real(self, bundle)
        if kept is not None:
            for index, rows in bundle.packets.items():
                kept.packets[index] = [*kept.packets.get(index, []), *rows]

    patch.setattr(SimNode, "_deliver", deliver)


@plant
def incomplete_slice_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimNode, "_missing", lambda self, *args: None)


@plant
def slice_sealed_twice(patch: pytest.MonkeyPatch) -> None:
    real = SimNode._seal

    def seal(self: SimNode, plan: SlicePlan) -> None:
        for partition in self.partitions.values():
            partition.sealed = 0
        real(self, plan)

    patch.setattr(SimNode, "_seal", seal)


# -- fencing --------------------------------------------------------------------------------------


@plant
def old_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    def kept(self: SimNode, call: Recover, mine: dict[PartitionId, int]) -> dict[Any, Any]:
        found = {p: x for p, x in self.partitions.items() if p in mine}
        for partition in found.values():
            partition.epoch = mine[partition.id]
        return found if call.driver == self._driver else {}

    patch.setattr(SimNode, "_kept", kept)


@plant
def old_mapping_version_accepted(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: SimNode, plan: SlicePlan) -> bool:
        return self.mapping is not None and plan.number >= self._notes.slice

    patch.setattr(SimNode, "_is_current", is_current)


@plant
def old_slice_accepted(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: SimNode, plan: SlicePlan) -> bool:
        self._notes.slice = min(self._notes.slice, plan.number)
        return self.mapping is not None and self.mapping.version == plan.mapping

    patch.setattr(SimNode, "_is_current", is_current)


@plant
def old_driver_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimNode, "_refuse_older", lambda self, run: None)


@plant
def partitions_of_an_earlier_driver_kept(patch: pytest.MonkeyPatch) -> None:
    def kept(self: SimNode, call: Recover, mine: dict[PartitionId, int]) -> dict[Any, Any]:
        if call.driver == self._driver:
            return {p: x for p, x in self.partitions.items() if mine.get(p) == x.epoch}
        found = {p: x for p, x in self.partitions.items() if p in mine}
        for partition in found.values():
            partition.epoch = mine[partition.id]
        return found

    patch.setattr(SimNode, "_kept", kept)


@plant
def epochs_used_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    real = Disk.take_over

    def take_over(self: Disk) -> Past:
        return replace(real(self), epochs={})

    patch.setattr(Disk, "take_over", take_over)


# -- recovery -------------------------------------------------------------------------------------


def patch_plan(patch: pytest.MonkeyPatch, change: Callable[[RecoveryPlan], RecoveryPlan]) -> None:
    real = controller_module.plan_recovery
    patch.setattr(controller_module, "plan_recovery", lambda *args: change(real(*args)))


@plant
def shadow_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda plan: replace(plan, shadows=frozenset(sorted(plan.shadows)[1:])))


@plant
def sender_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda plan: replace(plan, senders=frozenset(sorted(plan.senders)[1:])))


@plant
def backups_asked_for_that_begin_too_late(patch: pytest.MonkeyPatch) -> None:
    def covers(self: BackupLedger, partition: PartitionId, first: int, mapping: Mapping) -> bool:
        chosen = self.chosen(mapping)
        return chosen is None or partition in chosen

    patch.setattr(BackupLedger, "covers", covers)


@plant
def backups_counted_from_before_they_began(patch: pytest.MonkeyPatch) -> None:
    real = BackupLedger.choose

    def choose(self: BackupLedger, *args: Any) -> NoteBackups | None:
        before = dict(self._from)
        choice = real(self, *args)
        self._from = before
        return choice

    patch.setattr(BackupLedger, "choose", choose)


@plant
def replay_begins_one_slice_late(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda plan: replace(plan, slices=plan.slices[1:]))


@plant
def replay_ends_one_slice_early(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda plan: replace(plan, slices=plan.slices[:-1]))


@plant
def state_restored_from_the_older_cut(patch: pytest.MonkeyPatch) -> None:
    """… and replayed from the newer one."""
    real = CheckpointLedger.written

    def written(self: CheckpointLedger, reports: Iterable[CheckpointWritten]) -> Cut | None:
        before = self.cut
        found = real(self, reports)
        if found is not None and before is not None:
            self.cut = found = replace(found, files=before.files)
        return found

    patch.setattr(CheckpointLedger, "written", written)


@plant
def replay_under_another_time(patch: pytest.MonkeyPatch) -> None:
    real = SliceRecord.plan

    def plan(self: SliceRecord, mapping: int) -> SlicePlan:
        return replace(real(self, mapping), processing_ms=self.processing_ms + 1)

    patch.setattr(SliceRecord, "plan", plan)


@plant
def slice_run_again_under_another_time(patch: pytest.MonkeyPatch) -> None:
    real = Controller._interrupt

    def interrupt(self: Controller, logged: int | None) -> None:
        real(self, logged)
        if self._again is not None:
            self._again = replace(self._again, processing_ms=self._again.processing_ms + 1)

    patch.setattr(Controller, "_interrupt", interrupt)


@plant
def delta_of_a_cut_given_up_left_out(patch: pytest.MonkeyPatch) -> None:
    real = CheckpointLedger.written

    def written(self: CheckpointLedger, reports: Iterable[CheckpointWritten]) -> Cut | None:
        heard = [r for r in reports if r.slice == self._sealed]
        return real(self, [replace(r, after=self._newest.get(r.partition, 0)) for r in heard])

    patch.setattr(CheckpointLedger, "written", written)


@plant
def chain_goes_on_with_a_new_owner(patch: pytest.MonkeyPatch) -> None:
    """A cut is not given up when a partition it waits for is lost."""
    real = CheckpointLedger.installed

    def installed(self: CheckpointLedger, partitions: Any, mapping: Any) -> None:
        missing, self._missing = self._missing, set()
        real(self, partitions, mapping)
        self._missing = missing - set(partitions)

    patch.setattr(CheckpointLedger, "installed", installed)


@plant
def batch_read_again_into_a_log_that_was_begun(patch: pytest.MonkeyPatch) -> None:
    real = Controller._interrupt

    def interrupt(self: Controller, logged: int | None) -> None:
        running = self._running
        real(self, logged)
        if running is not None and self._again is not None:
            self._again = replace(self._again, attempt=running.attempt)

    patch.setattr(Controller, "_interrupt", interrupt)


@plant
def half_a_log_taken_for_the_whole(patch: pytest.MonkeyPatch) -> None:
    real = Controller._interrupt

    def interrupt(self: Controller, logged: int | None) -> None:
        real(self, 1 if logged is None else logged)

    patch.setattr(Controller, "_interrupt", interrupt)


# -- found by the simulator, mended since ---------------------------------------------------------


@plant
def attempts_counted_per_slice(patch: pytest.MonkeyPatch) -> None:
    """A source task that nobody waits for any more deletes logs of later slices."""

    def next_attempt(self: Controller) -> int:
        plan = self._running or self._again
        return 0 if plan is None or plan.feed is not Feed.LIVE else plan.attempt + 1

    patch.setattr(Controller, "_next_attempt", next_attempt)


@plant
def torn_delta_of_a_shadow_stays_in_the_chain(patch: pytest.MonkeyPatch) -> None:
    real = Controller._on_restore_failed

    def on_restore_failed(self: Controller, event: Any) -> list[Command]:
        if self._recovery is not None:
            self._recovery = replace(self._recovery, shadows=frozenset())
        return real(self, event)

    patch.setattr(Controller, "_on_restore_failed", on_restore_failed)


@plant
def replaced_process_without_partitions_ignored(patch: pytest.MonkeyPatch) -> None:
    real = Controller._reassign

    def reassign(self: Controller, lost: frozenset[PartitionId], **_: bool) -> list[Command]:
        return real(self, lost)

    patch.setattr(Controller, "_reassign", reassign)


@plant
def silent_partition_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    """A process was replaced in its first recovery, and a late call gave it half of it."""
    patch.setattr(Controller, "_silent", lambda self, reports: frozenset())


@plant
def staged_rows_of_two_attempts_in_one_place(patch: pytest.MonkeyPatch) -> None:
    real = Disk.staged_path
    patch.setattr(Disk, "staged_path", staticmethod(lambda name, staging: real(name, 0)))


# -- online adjustment ----------------------------------------------------------------------------


@plant
def mapping_switched_without_waiting_for_the_cut(patch: pytest.MonkeyPatch) -> None:
    real = Controller._adjust

    def adjust(self: Controller) -> list[Command]:
        change, newest = self._change, self.newest
        if change is not None and change.prepared and newest and self._checkpoints.cut:
            self._wishes.done()
            self._layouts.reset(change.mapping.groups)
            return self._recover(change.moved, change.mapping, change.what)
        return real(self)

    patch.setattr(Controller, "_adjust", adjust)


@plant
def prepared_state_installed_without_the_last_delta(patch: pytest.MonkeyPatch) -> None:
    real = SimPreparations.take

    def take(self: SimPreparations, pid: PartitionId, epoch: int, plan: RecoveryPlan) -> Any:
        partition, _ = real(self, pid, epoch, plan)
        return partition, set(plan.files.get(pid, ()))

    patch.setattr(SimPreparations, "take", take)


@plant
def prepared_state_of_a_change_given_up_used(patch: pytest.MonkeyPatch) -> None:
    """… though it was loaded for other key groups, or from files that do not fit."""

    def take(self: SimPreparations, pid: PartitionId, epoch: int, plan: RecoveryPlan) -> Any:
        found = self._loading.pop(pid)
        if not found.done or found.failed:
            raise KeyError(pid)
        found.partition.epoch = epoch
        return found.partition, set(found.files)

    def begin(self: SimPreparations, plan: RecoveryPlan, mine: Any, empty: Any) -> Any:
        kept = dict(self._loading)
        loads = real(self, plan, mine, empty)
        self._loading |= kept
        return loads

    real = SimPreparations.begin
    patch.setattr(SimPreparations, "begin", begin)
    patch.setattr(SimPreparations, "take", take)


def patch_adjust(patch: pytest.MonkeyPatch, change: Callable[[Mapping, Mapping], Mapping]) -> None:
    real = elasticity.adjust
    patch.setattr(elasticity, "adjust", lambda before, *args: change(before, real(before, *args)))


@plant
def epoch_kept_after_a_move(patch: pytest.MonkeyPatch) -> None:
    def kept(before: Mapping, after: Mapping) -> Mapping:
        owners = {
            p: replace(o, epoch=before.owners[p].epoch if p in before.owners else o.epoch)
            for p, o in after.owners.items()
        }
        return replace(after, owners=owners)

    patch_adjust(patch, kept)


@plant
def epoch_of_a_removed_partition_used_again(patch: pytest.MonkeyPatch) -> None:
    def anew(before: Mapping, after: Mapping) -> Mapping:
        owners = {
            p: o if p in before.owners else replace(o, epoch=1) for p, o in after.owners.items()
        }
        return replace(after, owners=owners)

    patch_adjust(patch, anew)


@plant
def moved_key_groups_kept_at_the_old_owner(patch: pytest.MonkeyPatch) -> None:
    real = SimNode._restored

    def restored(self: SimNode, plan: RecoveryPlan, pid: PartitionId, epoch: int) -> SimPartition:
        made = real(self, plan, pid, epoch)
        before = self.partitions.get(pid)
        if before is not None:
            made._hashes = {**before._hashes, **made._hashes}
        return made

    patch.setattr(SimNode, "_restored", restored)


@plant
def partition_with_other_key_groups_not_installed(patch: pytest.MonkeyPatch) -> None:
    def unchanged(pid: PartitionId, node: NodeId, before: Mapping, groups: Any) -> bool:
        owner = before.owners.get(pid)
        return owner is not None and owner.node == node

    patch.setattr(mapping_module, "_unchanged", unchanged)


@plant
def mapping_journalled_after_it_is_installed(patch: pytest.MonkeyPatch) -> None:
    real = Controller._recover

    def recover(self: Controller, *args: Any) -> list[Command]:
        return real(self, *args)[::-1]

    patch.setattr(Controller, "_recover", recover)


@plant
def node_released_that_still_has_partitions(patch: pytest.MonkeyPatch) -> None:
    def empty(self: Wishes, mapping: Mapping, nodes: Sequence[NodeId]) -> tuple[NodeId, ...]:
        return tuple(n for n in nodes if n in self.drained)

    patch.setattr(Wishes, "empty", empty)


@plant
def drained_node_given_partitions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wishes, "allowed", lambda self, nodes: list(nodes))


@plant
def drained_node_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wishes, "empty", lambda self, mapping, nodes: ())


@plant
def older_cut_replayed_under_the_newer_layout(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since: downstream, rows come in another order."""
    patch.setattr(LayoutLedger, "stage", lambda self, records: (records, self.current, False))


def keep_the_change(patch: pytest.MonkeyPatch, event: type) -> None:
    """What was prepared before the event goes on after it."""
    real = Controller._adjust
    real_handle = Controller.handle

    def handle(self: Controller, heard: Any) -> list[Command]:
        self.__dict__["kept"] = self._change if isinstance(heard, event) else None
        return real_handle(self, heard)

    def adjust(self: Controller) -> list[Command]:
        kept = self.__dict__.pop("kept", None)
        if kept is not None and self.mapping and kept.mapping.version == self.mapping.version + 1:
            self._change = kept
        return real(self)

    patch.setattr(Controller, "handle", handle)
    patch.setattr(Controller, "_adjust", adjust)


@plant
def scaling_lost_behind_one_on_its_way(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since."""
    keep_the_change(patch, ScaleRequested)


@plant
def change_made_that_a_drain_came_after(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since."""
    keep_the_change(patch, DrainRequested)


@plant
def change_counts_on_a_node_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since."""
    keep_the_change(patch, NodesLost)


# -- parallel recovery ----------------------------------------------------------------------------


@plant
def operator_divided_whose_order_others_see(patch: pytest.MonkeyPatch) -> None:
    real = Controller._divide

    def divide(self: Controller, ways: int) -> None:
        self._last = frozenset(c.name for c in self._plan.node_chains)
        real(self, ways)

    patch.setattr(Controller, "_divide", divide)


@plant
def divided_partition_left_out_of_the_recovery(patch: pytest.MonkeyPatch) -> None:
    real = Controller._divide

    def divide(self: Controller, ways: int) -> None:
        lost = self._lost
        real(self, ways)
        self._lost = lost

    patch.setattr(Controller, "_divide", divide)


# -- copies ---------------------------------------------------------------------------------------


@plant
def copy_taken_for_made_though_it_was_cut_short(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since."""
    patch.setattr(Controller, "_drop_copies", lambda self, partitions: None)


@plant
def promoted_copy_does_not_send_its_backups(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since."""
    patch_plan(patch, lambda plan: replace(plan, senders=plan.senders - plan.promoted))


@plant
def copy_gets_no_packets(patch: pytest.MonkeyPatch) -> None:
    from anabranch.sim import node, sources

    real = node.cut

    def cut(rows: Any, edge: Any, mapping: Mapping, only: Any) -> Any:
        return real(rows, edge, replace(mapping, copies={}), only)

    patch.setattr(node, "cut", cut)
    patch.setattr(sources, "cut", cut)
