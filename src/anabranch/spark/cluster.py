"""Waves as Spark stages: pinned tasks, and a shuffle that carries blobs.

A slice is one Spark job. Stage 0 runs the source tasks wherever Spark likes; every further stage
has one task per node, pinned to it by zipping the shuffle's output with a collection whose
partitions prefer that executor. Each task sends exactly one blob to each node, so the number of
elements to zip is known, and a lost one fails the zip instead of going unnoticed.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyspark.core.rdd import RDD
from pyspark.serializers import PairDeserializer
from pyspark.sql import SparkSession

from anabranch.driver.cluster import (
    NodesLostError,
    NodesObserver,
    Ran,
    RecoveryJob,
    SliceJob,
    Stages,
)
from anabranch.driver.heartbeats import Beat
from anabranch.errors import AnabranchError, ClusterError, OperatorError
from anabranch.model.ids import NodeId
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed
from anabranch.node.protocol.messages import (
    ForgetRequest,
    PollRequest,
    PrepareRequest,
    WarmRequest,
)
from anabranch.spark import tasks
from anabranch.spark.nodes import NodeWatch
from anabranch.spark.rdds import OUT, Rdds
from anabranch.spark.session import first_line

_FRAMES = tasks.WholeFrames()
_PAIRS = PairDeserializer(_FRAMES, _FRAMES)


@dataclass(frozen=True)
class Limit:
    """What may take how long."""

    what: str
    seconds: float


class SparkCluster:
    """Every executor of the session is a node, once it is warm."""

    def __init__(
        self,
        spark: SparkSession,
        job: str,
        spec: bytes,
        waves: int,
        node_timeout_s: float,
        slice_timeout_s: float | None = None,
    ) -> None:
        """`job` and `spec` are what nodes are made ready for; `waves`, those of a slice."""
        self._slice_timeout_s = slice_timeout_s
        self._job = job
        self._spec = spec
        self._waves = waves
        self._sc: Any = spark.sparkContext
        self._rdds = Rdds(self._sc)
        self.control_bytes = 0  # of requests and reports, on the wire
        self._newest_batch: tuple[int | None, Any] = (None, None)
        self._past_batch: Any = None  # the one before
        self._shuffles: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        # These never change, so they are pickled and handed to the JVM once.
        self._wave = self._rdds.function(tasks.wave_frames, _PAIRS)
        self._ask = self._rdds.function(tasks.control_frames, _FRAMES)
        threading.Thread(target=self._free_shuffles, name="anabranch-free", daemon=True).start()
        self.watch = NodeWatch(spark, node_timeout_s, self.warm)
        try:
            self.warm(*self.watch.ready)
        except BaseException:
            self._let_go()
            raise

    # -- the nodes -----------------------------------------------------------------------------

    @property
    def pulse(self) -> object:
        return self.watch.pulse

    @property
    def host_names(self) -> dict[NodeId, str]:
        return self.watch.hosts

    @property
    def joining(self) -> tuple[NodeId, ...]:
        return self.watch.joining

    @property
    def wanted(self) -> int:
        return self.watch.wanted

    def report_to(self, observer: NodesObserver) -> None:
        self.watch.start(observer)

    def request(self, count: int) -> None:
        self.watch.request(count)

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        self.watch.release(nodes)

    def look_for_nodes(self) -> tuple[NodeId, ...]:
        return self.watch.ready

    def forget(self, job: str) -> None:
        """The job has ended: let the node processes drop its state."""
        self.watch.cancel()  # what goes on beside slices
        nodes = self.watch.ready
        try:
            with contextlib.suppress(Exception):  # the cluster may be gone: so is the state
                self._control([ForgetRequest(job) for _ in nodes], nodes)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._shuffles.put(None)
        self.watch.close()

    # -- jobs ----------------------------------------------------------------------------------

    def run(self, job: SliceJob | RecoveryJob) -> Ran:
        """As one Spark job."""
        if isinstance(job, SliceJob):
            with self._explained(f"run slice {job.plan.number}"):
                return self._slice(job)
        with self._explained("recover partitions"):
            return self._recovery(job)

    def begin(self, job: RecoveryJob) -> Future[Ran]:
        """On a thread of its own: Spark runs its job beside others, task by task."""
        future: Future[Ran] = Future()

        def work() -> None:
            try:
                ran = self.run(job)
            except BaseException as e:
                future.set_exception(e)
            else:
                future.set_result(ran)

        threading.Thread(target=work, name="anabranch-catch-up", daemon=True).start()
        return future

    def _slice(self, job: SliceJob) -> Ran:
        what = f"slice {job.plan.number}"
        if job.plan.feed is Feed.LIVE:
            given, count, form = self._live(job)
            stages = job.stages(count)
        else:
            stages = job.stages(0)
            given, form = self._blanks(stages), _FRAMES
        frames = self._sourced(stages, given, tasks.source_frames, form)
        return self._carried_out(stages, frames, what, self._limit(what, 1))

    def _recovery(self, job: RecoveryJob) -> Ran:
        """The waves of several slices at once."""
        plan, stages = job.plan, job.stages()
        frames = self._sourced(stages, self._blanks(stages), tasks.replay_frames, _FRAMES)
        what = f"recover {len(plan.restored)} partitions up to slice {plan.next_slice - 1}"
        replay = f"the replay of slices {plan.first} to {plan.next_slice - 1}"
        return self._carried_out(stages, frames, what, self._limit(replay, len(plan.slices)))

    def _sourced(self, stages: Stages[Any], given: Any, work: Any, form: Any) -> Any:
        """What the source tasks send; None where there are none."""
        if not stages.tasks:
            return None
        function = partial(work, self._spec, _dump(stages.source))
        return self._rdds.stage(given, self._rdds.function(function, form))

    def _carried_out(self, stages: Stages[Any], frames: Any, what: str, limit: Limit | None) -> Ran:
        """The waves after the source stage, each one stage of pinned tasks."""
        nodes, upstream, shuffles = stages.nodes, stages.tasks, list[int]()
        for wave in stages.waves:
            requests = [_dump(request) for request in wave]
            self.control_bytes += sum(map(len, requests))
            pinned = self._collection(requests, nodes, max(1, upstream))
            if frames is not None:
                shuffled, shuffle = self._rdds.shuffle(frames, len(nodes))
                shuffles.append(shuffle)
            else:
                shuffled = self._collection([b""] * len(nodes), nodes)
            frames = self._rdds.stage(pinned.zip(shuffled), self._wave)
            upstream = len(nodes)
        self._sc.setJobDescription(what)
        try:
            answers = self._collect(frames, nodes, stages.tasks, limit)
        finally:
            for shuffle in shuffles:  # not before: other jobs go on meanwhile, and free theirs
                self._shuffles.put(shuffle)
        return Ran(stages.tasks, tuple(pickle.loads(frame) for frame in answers))

    def _limit(self, what: str, slices: int) -> Limit | None:
        if self._slice_timeout_s is None or not slices:
            return None
        return Limit(what, slices * self._slice_timeout_s)

    def _blanks(self, stages: Stages[Any]) -> Any:
        """Nothing to read: one empty element per source task, spread over the nodes."""
        where = [stages.nodes[i % len(stages.nodes)] for i in range(stages.tasks)]
        return self._collection([b""] * stages.tasks, where)

    def _live(self, job: SliceJob) -> tuple[Any, int, Any]:
        """The RDD of a batch's rows, the number of its partitions, and the form of its
        elements."""
        jdf = job.rows._jdf
        if job.plan.batch != self._newest_batch[0]:
            self._past_batch, self._newest_batch = self._newest_batch[1], (job.plan.batch, jdf)
        rdd = jdf.toArrowBatchRdd(jdf.queryExecution().executedPlan())
        count = rdd.getNumPartitions()
        if self.watch.settled or not count:
            return rdd.toJavaRDD(), count, _FRAMES
        return self._spread(rdd, count, job.nodes), count, _PAIRS

    def _spread(self, rdd: Any, count: int, nodes: tuple[NodeId, ...]) -> Any:
        """The batch's partitions, each preferring one of the nodes.

        Without a preference Spark would give some of them to an executor that has just joined
        and still has to start Python: seconds. The only RDD in Spark's own classes that adds a
        preference to another one without reading it is a Cartesian product, here of every
        partition with a single empty element that is pinned.
        """
        groups = min(count, len(nodes))
        spread = [
            self._pin(rdd, [p % groups == i for p in range(count)], nodes[i]) for i in range(groups)
        ]
        first, *others = spread
        for other in others:
            first = first.union(other)
        return first

    def _pin(self, rdd: Any, chosen: Sequence[bool], node: NodeId) -> Any:
        return self._rdds.pinned(rdd, chosen, self.watch.location(node))

    def _free_shuffles(self) -> None:
        """Free the shuffle files of past slices; Spark itself waits for its driver's GC."""
        cleaner = self._sc._jsc.sc().cleaner()
        kept: deque[int] = deque()
        while cleaner.isDefined() and (shuffle := self._shuffles.get()) is not None:
            kept.append(shuffle)
            if len(kept) > 2 * self._waves:  # the slice in hand may still need its own
                cleaner.get().doCleanupShuffle(kept.popleft(), False)

    # -- without a slice -----------------------------------------------------------------------

    def ask(self, requests: Sequence[PrepareRequest | PollRequest]) -> list[NodeReport]:
        what = "prepare partitions" if isinstance(requests[0], PrepareRequest) else "poll the nodes"
        with self._explained(what):
            return self._control(requests, tuple(r.node for r in requests))

    def warm(self, *nodes: NodeId) -> None:
        """Make executors ready before they get work: Python, the node process, the job, and the
        JVM's path through a shuffle."""
        with self._explained(f"warm node {', '.join(nodes)}"):
            self._sc.setJobDescription(f"warm node {', '.join(nodes)}")
            work = self._rdds.function(partial(tasks.rehearsal_frames, self._spec), _FRAMES)
            frames = self._rdds.stage(self._collection([b""] * len(nodes), nodes), work)
            pulse = self.pulse
            requests = [_dump(WarmRequest(self._job, self._spec, n, pulse)) for n in nodes]
            shuffled, shuffle = self._rdds.shuffle(frames, len(nodes))
            pinned = self._collection(requests, nodes).zip(shuffled)
            asked = self._rdds.stage(pinned, self._rdds.function(tasks.control_frames, _PAIRS))
            self._answers(self._collect(asked, nodes, None))
            self._shuffles.put(shuffle)  # not before: slices go on meanwhile, and free theirs
            self._rehearse_reading(nodes[0])

    def _rehearse_reading(self, node: NodeId) -> None:
        """Read a part of a past batch on a node that joins, and drop it: a JVM's first scan takes
        seconds. Not of the newest one, whose rows Spark is still counting."""
        if self._past_batch is None:
            return
        with contextlib.suppress(Exception):  # the source may not have it any more
            past = self._past_batch
            rdd = past.toArrowBatchRdd(past.queryExecution().executedPlan())
            count = rdd.getNumPartitions()
            if count:
                one = self._pin(rdd, [p == 0 for p in range(count)], node)
                read = self._rdds.stage(one, self._rdds.function(tasks.dropped_frames, _PAIRS))
                self._collect(read, (node,), None)

    def _control(self, requests: Sequence[Any], nodes: tuple[NodeId, ...]) -> list[Any]:
        self._sc.setJobDescription(type(requests[0]).__name__)
        pinned = self._collection([_dump(r) for r in requests], nodes)
        stage = self._rdds.stage(pinned, self._ask)
        return self._answers(self._collect(stage, nodes, None))

    @staticmethod
    def _answers(frames: list[bytes]) -> list[Any]:
        answers = [pickle.loads(frame) for frame in frames]
        for answer in answers:
            if isinstance(answer, AnabranchError):
                raise answer
            if isinstance(answer, Exception):
                raise ClusterError(f"a node could not be reached: {answer!r}") from answer
        return answers

    def _collection(self, heads: Sequence[bytes], where: Sequence[NodeId], count: int = 1) -> Any:
        return self._rdds.collection(heads, [self.watch.location(n) for n in where], count)

    def _collect(
        self,
        frames: Any,
        nodes: tuple[NodeId, ...],
        tasks: int | None,
        limit: Limit | None = None,
    ) -> list[bytes]:
        """Run the job; NodesLostError as soon as one of its nodes is known to be gone, and
        OperatorError when it takes longer than it may."""
        with self.watch.guarding(nodes, limit.seconds if limit else None) as guard:
            try:
                answers = list(RDD(frames, self._sc, OUT).collect())
                self.control_bytes += sum(map(len, answers))
                return answers
            except Exception:
                if limit is not None and guard.overdue is not None:
                    raise self._overdue(limit, guard.overdue) from None
                lost = guard.lost()
                if not lost:
                    raise
                raise NodesLostError(list(lost), "; ".join(set(lost.values())), tasks) from None

    def _overdue(self, limit: Limit, doing: dict[NodeId, Beat]) -> OperatorError:
        """Name what hangs, and end it: Spark has cancelled its tasks, and ends their workers; a
        node process would go on for ever."""
        stuck = [n for n, beat in doing.items() if beat.itself and not self.watch.end_process(n)]
        where = [f"node {n} was in {beat.doing}" for n, beat in doing.items()]
        left = f"; the process of node {', '.join(stuck)} could not be ended" if stuck else ""
        return OperatorError(
            f"{limit.what} took longer than slice_timeout allows ({limit.seconds:g} s): "
            f"{'; '.join(where) or 'no node was in an operator'}{left}; mend what does not return, "
            "or give slices more time, and start the job again with the same checkpoint directory, "
            "nothing committed is lost"
        )

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """What Spark raises becomes one sentence; its trace stays attached as the cause."""
        try:
            yield
        except (AnabranchError, NodesLostError):
            raise
        except Exception as e:
            raise ClusterError(f"Spark could not {action}: {first_line(e)}") from e


def _dump(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
