"""The partitions of one node and the waves that pass over them.

`wave` takes the blobs that arrived for a node and returns one blob per destination node. What it
cannot run it says ("not hosted", "incomplete", a failure) and goes on: an answer, never a crash,
and never half an input for a later wave. `recover` does the same for a recovery: several slices
at once, for the partitions that are rebuilt only.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from anabranch.errors import AnabranchError, ClusterError, InvariantError, StorageError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.plan import Edge
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import Failure, NodeReport, PartitionReport, SourceReport, Staged
from anabranch.model.slices import SlicePlan
from anabranch.node import activity
from anabranch.node.chain import ChainError
from anabranch.node.checkpoint_writer import CheckpointWriter
from anabranch.node.heartbeat import Heartbeat, Pulse
from anabranch.node.messages import (
    JobSpec,
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    WarmRequest,
    WaveRequest,
)
from anabranch.node.packets import Bundle, Inbox, Route, cut, decode_blob, encode_blob
from anabranch.node.partition import Output, Partition, spill
from anabranch.node.preparation import Preparations
from anabranch.operators.base import SliceTime

BACKUP_MEMORY_BYTES = 256 << 20  # backups of a node above this go to its local disk
Answer = tuple[list[list[Any]], NodeReport | None]
DriverRequest = WaveRequest | RecoverRequest | PrepareRequest | PollRequest


class SliceNotes:
    """What a node has to report about the slice, or the recovery, in hand."""

    def __init__(self, slice_no: int) -> None:
        self.slice = slice_no
        self.partitions: dict[PartitionId, PartitionReport] = {}
        self.incomplete: dict[PartitionId, str] = {}
        self.not_hosted: dict[PartitionId, None] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.sources: dict[int, SourceReport] = {}
        self.staged: dict[tuple[str, str], Staged] = {}
        self.replayed: dict[tuple[int, int], Any] = {}
        self.restore_s = 0.0

    def forget(self, partition: PartitionId) -> None:
        """A wave that is run again answers anew for its partitions."""
        self.incomplete.pop(partition, None)
        self.not_hosted.pop(partition, None)
        self.failures = {k: f for k, f in self.failures.items() if k[0] != str(partition)}

    @property
    def problems(self) -> bool:
        return bool(self.incomplete or self.not_hosted or self.failures)


class Host:
    """Everything a node process owns for one job. One thread calls it; another one writes
    checkpoints."""

    def __init__(
        self, spill_directory: Path | None = None, executor_pid: int | None = None
    ) -> None:
        self._executor_pid = executor_pid
        self._heartbeat: Heartbeat | None = None
        self.incarnation = uuid.uuid4().hex
        self._driver = ""
        self._run = 0
        self._node = NodeId("")
        self._known_spec: tuple[bytes, Any] = (b"", None)
        self._job: JobSpec | None = None
        self._mapping: Mapping | None = None
        self._partitions: dict[PartitionId, Partition] = {}
        self._shadows: dict[PartitionId, Partition] = {}
        self._recovery = (0, 0)  # the newest one installed: version of its mapping, its part
        self._recovering = False  # … until the first wave of a slice after it
        self._inbox = Inbox()
        self._floor = 0  # packets of slices below are late
        self._edges: dict[int, Edge] = {}
        self._routes: dict[tuple[int, tuple[NodeId, ...]], Route] = {}
        self._notes = SliceNotes(0)
        self._writer = CheckpointWriter()
        self._preparations = Preparations()
        self._spill_directory = spill_directory or Path(tempfile.gettempdir()) / self.incarnation
        self._disk_full = False

    def close(self) -> None:
        """The job has ended: what is sealed is still written, then the writer ends too."""
        self._writer.close()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for partition in self._partitions.values():
            partition.forget()

    def join(self) -> None:
        """Wait, after `close`, until nothing is written any more."""
        self._writer.join()

    def warm(self, request: WarmRequest) -> None:
        """Load the job and run its chains once, on no rows."""
        job = pickle.loads(request.spec)
        self.adopt(request.spec, job)
        for program in job.programs.values():
            program.rehearse()
        self._beat_for(request.pulse, request.node)

    def adopt(self, spec: bytes, job: JobSpec) -> None:
        """This is the job that `spec` stands for: a recovery need not load it."""
        self._known_spec = (spec, job)

    def prepare(self, request: PrepareRequest) -> NodeReport:
        """Begin to load what the plan will install here, or go on with it."""
        self._refuse_strange(request)
        plan = request.plan
        self._preparations.begin(
            self._job_of(request.spec), plan, plan.mapping.held_by(request.node)
        )
        return replace(self._report(), node=request.node)

    def _job_of(self, spec: bytes) -> JobSpec:
        known, job = self._known_spec
        if known != spec:
            job = pickle.loads(spec)
            self.adopt(spec, job)
        return cast("JobSpec", job)

    def poll(self, request: PollRequest) -> NodeReport:
        """A report outside of a slice: written checkpoints above all."""
        self._refuse_strange(request)
        return self._report()

    def _refuse_strange(self, request: DriverRequest) -> None:
        """Nothing changes by what an older driver says, or what is meant for another node."""
        if request.run < self._run:
            raise InvariantError(
                f"a driver of generation {request.run} spoke to a node owned by generation "
                f"{self._run}"
            )
        if self._node not in ("", request.node):
            raise ClusterError(
                f"a task for node {request.node} was run on node {self._node}, which has not its "
                "state: Spark did not wait for the node it is pinned to (spark.locality.wait."
                "process is 600s in a session of Anabranch's); nothing was changed, start the job "
                "again",
                node=request.node,
            )

    # -- a wave of a slice ---------------------------------------------------------------------

    def wave(self, request: WaveRequest, blobs: Sequence[Any]) -> Answer:
        """Run one wave; returns a blob (as buffers) per destination node, and the last wave's
        report or None. A call of an earlier slice or mapping comes from a task that nobody waits
        for any more: it changes nothing."""
        self._refuse_strange(request)
        plan = request.plan
        current = self._mapping is not None and self._mapping.version == plan.mapping
        if not current or plan.number < self._notes.slice:
            return _nothing(request.nodes), self._report() if request.last else None
        if plan.number > self._notes.slice:
            self._notes = SliceNotes(plan.number)
        self._recovering = False
        self._shadows.clear()
        self._floor = plan.number
        for partition in self._partitions.values():
            partition.backs_up = request.backups is None or partition.id in request.backups
            partition.confirm(request.confirmed, request.trim)
        self._inbox.drop(request.confirmed)
        for blob in blobs:
            self._receive(blob)
        sent: list[tuple[int, Bundle]] = []
        assert self._mapping is not None
        copies = self._mapping.copied_by(self._node)
        for pid in self._expected(request.depth):
            hosted = self._hosted(pid)
            output = self._apply(hosted, plan, request) if hosted is not None else None
            if pid in copies or hosted is None or output is None:
                continue  # what a copy has to say, its partition says
            if self._stage(hosted, output):
                self._notes.partitions[pid] = output.report
                sent += list(self._route(hosted, output, request.nodes))
        outgoing = self._send(sent, request.node, request.nodes)
        if not request.last:
            return outgoing, None
        if plan.seal and not self._notes.problems:
            self._seal(plan)
        self._spill(request.confirmed)
        return outgoing, self._report()

    def _hosted(self, pid: PartitionId) -> Partition | None:
        self._notes.forget(pid)
        partition = self._partitions.get(pid)
        if partition is None:
            self._notes.not_hosted[pid] = None
        return partition

    def _expected(self, depth: int) -> list[PartitionId]:
        """The partitions the mapping gives to this node at one depth, and the copies."""
        assert self._mapping is not None
        assert self._job is not None
        mine = self._mapping.held_by(self._node)
        return [p for p in mine if self._job.programs[p.chain].chain.depth == depth]

    def _apply(
        self, partition: Partition, plan: SlicePlan, request: WaveRequest | RecoverRequest
    ) -> Output | None:
        """Apply the slice to one partition, or note why not."""
        pid = partition.id
        edges = [e.id for e in partition.program.chain.inputs]
        if not partition.has_applied(plan.number):
            lacking = None
            if partition.next_slice != plan.number:
                lacking = f"it is at slice {partition.next_slice}, not {plan.number}"
            else:
                tasks = request.source_tasks if isinstance(request, WaveRequest) else None
                counts = {e: self._sources_of(e, plan, tasks) for e in edges}
                lacking = self._inbox.missing(plan.number, counts)
            if lacking:
                self._notes.incomplete[pid] = lacking
                return None
        when = SliceTime(plan.number, plan.watermark_us, plan.processing_ms, plan.watermarks)
        try:
            packets = self._inbox.packets(plan.number, edges, pid.index)
            with activity.at(str(pid)):
                return partition.apply(when, packets)
        except ChainError as e:
            self._notes.failures[(str(pid), e.operator)] = e.failure(str(pid))
        return None

    def _sources_of(self, edge: int, plan: SlicePlan, live_tasks: int | None) -> int:
        """How many source partitions an edge has under the mapping of the slice."""
        assert self._job is not None
        assert self._mapping is not None
        source = self._edges[edge].source
        if self._job.programs[source].chain.is_source:
            return plan.source_tasks if live_tasks is None else live_tasks
        return max(self._mapping.groups[source]) + 1

    def _stage(self, partition: Partition, output: Output) -> bool:
        """Put the slice's sink rows aside, once; False when storage refused."""
        assert self._job is not None
        for name, table in output.sinks.items():
            key = (name, str(partition.id))
            if key not in self._notes.staged:
                # Source tasks call themselves source-N; an operator may be named "source".
                writer = f"part-{partition.id.chain}-{partition.id.index}"
                sink = self._job.sinks[name]
                try:
                    staged = sink.stage(name, table, output.slice, self._run, writer)
                except AnabranchError as e:
                    failure = Failure(str(partition.id), "", e.message, repr(e), kind="storage")
                    self._notes.failures[(str(partition.id), "")] = failure
                    return False
                self._notes.staged[key] = staged
        return True

    # -- a wave of a recovery ------------------------------------------------------------------

    def recover(self, request: RecoverRequest, blobs: Sequence[Any]) -> Answer:
        """Rebuild partitions over several slices; the first wave installs them."""
        self._refuse_strange(request)
        plan = request.plan
        key = (plan.mapping.version, plan.part)
        is_new = request.driver != self._driver or key > self._recovery
        if request.depth == 1 and is_new:
            try:
                self._begin(request)
            except StorageError as e:
                self._notes = SliceNotes(plan.next_slice - 1)
                failure = Failure(str(request.node), "", e.message, repr(e), kind="restore")
                self._notes.failures[(str(request.node), "")] = failure
        current = (self._driver, self._recovery) == (request.driver, key)
        if not current or not self._recovering:  # a call that nobody waits for any more
            return _nothing(request.nodes), self._report() if request.last else None
        for blob in blobs:
            self._receive(blob)
        sent: list[tuple[int, Bundle]] = []
        assert self._job is not None
        copies = plan.mapping.copied_by(request.node)
        for pid in self._expected(request.depth):
            if pid in plan.senders and pid not in copies:
                sent += list(self._resend(pid, request))
            elif pid in plan.restored or pid in plan.promoted or pid in copies:
                partition = self._hosted(pid)
                if partition is not None and pid in plan.restored:
                    sent += list(self._rebuild(partition, request))
            if (pid in plan.restored or pid in plan.promoted) and pid in self._partitions:
                self._note_rebuilt(self._partitions[pid])
        for pid, shadow in self._shadows.items():
            if self._job.programs[pid.chain].chain.depth == request.depth:
                sent += list(self._rebuild(shadow, request))
        outgoing = self._send(sent, request.node, request.nodes)
        if not request.last:
            return outgoing, None
        if plan.seals and not self._notes.problems:
            self._seal(plan.slices[-1])
        return outgoing, self._report()

    def _begin(self, request: RecoverRequest) -> None:
        """Take over what the mapping gives to this node. Partitions it keeps are not touched;
        on an error nothing has changed."""
        plan = request.plan
        if plan.part > 0:
            for partition in self._rebuilt(plan):
                partition.confirm(plan.first - 1, 0)
            self._inbox.drop(plan.first - 1)
        else:
            self._install(request)
        self._floor = plan.first
        restore_s = self._notes.restore_s
        self._notes = SliceNotes(plan.next_slice - 1)
        self._notes.restore_s = restore_s
        self._recovery, self._recovering = (plan.mapping.version, plan.part), True

    def _rebuilt(self, plan: RecoveryPlan) -> list[Partition]:
        mine = [self._partitions[p] for p in plan.restored if p in self._partitions]
        return [*mine, *self._shadows.values()]

    def _install(self, request: RecoverRequest) -> None:
        plan, started = request.plan, time.monotonic()
        if request.driver != self._driver or self._job is None:
            if request.spec is None:
                raise InvariantError("a node was asked to recover a job it does not know")
            job = self._job_of(request.spec)
            kept: dict[PartitionId, Partition] = {}
        else:
            job = self._job
            kept = self._partitions
        mine = plan.mapping.held_by(request.node)
        promoted = {p: x for p, x in kept.items() if p in plan.promoted and p in mine}
        kept = {p: x for p, x in kept.items() if mine.get(p) == x.epoch} | promoted
        taken = {
            p: self._restored(job, plan, p, epoch)
            for p, epoch in mine.items()
            if p not in kept and (p in plan.restored or p in plan.copied)
        }
        owned = plan.mapping.hosted_by(request.node)
        shadows = {p: self._restored(job, plan, p, owned[p]) for p in plan.shadows if p in owned}
        for pid, partition in self._partitions.items():
            if pid not in kept:
                partition.forget()
        for pid, partition in promoted.items():
            partition.take_over(mine[pid])
        if request.driver != self._driver:
            self._writer.begin(request.run)
            self._beat_for(request.pulse, request.node)
        self._driver, self._run, self._node, self._mapping, self._job = (
            request.driver, request.run, request.node, plan.mapping, job,
        )  # fmt: skip
        self._partitions, self._shadows = kept | taken, shadows
        self._preparations.clear()
        self._inbox, self._routes = Inbox(), {}
        self._edges = {e.id: e for p in job.programs.values() for e in p.chain.inputs}
        self._notes.restore_s = time.monotonic() - started

    def _beat_for(self, pulse: Pulse | None, node: NodeId) -> None:
        """This driver owns the node from now on: it gets the heartbeats."""
        if self._heartbeat is not None:
            if self._heartbeat.is_for(pulse, node):
                return
            self._heartbeat.stop()
        if pulse is not None:
            self._heartbeat = Heartbeat(pulse, node, self._executor_pid)

    def _restored(
        self, job: JobSpec, plan: RecoveryPlan, pid: PartitionId, epoch: int
    ) -> Partition:
        loaded: set[str] = set()
        try:
            partition, loaded = self._preparations.take(pid, epoch, plan)
        except KeyError:
            partition = Partition(pid, epoch, job.programs[pid.chain], plan.cut + 1)
        partition.next_slice = plan.cut + 1
        partition.backs_up = plan.backups is None or pid in plan.backups
        groups = plan.mapping.groups[pid.chain]
        owned = {g: p == pid.index for g, p in enumerate(groups)}
        files = [f for f in plan.files.get(pid, ()) if f not in loaded]
        partition.restore(Path(job.root), files, owned)
        return partition

    def _rebuild(
        self, partition: Partition, request: RecoverRequest
    ) -> Iterator[tuple[int, Bundle]]:
        for plan in request.plan.slices:
            output = self._apply(partition, plan, request)
            if output is None:
                return
            yield from self._route(partition, output, request.nodes, request.plan)

    def _note_rebuilt(self, partition: Partition) -> None:
        last = partition.outputs.get(partition.next_slice - 1)
        report = PartitionReport(partition.next_slice, partition.epoch, due_ms=partition.due_ms)
        self._notes.partitions[partition.id] = last.report if last else report

    def _resend(self, pid: PartitionId, request: RecoverRequest) -> Iterator[tuple[int, Bundle]]:
        """The backups of a healthy partition, for those that are rebuilt."""
        partition = self._hosted(pid)
        if partition is None:
            return
        for plan in request.plan.slices:
            output = partition.outputs.get(plan.number)
            if output is None:
                self._notes.incomplete[pid] = f"it has no backup of slice {plan.number}"
                return
            yield from self._route(partition, output, request.nodes, request.plan)

    # -- packets -------------------------------------------------------------------------------

    def _route(
        self,
        partition: Partition,
        output: Output,
        nodes: tuple[NodeId, ...],
        recovery: RecoveryPlan | None = None,
    ) -> Iterator[tuple[int, Bundle]]:
        """The output as bundles, with the index of the node each one goes to."""
        for edge in partition.program.chain.outputs:
            only: Collection[int] | None = None
            if recovery is not None:
                only = {p.index for p in recovery.rebuilt if p.chain == edge.target}
                if not only:
                    continue
            yield from enumerate(
                cut(
                    output.edges[edge.id],
                    self._route_of(edge, nodes),
                    len(nodes),
                    edge.id,
                    output.slice,
                    partition.id.index,
                    partition.epoch,
                    only,
                )
            )

    def _route_of(self, edge: Edge, nodes: tuple[NodeId, ...]) -> Route:
        assert self._job is not None
        assert self._mapping is not None
        key = (edge.id, nodes)
        if key not in self._routes:
            self._routes[key] = route_of(edge, self._mapping, nodes, self._job.key_groups)
        return self._routes[key]

    def _send(
        self, sent: list[tuple[int, Bundle]], node: NodeId, nodes: tuple[NodeId, ...]
    ) -> list[list[Any]]:
        """One blob per node; what is for a partition of this one stays here."""
        bundles: list[list[Bundle]] = [[] for _ in nodes]
        here = nodes.index(node)
        for destination, bundle in sent:
            if destination == here:
                self._deliver(bundle)
            else:
                bundles[destination].append(bundle)
        return [encode_blob(b) for b in bundles]

    def _receive(self, blob: Any) -> None:
        bundles, facts = decode_blob(blob)
        for bundle in bundles:
            self._deliver(bundle)
        if facts is not None:
            self._notes.sources.update((s.partition, s) for s in facts.sources)
            self._notes.staged.update(((s.sink, s.writer), s) for s in facts.staged)
            self._notes.failures.update(((f.where, f.operator), f) for f in facts.failures)
            self._notes.replayed.update(facts.replayed)

    def _deliver(self, bundle: Bundle) -> None:
        """Keep a bundle, unless an owner that was replaced sent it or its slice is past."""
        edge = self._edges.get(bundle.edge)
        if (
            edge is not None
            and bundle.epoch == self._epoch_of(edge, bundle.source)
            and bundle.slice >= self._floor
        ):
            self._inbox.add(bundle)

    def _epoch_of(self, edge: Edge, source: int) -> int:
        assert self._mapping is not None
        owner = self._mapping.owners.get(PartitionId(edge.source, source))
        return owner.epoch if owner is not None else self._run

    # -- checkpoints, backups, reports ---------------------------------------------------------

    def _seal(self, plan: SlicePlan) -> None:
        """Copy what changed; the writer's thread makes it durable while slices go on, unless this
        one waits for it."""
        assert self._job is not None
        assert self._mapping is not None
        place = (self._job.root, self._job.checkpoints, self._job.identity.job)
        number = plan.number
        copies = self._mapping.copied_by(self._node)
        write = self._writer.write if plan.waits else self._writer.submit
        for p in self._partitions.values():
            if p.id in copies:
                p.sealed_elsewhere()
            elif p.sealed < number:
                before = p.sealed
                full, states = p.seal(plan.writes)
                write(self._run, *place, p.id, number, p.epoch, full, before, states)

    def _spill(self, confirmed: int) -> None:
        """Move the oldest backups to disk while there are too many in memory."""
        self._disk_full = False
        kept = sorted(
            (o for p in self._partitions.values() for o in p.outputs.values()),
            key=lambda o: o.slice,
        )
        excess = sum(o.nbytes for o in kept) - BACKUP_MEMORY_BYTES
        for output in kept:
            if excess <= 0 or output.slice > confirmed:
                return
            if output.spilled is None:
                size = output.nbytes
                try:
                    spill(output, self._spill_directory)
                except OSError:
                    self._disk_full = True  # stays in memory; the driver slows down
                    return
                excess -= size

    def _report(self) -> NodeReport:
        notes = self._notes
        return NodeReport(
            node=self._node,
            incarnation=self.incarnation,
            slice=notes.slice,
            partitions=dict(notes.partitions),
            incomplete=dict(notes.incomplete),
            not_hosted=tuple(notes.not_hosted),
            failures=(*notes.failures.values(), *self._writer.failures()),
            sources=tuple(notes.sources.values()),
            staged=tuple(notes.staged.values()),
            checkpoints=self._writer.written(),
            replayed=dict(notes.replayed),
            restore_s=notes.restore_s,
            prepared=self._preparations.ready(),
            disk_full=self._disk_full,
            pid=os.getpid(),
            memory_bytes=_resident_bytes(),
            cpu_s=time.process_time(),
        )


def _nothing(nodes: Sequence[NodeId]) -> list[list[Any]]:
    return [encode_blob([]) for _ in nodes]


def route_of(edge: Edge, mapping: Mapping, nodes: Sequence[NodeId], key_groups: int) -> Route:
    """The routing of one edge under a mapping, with nodes numbered as in `nodes`."""
    position = {n: i for i, n in enumerate(nodes)}
    owners = mapping.partitions(edge.target)
    node_of = np.zeros(len(owners), dtype=np.uint16)
    for partition in owners:
        node_of[partition.index] = position[mapping.owners[partition].node]
    groups = np.asarray(mapping.groups[edge.target], dtype=np.uint16)
    copies = {p.index: position[mapping.copies[p]] for p in owners if p in mapping.copies}
    return Route(edge.keys, key_groups, groups, node_of, copies)


def _resident_bytes() -> int:
    with Path("/proc/self/statm").open() as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
