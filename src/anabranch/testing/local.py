"""A cluster in this process: hosts by direct calls in place of executors, and hooks for faults.

It carries out the same jobs as Spark does, stage by stage. A batch is a list of source tasks, each
with a table per source. To make things go wrong, give `before` a function, or overrides
`task`, `arrived` and `call`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pyarrow as pa

from anabranch.driver.cluster import (
    NodesLostError,
    NodesObserver,
    Ran,
    RecoveryJob,
    SliceJob,
    Stages,
)
from anabranch.errors import AnabranchError, ClusterError
from anabranch.model.ids import NodeId
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed
from anabranch.node.process.surroundings import new_host
from anabranch.node.protocol.exchange import Parcel
from anabranch.node.protocol.host import Answer, Host
from anabranch.node.protocol.messages import (
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    ReplayRequest,
    WaveRequest,
)
from anabranch.node.protocol.source_task import run_replay_task, run_source_task

Share = Mapping[str, pa.Table]  # what a source task reads: a table per source
Parcels = list[Parcel[pa.Table]]


class LocalCluster:
    """Nodes named "1", "2" and so on, in the order in which they join."""

    pulse = None
    joining = ()
    wanted = None

    def __init__(self, count: int, load: Callable[[bytes], Any]) -> None:
        """`load` makes the job from what the driver sends."""
        self._load = load
        self._joined = 0
        self._observer: NodesObserver | None = None
        self._begun: list[Host[pa.Table]] = []  # the dead among them
        self.hosts: dict[NodeId, Host[pa.Table]] = {}
        self.dead: dict[NodeId, str] = {}  # and of what
        # Called before every stage, wave of a node and end of a job: it may kill nodes.
        self.before: Callable[[str, int], None] = lambda step, depth: None
        self.join(count)

    # -- nodes ---------------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self.hosts)

    @property
    def host_names(self) -> Mapping[NodeId, str]:
        return {}

    def join(self, count: int) -> None:
        for _ in range(count):
            self._joined += 1
            self.replace(NodeId(str(self._joined)))

    def replace(self, node: NodeId) -> None:
        """Its process is another one, which knows nothing."""
        self.hosts[node] = new_host(load=self._load)
        self._begun.append(self.hosts[node])

    def kill(self, *nodes: NodeId, reason: str = "killed") -> None:
        """The executor is gone, with its node process."""
        for node in nodes:
            self.dead[node] = reason
            if node in self.hosts:
                self.hosts.pop(node).close()

    def report_to(self, observer: NodesObserver) -> None:
        """Of nodes that were asked for. Losses are met by the next job, and a caller that lets
        other nodes join says so."""
        self._observer = observer

    def request(self, count: int) -> None:
        """They come at once."""
        before = self.nodes
        self.join(count)
        if self._observer is not None:
            self._observer.nodes_joined(tuple(n for n in self.nodes if n not in before))

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            self.hosts.pop(node).close()

    def look_for_nodes(self) -> tuple[NodeId, ...]:
        if not self.hosts:
            raise ClusterError("no node is left")
        return self.nodes

    def forget(self, job: str) -> None:
        for host in self.hosts.values():
            host.close()

    def close(self) -> None:
        """When this returns, nothing is written any more."""
        for host in self._begun:
            host.close()
            host.join()

    # -- jobs ----------------------------------------------------------------------------------

    def ask(self, requests: Sequence[PrepareRequest | PollRequest]) -> list[NodeReport]:
        step = "prepare" if isinstance(requests[0], PrepareRequest) else "poll"
        self._strike(step, 0, [r.node for r in requests], None)
        return [self._asked(r) for r in requests]

    def _asked(self, request: PrepareRequest | PollRequest) -> NodeReport:
        host = self.hosts[request.node]
        return host.prepare(request) if isinstance(request, PrepareRequest) else host.poll(request)

    def run(self, job: SliceJob | RecoveryJob) -> Ran:
        if isinstance(job, SliceJob):
            shares: Sequence[Share] = job.rows if job.plan.feed is Feed.LIVE else ()
            return self._run(job.stages(len(shares)), job.caller.spec, shares)
        return self._run(job.stages(), job.caller.spec, ())

    def begin(self, job: RecoveryJob) -> Future[Ran]:
        """At once, before anything else."""
        future: Future[Ran] = Future()
        try:
            future.set_result(self.run(job))
        except (AnabranchError, NodesLostError) as e:
            future.set_exception(e)
        return future

    def _run(self, stages: Stages[Any], spec: bytes, shares: Sequence[Share]) -> Ran:
        step = "replay" if isinstance(stages.source, ReplayRequest) else "source"
        self._strike(step, 0, stages.nodes, stages.tasks)
        sent: list[Parcels] = []
        for task in range(stages.tasks):
            sent.append(self._sourced(stages, spec, task, shares[task] if shares else {}))
            self._strike(step, task + 1, stages.nodes, stages.tasks)
        step = "recovery" if step == "replay" else "wave"
        reports: list[NodeReport] = []
        for depth, wave in enumerate(stages.waves, 1):
            arrived = [self.arrived(r.node, [p[i] for p in sent]) for i, r in enumerate(wave)]
            sent = []
            for request, parcels in zip(wave, arrived, strict=True):
                self._strike(step, depth, stages.nodes, stages.tasks)
                answer, report = self.call(request, parcels)
                sent.append(answer)
                reports += [report] if report is not None else []
        self._strike("end", len(stages.waves), stages.nodes, stages.tasks)
        return Ran(stages.tasks, tuple(map(self.told, reports)))

    def _sourced(self, stages: Stages[Any], spec: bytes, task: int, share: Share) -> Parcels:
        source = stages.source
        if isinstance(source, ReplayRequest):
            return self.task(lambda: run_replay_task(self._load(spec), source, task))
        frames = arrow_frames(share, source.sources, source.schema)
        return self.task(lambda: run_source_task(self._load(spec), source, task, frames))

    def _strike(
        self, step: str, depth: int, nodes: Sequence[NodeId], source_tasks: int | None
    ) -> None:
        """Faults come between any two calls; a job ends when one of its nodes is gone."""
        self.before(step, depth)
        lost = [n for n in nodes if n in self.dead]
        if lost:
            raise NodesLostError(lost, "; ".join({self.dead[n]: None for n in lost}), source_tasks)

    # -- what a fault may change ---------------------------------------------------------------

    def task(self, work: Callable[[], Parcels]) -> Parcels:
        """Run a source task."""
        return work()

    def arrived(self, node: NodeId, parcels: Parcels) -> Parcels:
        """What a node gets of what was sent to it in the stage before."""
        return parcels

    def told(self, report: NodeReport) -> NodeReport:
        """What the driver hears of a node. How long it was busy says more of this machine than of
        the job, whose time is the test's."""
        partitions = {p: replace(seen, busy_s=0.0) for p, seen in report.partitions.items()}
        return replace(report, partitions=partitions)

    def call(self, request: WaveRequest | RecoverRequest, parcels: Parcels) -> Answer[pa.Table]:
        """Have a node run a wave."""
        host = self.hosts[request.node]
        if isinstance(request, WaveRequest):
            return host.wave(request, parcels)
        return host.recover(request, parcels)


def united(schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """Of a batch: the rows of the one source, or a struct column per source."""
    if len(schemas) == 1:
        return next(iter(schemas.values()))
    return pa.schema([(name, pa.struct(list(schema))) for name, schema in schemas.items()])


def arrow_frames(share: Share, sources: tuple[str, ...], schema: pa.Schema) -> list[bytes]:
    """As Spark hands a task its share: Arrow batches, several sources as struct columns."""
    if len(sources) == 1:
        given = [share[s].cast(schema) for s in sources if s in share]
    else:
        given = []
        for name, table in share.items():
            rows = pa.chunked_array([table.to_struct_array().combine_chunks()])
            columns = [
                rows.cast(schema.field(s).type)
                if s == name
                else pa.nulls(table.num_rows, schema.field(s).type)
                for s in sources
            ]
            given.append(pa.table(columns, schema=schema))
    return [b.serialize().to_pybytes() for t in given for b in t.to_batches() if b.num_rows]
