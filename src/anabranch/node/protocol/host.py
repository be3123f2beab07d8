"""The partitions of one node and the waves that pass over them.

`wave` takes the parcels that arrived for a node and returns one per destination node. What it
cannot run it says ("not hosted", "incomplete", a failure) and goes on: an answer, never a crash,
and never half an input for a later wave. `recover` does the same for a recovery: several slices
at once, for the partitions that are rebuilt only. Slices may run beside a recovery, for chains that
are not in it: then waves of both come in any order. Each has a hand of its own, and partitions of
paused chains are the recovery's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic

from anabranch.errors import AnabranchError, ClusterError, InvariantError, StorageError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.reports import Failure, NodeReport
from anabranch.model.slices import SlicePlan
from anabranch.node.protocol.carried import ChainError, Job, Process, R, Sealed
from anabranch.node.protocol.exchange import Exchange, Inbox, Parcel, Sent
from anabranch.node.protocol.messages import (
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    WarmRequest,
    WaveRequest,
)
from anabranch.node.protocol.notes import Hand, SliceNotes
from anabranch.node.protocol.partition import Output, Partition
from anabranch.node.protocol.preparation import Preparations
from anabranch.node.protocol.restoring import kept_of, restored
from anabranch.node.protocol.spilling import spilled
from anabranch.node.protocol.writing import CheckpointWriter

Answer = tuple[list[Parcel[R]], NodeReport | None]
DriverRequest = WaveRequest | RecoverRequest | PrepareRequest | PollRequest


class Host(Generic[R]):
    """Everything a node owns for one job. One thread calls it; its process has others, which write
    checkpoints and load state ahead."""

    def __init__(self, process: Process[R], load: Callable[[bytes], Any]) -> None:
        self._process = process
        self._load = load  # a job from what the driver sent
        self._driver = ""
        self._generation = 0
        self._node = NodeId("")  # a host learns its name with its first partitions
        self._known_spec: tuple[bytes, Any] = (b"", None)
        self._job: Job[R] | None = None
        self._exchange: Exchange[R] | None = None
        self._recovery = (0, 0)  # the newest one installed: version of its placement, its part
        self._recovering = False  # … until the first wave of a slice that does not run beside it
        self._wave = 0  # the slice of the newest one
        self._refused: tuple[str, tuple[int, int], Failure] | None = None  # the newest, and why
        # What there is of the slice and of the recovery; and which of them has the call in hand.
        self.hands: tuple[Hand[R], Hand[R]] = (Hand(), Hand())
        self._hand = self.hands[0]
        self._writer = CheckpointWriter(process.write_later)
        self._disk_full = False
        self.placement: Placement | None = None
        self.partitions: dict[PartitionId, Partition[R]] = {}
        self.shadows: dict[PartitionId, Partition[R]] = {}
        self.preparations: Preparations[R] = Preparations(process.load_later)

    @property
    def incarnation(self) -> str:
        return self._process.incarnation

    def close(self) -> None:
        """The job has ended: what is sealed is still written."""
        self._process.close()
        for partition in self.partitions.values():
            partition.forget()

    def join(self) -> None:
        """Wait, after `close`, until nothing is written any more."""
        self._process.join()

    def warm(self, request: WarmRequest) -> None:
        """Load the job and run its chains once, on no rows."""
        self._job_of(request.spec).rehearse()
        self._process.belong_to(request.pulse, request.node)

    def adopt(self, spec: bytes, job: Job[R]) -> None:
        """This is the job that `spec` stands for: a recovery need not load it."""
        self._known_spec = (spec, job)

    def _job_of(self, spec: bytes) -> Job[R]:
        if self._known_spec[0] != spec:
            self.adopt(spec, self._load(spec))
        job: Job[R] = self._known_spec[1]
        return job

    def prepare(self, request: PrepareRequest) -> NodeReport:
        """Begin to load what the plan will install here, or go on with it."""
        self._refuse_strange(request)
        plan = request.plan
        job = self._job_of(request.spec)
        self.preparations.begin(job, plan, plan.placement.held_by(request.node))
        return replace(self._report(), node=request.node)

    def poll(self, request: PollRequest) -> NodeReport:
        """A report outside of a slice: written checkpoints above all."""
        self._refuse_strange(request)
        return self._report()

    def _refuse_strange(self, request: DriverRequest) -> None:
        """Nothing changes by what an older driver says, or what is meant for another node."""
        if request.generation < self._generation:
            raise InvariantError(
                f"a driver of generation {request.generation} spoke to a node owned by generation "
                f"{self._generation}"
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

    def wave(self, request: WaveRequest, parcels: Sequence[Parcel[R]]) -> Answer[R]:
        """Run one wave; returns a parcel per destination node, and the last wave's report or None.
        A call of an earlier slice or placement comes from a task that nobody waits for any more: it
        changes nothing."""
        self._refuse_strange(request)
        plan = request.plan
        self._hand, replay = self.hands
        if not self._is_current(plan):
            return _nothing(request.nodes), self._report() if request.last else None
        if plan.number > self._notes.slice:
            self._hand.notes = SliceNotes(plan.number)
        self._wave = plan.number
        if not request.beside:
            self._recovering = False
            self.shadows.clear()
            replay.inbox = Inbox()
        inbox = self._hand.inbox
        inbox.floor = plan.number
        for partition in self.partitions.values():
            partition.backs_up = request.backups is None or partition.id in request.backups
            if partition.chain.name not in plan.paused:
                partition.confirm(request.confirmed, request.trim)
        inbox.drop(request.confirmed)
        self._receive(parcels)
        sent: list[Sent[R]] = []
        copies = self._installed.copied_by(self._node)
        for pid in self._expected(request.depth):
            if pid.chain in plan.paused:
                continue
            hosted = self._hosted(pid)
            output = self._apply(hosted, plan, request.source_tasks) if hosted is not None else None
            if pid in copies or hosted is None or output is None:
                continue  # what a copy has to say, its partition says
            if self._stage(hosted, output):
                self._notes.partitions[pid] = output.report
                sent += self.exchange.route(hosted, output, request.nodes, paused=plan.paused)
        outgoing = self.exchange.send(sent, request.nodes, inbox)
        if not request.last:
            return outgoing, None
        if plan.seal and not self._notes.problems:
            self._seal(plan)
        kept = [o for p in self.partitions.values() for o in p.outputs.values()]
        self._disk_full = not spilled(kept, request.confirmed, self._process)
        return outgoing, self._report()

    def _is_current(self, plan: SlicePlan) -> bool:
        known = self.placement is not None and self.placement.version == plan.placement
        return known and plan.number >= self._wave

    @property
    def _notes(self) -> SliceNotes:
        return self._hand.notes

    @property
    def exchange(self) -> Exchange[R]:
        assert self._exchange is not None
        return self._exchange

    @property
    def _installed(self) -> Placement:
        assert self.placement is not None
        return self.placement

    @property
    def _of_job(self) -> Job[R]:
        assert self._job is not None
        return self._job

    def _receive(self, parcels: Sequence[Parcel[R]]) -> None:
        for parcel in parcels:
            for bundle in parcel.bundles:
                self.exchange.deliver(bundle, self._hand.inbox)
            if parcel.facts is not None:
                self._notes.take(parcel.facts)

    def _hosted(self, pid: PartitionId) -> Partition[R] | None:
        self._notes.forget(pid)
        partition = self.partitions.get(pid)
        if partition is None:
            self._notes.not_hosted[pid] = None
        return partition

    def _expected(self, depth: int) -> list[PartitionId]:
        """The partitions the placement gives to this node at one depth, and the copies."""
        mine = self._installed.held_by(self._node)
        return [p for p in mine if self._of_job.chains[p.chain].depth == depth]

    def _apply(self, partition: Partition[R], plan: SlicePlan, tasks: int) -> Output[R] | None:
        """Apply the slice, fed by `source_tasks`, to one partition, or note why not."""
        pid = partition.id
        edges = [e.id for e in partition.chain.inputs]
        if not partition.has_applied(plan.number):
            lacking = f"it is at slice {partition.next_slice}, not {plan.number}"
            if partition.next_slice == plan.number:
                counts = {e: self.exchange.sources_of(e, tasks) for e in edges}
                lacking = self._hand.inbox.missing(plan.number, counts) or ""
            if lacking:
                self._notes.incomplete[pid] = lacking
                return None
        try:
            packets = self._hand.inbox.packets(plan.number, edges, pid.index)
            return partition.apply(plan, packets)
        except ChainError as e:
            self._notes.failed(e.failure(str(pid)))
        return None

    def _stage(self, partition: Partition[R], output: Output[R], late: bool = False) -> bool:
        """Put the slice's sink rows aside, once; False when storage refused. Those that come late
        say of which slice they are."""
        for name, rows in output.sinks.items():
            key = (name, str(partition.id), output.slice if late else None)
            if key not in self._notes.staged:
                # Source tasks call themselves source-N; an operator may be named "source".
                writer = f"part-{partition.id.chain}-{partition.id.index}"
                try:
                    staged = self._of_job.stage(name, rows, output.slice, self._generation, writer)
                except AnabranchError as e:
                    self._notes.failed(_refusal(str(partition.id), e, "storage"))
                    return False
                self._notes.staged[key] = replace(staged, slice=key[2])
        return True

    # -- a wave of a recovery ------------------------------------------------------------------

    def recover(self, request: RecoverRequest, parcels: Sequence[Parcel[R]]) -> Answer[R]:
        """Rebuild partitions over several slices; the first wave installs them."""
        self._refuse_strange(request)
        self._hand = self.hands[1]
        plan = request.plan
        key = (plan.placement.version, plan.part)
        if request.depth == 1 and self._is_new(request.driver, *key):
            if request.driver != self._driver:
                # Whatever comes of it: what writes of an earlier driver's met is not this one's.
                self._writer.begin(request.generation)
            try:
                self._begin(request)
            except StorageError as e:
                self._refused = (request.driver, key, _refusal(str(request.node), e, "restore"))
        current = (self._driver, self._recovery) == (request.driver, key)
        if not current or not self._recovering:  # a call that nobody waits for any more
            return _nothing(request.nodes), self._refusal(request) if request.last else None
        self._receive(parcels)
        sent: list[Sent[R]] = []
        copies = plan.placement.copied_by(request.node)
        for pid in self._expected(request.depth):
            if pid in plan.senders and pid not in copies:
                sent += self._resend(pid, request)
            elif pid in plan.restored or pid in plan.promoted or pid in copies:
                partition = self._hosted(pid)
                if partition is not None and pid in plan.restored:
                    sent += self._rebuild(partition, request)
            if (pid in plan.restored or pid in plan.promoted) and pid in self.partitions:
                self._notes.partitions[pid] = self.partitions[pid].report()
        for shadow in self.shadows.values():
            if shadow.chain.depth == request.depth:
                sent += self._rebuild(shadow, request)
        outgoing = self.exchange.send(sent, request.nodes, self._hand.inbox)
        if not request.last:
            return outgoing, None
        if plan.seals and not self._notes.problems:
            self._seal(plan.slices[-1])
        return outgoing, self._report()

    def _refusal(self, request: RecoverRequest) -> NodeReport:
        """What there is to say of a recovery that is not the one in hand: why it could not begin,
        if it could not. Of another one that could not, it says nothing."""
        report, plan = self._report(), request.plan
        if self._refused is None:
            return report
        driver, key, why = self._refused
        if (driver, key) != (request.driver, (plan.placement.version, plan.part)):
            return report
        return replace(report, slice=plan.next_slice - 1, failures=(why, *report.failures))

    def _is_new(self, driver: str, version: int, part: int) -> bool:
        """Is this recovery to be begun? Its later parts are for those who installed its first, and
        have something to do."""
        if part > 0:
            known, before = self._recovery
            return driver == self._driver and known == version and part > before
        return driver != self._driver or (version, part) > self._recovery

    def _begin(self, request: RecoverRequest) -> None:
        """Take over what the placement gives to this node. Partitions it keeps are not touched;
        on an error nothing has changed."""
        plan = request.plan
        restore_s = self._notes.restore_s
        if plan.part > 0:
            rebuilt = [self.partitions[p] for p in plan.restored if p in self.partitions]
            for partition in (*rebuilt, *self.shadows.values()):
                partition.confirm(plan.confirmed(partition.chain.name), 0)
            self._hand.inbox = Inbox()  # a part comes with all that it needs
        else:
            restore_s = self._install(request)
        self._hand.inbox.floor = plan.first
        self._hand.notes = SliceNotes(plan.next_slice - 1, restore_s)
        for partition in self.partitions.values():  # slices may leave out this node, and not tell
            partition.backs_up = plan.backups is None or partition.id in plan.backups
        self._recovery, self._recovering = (plan.placement.version, plan.part), True

    def _install(self, request: RecoverRequest) -> float:
        """Returns how long it took, in seconds."""
        plan, started = request.plan, self._process.monotonic_s()
        is_owned = request.driver == self._driver and self._job is not None
        if not is_owned and request.spec is None:
            raise InvariantError("a node was asked to recover a job it does not know")
        job = self._of_job if is_owned else self._job_of(request.spec or b"")
        mine = plan.placement.held_by(request.node)
        kept = kept_of(self.partitions, plan, request.node, request.driver == self._driver)
        promoted = {p: x for p, x in kept.items() if p in plan.promoted}
        taken = {
            p: restored(job, self.preparations, plan, p, epoch)
            for p, epoch in mine.items()
            if p not in kept and (p in plan.restored or p in plan.copied)
        }
        owned = plan.placement.hosted_by(request.node)
        shadows = {
            p: restored(job, self.preparations, plan, p, owned[p])
            for p in plan.shadows
            if p in owned
        }
        for pid, partition in self.partitions.items():
            if pid not in kept:
                partition.forget()
        for pid, partition in promoted.items():
            partition.take_over(mine[pid])
        if request.driver != self._driver:
            self._process.belong_to(request.pulse, request.node)
        self._driver, self._generation, self._node, self.placement, self._job = (
            request.driver, request.generation, request.node, plan.placement, job,
        )  # fmt: skip
        self.partitions, self.shadows = kept | taken, shadows
        self._wave = 0
        self.preparations.clear()
        self._exchange = Exchange(job, request.generation, request.node, plan.placement)
        self.hands = (Hand(), Hand())
        self._hand = self.hands[1]
        return self._process.monotonic_s() - started

    def _rebuild(self, partition: Partition[R], request: RecoverRequest) -> Iterator[Sent[R]]:
        recovery, chain = request.plan, partition.chain
        late = recovery.late.get(chain.name) if partition.id in recovery.restored else None
        for plan in recovery.slices:
            takes = recovery.takes(chain.name, plan.number)
            if not takes and not recovery.wants(chain, plan.number):
                continue
            passed = plan.number < partition.next_slice and not partition.has_applied(plan.number)
            if passed and not recovery.wants(chain, plan.number):
                continue  # a recovery before this one came so far, and nobody waits for its output
            output = self._apply(partition, plan, plan.source_tasks)
            if output is None:
                return
            comes_late = takes and late is not None and plan.number >= late
            if comes_late and not self._stage(partition, output, late=True):
                return
            yield from self.exchange.route(partition, output, request.nodes, recovery)

    def _resend(self, pid: PartitionId, request: RecoverRequest) -> Iterator[Sent[R]]:
        """The backups of a healthy partition, for those that are rebuilt."""
        partition = self._hosted(pid)
        if partition is None:
            return
        for plan in request.plan.slices:
            if not request.plan.wants(partition.chain, plan.number):
                continue
            output = partition.outputs.get(plan.number)
            if output is None:
                self._notes.incomplete[pid] = f"it has no backup of slice {plan.number}"
                return
            yield from self.exchange.route(partition, output, request.nodes, request.plan)

    # -- checkpoints, backups, reports ---------------------------------------------------------

    def _seal(self, plan: SlicePlan) -> None:
        """Copy what changed; it becomes durable while slices go on, unless this one waits."""
        copies = self._installed.copied_by(self._node)
        write = self._writer.write if plan.waits else self._writer.submit
        for p in self.partitions.values():
            if p.chain.name in plan.paused:
                continue
            if p.id in copies:
                p.sealed_elsewhere()
            elif p.sealed < plan.number:
                before = p.sealed
                full, content = p.seal(plan.writes)
                sealed = Sealed(self._generation, p.id, plan.number, p.epoch, full, before, content)
                write(self._of_job, sealed)

    def _report(self) -> NodeReport:
        notes, vitals = self._notes, self._process.vitals()
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
            prepared=self.preparations.ready(),
            disk_full=self._disk_full,
            pid=vitals.pid,
            memory_bytes=vitals.memory_bytes,
            cpu_s=vitals.cpu_s,
            placement=self.placement.version if self.placement is not None else 0,
        )


def _nothing(nodes: Sequence[NodeId]) -> list[Parcel[R]]:
    return [Parcel() for _ in nodes]


def _refusal(where: str, error: AnabranchError, kind: str) -> Failure:
    return Failure(where, "", error.message, repr(error), kind=kind)
