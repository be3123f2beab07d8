"""Run a topology in this process, without Spark, slice by slice: for tests of your own topologies.

    outputs = play(topology, [{"lines": rows}, Lose(), {"lines": more}, Restart(nodes=3), Idle()])

The same control plane, nodes and storage as on a cluster, with hosts in this process in place of
executors. Sinks are replaced by memory. A step is the rows of one slice per source (a list of
dicts, a Polars frame or an Arrow table), or something that happens between two slices; the result
is what reached every sink, step by step.

The clock is the steps' own: a second per slice, from 1970 on or from `start`. Only with a `start`
do sources compare event times with it (`max_ahead`).
"""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from anabranch.api import Topology
from anabranch.control.controller import ControlConfig, Controller
from anabranch.driver.actions import Actions, NodesLostError
from anabranch.driver.preparing import JobParts, RunConfig, prepare
from anabranch.driver.progress import Totals
from anabranch.driver.steps import Steps
from anabranch.errors import ClusterError, ConfigError
from anabranch.model.events import (
    BatchArrived,
    DrainRequested,
    Event,
    Idled,
    NodesJoined,
    ScaleRequested,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping as PartitionMapping
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.host import Host
from anabranch.node.messages import (
    JobSpec,
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    WaveRequest,
)
from anabranch.node.source_task import (
    ReplayRequest,
    SourceRequest,
    run_replay_task,
    run_source_task,
)
from anabranch.operators.event_time import Timed
from anabranch.storage.sinks import Memory

Rows = Any  # a list of dicts, a Polars frame or an Arrow table
_LOCAL = b"local"  # in place of a pickled job: hosts in this process share the object


@dataclass(frozen=True)
class Lose:
    """So many nodes die, with their state; as many others join."""

    nodes: int = 1


@dataclass(frozen=True)
class Restart:
    """The driver is killed and started again on the same checkpoint directory: with so many
    nodes, and with another topology if one is given (other code, another parallelism)."""

    nodes: int | None = None
    topology: Topology | None = None


@dataclass(frozen=True)
class Idle:
    """No rows come for a while: time moves on, windows that the watermark has passed close."""

    seconds: float = 1.0


@dataclass(frozen=True)
class Scale:
    """An operator gets another parallelism; it is there before the next step."""

    operator: str
    parallelism: int


@dataclass(frozen=True)
class Join:
    """So many nodes join; partitions move to them."""

    nodes: int = 1


@dataclass(frozen=True)
class Drain:
    """The node with the most partitions is emptied and released."""


Step = Mapping[str, Rows] | Lose | Restart | Idle | Scale | Join | Drain
Output = dict[str, pl.DataFrame]


def play(
    topology: Topology,
    steps: Sequence[Step],
    *,
    nodes: int = 2,
    schemas: Mapping[str, pa.Schema] | None = None,
    start: datetime | None = None,
) -> list[Output]:
    """Run the steps; per step, the rows that reached each sink because of it.

    Schemas of sources are taken from the first rows given for them, unless named.
    """
    known = {n: _table(rows, None).schema for n, rows in _first_rows(steps).items()}
    # A host's thread may still write a checkpoint when the last step is done.
    with tempfile.TemporaryDirectory(prefix="anabranch-play-", ignore_cleanup_errors=True) as root:
        job = LocalJob(topology, Path(root), {**known, **(schemas or {})}, nodes, start)
        try:
            return [job.step(step) for step in steps]
        finally:
            job.close()


def _first_rows(steps: Sequence[Step]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for step in steps:
        if isinstance(step, Mapping):
            for name, rows in step.items():
                if len(rows):
                    found.setdefault(name, rows)
    return found


class LocalJob:
    """A topology that runs here, on a directory, step by step."""

    def __init__(
        self,
        topology: Topology,
        root: Path,
        schemas: Mapping[str, pa.Schema],
        nodes: int = 2,
        start: datetime | None = None,
    ) -> None:
        self._root = root
        self._schemas = dict(schemas)
        self._timeless = start is None
        self._now_ms = 0 if start is None else int(start.timestamp() * 1000)
        self._lives: list[LocalNodes] = []
        self._start(topology, nodes)

    def _start(self, topology: Topology, nodes: int) -> None:
        missing = [n for n in topology._sources if n not in self._schemas]
        if missing:
            raise ConfigError(
                f"no rows were given for source {missing[0]!r}; give it a schema: "
                f"schemas={{{missing[0]!r}: pa.schema(...)}}"
            )
        self._topology = topology
        self._sinks = {name: Memory() for name in topology._sinks}
        plan = topology.plan()
        parts = JobParts(
            plan=_unbounded(plan) if self._timeless else plan,
            sources=topology._sources,
            event_times=topology._event_times,
            watermark_delays_us=topology._delays,
            sinks=self._sinks,
        )
        ordered = {n: self._schemas[n] for n in topology._sources}
        united = pa.schema([(n, pa.struct(list(s))) for n, s in ordered.items()])
        united = united if len(ordered) > 1 else next(iter(ordered.values()))
        prepared = prepare(parts, RunConfig(self._root), ordered, united)
        self._nodes = LocalNodes(nodes, parts.plan.waves, prepared.spec, tuple(ordered), united)
        self._lives.append(self._nodes)
        self.actions = Actions(self._root, prepared, self._sinks, clock=lambda: self._now_ms)
        past = self.actions.resume()
        config = ControlConfig(
            watermark_delays_us=topology._delays, idle_timeouts_ms=topology._idle_timeouts
        )
        self.controller = Controller(parts.plan, config, past)
        self.actions.complete_sinks(past)
        self._steps = Steps(self.controller, self.actions, self._nodes)
        self._handle(NodesJoined(self._nodes.nodes, self._now_ms))
        newest = self.controller.newest
        self._batch = newest.batch + 1 if newest and newest.batch is not None else 0

    @property
    def totals(self) -> Totals:
        """What became of all rows since the start, or the last `Restart`."""
        return self.actions.totals

    def step(self, step: Step) -> Output:
        """Do one step; what reached the sinks."""
        before = self._newest
        match step:
            case Lose():
                self._nodes.lose(step.nodes)
                self._handle(NodesJoined(self._nodes.nodes, self._now_ms))
            case Restart():
                self.actions.close()
                count = step.nodes or len(self._nodes.nodes)
                self._start(step.topology or self._topology, count)
            case Idle():
                self._now_ms += int(step.seconds * 1000)
                self._handle(Idled(self._now_ms))
            case Scale():
                self._handle(ScaleRequested(step.operator, step.parallelism, self._now_ms))
                self._settle()
            case Join():
                self._nodes.join(step.nodes)
                self._handle(NodesJoined(self._nodes.nodes, self._now_ms))
                self._settle()
            case Drain():
                assert self.controller.mapping is not None
                owners = [o.node for o in self.controller.mapping.owners.values()]
                fullest = max(self._nodes.nodes, key=owners.count)
                self._handle(DrainRequested(fullest, self._now_ms))
                self._settle()
            case _:
                self._feed(step)
        return {n: self._rows(s, before) for n, s in self._sinks.items()}

    def _settle(self) -> None:
        """Let the job idle until a change of its mapping is made."""
        while self.controller.adjusting:
            self._now_ms += 1
            self._handle(Idled(self._now_ms))

    def stop(self) -> Output:
        """A graceful end: close what the watermark allows, checkpoint."""
        before = self._newest
        self._handle(StopRequested(self._now_ms))
        self.actions.close()
        return {n: self._rows(s, before) for n, s in self._sinks.items()}

    def close(self) -> None:
        """End as it is; when this returns, nothing is written to the directory any more."""
        self.actions.close()
        for nodes in self._lives:
            nodes.close()

    def _feed(self, rows: Mapping[str, Rows]) -> None:
        unknown = [n for n in rows if n not in self._topology._sources]
        if unknown:
            known = ", ".join(self._topology._sources)
            raise ConfigError(f"there is no source {unknown[0]!r}; the topology has {known}")
        tables = {n: _table(given, self._schemas[n]) for n, given in rows.items()}
        self.actions.batch = tables
        self._now_ms += 1000
        while self.actions.finished_batch != self._batch:
            self._handle(BatchArrived(self._batch, self._now_ms))
        self._batch += 1

    @property
    def _newest(self) -> int:
        return self.controller.newest.number if self.controller.newest else 0

    @staticmethod
    def _rows(sink: Memory, after: int) -> pl.DataFrame:
        tables = [t for n in sorted(sink.slices) if n > after for t in sink.slices[n]]
        table = pa.concat_tables(tables) if tables else sink._schema.empty_table()
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return frame

    def _handle(self, event: Event) -> None:
        self._steps.take(event)


def _unbounded(plan: Plan) -> Plan:
    """The plan with sources that take any event time: the clock is not one to compare it with."""
    graph = plan.topology
    operators = tuple(
        replace(o, kernel=replace(o.kernel, max_ahead_us=None))
        if isinstance(o.kernel, Timed)
        else o
        for o in graph.operators
    )
    return compile_plan(replace(graph, operators=operators))


class LocalNodes:
    """Hosts in this process, in place of executors. A batch is a table per source."""

    def __init__(
        self, count: int, waves: int, job: JobSpec, sources: tuple[str, ...], schema: pa.Schema
    ) -> None:
        self._waves, self._job, self._sources, self._schema = waves, job, sources, schema
        self._driver = uuid.uuid4().hex
        self._joined = 0
        self._hosts: dict[NodeId, Host] = {}
        self._begun: list[Host] = []  # the dead among them
        self._dead: set[NodeId] = set()
        self.join(count)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self._hosts)

    def join(self, count: int) -> None:
        for _ in range(count):
            self._joined += 1
            host = Host()
            host.adopt(_LOCAL, self._job)
            self._begun.append(host)
            self._hosts[NodeId(str(self._joined))] = host

    def lose(self, count: int) -> None:
        for node in list(self._hosts)[:count]:
            self._hosts.pop(node).close()
            self._dead.add(node)
        self.join(count)

    def await_nodes(self) -> tuple[NodeId, ...]:
        if not self._hosts:
            raise ClusterError("no node is left")
        return self.nodes

    def prepare(self, plan: RecoveryPlan, run: int) -> list[NodeReport]:
        nodes = plan.mapping.nodes
        self._refuse_dead(nodes, None)
        return [self._hosts[n].prepare(PrepareRequest("", _LOCAL, run, n, plan)) for n in nodes]

    def request(self, count: int) -> None:
        """Nobody can be asked here."""

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        for node in nodes:
            self._hosts.pop(node).close()

    def poll(self, run: int, nodes: tuple[NodeId, ...]) -> list[NodeReport]:
        self._refuse_dead(nodes, None)
        return [self._hosts[n].poll(PollRequest("", run, n)) for n in nodes]

    def close(self) -> None:
        for host in self._begun:
            host.close()
            host.join()

    def forget(self) -> None:
        for host in self._hosts.values():
            host.close()

    def run_slice(
        self,
        plan: SlicePlan,
        run: int,
        confirmed: int,
        trim: int,
        backups: frozenset[PartitionId] | None,
        mapping: PartitionMapping,
        batch: Mapping[str, pa.Table],
    ) -> tuple[int, list[NodeReport]]:
        nodes = mapping.nodes
        count = {Feed.LIVE: 1, Feed.LOG: plan.source_tasks, Feed.NONE: 0}[plan.feed]
        self._refuse_dead(nodes, count)
        request = SourceRequest(run, nodes, mapping, plan, count, self._sources, self._schema)
        frames = _frames(batch, self._sources, self._schema) if plan.feed is Feed.LIVE else []
        sent = [run_source_task(self._job, request, task, frames) for task in range(count)]

        def wave(node: NodeId, depth: int, last: bool) -> WaveRequest:
            return WaveRequest(
                "", run, node, nodes, plan, count, depth, last, confirmed, trim, backups
            )

        return count, self._run_waves(wave, sent, nodes)

    def recover(self, plan: RecoveryPlan, run: int) -> list[NodeReport]:
        nodes = plan.mapping.nodes
        self._refuse_dead(nodes, None)
        count = 1 if plan.reads_log and any(s.source_tasks for s in plan.slices) else 0
        request = ReplayRequest(run, nodes, plan, count)
        sent = [run_replay_task(self._job, request, task) for task in range(count)]

        def wave(node: NodeId, depth: int, last: bool) -> RecoverRequest:
            return RecoverRequest(
                "", _LOCAL, self._driver, None, run, node, nodes, plan, depth, last
            )

        return self._run_waves(wave, sent, nodes)

    def _run_waves(
        self,
        wave: Callable[[NodeId, int, bool], WaveRequest | RecoverRequest],
        sent: list[list[list[Any]]],
        nodes: tuple[NodeId, ...],
    ) -> list[NodeReport]:
        reports = []
        for depth in range(1, self._waves + 1):
            arrived = [[b"".join(blobs[i]) for blobs in sent] for i in range(len(nodes))]
            sent = []
            for node, blobs in zip(nodes, arrived, strict=True):
                request = wave(node, depth, depth == self._waves)
                host = self._hosts[node]
                if isinstance(request, WaveRequest):
                    answer, report = host.wave(request, blobs)
                else:
                    answer, report = host.recover(request, blobs)
                sent.append(answer)
                reports += [report] if report is not None else []
        return reports

    def _refuse_dead(self, nodes: tuple[NodeId, ...], tasks: int | None) -> None:
        lost = [n for n in nodes if n in self._dead]
        if lost:
            raise NodesLostError(lost, "it was told to die", tasks)


def _table(rows: Rows, schema: pa.Schema | None) -> pa.Table:
    if isinstance(rows, pl.DataFrame):
        rows = rows.to_arrow()
    if not isinstance(rows, pa.Table):
        with _said(rows):
            return pa.Table.from_pylist([dict(r) for r in rows], schema)
    return rows.cast(schema) if schema is not None else rows


@contextlib.contextmanager
def _said(rows: Any) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise ConfigError(f"these rows are no table: {e}; the first is {rows[:1]!r}") from e


def _frames(
    tables: Mapping[str, pa.Table], sources: tuple[str, ...], schema: pa.Schema
) -> list[bytes]:
    """As Spark hands a batch over: Arrow batches, several sources as struct columns."""
    if len(sources) == 1:
        given = [tables[s].cast(schema) for s in sources if s in tables]
    else:
        given = []
        for name, table in tables.items():
            rows = pa.chunked_array([table.to_struct_array().combine_chunks()])
            columns = [
                rows.cast(schema.field(s).type)
                if s == name
                else pa.nulls(table.num_rows, schema.field(s).type)
                for s in sources
            ]
            given.append(pa.table(columns, schema=schema))
    return [b.serialize().to_pybytes() for t in given for b in t.to_batches() if b.num_rows]


__all__: Sequence[str] = [
    "Drain",
    "Idle",
    "Join",
    "LocalJob",
    "Lose",
    "Restart",
    "Scale",
    "play",
]
