"""Waves as Spark stages: pinned tasks, and a shuffle that carries blobs.

A slice is one Spark job. Stage 0 runs the source tasks wherever Spark likes; every further stage
has one task per node, pinned to it by zipping the shuffle's output with a collection whose
partitions prefer that executor. Each task sends exactly one blob to each node, so the number of
elements to zip is known, and a lost one fails the zip instead of going unnoticed.

The JVM classes are reached through PySpark's gateway: `ParallelCollectionRDD` with preferred
locations, `PairwiseRDD` (how PySpark shuffles pairs of raw frames) and `Dataset.toArrowBatchRdd`.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pyspark.core.rdd import RDD, _prepare_for_python_RDD
from pyspark.serializers import NoOpSerializer, PairDeserializer
from pyspark.sql import DataFrame, SparkSession

from anabranch.errors import AnabranchError, ClusterError
from anabranch.model.ids import NodeId
from anabranch.model.mapping import Mapping as PartitionMapping
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.messages import ForgetRequest, InstallRequest, PollRequest, WaveRequest
from anabranch.node.source_task import SourceRequest
from anabranch.spark import tasks

_FRAMES = NoOpSerializer()
_PAIRS = PairDeserializer(_FRAMES, _FRAMES)


class WaveRunner:
    """Runs slices, installs and polls on a fixed set of nodes."""

    def __init__(
        self, spark: SparkSession, job: str, nodes: Mapping[NodeId, str], waves: int
    ) -> None:
        self._job = job
        self.nodes = tuple(nodes)
        self._sc: Any = spark.sparkContext
        self._jvm: Any = self._sc._jvm
        self._waves = waves
        self._python = self._jvm.org.apache.spark.api.python.PythonUtils
        byte_array = self._jvm.java.lang.Class.forName("[B")
        self._bytes_tag = self._jvm.scala.reflect.ClassTag.apply(byte_array)
        locations = self._jvm.java.util.HashMap()
        for i, (node, host) in enumerate(nodes.items()):
            where = self._jvm.java.util.ArrayList()
            where.add(f"executor_{host}_{node}")
            locations.put(i, self._python.toSeq(where))
        self._locations = self._python.toScalaMap(locations)
        # Any partitioner with as many partitions as nodes: the frames carry the partition.
        self._partitioner = self._jvm.PythonPartitioner(len(nodes), id(self))
        self._shuffles: queue.SimpleQueue[int] = queue.SimpleQueue()
        # These never change, so they are pickled and handed to the JVM once.
        self._wave = self._function(tasks.wave_frames, _PAIRS)
        self._ask = self._function(tasks.control_frames, _FRAMES)
        threading.Thread(target=self._free_shuffles, name="anabranch-free", daemon=True).start()

    # -- slices --------------------------------------------------------------------------------

    def run_slice(
        self,
        plan: SlicePlan,
        run: int,
        confirmed: int,
        mapping: PartitionMapping,
        spec: bytes,
        sources: tuple[str, ...],
        schema: Any,
        batch: DataFrame | None,
    ) -> tuple[int, list[NodeReport]]:
        """Run one slice as one Spark job; the number of source tasks, and every node's report."""
        arrow, count = self._feed(plan, batch)
        frames: Any = None
        if arrow is not None:
            request = SourceRequest(run, self.nodes, mapping, plan, count, sources, schema)
            work = partial(tasks.source_frames, spec, _dump(request))
            frames = self._python_stage(arrow, self._function(work, _FRAMES))
        upstream = count
        for depth in range(1, self._waves + 1):
            last = depth == self._waves
            requests = [
                _dump(
                    WaveRequest(self._job, run, n, self.nodes, plan, count, depth, last, confirmed)
                )
                for n in self.nodes
            ]
            pinned = self._pinned(requests, max(1, upstream))
            shuffled = (
                self._shuffle(frames)
                if frames is not None and upstream
                else self._pinned([b""] * len(self.nodes), 1)
            )
            frames = self._python_stage(pinned.zip(shuffled), self._wave)
            upstream = len(self.nodes)
        self._sc.setJobDescription(f"slice {plan.number}" + (" (replay)" if plan.replay else ""))
        return count, [_load(frame) for frame in self._collect(frames)]

    def _feed(self, plan: SlicePlan, batch: DataFrame | None) -> tuple[Any, int]:
        """The RDD of the source tasks' input and the number of these tasks."""
        if plan.feed is Feed.LIVE:
            jdf = batch._jdf  # type: ignore[union-attr]
            rdd = jdf.toArrowBatchRdd(jdf.queryExecution().executedPlan())
            count = rdd.getNumPartitions()
            return (rdd.toJavaRDD(), count) if count else (None, 0)
        if plan.feed is Feed.LOG and plan.source_tasks:
            elements = self._jvm.java.util.Collections.nCopies(plan.source_tasks, bytearray())
            rdd = self._sc._jsc.parallelize(elements, plan.source_tasks)
            return rdd, plan.source_tasks
        return None, 0

    def _free_shuffles(self) -> None:
        """Free the shuffle files of past slices; Spark itself waits for its driver's GC."""
        cleaner = self._sc._jsc.sc().cleaner()
        kept: deque[int] = deque()
        while cleaner.isDefined():
            kept.append(self._shuffles.get())
            if len(kept) > 2 * self._waves:  # the slice in hand may still need its own
                cleaner.get().doCleanupShuffle(kept.popleft(), False)

    # -- install and poll ----------------------------------------------------------------------

    def install(self, requests: Sequence[InstallRequest]) -> list[NodeReport]:
        """Hand every node its partitions, in the order of the nodes."""
        return self._control([_dump(r) for r in requests], "install partitions")

    def poll(self, run: int) -> list[NodeReport]:
        requests = [_dump(PollRequest(self._job, run, n)) for n in self.nodes]
        return self._control(requests, "poll nodes")

    def forget(self) -> None:
        """The job has ended: let the node processes drop its state."""
        self._control([_dump(ForgetRequest(self._job)) for _ in self.nodes], "forget the job")

    def _control(self, requests: list[bytes], description: str) -> list[NodeReport]:
        self._sc.setJobDescription(description)
        stage = self._python_stage(self._pinned(requests, 1), self._ask)
        answers = [_load(frame) for frame in self._collect(stage)]
        for answer in answers:
            if isinstance(answer, AnabranchError):
                raise answer
            if isinstance(answer, Exception):
                raise ClusterError(f"a node could not be reached: {answer!r}") from answer
        return answers

    # -- plumbing ------------------------------------------------------------------------------

    def _pinned(self, heads: Sequence[bytes], count: int) -> Any:
        """A collection with one partition per node: its head, then empty elements up to `count`."""
        elements = self._jvm.java.util.ArrayList()
        for head in heads:
            elements.add(bytearray(head))
            if count > 1:
                padding = self._jvm.java.util.Collections.nCopies(count - 1, bytearray())
                elements.addAll(padding)
        rdd = self._jvm.org.apache.spark.rdd.ParallelCollectionRDD(
            self._sc._jsc.sc(),
            self._python.toSeq(elements),
            len(heads),
            self._locations,
            self._bytes_tag,
        )
        return rdd.toJavaRDD()

    def _function(self, function: Any, deserializer: Any) -> Any:
        """A Python function from frames to frames, as the JVM's PythonRDD takes it."""
        sc = self._sc
        command = (function, None, deserializer, _FRAMES)
        pickled, broadcasts, environment, includes = _prepare_for_python_RDD(sc, command)
        # No accumulator: with one, Spark's scheduler thread calls back into this process after
        # every task and waits for the answer, though there is never anything to add.
        return self._jvm.SimplePythonFunction(
            bytearray(pickled), environment, includes, sc.pythonExec, sc.pythonVer, broadcasts, None
        )

    def _python_stage(self, jrdd: Any, function: Any) -> Any:
        return self._jvm.PythonRDD(jrdd.rdd(), function, True, False).asJavaRDD()

    def _shuffle(self, frames: Any) -> Any:
        pairs = self._jvm.PairwiseRDD(frames.rdd()).asJavaPairRDD()
        shuffled = pairs.partitionBy(self._partitioner)
        self._shuffles.put(shuffled.rdd().dependencies().head().shuffleId())
        return shuffled.values()

    def _collect(self, frames: Any) -> list[bytes]:
        return list(RDD(frames, self._sc, _FRAMES).collect())


def _dump(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _load(frame: bytes) -> Any:
    return pickle.loads(frame)
