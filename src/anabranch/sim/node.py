"""A simulated node process: the rules of `node/host.py`, without rows, threads or files.

Complete input, atomic and repeatable apply, fencing by mapping version, epoch and generation,
backups and their trimming, shadows, seals and checkpoint files in order, notes and reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from anabranch.errors import InvariantError, StorageError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.plan import Edge
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import (
    CheckpointWritten,
    Failure,
    NodeReport,
    PartitionReport,
    SourceReport,
    Staged,
)
from anabranch.model.slices import SlicePlan
from anabranch.sim.disk import Disk, Snapshot
from anabranch.sim.packets import Answer, Blob, Bundle, Prepare, Recover, Wave, cut, needed
from anabranch.sim.partition import Output, SimPartition
from anabranch.sim.preparation import SimPreparations
from anabranch.sim.workload import Row, Workload

REPORTED_CHECKPOINTS = 4  # as the real writer: files per partition that reports repeat


class Notes:
    """What a node has to report about the slice, or the recovery, in hand."""

    def __init__(self, slice_no: int) -> None:
        self.slice = slice_no
        self.partitions: dict[PartitionId, PartitionReport] = {}
        self.incomplete: dict[PartitionId, str] = {}
        self.not_hosted: dict[PartitionId, None] = {}
        self.failures: list[Failure] = []
        self.sources: dict[int, SourceReport] = {}
        self.staged: dict[tuple[str, str], Staged] = {}
        self.replayed: dict[tuple[int, int], dict[str, int]] = {}


class SimNode:
    """One incarnation of a node process."""

    def __init__(
        self,
        incarnation: str,
        job: Workload,
        disk: Disk,
        background: Callable[[SimNode, Callable[[], None]], None],
        on_install: Callable[[SimNode, SimPartition], None],
    ) -> None:
        self.incarnation = incarnation
        self.node = NodeId("")  # a process learns its name with its first partitions
        self.mapping: Mapping | None = None
        self.partitions: dict[PartitionId, SimPartition] = {}
        self.inbox: dict[tuple[int, int], dict[int, Bundle]] = {}  # (slice, edge) → source
        self.disk_full = False
        self._job = job
        self._disk = disk
        self._background = background  # do it some time later, while this process lives
        self._on_install = on_install
        self._edges = {e.id: e for c in job.plan.node_chains for e in c.inputs}
        self._driver = ""
        self._run = 0
        self._shadows: dict[PartitionId, SimPartition] = {}
        self._recovery = (0, 0)
        self._recovering = False
        self._floor = 0
        self._notes = Notes(0)
        self.preparations = SimPreparations(disk)
        self._unwritten: deque[tuple[int, int, Snapshot]] = deque()  # run, epoch, content
        self._written: dict[tuple[PartitionId, int], CheckpointWritten] = {}

    def prepare(self, call: Prepare) -> NodeReport:
        self._refuse_older(call.run)
        mine = call.plan.mapping.held_by(call.node)
        for load in self.preparations.begin(call.plan, mine, self._empty):
            self._background(self, load)
        return replace(self._report(), node=call.node)

    def poll(self, run: int) -> NodeReport:
        self._refuse_older(run)
        return self._report()

    def _refuse_older(self, run: int) -> None:
        if run < self._run:
            raise InvariantError(
                f"a driver of generation {run} spoke to a node owned by generation {self._run}"
            )

    # -- a wave of a slice ---------------------------------------------------------------------

    def wave(self, call: Wave, blobs: Sequence[Blob]) -> Answer:
        self._refuse_older(call.run)
        plan = call.plan
        if not self._is_current(plan):
            return self._nothing(call.nodes), self._report() if call.last else None
        if plan.number > self._notes.slice:
            self._notes = Notes(plan.number)
        self._recovering = False
        self._shadows.clear()
        self._floor = plan.number
        for partition in self.partitions.values():
            partition.backs_up = call.backups is None or partition.id in call.backups
            partition.confirm(call.confirmed, call.trim)
        self._forget_packets(call.confirmed)
        for blob in blobs:
            self._receive(blob)
        sent: list[tuple[int, Bundle]] = []
        assert self.mapping is not None
        copies = self.mapping.copied_by(self.node)
        for pid in self._expected(call.depth):
            hosted = self._hosted(pid)
            output = self._apply(hosted, plan, call.source_tasks) if hosted else None
            if hosted and output and pid not in copies:
                self._stage(hosted, output)
                self._notes.partitions[pid] = PartitionReport(output.slice + 1, hosted.epoch)
                sent += self._route(hosted, output)
        outgoing = self._send(sent, call.nodes)
        if not call.last:
            return outgoing, None
        if plan.seal and not (self._notes.incomplete or self._notes.not_hosted):
            self._seal(plan)
        return outgoing, self._report()

    def _is_current(self, plan: SlicePlan) -> bool:
        """A call of another mapping or an earlier slice comes from a task nobody waits for."""
        known = self.mapping is not None and self.mapping.version == plan.mapping
        return known and plan.number >= self._notes.slice

    def _hosted(self, pid: PartitionId) -> SimPartition | None:
        self._notes.incomplete.pop(pid, None)
        self._notes.not_hosted.pop(pid, None)
        partition = self.partitions.get(pid)
        if partition is None:
            self._notes.not_hosted[pid] = None
        return partition

    def _expected(self, depth: int) -> list[PartitionId]:
        assert self.mapping is not None
        chains = self._job.plan.by_name
        return [p for p in self.mapping.held_by(self.node) if chains[p.chain].depth == depth]

    def _apply(
        self, partition: SimPartition, plan: SlicePlan, source_tasks: int | None
    ) -> Output | None:
        if not partition.has_applied(plan.number):
            lacking = (
                f"it is at slice {partition.next_slice}, not {plan.number}"
                if partition.next_slice != plan.number
                else self._missing(partition, plan, source_tasks)
            )
            if lacking:
                self._notes.incomplete[partition.id] = lacking
                return None
        return partition.apply(plan, self._packets(partition, plan.number))

    def _missing(
        self, partition: SimPartition, plan: SlicePlan, source_tasks: int | None
    ) -> str | None:
        """What the slice lacks: a bundle from every source of every edge."""
        assert self.mapping is not None
        for edge in partition.chain.inputs:
            if self._job.plan.by_name[edge.source].is_source:
                wanted = plan.source_tasks if source_tasks is None else source_tasks
            else:
                wanted = max(self.mapping.groups[edge.source]) + 1
            found = self.inbox.get((plan.number, edge.id), {})
            if len(found) < wanted:
                return f"edge {edge.id}: packets of {len(found)} of {wanted} sources"
        return None

    def _packets(self, partition: SimPartition, slice_no: int) -> list[tuple[int, list[Row]]]:
        found = []
        for edge in partition.chain.inputs:
            bundles = self.inbox.get((slice_no, edge.id), {})
            for source in sorted(bundles):
                rows = bundles[source].packets.get(partition.id.index)
                if rows:
                    found.append((edge.id, rows))
        return found

    def _stage(self, partition: SimPartition, output: Output) -> None:
        if not output.to_sinks or not output.rows:
            return
        for sink in partition.chain.sinks:
            key = (sink, str(partition.id))
            if key not in self._notes.staged:
                writer = f"part-{partition.id}"
                path = self._disk.stage((sink, output.slice, self._run, writer), output.rows)
                self._notes.staged[key] = Staged(sink, writer, len(output.rows), path)

    # -- a wave of a recovery ------------------------------------------------------------------

    def recover(self, call: Recover, blobs: Sequence[Blob]) -> Answer:
        self._refuse_older(call.run)
        plan = call.plan
        key = (plan.mapping.version, plan.part)
        if call.depth == 1 and (call.driver != self._driver or key > self._recovery):
            try:
                self._begin(call)
            except StorageError as e:
                self._notes = Notes(plan.next_slice - 1)
                failure = Failure(str(call.node), "", e.message, repr(e), kind="restore")
                self._notes.failures.append(failure)
        current = (self._driver, self._recovery) == (call.driver, key)
        if not current or not self._recovering:
            return self._nothing(call.nodes), self._report() if call.last else None
        for blob in blobs:
            self._receive(blob)
        sent: list[tuple[int, Bundle]] = []
        copies = plan.mapping.copied_by(call.node)
        for pid in self._expected(call.depth):
            if pid in plan.senders and pid not in copies:
                sent += self._resend(pid, plan)
            elif pid in plan.restored or pid in plan.promoted or pid in copies:
                partition = self._hosted(pid)
                if partition and pid in plan.restored:
                    sent += self._rebuild(partition, plan)
            if (pid in plan.restored or pid in plan.promoted) and pid in self.partitions:
                mine = self.partitions[pid]
                self._notes.partitions[pid] = PartitionReport(mine.next_slice, mine.epoch)
        for shadow in self._shadows.values():
            if shadow.chain.depth == call.depth:
                sent += self._rebuild(shadow, plan)
        outgoing = self._send(sent, call.nodes)
        if not call.last:
            return outgoing, None
        if plan.seals and not (self._notes.incomplete or self._notes.not_hosted):
            self._seal(plan.slices[-1])
        return outgoing, self._report()

    def _begin(self, call: Recover) -> None:
        """Take over what the mapping gives to this node; on an error nothing has changed."""
        plan = call.plan
        if plan.part > 0:
            rebuilt = [self.partitions[p] for p in plan.restored if p in self.partitions]
            for partition in (*rebuilt, *self._shadows.values()):
                partition.confirm(plan.first - 1, 0)
            self._forget_packets(plan.first - 1)
        else:
            self._install(call)
        self._floor = plan.first
        self._notes = Notes(plan.next_slice - 1)
        self._recovery, self._recovering = (plan.mapping.version, plan.part), True

    def _install(self, call: Recover) -> None:
        plan = call.plan
        mine = plan.mapping.held_by(call.node)
        kept = self._kept(call, mine)
        taken = {
            p: self._restored(plan, p, epoch)
            for p, epoch in mine.items()
            if p not in kept and (p in plan.restored or p in plan.copied)
        }
        owned = plan.mapping.hosted_by(call.node)
        shadows = {p: self._restored(plan, p, owned[p]) for p in owned if p in plan.shadows}
        if call.driver != self._driver:
            self._written = {}
        self._driver, self._run, self.node, self.mapping = (
            call.driver, call.run, call.node, plan.mapping,
        )  # fmt: skip
        self.partitions, self._shadows, self.inbox = kept | taken, shadows, {}
        self.preparations.clear()
        copies = plan.mapping.copied_by(call.node)
        promoted = {p: x for p, x in kept.items() if mine[p] != x.epoch}
        for pid, partition in promoted.items():
            partition.epoch = mine[pid]
        for pid, partition in (taken | promoted).items():
            if pid not in copies:
                self._on_install(self, partition)

    def _kept(self, call: Recover, mine: dict[PartitionId, int]) -> dict[PartitionId, SimPartition]:
        if call.driver != self._driver:
            return {}
        promoted = call.plan.promoted
        return {
            p: x
            for p, x in self.partitions.items()
            if p in mine and (mine[p] == x.epoch or p in promoted)
        }

    def _restored(self, plan: RecoveryPlan, pid: PartitionId, epoch: int) -> SimPartition:
        loaded: set[str] = set()
        try:
            partition, loaded = self.preparations.take(pid, epoch, plan)
        except KeyError:
            partition = self._empty(pid, epoch)
        partition.next_slice = plan.cut + 1
        partition.backs_up = plan.backups is None or pid in plan.backups
        left = [f for f in plan.files.get(pid, ()) if f not in loaded]
        files = [self._disk.read_checkpoint(f) for f in left]
        partition.restore(files, plan.mapping.groups[pid.chain])
        return partition

    def _empty(self, pid: PartitionId, epoch: int) -> SimPartition:
        return SimPartition(pid, epoch, self._job.plan.by_name[pid.chain])

    def _rebuild(self, partition: SimPartition, plan: RecoveryPlan) -> Iterator[tuple[int, Bundle]]:
        for slice_plan in plan.slices:
            output = self._apply(partition, slice_plan, None)
            if output is None:
                return
            yield from self._route(partition, output, plan)

    def _resend(self, pid: PartitionId, plan: RecoveryPlan) -> Iterator[tuple[int, Bundle]]:
        partition = self._hosted(pid)
        if partition is None:
            return
        for slice_plan in plan.slices:
            output = partition.outputs.get(slice_plan.number)
            if output is None:
                self._notes.incomplete[pid] = f"it has no backup of slice {slice_plan.number}"
                return
            yield from self._route(partition, output, plan)

    # -- packets -------------------------------------------------------------------------------

    def _route(
        self, partition: SimPartition, output: Output, recovery: RecoveryPlan | None = None
    ) -> Iterator[tuple[int, Bundle]]:
        """The output as bundles, with the index of the node each one goes to."""
        assert self.mapping is not None
        for edge in partition.chain.outputs:
            only = None if recovery is None else needed(edge, recovery)
            if only is not None and not only:
                continue
            for node, packets in enumerate(cut(output.rows, edge, self.mapping, only)):
                bundle = Bundle(edge.id, output.slice, partition.id.index, partition.epoch, packets)
                yield node, bundle

    def _send(self, sent: Sequence[tuple[int, Bundle]], nodes: tuple[NodeId, ...]) -> list[Blob]:
        """One blob per node; what is for a partition of this one stays here."""
        bundles: list[list[Bundle]] = [[] for _ in nodes]
        here = nodes.index(self.node)
        for destination, bundle in sent:
            if destination == here:
                self._deliver(bundle)
            else:
                bundles[destination].append(bundle)
        return [Blob(tuple(b)) for b in bundles]

    def _receive(self, blob: Blob) -> None:
        for bundle in blob.bundles:
            self._deliver(bundle)
        self._notes.sources.update((s.partition, s) for s in blob.sources)
        self._notes.staged.update(((s.sink, s.writer), s) for s in blob.staged)
        self._notes.replayed.update(blob.replayed)

    def _deliver(self, bundle: Bundle) -> None:
        """Keep a bundle, unless an owner that was replaced sent it or its slice is past."""
        edge = self._edges[bundle.edge]
        if bundle.epoch == self._epoch_of(edge, bundle.source) and bundle.slice >= self._floor:
            sources = self.inbox.setdefault((bundle.slice, bundle.edge), {})
            sources.setdefault(bundle.source, bundle)

    def _epoch_of(self, edge: Edge, source: int) -> int:
        assert self.mapping is not None
        owner = self.mapping.owners.get(PartitionId(edge.source, source))
        return owner.epoch if owner is not None else self._run

    def _forget_packets(self, upto: int) -> None:
        self.inbox = {k: v for k, v in self.inbox.items() if k[0] > upto}

    # -- checkpoints, reports ------------------------------------------------------------------

    def _seal(self, plan: SlicePlan) -> None:
        assert self.mapping is not None
        copies = self.mapping.copied_by(self.node)
        for partition in self.partitions.values():
            if partition.id not in copies and partition.sealed < plan.number:
                self._unwritten.append((self._run, partition.epoch, partition.seal(plan.writes)))
                if not plan.waits:
                    self._background(self, self.write_next)
        while plan.waits and self._unwritten:
            self.write_next()

    def write_next(self) -> None:
        """The oldest sealed state becomes a file."""
        if not self._unwritten:
            return
        run, epoch, snapshot = self._unwritten.popleft()
        pid, slice_no = snapshot.partition, snapshot.slice
        path = f"{pid.chain}/{pid.index}/{slice_no}-{epoch}.ckpt" if snapshot.changed else None
        if path is not None:
            self._disk.files[path] = snapshot
        if run != self._run:
            return
        self._written[(pid, slice_no)] = CheckpointWritten(
            pid, slice_no, epoch, path, snapshot.full, len(snapshot.keys), snapshot.after
        )
        mine = sorted(n for p, n in self._written if p == pid)
        for old in mine[:-REPORTED_CHECKPOINTS]:
            del self._written[(pid, old)]

    def _report(self) -> NodeReport:
        notes = self._notes
        return NodeReport(
            node=self.node,
            incarnation=self.incarnation,
            slice=notes.slice,
            partitions=dict(notes.partitions),
            incomplete=dict(notes.incomplete),
            not_hosted=tuple(notes.not_hosted),
            failures=tuple(notes.failures),
            sources=tuple(notes.sources.values()),
            staged=tuple(notes.staged.values()),
            checkpoints=tuple(self._written.values()),
            replayed=dict(notes.replayed),
            prepared=self.preparations.ready(),
            disk_full=self.disk_full,
        )

    @staticmethod
    def _nothing(nodes: Sequence[NodeId]) -> list[Blob]:
        return [Blob() for _ in nodes]
