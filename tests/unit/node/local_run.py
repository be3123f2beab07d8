"""The real driver, control plane and node code on hosts of this process, without Spark.

`LocalNodes` takes the place of Spark's waves: it runs source tasks and waves by direct calls and
can do to them what a cluster does: repeat a task, deliver a blob twice or in another order, lose
one, let a call of an earlier slice arrive late, lose a node process. A batch is a list of source
tasks, each with rows per source.
"""

from __future__ import annotations

import pickle
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

import anabranch as ab
from anabranch.control.strategies import STRATEGIES
from anabranch.driver.actions import NodesLostError, now_ms
from anabranch.driver.preparing import JobParts, RunConfig
from anabranch.errors import ClusterError
from anabranch.model.events import Event, NodesPolled, StopRequested
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.host import Host
from anabranch.node.messages import PollRequest, RecoverRequest, WaveRequest
from anabranch.node.source_task import (
    ReplayRequest,
    SourceRequest,
    run_replay_task,
    run_source_task,
)
from anabranch.spark.driver import JobDriver, StoppedError
from anabranch.storage.checkpoint_store import LOCAL
from oracle import Row

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
Task = Mapping[str, list[Row]]  # rows per source
Batch = Sequence[Task]


def table(rows: Sequence[Row]) -> pa.Table:
    return pa.table({"k": [r[0] for r in rows], "v": [r[1] for r in rows]}, SCHEMA)


@dataclass
class Faults:
    """What goes wrong, chosen by a seed; all of it must be harmless."""

    seed: int
    repeat: float = 0.0  # chance that a task or wave runs twice
    stale: float = 0.0  # chance that an earlier wave's call arrives again before this one
    shuffle: bool = False  # blobs in any order, some twice
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)


class LocalNodes:
    """Stands in for WaveRunner."""

    def __init__(self, count: int, waves: int, faults: Faults | None = None) -> None:
        self.hosts = {NodeId(str(i)): Host() for i in range(count)}
        self.faults = faults or Faults(0)
        self.lose: Callable[[int, NodeId, int], bool] = lambda slice_no, node, blob: False
        # Called before every step of a job: may kill nodes, or replace node processes.
        self.before: Callable[[str, int], None] = lambda step, depth: None
        self.dead: set[NodeId] = set()
        self.recovered: list[RecoveryPlan] = []
        self._waves = waves
        self._past: list[tuple[WaveRequest | RecoverRequest, list[bytes]]] = []

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(self.hosts)

    def kill(self, *nodes: NodeId) -> None:
        """The executor is gone, with its node process."""
        self.dead.update(nodes)
        for node in nodes:
            self.hosts.pop(node, None)

    def replace(self, node: NodeId) -> None:
        """The node process is another one."""
        self.hosts[node] = Host()

    def connect(self, spec: bytes, sources: tuple[str, ...], schema: pa.Schema) -> None:
        self._spec, self._sources, self._schema = spec, sources, schema
        self._driver = uuid.uuid4().hex

    def poll(self, run: int, nodes: tuple[NodeId, ...]) -> list[NodeReport]:
        self._check("poll", 0, nodes, None)
        return [self.hosts[n].poll(PollRequest("", run, n)) for n in nodes]

    def await_nodes(self) -> tuple[NodeId, ...]:
        if not self.hosts:
            raise ClusterError("no node is left")
        return self.nodes

    def forget(self) -> None:
        """The hosts stay as they are: whatever is left in them must not matter."""

    def run_slice(
        self,
        plan: SlicePlan,
        run: int,
        confirmed: int,
        trim: int,
        backups: frozenset[PartitionId] | None,
        mapping: Any,
        batch: Batch | None,
    ) -> tuple[int, list[NodeReport]]:
        nodes = mapping.nodes
        count = {Feed.LIVE: len(batch or ()), Feed.LOG: plan.source_tasks, Feed.NONE: 0}[plan.feed]
        self._check("source", 0, nodes, count)
        request = SourceRequest(run, nodes, mapping, plan, count, self._sources, self._schema)
        sent = []
        for task in range(count):
            sent.append(self._source_task(request, task, batch))
            self._check("source", task + 1, nodes, count)

        def wave(node: NodeId, depth: int, last: bool) -> WaveRequest:
            return WaveRequest(
                "", run, node, nodes, plan, count, depth, last, confirmed, trim, backups
            )

        return count, self._waves_of(wave, sent, nodes, count)

    def recover(self, plan: RecoveryPlan, run: int) -> list[NodeReport]:
        self.recovered.append(plan)
        nodes = plan.mapping.nodes
        logs = sum(s.source_tasks for s in plan.slices) if plan.reads_log else 0
        count = min(len(nodes), logs)
        self._check("replay", 0, nodes, None)
        request = ReplayRequest(run, nodes, plan, count)
        sent = []
        for task in range(count):
            for _ in range(self._times()):
                blobs = run_replay_task(pickle.loads(self._spec), request, task)
            sent.append([b"".join(b) for b in blobs])

        def wave(node: NodeId, depth: int, last: bool) -> RecoverRequest:
            spec = self._spec if depth == 1 else None
            return RecoverRequest("", spec, self._driver, None, run, node, nodes, plan, depth, last)

        return self._waves_of(wave, sent, nodes, None)

    def _waves_of(
        self,
        wave: Callable[[NodeId, int, bool], Any],
        sent: list[list[bytes]],
        nodes: tuple[NodeId, ...],
        tasks: int | None,
    ) -> list[NodeReport]:
        reports: list[NodeReport] = []
        for depth in range(1, self._waves + 1):
            arrived = self._arrived(sent, nodes)
            sent = []
            for node in nodes:
                request = wave(node, depth, depth == self._waves)
                step = "wave" if isinstance(request, WaveRequest) else "recovery"
                self._check(step, depth, nodes, tasks)
                blobs, report = self._wave(request, arrived[node])
                sent.append([b"".join(b) for b in blobs])
                if report is not None:
                    reports.append(report)
        self._check("end", self._waves, nodes, tasks)
        return reports

    def _check(self, step: str, depth: int, nodes: tuple[NodeId, ...], tasks: int | None) -> None:
        self.before(step, depth)
        lost = [n for n in nodes if n in self.dead]
        if lost:
            raise NodesLostError(lost, "killed", tasks)

    def _source_task(self, request: SourceRequest, task: int, batch: Batch | None) -> list[bytes]:
        blobs: list[list[Any]] = []
        for _ in range(self._times()):
            live = batch[task] if request.plan.feed is Feed.LIVE and batch is not None else {}
            frames = _frames(live, request.sources, request.schema)
            blobs = run_source_task(pickle.loads(self._spec), request, task, frames)
        return [b"".join(b) for b in blobs]

    def _wave(
        self, wave: WaveRequest | RecoverRequest, blobs: list[bytes]
    ) -> tuple[Any, NodeReport | None]:
        if self._past and self.faults.random.random() < self.faults.stale:
            old, with_blobs = self.faults.random.choice(self._past)
            if old.node in self.hosts:
                self._call(old, with_blobs)
        self._past.append((wave, blobs))
        answer = None
        for _ in range(self._times()):
            answer = self._call(wave, blobs)
        assert answer is not None
        return answer

    def _call(self, wave: WaveRequest | RecoverRequest, blobs: list[bytes]) -> Any:
        host = self.hosts[wave.node]
        return (
            host.wave(wave, blobs) if isinstance(wave, WaveRequest) else host.recover(wave, blobs)
        )

    def _arrived(
        self, sent: list[list[bytes]], nodes: tuple[NodeId, ...]
    ) -> dict[NodeId, list[bytes]]:
        arrived = {n: [blobs[i] for blobs in sent] for i, n in enumerate(nodes)}
        if self.faults.shuffle:
            for blobs in arrived.values():
                if blobs:
                    blobs.append(self.faults.random.choice(blobs))
                self.faults.random.shuffle(blobs)
        return {
            n: [b for i, b in enumerate(blobs) if not self.lose(i, n, len(blobs))]
            for n, blobs in arrived.items()
        }

    def _times(self) -> int:
        return 2 if self.faults.random.random() < self.faults.repeat else 1


def _frames(rows: Task, sources: tuple[str, ...], schema: pa.Schema) -> list[bytes]:
    """What Spark hands to a source task: Arrow batches, several sources as struct columns."""
    if len(sources) == 1:
        tables = [table(rows.get(sources[0], []))]
    else:
        tables = []
        for name in sources:
            values = [{"k": k, "v": v} for k, v in rows.get(name, [])]
            columns = [values if s == name else [None] * len(values) for s in sources]
            tables.append(pa.table(dict(zip(sources, columns, strict=True)), schema))
    return [b.serialize().to_pybytes() for t in tables for b in t.to_batches() if b.num_rows]


class LocalRun:
    """One job on a directory: start it, feed batches, stop it; start another one on the same."""

    def __init__(
        self,
        topology: ab.Topology,
        root: Path,
        nodes: int = 2,
        faults: Faults | None = None,
        hosts: LocalNodes | None = None,
        checkpoint_interval_ms: int = 1,
        max_rows_per_slice: int | None = None,
        schemas: Mapping[str, pa.Schema] | None = None,
        backups: frozenset[str] | None = None,
        strategy: str = "ours",
        recovery_bound_ms: int | None = None,
        checkpoints: str = LOCAL,
        behind: bool = False,
    ) -> None:
        parts = JobParts(
            plan=topology.plan(),
            sources=topology._sources,
            event_times=topology._event_times,
            watermark_delays_us=topology._delays,
            sinks=topology._sinks,
        )
        config = RunConfig(
            root,
            checkpoint_interval_ms=checkpoint_interval_ms,
            max_rows_per_slice=max_rows_per_slice,
            backups=backups,
            strategy=STRATEGIES[strategy],
            recovery_bound_ms=recovery_bound_ms,
            checkpoints=checkpoints,
        )
        self.driver = JobDriver(None, parts, config)  # type: ignore[arg-type]
        known = dict(schemas) if schemas else dict.fromkeys(topology._sources, SCHEMA)
        united = pa.schema([(n, pa.struct(list(s))) for n, s in known.items()])
        self.driver.prepare(known, united if len(known) > 1 else next(iter(known.values())))
        self.nodes = hosts or LocalNodes(nodes, parts.plan.waves, faults)
        prepared = self.driver._prepared
        self.nodes.connect(self.driver._spec, prepared.sources, prepared.schema)
        self.driver.take_over(lambda: (self.nodes, self.nodes.nodes), behind)
        newest = self.driver.controller.newest
        self.next_batch = newest.batch + 1 if newest and newest.batch is not None else 0

    def feed(self, batch: Batch, number: int | None = None) -> None:
        """Offer a batch as Spark would."""
        number = self.next_batch if number is None else number
        try:
            self.driver._on_batch(batch, number)  # type: ignore[arg-type]
        except StoppedError as e:
            raise e.__cause__ or self.driver.error or e from None
        self.next_batch = number + 1

    def stop(self) -> None:
        self.handle(StopRequested(now_ms()))
        self.driver._release()

    def handle(self, event: Event) -> None:
        """Another event than a batch."""
        assert self.driver._steps is not None
        self.driver._steps.take(event)

    def await_cut(self) -> None:
        """Ask the nodes until the checkpoint under way is on disk, however slow that is."""
        while self.driver.controller._checkpoints.in_flight:
            time.sleep(0.001)
            reports = self.nodes.poll(self.driver.actions.run, self.nodes.nodes)
            self.handle(NodesPolled(tuple(reports), now_ms()))

    def kill(self) -> None:
        """What a SIGKILL leaves: an unlocked directory and nothing else."""
        self.driver._release()


def rows_of(sink: ab.Memory, slice_no: int) -> list[Row]:
    tables = sink.slices.get(slice_no, [])
    return [(r["k"], r["v"]) for t in tables for r in t.to_pylist()]


class LocalQuery:
    """Stands in for Spark's streaming query: offers batches on a thread of its own, and ends when
    one is refused, when it is stopped or when there are no more."""

    def __init__(self, run: LocalRun, batches: Sequence[Batch]) -> None:
        self._run, self._batches = run, batches
        self._stopped = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._offer, daemon=True)

    def start(self) -> None:
        """And let the driver follow it."""
        self._thread.start()
        self._run.driver.follow(self)

    def stop(self) -> None:
        assert threading.current_thread() is not self._thread, "Spark would wait for itself here"
        self._stopped.set()
        self._thread.join()

    def awaitTermination(self) -> None:  # noqa: N802 - as Spark spells it
        self._thread.join()
        if self._problem is not None and not self._stopped.is_set():
            raise RuntimeError("the query was terminated with an exception")

    def _offer(self) -> None:
        try:
            for number, batch in enumerate(self._batches):
                if self._stopped.is_set():
                    return
                self._run.driver._on_batch(batch, number)  # type: ignore[arg-type]
        except BaseException as e:
            self._problem = e
