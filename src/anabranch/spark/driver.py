"""The driver of one run: feeds the control plane with events and carries out its commands.

One lock makes everything between an event and the last of its commands one step. Batches come on
the Spark query's own thread, which waits in `foreachBatch` until the batch is finished; idle time
and stops come on other threads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from anabranch.control.controller import ControlConfig, Controller, Past
from anabranch.control.fingerprint import refuse_difference
from anabranch.errors import (
    AnabranchError,
    ClusterError,
    StorageError,
    TopologyError,
)
from anabranch.model.commands import (
    Command,
    ExposeSlice,
    FailRun,
    FinishBatch,
    FinishRun,
    InstallPartitions,
    PollNodes,
    RunSlice,
    TrimStorage,
    WriteCut,
    WriteSlice,
)
from anabranch.model.events import (
    BatchArrived,
    Event,
    Idled,
    NodesJoined,
    NodesPolled,
    PartitionsInstalled,
    RestoreFailed,
    SliceRan,
    StopRequested,
)
from anabranch.model.ids import NodeId
from anabranch.model.mapping import Mapping as PartitionMapping
from anabranch.model.plan import Plan
from anabranch.model.slices import SlicePlan
from anabranch.node.messages import InstallRequest, JobSpec
from anabranch.node.schemas import build_programs, fingerprint, infer_schemas
from anabranch.operators.canonical import require_column
from anabranch.spark.progress import Progress, summarise
from anabranch.spark.session import check_executors, check_session, executors, ship_package
from anabranch.spark.shipping import pickle_job
from anabranch.spark.sources import arrow_schema, open_sources, unite
from anabranch.spark.waves import WaveRunner
from anabranch.storage import source_log
from anabranch.storage.journal import DirectoryLock, Head, Journal
from anabranch.storage.sinks import Parquet, Sink

log = logging.getLogger("anabranch")
POLL_PAUSE_S = 0.02  # between two looks at checkpoints in flight, while nothing else happens
PROGRESS_KEPT = 1_000


@dataclass(frozen=True)
class RunConfig:
    """How to run a topology."""

    checkpoint: Path
    slice_interval_ms: int = 1_000
    checkpoint_interval_ms: int = 10_000
    max_rows_per_slice: int | None = None
    available_now: bool = False


@dataclass(frozen=True)
class JobParts:
    """What the API hands over: the plan and everything that is not pure."""

    plan: Plan
    sources: Mapping[str, Any]
    event_times: Mapping[str, str]
    watermark_delays_us: Mapping[str, int]
    sinks: Mapping[str, Sink] = field(default_factory=dict)


class StoppedError(Exception):
    """Ends the Spark query from within: its batch must not be committed."""


class JobDriver:
    """Owns the run: the lock on the directory, the journal, the controller, the Spark query."""

    def __init__(self, spark: SparkSession, parts: JobParts, config: RunConfig) -> None:
        self._spark = spark
        self._parts = parts
        self._config = config
        self._root = config.checkpoint.absolute()
        self._step = threading.RLock()
        self._stopping = False
        self._ended = threading.Event()
        self._batch: DataFrame | None = None
        self._finished_batch: int | None = None
        self._query: Any = None
        self._last_slice_at = time.monotonic()
        self._mapping: PartitionMapping | None = None
        self.run = 0  # the driver's generation
        self.error: AnabranchError | None = None
        self.progress: deque[Progress] = deque(maxlen=PROGRESS_KEPT)
        self.on_progress: list[Callable[[Progress], None]] = []

    # -- start ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Check everything, take the directory, restore, replay, then begin to read."""
        check_session(self._spark)
        frames = open_sources(self._spark, self._parts.sources)
        schemas = {n: arrow_schema(self._spark, f, n) for n, f in frames.items()}
        self._stream = unite(frames)
        name = self._parts.plan.topology.name
        self.prepare(schemas, arrow_schema(self._spark, self._stream, name))
        self.take_over(self._connect)
        try:
            self._begin_reading()
        except BaseException:
            self._release()
            raise

    def prepare(self, schemas: Mapping[str, pa.Schema], united: pa.Schema) -> None:
        """Compile the job for the schemas of its sources and of their union; refuse what cannot
        run."""
        plan = self._parts.plan
        outputs, inputs = infer_schemas(plan.topology, schemas, self._parts.sinks)
        _check_event_times(self._parts.event_times, outputs)
        _check_paths(self._parts.sinks)
        self._schema = united
        self._sources = tuple(schemas)
        self._fingerprint: dict[str, Any] = fingerprint(plan, inputs)
        job = JobSpec(
            name=plan.topology.name,
            programs=build_programs(plan, outputs, inputs),
            sinks=self._parts.sinks,
            root=str(self._root),
            key_groups=plan.topology.key_groups,
            max_rows_per_slice=self._config.max_rows_per_slice,
            event_times=self._parts.event_times,
        )
        self._spec = pickle_job(job)

    def take_over(self, connect: Callable[[], WaveRunner]) -> None:
        """Own the directory, hand out the partitions, replay; returns when new rows may come."""
        self._lock = DirectoryLock(self._root)
        try:
            self._resume()
            self._complete_sinks()
            with self._step:
                self._runner = connect()
                self._handle(NodesJoined(self._runner.nodes, _now_ms()))
        except BaseException:
            self._release()
            raise

    def _complete_sinks(self) -> None:
        """A crash between journal and sink leaves the newest slice unexposed."""
        newest = self.controller.newest
        if newest is not None:
            self._execute(ExposeSlice(newest, ()))
        for sink in self._parts.sinks.values():
            sink.begin(newest.number if newest else 0)

    def _resume(self) -> None:
        """Read what earlier runs journalled."""
        self._journal = Journal(self._root / "journal")
        past = Past()
        found = self._journal.read()
        if found is not None:
            head, slices = found
            refuse_difference(head.fingerprint, self._fingerprint, str(self._root))
            before: Mapping[str, int] = head.fingerprint["parallelism"]
            now: Mapping[str, int] = self._fingerprint["parallelism"]
            past = Past(
                cut=head.cut,
                previous=head.previous,
                slices=(*head.slices, *slices),
                epochs=head.epochs,
                groups=head.groups,
                parallelism=before,
                rescaled=frozenset(c for c in now if before[c] != now[c]),
                mapping_version=head.mapping_version,
                generation=head.generation,
            )
        self._past = past
        self.run = past.generation + 1
        self._confirmed = past.slices[-1].number if past.slices else 0
        self.controller = Controller(
            self._parts.plan,
            ControlConfig(
                checkpoint_interval_ms=self._config.checkpoint_interval_ms,
                watermark_delays_us=self._parts.watermark_delays_us,
            ),
            past,
        )

    def _connect(self) -> WaveRunner:
        """Warm every executor of the session: they are the nodes."""
        ship_package(self._spark)
        check_executors(self._spark)
        nodes = {NodeId(e): host for e, host in executors(self._spark).items()}
        return WaveRunner(self._spark, str(self._root), nodes, self._parts.plan.waves)

    def _begin_reading(self) -> None:
        self._check_offsets()
        trigger: dict[str, Any] = (
            {"availableNow": True}
            if self._config.available_now
            else {"processingTime": f"{self._config.slice_interval_ms} milliseconds"}
        )
        writer = (
            self._stream.writeStream.foreachBatch(self._on_batch)
            .option("checkpointLocation", str(self._root / "spark"))
            .queryName(self._parts.plan.topology.name)
            .trigger(**trigger)
        )
        with _explained("start the source query"):
            self._query = writer.start()
        threading.Thread(target=self._watch_query, name="anabranch-watch", daemon=True).start()
        if not self._config.available_now:
            threading.Thread(target=self._tick, name="anabranch-tick", daemon=True).start()

    def _check_offsets(self) -> None:
        """The journal and Spark's offsets are one checkpoint: with only one of them left, rows
        would be skipped or read again without a word."""
        spark = self._root / "spark"
        newest = self.controller.newest
        batch = newest.batch if newest else None
        lost = None
        if batch is not None and not (spark / "offsets").is_dir():
            lost = f"the journal ends with batch {batch}, but Spark's offsets ({spark}) are gone"
        if (
            batch is None
            and (spark / "commits").is_dir()
            and any((spark / "commits").glob("[0-9]*"))
        ):
            lost = f"Spark's offsets ({spark}) are there, but the journal of the slices is gone"
        if lost is not None:
            raise StorageError(
                f"{lost}; restore the directory from a copy, or start with a new checkpoint "
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
            self._batch = batch
            self._finished_batch = None
            try:
                self._handle(BatchArrived(number, _now_ms()))
            except AnabranchError:
                self._hush_query()
                raise
            finally:
                self._batch = None
            if self._finished_batch != number:
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
                self.error = ClusterError(f"the source query failed: {_first_line(problem)}")
            with contextlib.suppress(AnabranchError):
                if self.error is None:
                    self._handle(StopRequested(_now_ms()))
        self._release()

    def _tick(self) -> None:
        """When no batch comes, let time move."""
        interval = self._config.slice_interval_ms / 1000
        while not self._ended.wait(interval):
            quiet = time.monotonic() - self._last_slice_at
            if quiet < 1.5 * interval or not self._step.acquire(blocking=False):
                continue
            try:
                if not self._stopping and self.error is None:
                    self._handle(Idled(_now_ms()))
            except AnabranchError:
                self._query.stop()
            finally:
                self._step.release()

    def stop(self) -> None:
        """Finish the slice in hand, checkpoint, end. Returns when all is durable."""
        with self._step:
            if self._stopping:
                return
            self._stopping = True
            if self.error is None:
                with contextlib.suppress(AnabranchError):
                    self._handle(StopRequested(_now_ms()))
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

    def _release(self) -> None:
        """Let go of everything; whoever waits for the end goes on only after that."""
        if hasattr(self, "_runner"):
            with contextlib.suppress(Exception):  # the cluster may be gone: so is the state
                self._runner.forget()
        if hasattr(self, "_journal"):
            self._journal.close()
        self._lock.release()
        self._ended.set()

    # -- commands ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        """One event and everything it causes. An error ends the run and is kept."""
        try:
            todo = deque(self.controller.handle(event))
            while todo:
                caused = self._execute(todo.popleft())
                if caused is not None:
                    todo.extend(self.controller.handle(caused))
        except AnabranchError as e:
            self.error = e
            raise

    def _execute(self, command: Command) -> Event | None:
        match command:
            case InstallPartitions():
                return self._install(command)
            case RunSlice():
                return self._run_slice(command.plan)
            case WriteSlice():
                self._journal.append(command.record)
                self._confirmed = command.record.number
            case ExposeSlice():
                for name, sink in self._parts.sinks.items():
                    staged = [s for s in command.staged if s.sink == name]
                    files = command.record.staged.get(name, [])
                    sink.expose(command.record.number, files, staged)
            case WriteCut():
                self._begin_segment(command)
            case TrimStorage():
                self._trim(command)
            case FinishBatch():
                self._finished_batch = command.batch
            case PollNodes():
                time.sleep(POLL_PAUSE_S)
                with _explained("poll the nodes"):
                    reports = self._runner.poll(self.run)
                return NodesPolled(tuple(reports), _now_ms())
            case FailRun():
                raise command.error
            case FinishRun():
                log.info("the run ended after slice %s", self._confirmed)
        return None

    def _install(self, command: InstallPartitions) -> Event:
        mapping = self._mapping = command.mapping
        past = self._past
        # A cut's files are found by the routing and the declared parallelism of that cut: keep
        # both until the next cut. Epochs must never repeat: keep the newest.
        declared = past.parallelism if past.cut else self._fingerprint["parallelism"]
        self._journal.begin(
            Head(
                generation=self.run,
                fingerprint={**self._fingerprint, "parallelism": declared},
                cut=past.cut,
                previous=past.previous,
                slices=past.slices,
                epochs={p: o.epoch for p, o in mapping.owners.items()} | dict(_gone(past, mapping)),
                groups=past.groups if past.cut else mapping.groups,
                mapping_version=mapping.version,
            )
        )
        requests = [
            InstallRequest(
                str(self._root),
                self._spec,
                self.run,
                n,
                mapping,
                command.restore,
                command.next_slice,
            )
            for n in self._runner.nodes
        ]
        try:
            with _explained("install the partitions"):
                self._runner.install(requests)
        except StorageError as e:
            log.warning("%s; trying the checkpoint before it", e.message)
            return RestoreFailed(e, _now_ms())
        return PartitionsInstalled(mapping.version, _now_ms())

    def _run_slice(self, plan: SlicePlan) -> Event:
        assert self._mapping is not None
        started = time.monotonic()
        with _explained(f"run slice {plan.number}"):
            tasks, reports = self._runner.run_slice(
                plan=plan,
                run=self.run,
                confirmed=self._confirmed if not plan.replay else plan.number - 1,
                mapping=self._mapping,
                spec=self._spec,
                sources=self._sources,
                schema=self._schema,
                batch=self._batch,
            )
        self._last_slice_at = time.monotonic()
        seconds = self._last_slice_at - started
        progress = summarise(plan, reports, seconds, self._mapping, self._parts.plan)
        self.progress.append(progress)
        for observe in self.on_progress:
            observe(progress)
        return SliceRan(plan.number, tasks, tuple(reports), _now_ms())

    def _begin_segment(self, command: WriteCut) -> None:
        previous = self.controller.previous_cut
        self._journal.begin(
            Head(
                generation=self.run,
                fingerprint=self._fingerprint,
                cut=command.cut,
                previous=previous,
                slices=command.carried,
                epochs=command.epochs,
                groups=command.mapping.groups,
                mapping_version=command.mapping.version,
            )
        )

    def _trim(self, command: TrimStorage) -> None:
        source_log.trim(self._root, command.log_below)
        for path in (self._root / "checkpoints").glob("*/*/*.ckpt"):
            if str(path.relative_to(self._root)) not in command.keep_files:
                number = int(path.name.partition("-")[0])
                if number < command.log_below:
                    path.unlink(missing_ok=True)


def _gone(past: Past, mapping: PartitionMapping) -> Iterator[tuple[Any, int]]:
    """Epochs of partitions that this run does not have: a later one may have them again."""
    return ((p, e) for p, e in past.epochs.items() if p not in mapping.owners)


def _check_event_times(columns: Mapping[str, str], outputs: Mapping[str, pa.Schema]) -> None:
    for source, column in columns.items():
        kind = require_column(outputs[source], column, f"the event time of source {source!r}")
        if not pa.types.is_timestamp(kind):
            raise TopologyError(
                f"the event time of source {source!r}, column {column!r}, is {kind}; cast it to "
                "a timestamp",
                operator=source,
            )


def _check_paths(sinks: Mapping[str, Sink]) -> None:
    """Two sinks in one directory would take each other's slices for their own."""
    owners: dict[Path, str] = {}
    for name, sink in sinks.items():
        if isinstance(sink, Parquet):
            other = owners.setdefault(Path(sink.path).absolute(), name)
            if other != name:
                raise TopologyError(
                    f"the sinks {other!r} and {name!r} write to the same directory {sink.path}; "
                    "give each its own, or unite their streams",
                    operator=name,
                )


@contextlib.contextmanager
def _explained(action: str) -> Iterator[None]:
    """What Spark raises becomes one sentence; its trace stays attached as the cause."""
    try:
        yield
    except AnabranchError:
        raise
    except Exception as e:
        raise ClusterError(f"Spark could not {action}: {_first_line(e)}") from e


def _first_line(error: Exception) -> str:
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() or java) if java is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
