"""Bugs to plant in what a node decides (`node/protocol`): one rule taken out, or bent, each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from plants import PLANTS, plant

from anabranch.model.ids import PartitionId
from anabranch.model.slices import SlicePlan, Writes
from anabranch.node.protocol import source_task
from anabranch.node.protocol.carried import Delta, Share
from anabranch.node.protocol.exchange import Exchange, Inbox, Parcel, SideFacts
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import RecoverRequest, WaveRequest
from anabranch.node.protocol.notes import SliceNotes
from anabranch.node.protocol.partition import Output, Partition
from anabranch.node.protocol.preparation import Preparations
from anabranch.sim.payload import SimJob, SimState

__all__ = ["PLANTS"]  # all of them: these add their own

# -- packets --------------------------------------------------------------------------------------


@plant
def packets_of_past_slices_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbox, "drop", lambda self, upto: None)


@plant
def packets_dropped_a_slice_early(patch: pytest.MonkeyPatch) -> None:
    real = Inbox.drop
    patch.setattr(Inbox, "drop", lambda self, upto: real(self, upto + 1))


@plant
def packets_in_the_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    def packets(self: Inbox[Any], slice_no: int, edges: Any, partition: int) -> Any:
        found: dict[int, list[Any]] = {}
        for edge in edges:
            for bundle in self._bundles.get((slice_no, edge), {}).values():
                rows = bundle.packets.of(partition) if bundle.packets is not None else None
                if rows is not None:
                    found.setdefault(edge, []).append(rows)
        return found

    patch.setattr(Inbox, "packets", packets)


@plant
def routes_of_the_placement_before_used(patch: pytest.MonkeyPatch) -> None:
    routes: dict[Any, Any] = {}
    real = Exchange._route_of

    def route_of(self: Exchange[Any], edge: Any, nodes: Any) -> Any:
        return routes.setdefault((id(self._job), edge.id, nodes), real(self, edge, nodes))

    patch.setattr(Exchange, "_route_of", route_of)


@plant
def sources_counted_by_the_first_edge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "sources_of", lambda self, edge, tasks: min(1, tasks))


# -- slices ---------------------------------------------------------------------------------------


@plant
def output_of_a_copy_sent_too(patch: pytest.MonkeyPatch) -> None:
    from anabranch.model.placement import Placement

    patch.setattr(Placement, "copied_by", lambda self, node: {})


@plant
def answer_of_a_wave_before_kept(patch: pytest.MonkeyPatch) -> None:
    """What was incomplete stays so, though the wave was run again."""
    patch.setattr(SliceNotes, "forget", lambda self, partition: None)


@plant
def state_changed_although_the_slice_is_incomplete(patch: pytest.MonkeyPatch) -> None:
    real = Host._apply

    def apply(self: Host[Any], partition: Partition[Any], plan: SlicePlan, tasks: int) -> Any:
        output = real(self, partition, plan, tasks)
        if output is None and partition.next_slice == plan.number:
            edges = [e.id for e in partition.chain.inputs]
            packets = self.hands[0].inbox.packets(plan.number, edges, partition.id.index)
            partition.state.apply(plan, packets)
        return output

    patch.setattr(Host, "_apply", apply)


# -- checkpoints ----------------------------------------------------------------------------------


@plant
def slice_sealed_that_has_problems(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SliceNotes, "problems", property(lambda self: False))


@plant
def delta_written_as_the_whole(patch: pytest.MonkeyPatch) -> None:
    real = Partition.seal

    def seal(self: Partition[Any], writes: Writes = Writes.FOLDED) -> tuple[bool, Any]:
        _, content = real(self, writes)
        return True, content

    patch.setattr(Partition, "seal", seal)


@plant
def nothing_written_though_time_has_passed(patch: pytest.MonkeyPatch) -> None:
    real = SimState.seal

    def seal(self: SimState) -> Delta:
        delta = real(self)
        return replace(delta, changed=bool(delta.rows) and delta.rows > 1)

    patch.setattr(SimState, "seal", seal)


@plant
def promoted_copy_goes_on_with_deltas(patch: pytest.MonkeyPatch) -> None:
    real = Partition.take_over

    def take_over(self: Partition[Any], epoch: int) -> None:
        real(self, epoch)
        self._delta_rows = 0

    patch.setattr(Partition, "take_over", take_over)


@plant
def spilled_backups_never_deleted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Output, "drop", lambda self: None)


# -- recoveries -----------------------------------------------------------------------------------


@plant
def later_part_begun_without_the_first(patch: pytest.MonkeyPatch) -> None:
    def is_new(self: Host[Any], driver: str, version: int, part: int) -> bool:
        if part > 0:
            self._driver = driver
        return driver != self._driver or (version, part) > self._recovery

    patch.setattr(Host, "_is_new", is_new)


@plant
def recovery_installed_again(patch: pytest.MonkeyPatch) -> None:
    """A late call of a recovery that is over takes its partitions back to the cut."""
    real = Host._is_new

    def is_new(self: Host[Any], driver: str, version: int, part: int) -> bool:
        again = driver == self._driver and (version, part) == self._recovery and part == 0
        return again or real(self, driver, version, part)

    patch.setattr(Host, "_is_new", is_new)


@plant
def restored_from_one_file_only(patch: pytest.MonkeyPatch) -> None:
    real = SimState.restore

    def restore(self: SimState, files: Any, owned: Any, gently: bool = False) -> None:
        real(self, list(files)[:1], owned, gently)

    patch.setattr(SimState, "restore", restore)


@plant
def restored_with_rows_of_other_groups(patch: pytest.MonkeyPatch) -> None:
    real = SimState.restore

    def restore(self: SimState, files: Any, owned: Any, gently: bool = False) -> None:
        real(self, files, range(100), gently)

    patch.setattr(SimState, "restore", restore)


@plant
def shadows_answer_as_partitions(patch: pytest.MonkeyPatch) -> None:
    real = Host._install

    def install(self: Host[Any], request: RecoverRequest) -> float:
        took_s = real(self, request)
        self.partitions |= self.shadows
        return took_s

    patch.setattr(Host, "_install", install)


@plant
def backup_resent_of_one_slice_less(patch: pytest.MonkeyPatch) -> None:
    real = Host._resend

    def resend(self: Host[Any], pid: PartitionId, request: RecoverRequest) -> Iterator[Any]:
        shorter = replace(request, plan=replace(request.plan, slices=request.plan.slices[:-1]))
        return real(self, pid, shorter)

    patch.setattr(Host, "_resend", resend)


@plant
def torn_file_taken_for_an_empty_one(patch: pytest.MonkeyPatch) -> None:
    from anabranch.errors import StorageError

    real = SimState.restore

    def restore(self: SimState, files: Any, owned: Any, gently: bool = False) -> None:
        for file in files:
            try:
                real(self, [file], owned, gently)
            except StorageError:
                continue

    patch.setattr(SimState, "restore", restore)


@plant
def state_loaded_ahead_shared_by_two(patch: pytest.MonkeyPatch) -> None:
    """It stays where it was loaded, and is taken again when it is out of date."""

    def take(self: Preparations[Any], pid: PartitionId, epoch: int, plan: Any) -> Any:
        found = self._loading[pid]
        if not found.done or found.failed:
            raise KeyError(pid)
        return found.state, set(plan.files.get(pid, ()))

    patch.setattr(Preparations, "take", take)
    patch.setattr(Preparations, "clear", lambda self: None)


# -- source tasks ---------------------------------------------------------------------------------


@plant
def source_task_reads_its_batch_again(patch: pytest.MonkeyPatch) -> None:
    """… in another order, though the slice is logged."""
    real = source_task._share

    def share(job: Any, request: Any, task: int, batch: Any) -> Any:
        if batch and job.read_log(request.plan, task) is not None:
            turned = {s: tuple(reversed(rows)) for s, rows in batch.items()}
            return job.compute(request, task, turned)[0], 0
        return real(job, request, task, batch)

    patch.setattr(source_task, "_share", share)


@plant
def later_slices_of_a_share_not_finished(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimJob, "finish_log", lambda self, plan, task, share: None)


@plant
def missing_log_taken_for_an_empty_one(patch: pytest.MonkeyPatch) -> None:
    def logged(job: Any, plan: Any, task: int) -> Share[Any] | None:
        found = job.read_log(plan, task)
        return found if found is not None or plan.feed.value == "live" else source_task.NOTHING

    patch.setattr(source_task, "_logged", logged)
    patch.setattr(SimJob, "finish_log", lambda self, plan, task, share: None)


@plant
def replay_tasks_leave_the_last_log_out(patch: pytest.MonkeyPatch) -> None:
    real = source_task.run_replay_task

    def run_replay_task(job: Any, request: Any, task: int) -> Any:
        return real(job, replace(request, tasks=request.tasks + 1), task)

    from anabranch.sim import cluster

    patch.setattr(cluster, "run_replay_task", run_replay_task)


@plant
def facts_of_source_tasks_lost(patch: pytest.MonkeyPatch) -> None:
    real = SliceNotes.take

    def take(self: SliceNotes, facts: SideFacts) -> None:
        real(self, replace(facts, sources=facts.sources[1:]))

    patch.setattr(SliceNotes, "take", take)


@plant
def wave_of_another_attempt_taken(patch: pytest.MonkeyPatch) -> None:
    """A repeated wave begins with what is left in the inbox, whoever sent it."""
    real = Host.wave

    def wave(self: Host[Any], request: WaveRequest, parcels: Sequence[Parcel[Any]]) -> Any:
        if self._exchange is not None and request.depth == 1:
            self._exchange._generation = max(self._exchange._generation, request.generation)
            for parcel in parcels:
                for bundle in parcel.bundles:
                    self.hands[0].inbox.add(bundle)
        return real(self, request, parcels)

    patch.setattr(Host, "wave", wave)
