"""The driver of one run: feeds the control plane with events and carries out its commands.

One lock makes everything between an event and the last of its commands one step. Batches come on
the Spark query's own thread, which waits in `foreachBatch` until the batch is finished; idle time,
losses, arrivals and stops come on other threads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from anabranch.control.controller import ControlConfig, Controller, Phase
from anabranch.driver.actions import Actions, Waves, now_ms
from anabranch.driver.endpoint import Endpoint
from anabranch.driver.preparing import JobParts, RunConfig, backup_chains, prepare
from anabranch.driver.progress import Progress
from anabranch.driver.status import status
from anabranch.errors import AdjustmentError, AnabranchError, ClusterError, StorageError
from anabranch.model.events import (
    BatchArrived,
    DrainRequested,
    Event,
    Idled,
    NodesJoined,
    NodesLost,
    ScaleRequested,
    StopRequested,
)
from anabranch.model.ids import NodeId
from anabranch.model.recovery import Adjustment, Recovery
from anabranch.model.scaling import Decision
from anabranch.spark.nodes import NodeWatch
from anabranch.spark.session import (
    check_executors,
    check_session,
    close_callbacks,
    ship_package,
)
from anabranch.spark.shipping import pickle_job
from anabranch.spark.sources import arrow_schema, open_sources, unite
from anabranch.spark.waves import WaveRunner, first_line
from anabranch.storage.journal import DirectoryLock
from anabranch.storage.sinks import Home
from anabranch.storage.spark_offsets import misfit, newest_number

log = logging.getLogger("anabranch")


class StoppedError(Exception):
    """Ends the Spark query from within: its batch must not be committed."""


class JobDriver:
    """Owns the run: the lock on the directory, the controller, the Spark query."""

    def __init__(self, spark: SparkSession, parts: JobParts, config: RunConfig) -> None:
        self._spark = spark
        self._parts = parts
        self._config = config
        self._root = config.checkpoint.absolute()
        self._step = threading.RLock()
        self._stopping = False
        self._ended = threading.Event()
        self._query: Any = None
        self._watch: NodeWatch | None = None
        self._endpoint: Endpoint | None = None
        self.error: AnabranchError | None = None

    # -- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Check everything, take the directory, restore, replay, then begin to read."""
        check_session(self._spark)
        close_callbacks(self._spark)
        frames = open_sources(self._spark, self._parts.sources)
        schemas = {n: arrow_schema(self._spark, f, n) for n, f in frames.items()}
        self._stream = unite(frames)
        name = self._parts.plan.topology.name
        self.prepare(schemas, arrow_schema(self._spark, self._stream, name))
        self.take_over(self._connect)
        try:
            self._endpoint = Endpoint(self._root, self)
            self._begin_reading()
        except BaseException:
            self._release()
            raise

    def prepare(self, schemas: Mapping[str, pa.Schema], united: pa.Schema) -> None:
        """Compile the job for the schemas of its sources and of their union."""
        topology = self._parts.plan.topology
        for name, sink in self._parts.sinks.items():  # before nodes get their copies
            aside = topology.by_name[name].puts_aside
            sink.bind(Home(topology.name, name, self._root, self._spark, aside))
        self._prepared = prepare(self._parts, self._config, schemas, united)
        self._spec = pickle_job(self._prepared.spec)

    def take_over(
        self, connect: Callable[[], tuple[Waves, tuple[NodeId, ...]]], behind: bool = True
    ) -> None:
        """Own the directory, hand out the partitions, replay; returns when new rows may come.
        `behind`, old files are deleted by a thread of their own."""
        self._lock = DirectoryLock(self._root)
        plan = self._parts.plan
        self.actions = Actions(self._root, self._prepared, self._parts.sinks, behind=behind)
        try:
            past = self.actions.resume(self._config.drop_state)
            config = ControlConfig(
                checkpoint_interval_ms=self._config.checkpoint_interval_ms,
                watermark_delays_us=self._parts.watermark_delays_us,
                idle_timeouts_ms=self._parts.idle_timeouts_ms,
                backups=backup_chains(plan, self._config.backups),
                recovery_bound_s=None
                if self._config.recovery_bound_ms is None
                else self._config.recovery_bound_ms / 1000,
                slice_interval_ms=self._config.slice_interval_ms,
                autoscale=self._config.autoscale,
                parallel_recovery=self._config.parallel_recovery,
                synchronous=self._config.strategy.synchronous,
                whole=self._config.strategy.whole,
                rollback=self._config.strategy.rollback,
                behind_scaling=self._config.strategy.behind_scaling,
                copies=self._config.strategy.copies,
            )
            self.controller = Controller(plan, config, past)
            self.actions.complete_sinks(past)
            with self._step:
                self._waves, nodes = connect()
                self._handle(NodesJoined(nodes, now_ms(), self._hosts))
        except BaseException:
            self._release()
            raise
        if self._watch is not None:
            self._watch.start()

    def _connect(self) -> tuple[Waves, tuple[NodeId, ...]]:
        """Warm every executor of the session: they are the nodes."""
        self._check_offsets()
        ship_package(self._spark)
        check_executors(self._spark)
        timeout_s = self._config.node_timeout_ms / 1000
        watch = NodeWatch(self._spark, timeout_s, self._warm, self._on_lost, self._on_joined)
        self._watch = watch
        runner = WaveRunner(
            self._spark,
            watch,
            str(self._root),
            self._parts.plan.waves,
            self._spec,
            self._prepared.sources,
            self._prepared.schema,
        )
        self._runner = runner
        runner.warm(*watch.ready)
        return runner, watch.ready

    def _begin_reading(self) -> None:
        trigger: dict[str, Any] = (
            {"availableNow": True}
            if self._config.available_now
            else {"processingTime": f"{self._config.slice_interval_ms} milliseconds"}
        )
        writer = (
            self._stream.writeStream.foreachBatch(self._on_batch)
            # Spark's default file system may be another one. Hadoop decodes no escapes in a path.
            .option("checkpointLocation", f"file://{self._root}/spark")
            .queryName(self._parts.plan.topology.name)
            .trigger(**trigger)
        )
        try:
            self._query = writer.start()
        except Exception as e:
            raise ClusterError(f"Spark could not start the source query: {first_line(e)}") from e
        threading.Thread(target=self._watch_query, name="anabranch-watch", daemon=True).start()
        if not self._config.available_now:
            threading.Thread(target=self._tick, name="anabranch-tick", daemon=True).start()

    def _check_offsets(self) -> None:
        """The journal and Spark's offsets are one checkpoint, or rows would be skipped or read
        again without a word."""
        spark, newest = self._root / "spark", self.controller.newest
        wrong = misfit(
            newest.batch if newest else None,
            newest is None or newest.batch_end,
            newest_number(spark / "offsets"),
            newest_number(spark / "commits"),
        )
        if wrong is not None:
            raise StorageError(
                f"{wrong} ({spark}): the directory is not one that a job has left; restore it from "
                "a copy that was made while no job ran on it, or start with a new checkpoint "
                "directory",
                path=str(self._root),
            )

    # -- threads that bring events -------------------------------------------------------------

    def _hush_query(self) -> None:
        """The query is about to end by an exception of ours: Spark need not print its trace."""
        log4j = self._spark._jvm.org.apache.logging.log4j
        for name in ("sql.execution.streaming", "api.python.PythonForeachWriter"):
            log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)

    def _on_batch(self, batch: DataFrame, number: int) -> None:
        """Spark offers a batch; returning from here lets Spark commit its offsets."""
        with self._step:
            if self._stopping or self.error is not None:
                self._hush_query()
                raise StoppedError
            self.actions.batch = batch
            self.actions.finished_batch = None
            try:
                self._handle(BatchArrived(number, now_ms()))
            except AnabranchError:
                self._hush_query()
                raise
            finally:
                self.actions.batch = None
            if self.actions.finished_batch != number:
                self._hush_query()
                raise StoppedError

    def _watch_query(self) -> None:
        """The query's end is the end of the data, a failure, or somebody's stop."""
        problem: Exception | None = None
        try:
            self._query.awaitTermination()
        except PySparkException as e:
            problem = e
        with self._step:
            if self._stopping:
                return
            self._stopping = True
            if self.error is None and problem is not None:
                self.error = ClusterError(f"the source query failed: {first_line(problem)}")
            with contextlib.suppress(AnabranchError):
                if self.error is None:
                    self._handle(StopRequested(now_ms()))
        self._release()

    def _tick(self) -> None:
        """When no batch comes, let time move."""
        interval = self._config.slice_interval_ms / 1000
        while not self._ended.wait(interval):
            quiet = time.monotonic() - self.actions.last_slice_at
            if quiet < 1.5 * interval or not self._step.acquire(blocking=False):
                continue
            try:
                self._from_outside(Idled(now_ms()))
            finally:
                self._step.release()

    @property
    def _hosts(self) -> dict[NodeId, str]:
        return self._watch.hosts if self._watch is not None else {}

    def scale(self, operator: str, parallelism: int) -> None:
        """Ask for another parallelism; AdjustmentError says why not."""
        self._request(ScaleRequested(operator, parallelism, now_ms()))

    def drain(self, node: str) -> None:
        """Ask for a node to be emptied and released; AdjustmentError says why not."""
        self._request(DrainRequested(NodeId(node), now_ms()))

    def add_nodes(self, count: int) -> None:
        """Ask the cluster for more nodes."""
        if count < 1:
            raise AdjustmentError(f"{count} nodes cannot be added; give at least 1")
        self._runner.request(count)

    def status(self) -> dict[str, Any]:
        """What the job does, as plain data."""
        interval_ms = self._config.slice_interval_ms
        plan = self._parts.plan
        return status(plan, self.controller, self.actions, interval_ms, self._hosts, now_ms())

    def _request(self, event: ScaleRequested | DrainRequested) -> None:
        with self._step:
            if self._stopping or self.error is not None:
                raise AdjustmentError("the job is ending; start it again to change it")
            self._from_outside(event)

    def _warm(self, node: NodeId) -> None:
        self._runner.warm(node)

    def _on_lost(self, nodes: tuple[NodeId, ...], reason: str) -> None:
        """Nodes went while no job needed them: recover before the next slice does."""
        with self._step:
            mapping = self.controller.mapping
            if mapping is None or not set(nodes) & set(mapping.nodes):
                # A job has met the loss in the meantime, or nothing lived there.
                self._from_outside(NodesLost(nodes, reason, None, now_ms()))
            else:
                self._from_outside(self.actions.lost(nodes, reason))

    def _on_joined(self, nodes: tuple[NodeId, ...]) -> None:
        with self._step:
            self._from_outside(NodesJoined(nodes, now_ms(), self._hosts))

    def _from_outside(self, event: Event) -> None:
        """An event that no batch waits for; its error must end the query itself."""
        if self._stopping or self.error is not None:
            return
        try:
            self._handle(event)
        except AdjustmentError:  # a refusal: nothing has changed
            raise
        except AnabranchError:
            if self._query is not None:
                self._query.stop()

    def stop(self) -> None:
        """Finish the slice in hand, checkpoint, end. Returns when all is durable."""
        with self._step:
            if self._stopping:
                return
            self._stopping = True
            if self.error is None:
                with contextlib.suppress(AnabranchError):
                    self._handle(StopRequested(now_ms()))
        self._query.stop()
        self._release()

    def await_termination(self, timeout: float | None = None) -> bool:
        return self._ended.wait(timeout)

    @property
    def name(self) -> str:
        return self._parts.plan.topology.name

    @property
    def active(self) -> bool:
        return not self._ended.is_set()

    @property
    def progress(self) -> deque[Progress]:
        return self.actions.progress

    @property
    def recovering(self) -> bool:
        return self.controller.phase in (Phase.RECOVERING, Phase.WAITING)

    @property
    def recoveries(self) -> list[Recovery]:
        return self.actions.recoveries

    @property
    def adjustments(self) -> list[Adjustment]:
        return self.actions.adjustments

    @property
    def decisions(self) -> list[Decision]:
        return self.actions.decisions

    @property
    def on_progress(self) -> list[Callable[[Progress], None]]:
        return self.actions.on_progress

    def _release(self) -> None:
        """Let go of everything; whoever waits for the end goes on only after that."""
        if self._endpoint is not None:
            self._endpoint.close()
        if hasattr(self, "_waves"):
            self._waves.forget()
        if self._watch is not None:
            self._watch.close()
        self.actions.close()
        self._lock.release()
        self._ended.set()

    def _handle(self, event: Event) -> None:
        """One event and everything it causes. An error ends the run and is kept."""
        try:
            self.actions.check()  # a driver that was replaced ends, also when it has nothing to do
            todo = deque(self.controller.handle(event))
            while todo:
                caused = self.actions.execute(todo.popleft(), self._waves)
                if caused is not None:
                    todo.extend(self.controller.handle(caused))
        except AdjustmentError:  # a refusal: nothing has changed
            raise
        except AnabranchError as e:
            self.error = e
            raise
