"""The driver of one run on Spark: brings events to `driver/steps.py`, begins and ends everything.

Batches come on the Spark query's own thread, which waits in `foreachBatch` until the batch is
finished and offers it again for every slice it is cut into. Idle time, losses, arrivals, requests
and stops come on other threads. However the run ends, the query ends first, and one thread that
waits for that lets go of everything else.
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
from pyspark.sql import DataFrame, SparkSession

from anabranch.control.controller import ControlConfig, Controller, Phase
from anabranch.driver.actions import Actions, Waves, now_ms
from anabranch.driver.endpoint import Endpoint
from anabranch.driver.preparing import JobParts, RunConfig, backup_chains, prepare
from anabranch.driver.progress import Progress
from anabranch.driver.status import status
from anabranch.driver.steps import Observer, Steps
from anabranch.errors import (
    AdjustmentError,
    AnabranchError,
    ClusterError,
    InvariantError,
    StorageError,
)
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
        self._steps: Steps | None = None
        self._ended = threading.Event()
        self._essential = threading.local()  # a thread that must not wait for the end of the run
        self._query: Any = None
        self._watch: NodeWatch | None = None
        self._endpoint: Endpoint | None = None

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
            self._waves, nodes = connect()
            self._steps = Steps(self.controller, self.actions, self._waves)
            if self._watch is not None:
                self._watch.start()
            self._steps.take(NodesJoined(nodes, now_ms(), self._hosts))
        except BaseException:
            self._release()
            raise

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
            None if self._config.slice_timeout_ms is None else self._config.slice_timeout_ms / 1000,
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
            query = writer.start()
        except Exception as e:
            raise ClusterError(f"Spark could not start the source query: {first_line(e)}") from e
        self.follow(query)
        if not self._config.available_now:
            threading.Thread(target=self._tick, name="anabranch-tick", daemon=True).start()

    def follow(self, query: Any) -> None:
        """From here on the run ends with this query, and this query with the run."""
        assert self._steps is not None
        self._query = query
        threading.Thread(target=self._watch_query, name="anabranch-watch", daemon=True).start()
        if self._steps.over:  # since before the query was known
            query.stop()

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

    def _on_batch(self, batch: DataFrame, number: int) -> None:
        """Spark offers a batch; returning from here lets Spark commit its offsets."""
        self._essential.thread = True
        self.actions.batch, self.actions.finished_batch = batch, None
        try:
            while self.actions.finished_batch != number:
                self._offer(number)
        finally:
            self.actions.batch = None
            self._essential.thread = False

    def _offer(self, number: int) -> None:
        """One slice of a batch, or what must come before it; then others have their turn."""
        assert self._steps is not None
        before = self.controller.newest
        try:
            self._steps.take(BatchArrived(number, now_ms()))
        except BaseException as e:  # it is kept, and ends the run
            self._hush_query()
            raise StoppedError from e
        if self.actions.finished_batch == number:
            return
        if not self._steps.over and self.controller.newest is before:
            self._steps.abort(InvariantError(f"batch {number} was offered and nothing came of it"))
        if self._steps.over:
            self._hush_query()
            raise StoppedError

    def _hush_query(self) -> None:
        """The query is about to end by an exception of ours: Spark need not print its trace."""
        with contextlib.suppress(Exception):  # Spark may be gone
            log4j = self._spark._jvm.org.apache.logging.log4j
            for name in ("sql.execution.streaming", "api.python.PythonForeachWriter"):
                log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)

    def _watch_query(self) -> None:
        """The query's end is the end of the data, a failure, or that of the run."""
        assert self._steps is not None
        self._essential.thread = True
        problem: Exception | None = None
        try:
            self._query.awaitTermination()
        except Exception as e:  # also of the gateway, when the JVM is gone
            problem = e
        try:
            if problem is not None:
                self._steps.abort(ClusterError(f"the source query failed: {first_line(problem)}"))
            else:
                self._steps.take(StopRequested(now_ms()))
        except BaseException as e:
            log.debug("the run ends with %r", e)  # it is kept
        finally:
            self._release()

    def _tick(self) -> None:
        """When no batch comes, let time move."""
        interval = self._config.slice_interval_ms / 1000
        while not self._ended.wait(interval):
            quiet = time.monotonic() - self.actions.last_slice_at
            if quiet >= 1.5 * interval:
                self._bring(Idled(now_ms()), wait=False)

    @property
    def _hosts(self) -> dict[NodeId, str]:
        return self._watch.hosts if self._watch is not None else {}

    def scale(self, operator: str, parallelism: int) -> None:
        """Ask for another parallelism; AdjustmentError says why not."""
        self._bring(ScaleRequested(operator, parallelism, now_ms()))

    def drain(self, node: str) -> None:
        """Ask for a node to be emptied and released; AdjustmentError says why not."""
        self._bring(DrainRequested(NodeId(node), now_ms()))

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

    def _warm(self, node: NodeId) -> None:
        self._runner.warm(node)

    def _on_lost(self, nodes: tuple[NodeId, ...], reason: str) -> None:
        """Nodes went while no job needed them: recover before the next slice does."""
        self._bring(NodesLost(nodes, reason, None, now_ms()))

    def _on_joined(self, nodes: tuple[NodeId, ...]) -> None:
        self._bring(NodesJoined(nodes, now_ms(), self._hosts))

    def _bring(self, event: Event, wait: bool = True) -> bool:
        """An event that no batch waits for; False if it comes later. An error is kept and, like
        any end of the run, ends the query, unless this is the query's own thread."""
        assert self._steps is not None
        try:
            return self._steps.take(event, wait)
        except AdjustmentError:
            raise
        except AnabranchError:
            return True
        finally:
            if self._steps.over and not self._is_essential and self._query is not None:
                with contextlib.suppress(Exception):  # Spark may be gone
                    self._query.stop()

    @property
    def _is_essential(self) -> bool:
        return getattr(self._essential, "thread", False)

    def stop(self) -> None:
        """Finish the slice in hand, checkpoint, end. Returns when all is durable and let go of;
        asked for by an observer or a sink, when the run is about to end."""
        if self._bring(StopRequested(now_ms())) and not self._is_essential:
            self._ended.wait()

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
    def error(self) -> AnabranchError | None:
        return self._steps.error if self._steps is not None else None

    @property
    def on_progress(self) -> list[Observer]:
        assert self._steps is not None
        return self._steps.on_progress

    def _release(self) -> None:
        """Let go of everything, whatever fails on the way; whoever waits for the end goes on only
        after that."""
        things: list[Callable[[], object]] = []
        if self._endpoint is not None:
            things.append(self._endpoint.close)
        if hasattr(self, "_waves"):
            things.append(self._waves.forget)
        if self._watch is not None:
            things.append(self._watch.close)
        things += [self.actions.close, self._lock.release]
        for let_go in things:
            try:
                let_go()
            except Exception as e:
                log.warning("while the run ended, %s failed: %r", let_go.__qualname__, e)
        self._ended.set()
