"""Bugs to plant: each breaks one rule of the protocol, in the controller, in what it plans, or in
the simulated node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from anabranch.control import rebuild as rebuild_module
from anabranch.control import verdict
from anabranch.control import wishes as wishes_module
from anabranch.control.adjustment import Adjustment, AdjustmentState
from anabranch.control.controller import Controller
from anabranch.control.ledgers.backups import BackupLedger
from anabranch.control.ledgers.checkpoints import CheckpointLedger
from anabranch.control.ledgers.layouts import LayoutLedger
from anabranch.control.ledgers.owners import OwnerLedger
from anabranch.control.ledgers.slices import SliceLedger
from anabranch.control.policies.processing_time import ProcessingTime
from anabranch.control.rebuild import Rebuild
from anabranch.control.schedule import Schedule, SliceState
from anabranch.control.settings import Past
from anabranch.control.wishes import Wishes
from anabranch.driver.holding import Holding
from anabranch.model import placement as placement_module
from anabranch.model.commands import Command, NoteBackups, WriteSlice
from anabranch.model.events import DrainRequested, NodesLost, ScaleRequested
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.recovery import Cause, RecoveryPlan
from anabranch.model.reports import CheckpointWritten, Staged
from anabranch.model.slices import Cut, Feed, SlicePlan, SliceRecord
from anabranch.node.protocol import host as host_module
from anabranch.node.protocol.carried import Job, Sealed
from anabranch.node.protocol.exchange import Bundle, Inbox
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import RecoverRequest
from anabranch.node.protocol.partition import Output, Partition
from anabranch.node.protocol.preparation import Preparations
from anabranch.node.protocol.writing import CheckpointWriter
from anabranch.sim.payload import ByPartition, SimJob, encode
from anabranch.sim.sinks import SimSink
from anabranch.storage import source_log
from anabranch.storage.checkpoint_files import checkpoint_name

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(function: Plant) -> Plant:
    PLANTS[function.__name__] = function
    return function


# -- trimming and acknowledging -------------------------------------------------------------------


@plant
def backups_trimmed_one_slice_early(patch: pytest.MonkeyPatch) -> None:
    real = Schedule._run

    def run(self: Schedule, plan: SlicePlan) -> list[Command]:
        return [replace(c, trim=c.trim + 1) for c in real(self, plan)]  # type: ignore[union-attr]

    patch.setattr(Schedule, "_run", run)


@plant
def log_trimmed_one_slice_early(patch: pytest.MonkeyPatch) -> None:
    real = source_log.trim
    patch.setattr(source_log, "trim", lambda store, below: real(store, below + 1))


@plant
def files_of_the_older_cut_deleted(patch: pytest.MonkeyPatch) -> None:
    def keep(self: CheckpointLedger) -> frozenset[str]:
        return (
            frozenset(f for fs in self.cut.files.values() for f in fs) if self.cut else frozenset()
        )

    patch.setattr(CheckpointLedger, "keep_files", property(keep))


@plant
def backups_never_trimmed(patch: pytest.MonkeyPatch) -> None:
    real = Schedule._run

    def run(self: Schedule, plan: SlicePlan) -> list[Command]:
        return [replace(c, trim=0) for c in real(self, plan)]  # type: ignore[union-attr]

    patch.setattr(Schedule, "_run", run)


@plant
def checkpoint_acknowledged_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    real = CheckpointWriter.submit

    def submit(self: CheckpointWriter, job: Job[Any], sealed: Sealed) -> None:
        real(self, job, sealed)
        pid, number = sealed.partition, sealed.slice
        path = checkpoint_name(pid, number, sealed.epoch)
        self._written[(pid, number)] = CheckpointWritten(
            pid, number, sealed.epoch, path, sealed.full, 0, sealed.before
        )

    patch.setattr(CheckpointWriter, "submit", submit)


@plant
def last_output_dropped_before_its_slice_is_journalled(patch: pytest.MonkeyPatch) -> None:
    real = Partition.confirm

    def confirm(self: Partition[Any], slice_no: int, trim: int) -> None:
        real(self, slice_no if self.backs_up else slice_no + 1, trim)

    patch.setattr(Partition, "confirm", confirm)


@plant
def slice_exposed_before_it_is_journalled(patch: pytest.MonkeyPatch) -> None:
    real = Schedule._commit

    def commit(self: Schedule, *args: Any) -> list[Command]:
        write, expose, *rest = real(self, *args)
        assert isinstance(write, WriteSlice)
        return [expose, write, *rest]

    patch.setattr(Schedule, "_commit", commit)


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
    real = Partition.apply

    def apply(self: Partition[Any], plan: SlicePlan, packets: Any) -> Output[Any]:
        self.outputs.pop(plan.number, None)
        return real(self, plan, packets)

    patch.setattr(Partition, "apply", apply)


@plant
def repeated_packets_added_up(patch: pytest.MonkeyPatch) -> None:
    real = Inbox.add

    def add(self: Inbox[Any], bundle: Bundle[Any]) -> None:
        kept = self._bundles.get((bundle.slice, bundle.edge), {}).get(bundle.source)
        real(self, bundle)
        if kept is not None and kept.packets is not None and bundle.packets is not None:
            assert isinstance(kept.packets, ByPartition)
            assert isinstance(bundle.packets, ByPartition)
            both = [kept.packets, bundle.packets]
            twice = ByPartition({i: tuple(r for b in both for r in b[i]) for i in both[0]})
            self._bundles[(bundle.slice, bundle.edge)][bundle.source] = replace(
                bundle, packets=twice
            )

    patch.setattr(Inbox, "add", add)


@plant
def incomplete_slice_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbox, "missing", lambda self, *args: None)


@plant
def slice_sealed_twice(patch: pytest.MonkeyPatch) -> None:
    real = Host._seal

    def seal(self: Host[Any], plan: SlicePlan) -> None:
        for partition in self.partitions.values():
            partition.sealed = 0
        real(self, plan)

    patch.setattr(Host, "_seal", seal)


# -- fencing --------------------------------------------------------------------------------------


@plant
def old_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    def kept(partitions: Any, plan: RecoveryPlan, node: Any, same_driver: bool) -> Any:
        mine = plan.placement.held_by(node)
        found = {p: x for p, x in partitions.items() if p in mine}
        for partition in found.values():
            partition.epoch = mine[partition.id]
        return found if same_driver else {}

    patch.setattr(host_module, "kept_of", kept)


@plant
def old_placement_version_accepted(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: Host[Any], plan: SlicePlan) -> bool:
        return self.placement is not None and plan.number >= self._notes.slice

    patch.setattr(Host, "_is_current", is_current)


@plant
def old_slice_accepted(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: Host[Any], plan: SlicePlan) -> bool:
        self._notes.slice = min(self._notes.slice, plan.number)
        return self.placement is not None and self.placement.version == plan.placement

    patch.setattr(Host, "_is_current", is_current)


@plant
def old_driver_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Host, "_refuse_strange", lambda self, request: None)


@plant
def partitions_of_an_earlier_driver_kept(patch: pytest.MonkeyPatch) -> None:
    def kept(partitions: Any, plan: RecoveryPlan, node: Any, same_driver: bool) -> Any:
        mine = plan.placement.held_by(node)
        if same_driver:
            return {p: x for p, x in partitions.items() if mine.get(p) == x.epoch}
        found = {p: x for p, x in partitions.items() if p in mine}
        for partition in found.values():
            partition.take_over(mine[partition.id])
        return found

    patch.setattr(host_module, "kept_of", kept)


@plant
def epochs_used_again_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    real = Holding._resume

    def resume(self: Holding, dropped: Any) -> Past:
        return replace(real(self, dropped), epochs={})

    patch.setattr(Holding, "_resume", resume)


# -- recovery -------------------------------------------------------------------------------------


def patch_plan(patch: pytest.MonkeyPatch, change: Callable[[RecoveryPlan], RecoveryPlan]) -> None:
    real = rebuild_module.plan_recovery
    patch.setattr(rebuild_module, "plan_recovery", lambda *args: change(real(*args)))


@plant
def shadow_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda plan: replace(plan, shadows=frozenset(sorted(plan.shadows)[1:])))


@plant
def sender_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda plan: replace(plan, senders=frozenset(sorted(plan.senders)[1:])))


@plant
def backups_asked_for_that_begin_too_late(patch: pytest.MonkeyPatch) -> None:
    def covers(
        self: BackupLedger, partition: PartitionId, first: int, placement: Placement
    ) -> bool:
        chosen = self.chosen(placement)
        return chosen is None or partition in chosen

    patch.setattr(BackupLedger, "covers", covers)


@plant
def backups_counted_from_before_they_began(patch: pytest.MonkeyPatch) -> None:
    real = BackupLedger.choose

    def choose(self: BackupLedger, *args: Any) -> NoteBackups | None:
        before = dict(self.first_kept)
        choice = real(self, *args)
        self.first_kept = before
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
            self.cuts[0] = found = replace(found, files=before.files)
        return found

    patch.setattr(CheckpointLedger, "written", written)


@plant
def replay_under_another_time(patch: pytest.MonkeyPatch) -> None:
    real = SliceRecord.plan

    def plan(self: SliceRecord, placement: int) -> SlicePlan:
        return replace(real(self, placement), processing_ms=self.processing_ms + 1)

    patch.setattr(SliceRecord, "plan", plan)


@plant
def slice_run_again_under_another_time(patch: pytest.MonkeyPatch) -> None:
    real = Schedule.interrupt

    def interrupt(self: Schedule, logged: int | None) -> None:
        real(self, logged)
        if self.state is SliceState.CUT_SHORT and self.slice is not None:
            self.slice = replace(self.slice, processing_ms=self.slice.processing_ms + 1)

    patch.setattr(Schedule, "interrupt", interrupt)


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

    def installed(self: CheckpointLedger, partitions: Any, placement: Any) -> None:
        missing, self._missing = self._missing, set()
        real(self, partitions, placement)
        self._missing = missing - set(partitions)

    patch.setattr(CheckpointLedger, "installed", installed)


@plant
def batch_read_again_into_a_log_that_was_begun(patch: pytest.MonkeyPatch) -> None:
    real = Schedule.interrupt

    def interrupt(self: Schedule, logged: int | None) -> None:
        before = self.slice
        real(self, logged)
        if before is not None and self.slice is not None:
            self.slice = replace(self.slice, attempt=before.attempt)

    patch.setattr(Schedule, "interrupt", interrupt)


@plant
def half_a_log_taken_for_the_whole(patch: pytest.MonkeyPatch) -> None:
    real = Schedule.interrupt

    def interrupt(self: Schedule, logged: int | None) -> None:
        real(self, 1 if logged is None else logged)

    patch.setattr(Schedule, "interrupt", interrupt)


# -- found by the simulator, mended since ---------------------------------------------------------


@plant
def attempts_counted_per_slice(patch: pytest.MonkeyPatch) -> None:
    """A source task that nobody waits for any more logs slices of a later batch."""

    def next_attempt(self: Schedule) -> int:
        plan = self.slice
        return 0 if plan is None or plan.feed is not Feed.LIVE else plan.attempt + 1

    patch.setattr(Schedule, "_next_attempt", next_attempt)


@plant
def torn_delta_of_a_shadow_stays_in_the_chain(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild.torn

    def torn(self: Rebuild, error: Any) -> list[Command]:
        if self.running is not None:
            self.running = replace(self.running, shadows=frozenset())
        return real(self, error)

    patch.setattr(Rebuild, "torn", torn)


@plant
def replaced_process_without_partitions_ignored(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild.again

    def again(self: Rebuild, lost: frozenset[PartitionId], cause: Cause) -> list[Command]:
        return real(self, lost, Cause.NODES_LOST)

    patch.setattr(Rebuild, "again", again)


@plant
def silent_partition_not_tried_again(patch: pytest.MonkeyPatch) -> None:
    """A process was replaced in its first recovery, and a late call gave it half of it."""
    patch.setattr(verdict, "silent", lambda *args: frozenset())


@plant
def staged_rows_of_two_attempts_in_one_place(patch: pytest.MonkeyPatch) -> None:
    def stage(self: SimSink, name: str, table: Any, slice_no: int, run: int, writer: str) -> Staged:
        path = self._staging() / f"{slice_no}-{run}" / f"{writer}.staged"
        self.home.store.put(str(path), [encode(table)])
        return Staged(name, writer, len(table), path=str(path))

    patch.setattr(SimSink, "stage", stage)


# -- online adjustment ----------------------------------------------------------------------------


@plant
def placement_switched_without_waiting_for_the_cut(patch: pytest.MonkeyPatch) -> None:
    real = Adjustment.step

    def step(self: Adjustment) -> list[Command]:
        change, ledgers = self.change, self._ledgers
        sealing = self.state is AdjustmentState.SEALING and ledgers.checkpoints.cut
        if change is not None and sealing and ledgers.slices.newest:
            ledgers.layouts.reset(change.placement.groups)
            return self._switch(change)
        return real(self)

    patch.setattr(Adjustment, "step", step)


@plant
def prepared_state_installed_without_the_last_delta(patch: pytest.MonkeyPatch) -> None:
    real = Preparations.take

    def take(self: Preparations[Any], pid: PartitionId, epoch: int, plan: RecoveryPlan) -> Any:
        state, _ = real(self, pid, epoch, plan)
        return state, set(plan.files.get(pid, ()))

    patch.setattr(Preparations, "take", take)


@plant
def prepared_state_of_a_change_given_up_used(patch: pytest.MonkeyPatch) -> None:
    """… though it was loaded for other key groups, or from files that do not fit."""
    real = Preparations.begin

    def take(self: Preparations[Any], pid: PartitionId, epoch: int, plan: RecoveryPlan) -> Any:
        found = self._loading.pop(pid)
        if not found.done or found.failed:
            raise KeyError(pid)
        return found.state, set(found.files)

    def begin(self: Preparations[Any], *args: Any) -> None:
        kept = dict(self._loading)
        real(self, *args)
        self._loading |= kept

    patch.setattr(Preparations, "begin", begin)
    patch.setattr(Preparations, "take", take)


def patch_adjust(
    patch: pytest.MonkeyPatch, change: Callable[[Placement, Placement], Placement]
) -> None:
    real = wishes_module.adjust
    patch.setattr(
        wishes_module, "adjust", lambda before, *args: change(before, real(before, *args))
    )


@plant
def epoch_kept_after_a_move(patch: pytest.MonkeyPatch) -> None:
    def kept(before: Placement, after: Placement) -> Placement:
        owners = {
            p: replace(o, epoch=before.owners[p].epoch if p in before.owners else o.epoch)
            for p, o in after.owners.items()
        }
        return replace(after, owners=owners)

    patch_adjust(patch, kept)


@plant
def epoch_of_a_removed_partition_used_again(patch: pytest.MonkeyPatch) -> None:
    def anew(before: Placement, after: Placement) -> Placement:
        owners = {
            p: o if p in before.owners else replace(o, epoch=1) for p, o in after.owners.items()
        }
        return replace(after, owners=owners)

    patch_adjust(patch, anew)


@plant
def moved_key_groups_kept_at_the_old_owner(patch: pytest.MonkeyPatch) -> None:
    real = Host._install

    def install(self: Host[Any], request: RecoverRequest) -> float:
        before = dict(self.partitions)
        took_s = real(self, request)
        for pid, made in self.partitions.items():
            if pid in before and before[pid] is not made:
                made.state.hashes = {**before[pid].state.hashes, **made.state.hashes}
        return took_s

    patch.setattr(Host, "_install", install)


@plant
def partition_with_other_key_groups_not_installed(patch: pytest.MonkeyPatch) -> None:
    def unchanged(pid: PartitionId, node: NodeId, before: Placement, groups: Any) -> bool:
        owner = before.owners.get(pid)
        return owner is not None and owner.node == node

    patch.setattr(placement_module, "_unchanged", unchanged)


@plant
def placement_journalled_after_it_is_installed(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild.begin

    def begin(self: Rebuild, *args: Any) -> list[Command]:
        return real(self, *args)[::-1]

    patch.setattr(Rebuild, "begin", begin)


@plant
def node_released_that_still_has_partitions(patch: pytest.MonkeyPatch) -> None:
    def empty(self: Wishes, placement: Placement, nodes: Sequence[NodeId]) -> tuple[NodeId, ...]:
        return tuple(n for n in nodes if n in self.drained)

    patch.setattr(Wishes, "empty", empty)


@plant
def drained_node_given_partitions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wishes, "allowed", lambda self, nodes: list(nodes))


@plant
def drained_node_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wishes, "empty", lambda self, placement, nodes: ())


@plant
def older_cut_replayed_under_the_newer_layout(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since: downstream, rows come in another order."""
    patch.setattr(LayoutLedger, "stage", lambda self, records: (records, self.current, False))


def keep_the_change(patch: pytest.MonkeyPatch, event: type) -> None:
    """What was prepared before the event goes on after it."""
    real = Adjustment.step
    real_handle = Controller.handle

    def handle(self: Controller, heard: Any, wall_ms: int) -> list[Command]:
        change = self.adjustment.change if isinstance(heard, event) else None
        self.adjustment.__dict__["kept"] = change, self.adjustment.state
        return real_handle(self, heard, wall_ms)

    def step(self: Adjustment) -> list[Command]:
        change, state = self.__dict__.pop("kept", (None, None))
        if (
            change is not None
            and change.placement.version == self._ledgers.owners.placement.version + 1
        ):
            self.change, self.state = change, state
        return real(self)

    patch.setattr(Controller, "handle", handle)
    patch.setattr(Adjustment, "step", step)


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


# -- moves of the machines ------------------------------------------------------------------------


@plant
def loss_not_forgotten_after_the_rebuild(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild.recovered

    def recovered(self: Rebuild, *args: Any) -> list[Command]:
        lost = self.lost
        commands = real(self, *args)
        self.lost |= lost
        return commands

    patch.setattr(Rebuild, "recovered", recovered)


@plant
def state_taken_for_prepared_before_it_is_asked_for(patch: pytest.MonkeyPatch) -> None:
    real = Adjustment._next_change

    def next_change(self: Adjustment) -> Any:
        change = real(self)
        if change is not None:
            self._to(AdjustmentState.SEALING)
        return change

    patch.setattr(Adjustment, "_next_change", next_change)


@plant
def slice_run_while_partitions_are_rebuilt(patch: pytest.MonkeyPatch) -> None:
    placed = property(lambda self: self._ledgers.owners.in_force is not None)
    patch.setattr(Rebuild, "whole", placed)


@plant
def copies_that_took_over_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild.recovered

    def recovered(self: Rebuild, *args: Any) -> list[Command]:
        promoted = self.promoted
        commands = real(self, *args)
        self.promoted |= promoted
        return commands

    patch.setattr(Rebuild, "recovered", recovered)


# -- parallel recovery ----------------------------------------------------------------------------


@plant
def operator_divided_whose_order_others_see(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild._divide

    def divide(self: Rebuild, *arguments: Any) -> Placement:
        self._last = frozenset(c.name for c in self._plan.node_chains)
        return real(self, *arguments)

    patch.setattr(Rebuild, "_divide", divide)


@plant
def divided_partition_left_out_of_the_recovery(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild._divide

    def divide(self: Rebuild, *arguments: Any) -> Placement:
        lost = self.lost
        after = real(self, *arguments)
        self.lost = lost
        return after

    patch.setattr(Rebuild, "_divide", divide)


# -- copies ---------------------------------------------------------------------------------------


@plant
def copy_taken_for_made_though_it_was_cut_short(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since."""
    patch.setattr(OwnerLedger, "drop_copies", lambda self, partitions: None)


@plant
def promoted_copy_does_not_send_its_backups(patch: pytest.MonkeyPatch) -> None:
    """Found by the simulator, mended since."""
    patch_plan(patch, lambda plan: replace(plan, senders=plan.senders - plan.promoted))


@plant
def copy_gets_no_packets(patch: pytest.MonkeyPatch) -> None:
    real = SimJob.cut

    def cut(self: SimJob, rows: Any, route: Any, only: Any) -> Any:
        return real(self, rows, replace(route, placement=replace(route.placement, copies={})), only)

    patch.setattr(SimJob, "cut", cut)


@plant
def progress_kept_of_a_recovery_from_another_cut(patch: pytest.MonkeyPatch) -> None:
    real = Rebuild._going_on

    def going_on(
        self: Rebuild, begun: frozenset[PartitionId], placement: Placement
    ) -> frozenset[PartitionId]:
        self._first = self._ledgers.checkpoints.cut_slice + 1
        return real(self, begun, placement)

    patch.setattr(Rebuild, "_going_on", going_on)


@plant
def progress_kept_of_an_owner_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rebuild, "_going_on", lambda self, begun, placement: begun)
    real = Rebuild.again

    def again(self: Rebuild, lost: frozenset[PartitionId], cause: Cause) -> list[Command]:
        self.lost |= lost
        return real(self, lost if not self.running else frozenset(), cause)

    patch.setattr(Rebuild, "again", again)


@plant
def frontier_of_what_goes_on_set_back(patch: pytest.MonkeyPatch) -> None:
    real = OwnerLedger.advance

    def advance(
        self: OwnerLedger, reports: Any, upto: int, partitions: Any, ahead: Any = ()
    ) -> None:
        real(self, reports, upto, partitions, ahead)
        self.frontier |= dict.fromkeys(ahead, upto - 1)

    patch.setattr(OwnerLedger, "advance", advance)
