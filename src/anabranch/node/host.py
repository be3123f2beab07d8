"""The partitions of one node and the waves that pass over them.

`wave` takes the blobs that arrived for a node and returns one blob per destination node. What it
cannot run it says ("not hosted", "incomplete", a failure) and goes on: an answer, never a crash,
and never half an input for a later wave.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.errors import AnabranchError, InvariantError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.plan import Edge
from anabranch.model.reports import (
    CheckpointWritten,
    Failure,
    NodeReport,
    PartitionReport,
    SourceReport,
    Staged,
)
from anabranch.node.chain import ChainError
from anabranch.node.messages import InstallRequest, JobSpec, PollRequest, WaveRequest
from anabranch.node.packets import Bundle, Inbox, Route, cut, decode_blob, encode_blob
from anabranch.node.partition import Output, Partition
from anabranch.operators.base import SliceTime
from anabranch.storage.checkpoint_files import checkpoint_path, write_checkpoint

MAX_CHECKPOINT_QUEUE = 256  # sealed partitions that wait for the disk; more would fill memory


class SliceNotes:
    """What a node has to report about the slice in flight."""

    def __init__(self, slice_no: int) -> None:
        self.slice = slice_no
        self.partitions: dict[PartitionId, PartitionReport] = {}
        self.incomplete: dict[PartitionId, str] = {}
        self.not_hosted: dict[PartitionId, None] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.sources: dict[int, SourceReport] = {}
        self.staged: dict[tuple[str, str], Staged] = {}

    def forget(self, partition: PartitionId) -> None:
        """A wave that is run again answers anew for its partitions."""
        self.incomplete.pop(partition, None)
        self.not_hosted.pop(partition, None)
        self.failures = {k: f for k, f in self.failures.items() if k[0] != str(partition)}


class Host:
    """Everything a node process owns. One thread calls it; checkpoints are written by another."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self._run = 0
        self._node = NodeId("")
        self._job: JobSpec | None = None
        self._mapping: Mapping | None = None
        self._partitions: dict[PartitionId, Partition] = {}
        self._inbox = Inbox()
        self._edges: dict[int, Edge] = {}
        self._routes: dict[tuple[int, tuple[NodeId, ...]], Route] = {}
        self._notes = SliceNotes(0)
        self._sealed = 0  # the newest slice at which a checkpoint was sealed
        self._writer = CheckpointWriter()

    # -- requests ------------------------------------------------------------------------------

    def install(self, request: InstallRequest) -> NodeReport:
        """Take over partitions; whatever an older driver left is dropped."""
        self._refuse_older(request.run)
        self._run, self._node, self._mapping = request.run, request.node, request.mapping
        self._job = pickle.loads(request.spec)
        self._partitions = {}
        self._inbox = Inbox()
        self._edges = {e.id: e for p in self._job.programs.values() for e in p.chain.inputs}
        self._routes = {}
        self._notes = SliceNotes(request.next_slice - 1)
        self._sealed = 0
        self._writer.begin(request.run)
        for partition, epoch in request.mapping.hosted_by(request.node).items():
            groups = request.mapping.groups[partition.chain]
            owned = {g: p == partition.index for g, p in enumerate(groups)}
            program = self._job.programs[partition.chain]
            hosted = Partition(partition, epoch, program, request.next_slice)
            hosted.restore(Path(self._job.root), request.restore.get(partition, ()), owned)
            self._partitions[partition] = hosted
        return self._report()

    def close(self) -> None:
        """The job has ended: what is sealed is still written, then the writer ends too."""
        self._writer.close()

    def poll(self, request: PollRequest) -> NodeReport:
        """A report outside of a slice: written checkpoints above all."""
        self._refuse_older(request.run)
        return self._report()

    def wave(self, request: WaveRequest, blobs: Sequence[Any]) -> tuple[list[list[Any]], Any]:
        """Run one wave; returns a blob (as buffers) per destination node, and the last wave's
        report or None. A call of an earlier slice comes from a task that nobody waits for any
        more: it changes nothing."""
        self._refuse_older(request.run)
        if request.plan.number < self._notes.slice:
            return [encode_blob([]) for _ in request.nodes], None
        if request.plan.number > self._notes.slice:
            self._notes = SliceNotes(request.plan.number)
        for partition in self._partitions.values():
            partition.confirm(request.confirmed)
        self._inbox.drop(request.confirmed)
        for blob in blobs:
            self._receive(blob)
        bundles: list[list[Bundle]] = [[] for _ in request.nodes]
        if self._job is not None and self._mapping is not None:
            for partition_id in self._expected_partitions(request.depth):
                for destination, bundle in self._advance(partition_id, request):
                    bundles[destination].append(bundle)
        here = request.nodes.index(request.node)
        for bundle in bundles[here]:
            self._deliver(bundle)  # to a partition of this node: no shuffle
        bundles[here] = []
        outgoing = [encode_blob(b) for b in bundles]
        if not request.last:
            return outgoing, None
        if (
            request.plan.seal
            and self._partitions
            and not self._problems
            and self._sealed < request.plan.number
        ):
            self._seal(request.plan.number)
        return [], self._report()

    def _refuse_older(self, run: int) -> None:
        if run < self._run:
            raise InvariantError(
                f"a driver of generation {run} spoke to a node owned by generation {self._run}"
            )

    # -- one partition, one slice --------------------------------------------------------------

    def _expected_partitions(self, depth: int) -> list[PartitionId]:
        """The partitions the mapping gives to this node at one depth."""
        assert self._mapping is not None
        assert self._job is not None
        mine = self._mapping.hosted_by(self._node)
        return [p for p in mine if self._job.programs[p.chain].chain.depth == depth]

    def _advance(self, pid: PartitionId, request: WaveRequest) -> list[tuple[int, Bundle]]:
        """Apply the slice to one partition, or note why not; its bundles per destination."""
        self._notes.forget(pid)
        partition = self._partitions.get(pid)
        if partition is None:
            self._notes.not_hosted[pid] = None
            return []
        plan = request.plan
        edges = [e.id for e in partition.program.chain.inputs]
        if not partition.has_applied(plan.number):
            if partition.next_slice != plan.number:
                self._notes.incomplete[pid] = (
                    f"it is at slice {partition.next_slice}, not {plan.number}"
                )
                return []
            counts = {e: self._sources_of(e, request) for e in edges}
            lacking = self._inbox.missing(plan.number, counts)
            if lacking:
                self._notes.incomplete[pid] = lacking
                return []
        when = SliceTime(plan.number, plan.watermark_us, plan.processing_ms)
        try:
            packets = self._inbox.packets(plan.number, edges, pid.index)
            output = partition.apply(when, packets)
            if not plan.replay:
                self._stage(partition, output)
        except ChainError as e:
            self._notes.failures[(str(pid), e.operator)] = e.failure(str(pid))
            return []
        except AnabranchError as e:
            failure = Failure(str(pid), "", e.message, repr(e), kind="storage")
            self._notes.failures[(str(pid), "")] = failure
            return []
        self._notes.partitions[pid] = output.report
        return self._route(partition, output, request)

    def _sources_of(self, edge: int, request: WaveRequest) -> int:
        """How many source partitions an edge has under the mapping of the slice."""
        assert self._job is not None
        assert self._mapping is not None
        source = self._edges[edge].source
        if self._job.programs[source].chain.is_source:
            return request.source_tasks
        return max(self._mapping.groups[source]) + 1

    def _route(
        self, partition: Partition, output: Output, request: WaveRequest
    ) -> list[tuple[int, Bundle]]:
        routed = []
        for edge in partition.program.chain.outputs:
            bundles = cut(
                output.edges[edge.id],
                self._route_of(edge, request),
                len(request.nodes),
                edge.id,
                output.slice,
                partition.id.index,
                partition.epoch,
            )
            routed += list(enumerate(bundles))
        return routed

    def _route_of(self, edge: Edge, request: WaveRequest) -> Route:
        assert self._job is not None
        assert self._mapping is not None
        key = (edge.id, request.nodes)
        if key not in self._routes:
            self._routes[key] = route_of(edge, self._mapping, request.nodes, self._job.key_groups)
        return self._routes[key]

    def _stage(self, partition: Partition, output: Output) -> None:
        """Put the slice's sink rows aside, once."""
        assert self._job is not None
        for name, table in output.sinks.items():
            key = (name, str(partition.id))
            if key not in self._notes.staged:
                # Source tasks call themselves source-N; an operator may be named "source".
                writer = f"part-{partition.id.chain}-{partition.id.index}"
                sink = self._job.sinks[name]
                self._notes.staged[key] = sink.stage(name, table, output.slice, self._run, writer)

    # -- packets -------------------------------------------------------------------------------

    def _receive(self, blob: Any) -> None:
        bundles, facts = decode_blob(blob)
        for bundle in bundles:
            self._deliver(bundle)
        if facts is not None:
            self._notes.sources.update((s.partition, s) for s in facts.sources)
            self._notes.staged.update(((s.sink, s.writer), s) for s in facts.staged)
            self._notes.failures.update(((f.where, f.operator), f) for f in facts.failures)

    def _deliver(self, bundle: Bundle) -> None:
        """Keep a bundle, unless an owner that was replaced sent it or its slice is past."""
        edge = self._edges.get(bundle.edge)
        if (
            edge is not None
            and bundle.epoch == self._epoch_of(edge, bundle.source)
            and bundle.slice >= self._notes.slice
        ):
            self._inbox.add(bundle)

    def _epoch_of(self, edge: Edge, source: int) -> int:
        assert self._mapping is not None
        owner = self._mapping.owners.get(PartitionId(edge.source, source))
        return owner.epoch if owner is not None else self._run

    # -- checkpoints and reports ---------------------------------------------------------------

    @property
    def _problems(self) -> bool:
        notes = self._notes
        return bool(notes.incomplete or notes.not_hosted or notes.failures)

    def _seal(self, slice_no: int) -> None:
        """Copy what changed; the writer thread makes it durable while slices go on.

        Once per slice: a second delta would be empty and take the place of the first.
        """
        assert self._job is not None
        self._sealed = slice_no
        for partition in self._partitions.values():
            full, states = partition.seal()
            self._writer.submit(
                self._run, self._job.root, partition.id, slice_no, partition.epoch, full, states
            )

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
            pid=os.getpid(),
            memory_bytes=_resident_bytes(),
            cpu_s=time.process_time(),
        )


class CheckpointWriter:
    """One background thread that turns sealed state into durable files, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, ...] | None] = queue.Queue(MAX_CHECKPOINT_QUEUE)
        self._lock = threading.Lock()
        self._run = 0
        self._written: dict[PartitionId, CheckpointWritten] = {}
        self._failures: list[Failure] = []
        threading.Thread(target=self._work, name="checkpoint-writer", daemon=True).start()

    def begin(self, run: int) -> None:
        """Speak only of this run from now on: another's partitions may have the same names."""
        with self._lock:
            self._run, self._written, self._failures = run, {}, []

    def submit(self, *sealed: Any) -> None:
        """Queue one partition's sealed state; waits when the disk is far behind."""
        self._queue.put(sealed)

    def close(self) -> None:
        self._queue.put(None)

    def written(self) -> tuple[CheckpointWritten, ...]:
        """The newest durable file per partition; repeated in every report, so none gets lost."""
        with self._lock:
            return tuple(self._written.values())

    def failures(self) -> tuple[Failure, ...]:
        """Repeated in every report, too: one of them ends the run."""
        with self._lock:
            return tuple(self._failures)

    def _work(self) -> None:
        while True:
            sealed = self._queue.get()
            if sealed is None:
                return
            run, root, partition, slice_no, epoch, full, states = sealed
            path = checkpoint_path(partition, slice_no, epoch)
            failure = None
            try:
                size = write_checkpoint(Path(root) / path, partition, slice_no, epoch, states)
            except Exception as e:
                message = e.message if isinstance(e, AnabranchError) else repr(e)
                failure = Failure(str(partition), "checkpoint", message, repr(e), kind="storage")
            with self._lock:
                if run != self._run:
                    continue
                if failure is not None:
                    self._failures.append(failure)
                    continue
                done = CheckpointWritten(partition, slice_no, epoch, str(path), full, size)
                self._written[partition] = done


def route_of(edge: Edge, mapping: Mapping, nodes: Sequence[NodeId], key_groups: int) -> Route:
    """The routing of one edge under a mapping, with nodes numbered as in `nodes`."""
    position = {n: i for i, n in enumerate(nodes)}
    owners = mapping.partitions(edge.target)
    node_of = np.zeros(len(owners), dtype=np.uint16)
    for partition in owners:
        node_of[partition.index] = position[mapping.owners[partition].node]
    groups = np.asarray(mapping.groups[edge.target], dtype=np.uint16)
    return Route(edge.keys, key_groups, groups, node_of)


def _resident_bytes() -> int:
    with Path("/proc/self/statm").open() as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
