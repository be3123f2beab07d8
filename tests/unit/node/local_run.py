"""The real driver, control plane and node code on hosts of this process, without Spark.

`FaultyCluster` does to jobs what a cluster does to them: it repeats a task, delivers a blob twice
or in another order, loses one, lets a call of an earlier slice arrive late, loses a node process. A
batch is a list of source tasks, each with rows per source.
"""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

import pyarrow as pa

import anabranch as ab
from anabranch.control.controller import Controller
from anabranch.driver.clock import now_ms
from anabranch.driver.cluster import Ran, RecoveryJob, SliceJob
from anabranch.driver.history import History
from anabranch.driver.opening import Opening
from anabranch.driver.options import Given, RunOptions
from anabranch.driver.preparing import prepare
from anabranch.driver.reading import Reading, StoppedError
from anabranch.driver.run import Run, RunJob
from anabranch.model.events import Event, NodesPolled, StopRequested
from anabranch.model.ids import NodeId
from anabranch.model.recovery import RecoveryPlan
from anabranch.node.arrow.packets import decode_blob, encode_blob
from anabranch.node.protocol.host import Answer
from anabranch.node.protocol.messages import RecoverRequest, WaveRequest
from anabranch.spark.shipping import pickle_spec
from anabranch.testing.local import LocalCluster, Parcels, united
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


class FaultyCluster(LocalCluster):
    """Nodes are named from "0" on, and get everything as bytes, as it travels."""

    def __init__(self, count: int, faults: Faults | None = None) -> None:
        super().__init__(0, pickle.loads)
        self._joined = -1
        self.join(count)
        self.faults = faults or Faults(0)
        self.lose: Callable[[int, NodeId, int], bool] = lambda blob, node, blobs: False
        self.recovered: list[RecoveryPlan] = []
        self._past: list[tuple[WaveRequest | RecoverRequest, list[bytes]]] = []

    def run(self, job: SliceJob | RecoveryJob) -> Ran:
        if isinstance(job, RecoveryJob):
            self.recovered.append(job.plan)
        return super().run(job)

    def forget(self, job: str) -> None:
        """The hosts stay as they are: whatever is left in them must not matter."""

    def task(self, work: Callable[[], Parcels]) -> Parcels:
        for _ in range(self._times() - 1):
            work()
        return work()

    def arrived(self, node: NodeId, parcels: Parcels) -> Parcels:
        if self.faults.shuffle:
            if parcels:
                parcels = [*parcels, self.faults.random.choice(parcels)]
            self.faults.random.shuffle(parcels)
        return [p for i, p in enumerate(parcels) if not self.lose(i, node, len(parcels))]

    def call(self, request: WaveRequest | RecoverRequest, parcels: Parcels) -> Answer[pa.Table]:
        blobs = [b"".join(encode_blob(p)) for p in parcels]
        if self._past and self.faults.random.random() < self.faults.stale:
            old, with_blobs = self.faults.random.choice(self._past)
            if old.node in self.hosts:
                self._call(old, with_blobs)
        self._past.append((request, blobs))
        for _ in range(self._times() - 1):
            self._call(request, blobs)
        return self._call(request, blobs)

    def _call(self, request: WaveRequest | RecoverRequest, blobs: list[bytes]) -> Answer[pa.Table]:
        return super().call(request, [decode_blob(b) for b in blobs])

    def _times(self) -> int:
        return 2 if self.faults.random.random() < self.faults.repeat else 1


class LocalRun:
    """One job on a directory: start it, feed batches, stop it; start another one on the same."""

    def __init__(
        self,
        topology: ab.Topology,
        root: Path,
        nodes: int = 2,
        faults: Faults | None = None,
        cluster: FaultyCluster | None = None,
        schemas: Mapping[str, pa.Schema] | None = None,
        behind: bool = False,
        **options: Unpack[Given],
    ) -> None:
        """Every slice seals a checkpoint, unless another interval is given."""
        parts = topology.parts()
        options.setdefault("checkpoint_interval", "1ms")
        chosen = RunOptions.of(options)
        opening = Opening(parts, root, chosen)
        known = dict(schemas) if schemas else dict.fromkeys(parts.sources, SCHEMA)
        try:
            prepared = prepare(parts, opening.root, chosen, known, united(known))
            spec = pickle_spec(prepared.spec)
            self.cluster = cluster or FaultyCluster(nodes, faults)
            self.run = Run(
                RunJob.of(opening, prepared, spec),
                lambda newest: self.cluster,
                behind=behind,
                closing=opening.close,
            )
        except BaseException:
            opening.close()
            raise
        self.prepared = prepared
        self.reading = Reading(self.run)
        newest = self.run.controller.newest
        self.next_batch = newest.batch + 1 if newest and newest.batch is not None else 0

    @property
    def controller(self) -> Controller:
        return self.run.controller

    @property
    def history(self) -> History:
        return self.run.history

    def feed(self, batch: Batch, number: int | None = None) -> None:
        """Offer a batch as Spark would."""
        number = self.next_batch if number is None else number
        try:
            self.offer(batch, number)
        except StoppedError as e:
            raise e.__cause__ or self.run.error or e from None
        self.next_batch = number + 1

    def offer(self, batch: Batch, number: int) -> None:
        shares = [{name: table(rows) for name, rows in task.items()} for task in batch]
        self.reading.on_batch(shares, number)

    def stop(self) -> None:
        self.handle(StopRequested(now_ms()))
        self.reading.close()

    def handle(self, event: Event) -> None:
        """Another event than a batch."""
        self.run.take(event)

    def await_cut(self) -> None:
        """Ask the nodes until the checkpoint under way is on disk, however slow that is."""
        while self.run.controller.ledgers.checkpoints.in_flight:
            time.sleep(0.001)
            self.poll()

    def poll(self) -> None:
        reports = self.cluster.ask(self.run.caller.poll(self.cluster.nodes))
        self.handle(NodesPolled(tuple(reports), now_ms()))

    def kill(self) -> None:
        """What a SIGKILL leaves: an unlocked directory and nothing else."""
        self.reading.close()


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
        self._run.reading.follow(self)

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
                self._run.offer(batch, number)
        except BaseException as e:
            self._problem = e
