"""The real driver, control plane and node code on hosts of this process, without Spark.

`LocalNodes` takes the place of Spark's waves: it runs source tasks and waves by direct calls and
can do to them what a cluster does: repeat a task, deliver a blob twice or in another order, lose
one, let a call of an earlier slice arrive late, lose a node process. A batch is a list of source
tasks, each with rows per source.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

import anabranch as ab
from anabranch.model.events import StopRequested
from anabranch.model.ids import NodeId
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.host import Host
from anabranch.node.messages import InstallRequest, PollRequest, WaveRequest
from anabranch.node.source_task import SourceRequest, run_source_task
from anabranch.spark.driver import JobDriver, JobParts, RunConfig
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
        self.nodes = tuple(NodeId(str(i)) for i in range(count))
        self.hosts = {n: Host() for n in self.nodes}
        self.faults = faults or Faults(0)
        self.lose: Callable[[int, NodeId, int], bool] = lambda slice_no, node, blob: False
        self._waves = waves
        self._past: list[tuple[WaveRequest, list[bytes]]] = []

    def install(self, requests: Sequence[InstallRequest]) -> list[NodeReport]:
        return [self.hosts[r.node].install(r) for r in requests]

    def poll(self, run: int) -> list[NodeReport]:
        return [h.poll(PollRequest("", run, n)) for n, h in self.hosts.items()]

    def forget(self) -> None:
        """The hosts stay as they are: whatever is left in them must not matter."""

    def run_slice(
        self,
        plan: SlicePlan,
        run: int,
        confirmed: int,
        mapping: Any,
        spec: bytes,
        sources: tuple[str, ...],
        schema: pa.Schema,
        batch: Batch | None,
    ) -> tuple[int, list[NodeReport]]:
        count = {Feed.LIVE: len(batch or ()), Feed.LOG: plan.source_tasks, Feed.NONE: 0}[plan.feed]
        request = SourceRequest(run, self.nodes, mapping, plan, count, sources, schema)
        arrived = self._arrived(
            [self._source_task(spec, request, task, batch) for task in range(count)]
        )
        reports: list[NodeReport] = []
        for depth in range(1, self._waves + 1):
            last = depth == self._waves
            sent = []
            for node in self.nodes:
                wave = WaveRequest("", run, node, self.nodes, plan, count, depth, last, confirmed)
                blobs, report = self._wave(wave, arrived[node])
                sent.append([b"".join(b) for b in blobs])
                if report is not None:
                    reports.append(report)
            if not last:
                arrived = self._arrived(sent)
        return count, reports

    def _source_task(
        self, spec: bytes, request: SourceRequest, task: int, batch: Batch | None
    ) -> list[bytes]:
        blobs: list[list[Any]] = []
        for _ in range(self._times()):
            live = batch[task] if request.plan.feed is Feed.LIVE and batch is not None else {}
            frames = _frames(live, request.sources, request.schema)
            blobs = run_source_task(pickle.loads(spec), request, task, frames)
        return [b"".join(b) for b in blobs]

    def _wave(self, wave: WaveRequest, blobs: list[bytes]) -> tuple[Any, NodeReport | None]:
        if self._past and self.faults.random.random() < self.faults.stale:
            old, with_blobs = self.faults.random.choice(self._past)
            self.hosts[old.node].wave(old, with_blobs)
        self._past.append((wave, blobs))
        answer = None
        for _ in range(self._times()):
            answer = self.hosts[wave.node].wave(wave, blobs)
        assert answer is not None
        return answer

    def _arrived(self, sent: list[list[bytes]]) -> dict[NodeId, list[bytes]]:
        arrived = {n: [blobs[i] for blobs in sent] for i, n in enumerate(self.nodes)}
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
        )
        self.driver = JobDriver(None, parts, config)  # type: ignore[arg-type]
        known = dict(schemas) if schemas else dict.fromkeys(topology._sources, SCHEMA)
        united = pa.schema([(n, pa.struct(list(s))) for n, s in known.items()])
        self.driver.prepare(known, united if len(known) > 1 else next(iter(known.values())))
        self.nodes = hosts or LocalNodes(nodes, parts.plan.waves, faults)
        self.driver.take_over(lambda: self.nodes)  # type: ignore[arg-type, return-value]
        newest = self.driver.controller.newest
        self.next_batch = newest.batch + 1 if newest and newest.batch is not None else 0

    def feed(self, batch: Batch, number: int | None = None) -> None:
        """Offer a batch as Spark would."""
        number = self.next_batch if number is None else number
        try:
            self.driver._on_batch(batch, number)  # type: ignore[arg-type]
        except Exception:
            if self.driver.error is not None:
                raise self.driver.error from None
            raise
        self.next_batch = number + 1

    def stop(self) -> None:
        self.driver._handle(StopRequested(10**15))
        self.driver._release()

    def kill(self) -> None:
        """What a SIGKILL leaves: an unlocked directory and nothing else."""
        self.driver._release()


def rows_of(sink: ab.Memory, slice_no: int) -> list[Row]:
    tables = sink.slices.get(slice_no, [])
    return [(r["k"], r["v"]) for t in tables for r in t.to_pylist()]
