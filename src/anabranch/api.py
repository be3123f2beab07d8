"""What a user writes: a lazy topology of named operators, then one `run` or `start`.

    topology = Topology("word_count")
    words = topology.source("lines", read_lines).flat_map("split", split_words)
    words.key_by("word").aggregate("count", n=count()).to("out", Parquet("counts"))
    topology.run(spark, checkpoint="checkpoints/word_count")

Nothing runs, and Spark is not needed, until `start` or `run`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from anabranch.control.autoscaler import Autoscale
from anabranch.control.strategies import STRATEGIES
from anabranch.errors import AnabranchError, ConfigError, TopologyError
from anabranch.model.duration import microseconds, parse_duration
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.topology import DEFAULT_KEY_GROUPS, Hold, Kind, Operator
from anabranch.model.topology import Topology as Graph
from anabranch.operators.aggregates import Aggregate, KeyedAggregate
from anabranch.operators.base import LateRows
from anabranch.operators.dedup import Deduplicate
from anabranch.operators.enrich import Enrich
from anabranch.operators.event_time import Timed
from anabranch.operators.failing import DeadLetters
from anabranch.operators.functions import SliceFunction, state_fields
from anabranch.operators.join import WindowJoin
from anabranch.operators.process import KeyedProcess
from anabranch.operators.sessions import Session, SessionAggregate
from anabranch.operators.stateless import Filter, FlatMap, Map, Select
from anabranch.operators.topk import TopK
from anabranch.operators.ttl import Ttl
from anabranch.operators.windows import WINDOW_END, WINDOW_START, Window, WindowedAggregate
from anabranch.operators.written import (
    aggregates_of,
    columns_of,
    key_columns,
    operator_name,
    predicate_of,
    window_of,
)
from anabranch.storage.checkpoint_store import LOCAL, check_url
from anabranch.storage.sinks import Sink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from anabranch.driver.progress import Progress, Totals
    from anabranch.model.recovery import Adjustment, Recovery
    from anabranch.model.scaling import Decision
    from anabranch.spark.driver import JobDriver

Duration = str | timedelta
DEFAULT_PARALLELISM = 2
NEVER_MS = 10**15
_ALL = "_all"  # a constant column: the key of operators over a whole stream


class Topology:
    """A DAG under construction. `parallelism` is that of operators which do not name their own."""

    def __init__(
        self,
        name: str,
        *,
        key_groups: int = DEFAULT_KEY_GROUPS,
        parallelism: int = DEFAULT_PARALLELISM,
    ) -> None:
        self.name = name
        self._key_groups = key_groups
        self._parallelism = parallelism
        self._operators: list[Operator] = []
        self._sources: dict[str, Any] = {}
        self._event_times: dict[str, str] = {}
        self._delays: dict[str, int] = {}
        self._idle_timeouts: dict[str, int] = {}  # in ms
        self._sinks: dict[str, Sink] = {}
        self._dead_letters: str | None = None  # the sink they go to

    def source(
        self,
        name: str,
        data: Any,
        *,
        time: str | None = None,
        watermark: Duration = "0s",
        idle_timeout: Duration | None = None,
        max_ahead: Duration | None = "1d",
        on_error: str = "fail",
    ) -> Stream:
        """A Spark streaming DataFrame, or a function from the session to one.

        `time` names its event-time column; rows may come up to `watermark` late. The slowest of
        several sources decides how far time has come, unless it has brought no rows for its
        `idle_timeout`: then time goes on without it, and what it brings later may be late.

        `on_error`, here and elsewhere, is what becomes of rows an operator cannot take: "fail"
        ends the run and shows the first of them, "dead_letter" puts them aside (see
        `dead_letters`) and goes on. A source refuses rows whose event time is more than
        `max_ahead` ahead of the clock, which would take the watermark with them (None: it takes
        them), and with "dead_letter" those without one.
        """
        puts_aside = _puts_aside(name, on_error)
        if puts_aside and time is None:
            raise TopologyError(
                f'source {name!r}: on_error="dead_letter" puts rows without an event time aside; '
                "name its column with time=",
                operator=name,
            )
        if idle_timeout is not None:
            if time is None:
                raise TopologyError(
                    f"source {name!r}: idle_timeout= says for how long it may hold event time "
                    "back; name its event-time column with time=",
                    operator=name,
                )
            self._idle_timeouts[name] = _positive_ms("idle_timeout", idle_timeout)
        kernel = None
        if time is not None:
            ahead = None if max_ahead is None else microseconds(parse_duration(max_ahead))
            kernel = Timed(time, ahead, refuses_nulls=puts_aside)
        self._add(Operator(name, Kind.SOURCE, kernel=kernel, puts_aside=puts_aside))
        self._sources[name] = data
        if time is not None:
            self._event_times[name] = time
            self._delays[name] = microseconds(parse_duration(watermark))
        return Stream(self, (name,))

    def dead_letters(self, name: str, sink: Sink) -> None:
        """Where rows go that operators with `on_error="dead_letter"` cannot take: the number of
        the slice, the operator, the reason, and the record as JSON; like any output, once."""
        if self._dead_letters is not None:
            raise TopologyError(
                f"dead letters go to {self._dead_letters!r} already; a topology has one place "
                "for them",
                name=name,
            )
        _check_sink(name, sink)
        self._dead_letters = name
        self._sinks[name] = sink

    def plan(self) -> Plan:
        """Check the topology and compile it to chains and waves."""
        operators = [*self._operators, *self._dead_letter_sink()]
        return compile_plan(Graph.checked(self.name, operators, self._key_groups))

    def _dead_letter_sink(self) -> list[Operator]:
        """The sink of dead letters, evaluated wherever an operator puts rows aside."""
        careful = [o for o in self._operators if o.puts_aside]
        if not careful and self._dead_letters is None:
            return []
        if self._dead_letters is None:
            raise TopologyError(
                f"{careful[0].name!r} puts rows aside that it cannot take "
                '(on_error="dead_letter"), but there is no place for them; name a sink with '
                "topology.dead_letters(name, sink)",
                operator=careful[0].name,
            )
        if not careful:
            raise TopologyError(
                f"nothing can reach the dead letters {self._dead_letters!r}: give the operators "
                'whose rows may fail on_error="dead_letter"',
                operator=self._dead_letters,
            )
        homes = [o.producers if o.kind is Kind.SINK else (o.name,) for o in careful]
        inputs = tuple(dict.fromkeys(p for home in homes for p in home))
        return [Operator(self._dead_letters, Kind.SINK, (inputs,), DeadLetters())]

    def start(
        self,
        spark: SparkSession,
        *,
        checkpoint: str | Path,
        slice: Duration = "1s",
        checkpoint_interval: Duration = "10s",
        max_rows_per_slice: int | None = None,
        available_now: bool = False,
        backups: str | Sequence[str] = "all",
        recovery_bound: Duration | None = None,
        node_timeout: Duration = "5s",
        slice_timeout: Duration | None = None,
        autoscale: Autoscale | bool = False,
        parallel_recovery: int = 1,
        drop_state: Sequence[str] = (),
        state_url: str | None = None,
        strategy: str = "ours",
    ) -> Job:
        """Start the job and return a handle to it.

        `checkpoint` is a directory that the driver and all nodes can reach; started again with
        the same one, the job goes on where it was. `available_now` ends the job when all data
        that is there now has been processed. `backups` names the operators that keep their output
        for the recovery of those behind them: "all", "sources" (whose log serves instead) or a
        list; what is not kept is computed again, which takes longer. With a `recovery_bound`, the
        job measures itself and chooses the cheapest backups that bring any lost node back in
        time. A node that gives no sign of life for `node_timeout` counts as lost; one whose
        process is gone is noticed at once. A slice that takes longer than `slice_timeout` ends the
        run with an error that names the operator that did not return; by default it may take as
        long as it likes, for after a long stop the first one may be large. With `autoscale`, the
        job measures its CPU and its slices and chooses the parallelism of its operators, and the
        nodes it asks for, by itself. With a `parallel_recovery` of 2 or more, a lost partition of
        an operator that only sinks read is rebuilt as so many, on as many nodes, until the next
        checkpoint makes them one.
        `drop_state` names operators that are not in the topology any more and whose state in the
        checkpoint is given up. With a `state_url` such as "s3://bucket/job", the files of state
        go there, to any store that fsspec knows; `checkpoint` keeps all the rest. `strategy` is
        for experiments: how another system would survive a loss.
        """
        from anabranch.driver.preparing import JobParts, RunConfig
        from anabranch.spark.driver import JobDriver

        if max_rows_per_slice is not None and max_rows_per_slice < 1:
            raise ConfigError(
                f"max_rows_per_slice is {max_rows_per_slice}; give at least 1, or None for no limit"
            )
        if parallel_recovery < 1:
            raise ConfigError(
                f"parallel_recovery is {parallel_recovery}; give the number of partitions that a "
                "lost one is rebuilt as, or 1 for no more than it was"
            )
        parts = JobParts(
            plan=self.plan(),
            sources=self._sources,
            event_times=self._event_times,
            watermark_delays_us=self._delays,
            idle_timeouts_ms=self._idle_timeouts,
            sinks=self._sinks,
        )
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy is {strategy!r}; there are {', '.join(STRATEGIES)}")
        chosen = STRATEGIES[strategy]
        config = RunConfig(
            checkpoint=Path(checkpoint),
            slice_interval_ms=_positive_ms("slice", slice),
            checkpoint_interval_ms=_positive_ms("checkpoint_interval", checkpoint_interval)
            if chosen.checkpoints
            else NEVER_MS,
            max_rows_per_slice=max_rows_per_slice,
            available_now=available_now,
            backups=_backups(backups) if chosen.backups else frozenset(),
            recovery_bound_ms=None
            if recovery_bound is None
            else _positive_ms("recovery_bound", recovery_bound),
            node_timeout_ms=_positive_ms("node_timeout", node_timeout),
            slice_timeout_ms=None
            if slice_timeout is None
            else _positive_ms("slice_timeout", slice_timeout),
            autoscale=Autoscale() if autoscale is True else autoscale or None,
            parallel_recovery=parallel_recovery,
            drop_state=tuple(drop_state),
            checkpoints=LOCAL if state_url is None else check_url(state_url),
            strategy=chosen,
        )
        driver = JobDriver(spark, parts, config)
        driver.start()
        return Job(driver)

    def run(self, spark: SparkSession, *, checkpoint: str | Path, **options: Any) -> Job:
        """`start`, then wait for the end; raises what ended the job. Options as for `start`."""
        job = self.start(spark, checkpoint=checkpoint, **options)
        with _plain_interrupts():
            try:
                job.await_termination()
            except KeyboardInterrupt:
                job.stop()
        return job

    def _add(self, operator: Operator) -> None:
        if any(o.name == operator.name for o in self._operators):
            raise TopologyError(
                f"two operators are named {operator.name!r}; give each its own name "
                "(state is found again by it after a restart)",
                name=operator.name,
            )
        self._operators.append(operator)

    def _check_timed(self, name: str, time: str, producers: Sequence[str]) -> None:
        """Event time comes from sources: without it, a window would never close."""
        for producer in producers:
            operator = self._named(producer)
            if operator.kind is Kind.SOURCE and producer not in self._event_times:
                raise TopologyError(
                    f"operator {name!r} goes by the event time {time!r}, but the source "
                    f"{producer!r} names none, so time would never pass; say which of its columns "
                    f'is the event time: topology.source({producer!r}, ..., time="...")',
                    operator=name,
                    source=producer,
                )
            self._check_timed(name, time, operator.producers)

    def _named(self, name: str) -> Operator:
        return next(o for o in self._operators if o.name == name)

    def _replace(self, operator: Operator) -> None:
        self._operators = [operator if o.name == operator.name else o for o in self._operators]


class Job:
    """A running topology."""

    def __init__(self, driver: JobDriver) -> None:
        self._driver = driver

    def stop(self) -> None:
        """Finish the slice in hand, checkpoint, and end. What is left of a batch that was cut into
        slices is where the next run begins. May be called by a function given to `on_progress`
        too: then the job ends when that has returned."""
        self._driver.stop()

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when `timeout` seconds passed first. Raises what ended it."""
        ended = self._driver.await_termination(timeout)
        if ended and self._driver.error is not None:
            raise self._driver.error
        return ended

    @property
    def is_active(self) -> bool:
        return self._driver.active

    @property
    def exception(self) -> AnabranchError | None:
        """What ended the job, if something went wrong."""
        return self._driver.error

    @property
    def last_progress(self) -> Progress | None:
        """The newest slice."""
        return self._driver.progress[-1] if self._driver.progress else None

    @property
    def recent_progress(self) -> list[Progress]:
        """The newest slices, oldest first."""
        return list(self._driver.progress)

    @property
    def totals(self) -> Totals:
        """What became of all rows since the run started."""
        return self._driver.actions.totals

    @property
    def recoveries(self) -> list[Recovery]:
        """Every recovery of this run; the first one is its start."""
        return list(self._driver.recoveries)

    @property
    def adjustments(self) -> list[Adjustment]:
        """Every online adjustment of this run: scalings, and moves to and from nodes."""
        return list(self._driver.adjustments)

    @property
    def decisions(self) -> list[Decision]:
        """What the autoscaler decided in this run, and why."""
        return list(self._driver.decisions)

    def scale(self, operator: str, parallelism: int) -> None:
        """Run an operator at another parallelism, without a stop. Returns once the request is
        accepted; `adjustments` says when it is done. Operators fused with it are scaled too."""
        self._driver.scale(operator, parallelism)

    def add_nodes(self, count: int) -> None:
        """Ask the cluster for more nodes; partitions move to them when they have joined."""
        self._driver.add_nodes(count)

    def drain(self, node: str) -> None:
        """Move every partition off a node, then give it back to the cluster."""
        self._driver.drain(node)

    @property
    def is_adjusting(self) -> bool:
        """Is a scaling, or a move of partitions, on its way?"""
        return self._driver.controller.adjusting

    @property
    def is_recovering(self) -> bool:
        """Are partitions being restored right now?"""
        return self._driver.recovering

    def on_progress(self, observe: Callable[[Progress], None]) -> None:
        """Call `observe` after every slice, on a thread of the driver: be quick. What it raises is
        logged once, and does not touch the job."""
        self._driver.on_progress.append(observe)


@dataclass(frozen=True)
class Stream:
    """Rows that flow; every method adds an operator and returns the stream it makes.

    Rows are final, or updates: an operator named `updated_by` shows a key again whenever its
    result changes. What would take every update for another row refuses them.
    """

    topology: Topology
    producers: tuple[str, ...]
    updated_by: str | None = None

    def filter(
        self,
        name: str,
        predicate: Any = None,
        *,
        deterministic: bool = True,
        on_error: str = "fail",
    ) -> Stream:
        """Keep rows where a Polars expression, SQL ("v > 1"), or a function of a Polars frame is
        true.

        `deterministic=False`, here and elsewhere, says that the same rows may give another
        result: what was shown must then not be computed again. `on_error` as for a source: rows
        on which the function raises by themselves.
        """
        operator_name(name, "filter", '"positive", pl.col("v") > 0')
        kernel = Filter(predicate_of(name, predicate))
        return self._stateless(name, kernel, deterministic, on_error)

    def select(self, name: str, *columns: Any, on_error: str = "fail", **named: Any) -> Stream:
        """Column names, Polars expressions and SQL ("v * 2 AS w"), row by row; by keyword, under
        that name."""
        operator_name(name, "select", '"slim", "user", total=pl.col("n") * 2')
        kernel = Select(columns_of(name, columns, named))
        return self._stateless(name, kernel, on_error=on_error)

    def map(
        self,
        name: str,
        function: Callable[[Any], Any],
        *,
        deterministic: bool = True,
        on_error: str = "fail",
    ) -> Stream:
        """A function from a Polars frame to a frame (or Arrow table) with as many rows."""
        return self._stateless(name, Map(function), deterministic, on_error)

    def flat_map(
        self,
        name: str,
        function: Callable[[Any], Any],
        *,
        deterministic: bool = True,
        on_error: str = "fail",
    ) -> Stream:
        """A function from a Polars frame to a frame (or Arrow table) with any number of rows."""
        return self._stateless(name, FlatMap(function), deterministic, on_error)

    def enrich(
        self,
        name: str,
        table: Any,
        *,
        on: str | Sequence[str],
        columns: Sequence[str] | None = None,
        how: str = "left",
    ) -> Stream:
        """Add columns of a static table (all others, if not named) to rows with the same key.

        The table is a batch Spark DataFrame, an Arrow table or a Polars frame with every key once.
        It is taken now and travels with the job. Rows without a match get nulls; with
        `how="inner"` they are dropped. A null key has no match.
        """
        keys = [on] if isinstance(on, str) else list(on)
        try:
            kernel = Enrich.of(table, keys, columns, how)
        except TopologyError as e:
            raise TopologyError(f"operator {name!r}: {e.message}", **e.fields) from e
        return self._stateless(name, kernel)

    def union(self, *others: Stream) -> Stream:
        """The rows of several streams with the same columns."""
        streams = (self, *others)
        for other in others:
            if not isinstance(other, Stream):
                raise TopologyError(f"union takes streams, but got {type(other).__name__}")
        updated_by = next((s.updated_by for s in streams if s.updated_by is not None), None)
        return Stream(self.topology, tuple(p for s in streams for p in s.producers), updated_by)

    def changes(self) -> Stream:
        """The updates of a running aggregate or ranking as rows: whatever follows takes each of
        them for a row of its own, so a sum of counts adds up every count there ever was."""
        return replace(self, updated_by=None)

    def key_by(self, *columns: str) -> KeyedStream:
        """Name the key: rows with the same key meet in the same partition, in order.

        Null is a key like any other; so is NaN, and -0.0 is the same key as 0.0.
        """
        return KeyedStream(self, key_columns(columns))

    def __getattr__(self, name: str) -> Any:
        """What only a keyed stream has says so."""
        if name.startswith("_") or not hasattr(KeyedStream, name):
            raise AttributeError(f"a Stream has no {name!r}")
        raise TopologyError(
            f'{name} works by key: name the key first, as in .key_by("user").{name}(...)'
        )

    def top_k(self, name: str, k: int, *, by: str, descending: bool = True) -> Stream:
        """The k rows of the whole stream with the largest value of `by`, and their `rank`.

        One partition keeps the ranking; what feeds it sends at most k rows per part and slice.
        """
        marked = self.select(f"{name}.all", pl.all(), pl.lit(0, pl.Int8).alias(_ALL))
        ranking = marked.key_by(_ALL).top_k(name, k, by=by, descending=descending, parallelism=1)
        return ranking.select(f"{name}.ranking", pl.exclude(_ALL))

    def late(self, name: str) -> Stream:
        """The rows that came too late for the operator that makes this stream: windowed
        aggregates, `deduplicate(within=…)` or `join_windows`.

        They are as the operator was given them (of a join, with nulls for the other side's
        columns). To have them, rows go through the shuffle as they are, as with
        `precombine=False`.
        """
        operator = self.topology._named(self.producers[0])
        if len(self.producers) > 1 or not hasattr(operator.kernel, "late_schema"):
            raise TopologyError(
                f"operator {name!r}: no row is late for {' and '.join(self.producers)}; take "
                ".late(...) of windowed aggregates, deduplicate(within=...) or join_windows",
                operator=name,
            )
        self.topology._replace(replace(operator, precombine=False))
        return replace(self._stateless(name, LateRows()), updated_by=None)

    def to(self, name: str, sink: Sink, *, on_error: str = "fail") -> None:
        """End the stream in a sink. `on_error` as for a source, for rows that a PostgreSQL sink
        or its server refuses."""
        _check_sink(name, sink)
        puts_aside = _puts_aside(name, on_error)
        if puts_aside and not sink.tells_rows:
            raise TopologyError(
                f"the sink {name!r}: a {type(sink).__name__} sink takes all rows of a slice or "
                'none, so on_error="dead_letter" has no meaning for it; leave it out',
                operator=name,
            )
        kernel = sink if puts_aside else None
        self.topology._add(
            Operator(name, Kind.SINK, (self.producers,), kernel, puts_aside=puts_aside)
        )
        self.topology._sinks[name] = sink

    def _stateless(
        self, name: str, kernel: Any, deterministic: bool = True, on_error: str = "fail"
    ) -> Stream:
        self.topology._add(
            Operator(
                name,
                Kind.STATELESS,
                (self.producers,),
                kernel,
                keeps_columns=bool(kernel.keeps_columns),
                deterministic=deterministic,
                puts_aside=_puts_aside(name, on_error),
                gives_late=isinstance(kernel, LateRows),
            )
        )
        return Stream(self.topology, (name,), self.updated_by)


@dataclass(frozen=True)
class KeyedStream:
    """A stream and its key: what stateful operators take."""

    stream: Stream
    keys: tuple[str, ...]

    def aggregate(
        self,
        name: str,
        *,
        ttl: Duration | None = None,
        time: str | None = None,
        parallelism: int | None = None,
        precombine: bool = True,
        **aggregates: Aggregate,
    ) -> Stream:
        """Running aggregates per key; after a slice, the new values of the keys it touched: rows
        that are updates, which only stateless operators, `process` and sinks take.

        With `ttl`, a key is forgotten that no row has touched for that long: by the event-time
        column `time` and the watermark or, without `time`, by processing time.
        """
        self._refuse_updates(name)
        lives = Ttl.of(ttl, time)
        kernel = KeyedAggregate(self.keys, aggregates_of(name, aggregates), lives)
        ports = (self.stream.producers,)
        results = self._keyed(name, kernel, ports, parallelism, precombine, time=time)
        return replace(results, updated_by=name)

    def window(
        self, window: Window | Session, *, time: str, lateness: Duration = "0s"
    ) -> WindowedStream:
        """Cut the stream into event-time windows (tumbling, hopping, session) by column `time`."""
        return WindowedStream(self, window_of(window), time, parse_duration(lateness))

    def deduplicate(
        self,
        name: str,
        *,
        within: Duration | None = None,
        time: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """The first row of every key, whole; its repetitions are dropped.

        With `within`, a key may pass again once that much event time, by the column `time`, lies
        between; what is older than the watermark needs is forgotten. Without, keys are remembered
        for ever.
        """
        self._refuse_updates(name)
        kernel = Deduplicate(self.keys, time, None if within is None else parse_duration(within))
        return self._keyed(name, kernel, (self.stream.producers,), parallelism, time=time)

    def top_k(
        self,
        name: str,
        k: int,
        *,
        by: str,
        descending: bool = True,
        ttl: Duration | None = None,
        time: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Per key the k rows with the largest value of `by` (the smallest, if not `descending`),
        ties by first arrival; after a slice, the new ranking (`rank` from 1) of keys whose ranking
        it changed: rows that are updates. `ttl` and `time` as for `aggregate`.

        Keyed by the `window_end` (or `window_start`) of windowed results, a ranking is final:
        it is shown once, when no more rows of its window can come, and then forgotten."""
        self._refuse_updates(name)
        ports = (self.stream.producers,)
        closing = self._closing_column()
        if closing is None:
            kernel = TopK(self.keys, k, by, descending, Ttl.of(ttl, time))
            rankings = self._keyed(name, kernel, ports, parallelism, time=time)
            return replace(rankings, updated_by=name)
        if ttl is not None or time is not None:
            raise TopologyError(
                f"operator {name!r} ranks by window, so its rankings end with their windows; leave "
                "ttl= and time= out",
                operator=name,
            )
        final = TopK.final(self.keys, k, by, descending, closing)
        return self._keyed(name, final, ports, parallelism, time=closing, holds=final.holds)

    def _closing_column(self) -> str | None:
        """The column of the key that says in which of the windows above a row is, if one does."""
        producers = self.stream.producers
        for column in (WINDOW_END, WINDOW_START):
            if column in self.keys and all(self._comes_by_window(p, column) for p in producers):
                return column
        return None

    def _comes_by_window(self, name: str, column: str) -> bool:
        op = self.stream.topology._named(name)
        if op.holds:
            windowed = isinstance(op.kernel, WindowedAggregate | SessionAggregate | TopK)
            return windowed and any(c in (column, None) for c, _ in op.holds)
        if op.kind is Kind.SOURCE or op.gives_late or not op.keeps_columns:
            return False
        return all(self._comes_by_window(p, column) for p in op.producers)

    def _refuse_updates(self, name: str) -> None:
        shown = self.stream.updated_by
        if shown is not None:
            raise TopologyError(
                f"operator {name!r} would take every update for another row: {shown!r} shows a key "
                f"again whenever its result changes. Aggregate by window in {shown!r}, so that "
                "each result comes once and is final (.window(...).aggregate(...)); keep the "
                "newest row of every key in a function of your own (.process(...)); or, if every "
                "change shall count, say so with .changes()",
                operator=name,
                updated_by=shown,
            )

    def process(
        self,
        name: str,
        function: SliceFunction,
        *,
        time: str | None = None,
        ttl: Duration | None = None,
        watermark: Duration = "0s",
        parallelism: int | None = None,
        deterministic: bool = True,
        on_error: str = "fail",
    ) -> Stream:
        """State and timers of your own: a `SliceFunction` or, row by row and slower, a
        `RowFunction`.

        `time` names the event-time column; event timers have its type. What a function emits for
        an event timer may lie up to `watermark` before it: operators behind go by event time as
        they do behind a source. With `ttl`, a key is
        forgotten, with its timers, that no row has touched for that long: by `time` and the
        watermark or, without `time`, by processing time.

        With `on_error="dead_letter"`, a slice on which the function raises runs without the rows
        that make it raise; a timer that raises ends the run.
        """
        if not isinstance(function, SliceFunction):
            what = f"the class {function.__name__}" if isinstance(function, type) else function
            raise TopologyError(
                f"operator {name!r}: process takes an instance of a subclass of SliceFunction or "
                f"RowFunction, but got {what!s}",
                operator=name,
            )
        lives = None if ttl is None else Ttl.of(ttl, time)
        kernel = KeyedProcess(self.keys, function, state_fields(function), time, lives)
        # A timer may be set to the watermark itself, and comes in the slice after.
        hold = Hold(1 + microseconds(parse_duration(watermark)))
        return self._keyed(
            name,
            kernel,
            (self.stream.producers,),
            parallelism,
            deterministic=deterministic,
            puts_aside=_puts_aside(name, on_error),
            time=time,
            holds=((None, hold),),
        )

    def join_windows(
        self,
        name: str,
        other: KeyedStream,
        *,
        left: Sequence[str],
        right: Sequence[str],
        parallelism: int | None = None,
        retain: Duration = "1m",
    ) -> Stream:
        """Join two streams of windowed aggregates on key and window.

        `left` and `right` name the columns to keep of each. A row waits for its partner until
        the watermark is `retain` past the end of its window.
        """
        if self.keys != other.keys:
            raise TopologyError(
                f"operator {name!r} joins streams keyed by {self.keys} and {other.keys}; "
                "key both by the same columns",
                operator=name,
            )
        self._refuse_updates(name)
        other._refuse_updates(name)
        kernel = WindowJoin(self.keys, tuple(left), tuple(right), parse_duration(retain))
        ports = (self.stream.producers, other.stream.producers)
        return self._keyed(name, kernel, ports, parallelism, time=WINDOW_END)

    def _keyed(
        self,
        name: str,
        kernel: Any,
        ports: tuple[tuple[str, ...], ...],
        parallelism: int | None,
        precombine: bool = True,
        deterministic: bool = True,
        puts_aside: bool = False,
        time: str | None = None,
        holds: tuple[tuple[str | None, Hold], ...] = (),
    ) -> Stream:
        topology = self.stream.topology
        if time is not None:
            topology._check_timed(name, time, [p for port in ports for p in port])
        topology._add(
            Operator(
                name,
                Kind.KEYED,
                ports,
                kernel,
                keys=self.keys,
                parallelism=topology._parallelism if parallelism is None else parallelism,
                keeps_columns=isinstance(kernel, Deduplicate | TopK | WindowJoin),
                precombine=precombine,
                deterministic=deterministic,
                puts_aside=puts_aside,
                time=time,
                holds=holds,
            )
        )
        return Stream(topology, (name,))


@dataclass(frozen=True)
class WindowedStream:
    """A keyed stream cut into windows; aggregates are emitted when a window closes."""

    keyed: KeyedStream
    window: Window | Session
    time: str
    lateness: timedelta

    def aggregate(
        self,
        name: str,
        *,
        parallelism: int | None = None,
        precombine: bool = True,
        **aggregates: Aggregate,
    ) -> Stream:
        """One row per key and window, once the watermark has passed the window's end."""
        self.keyed._refuse_updates(name)
        keys, time, lateness = self.keyed.keys, self.time, self.lateness
        checked = aggregates_of(name, aggregates)
        kernel: SessionAggregate | WindowedAggregate
        if isinstance(self.window, Session):
            kernel = SessionAggregate(keys, time, self.window, checked, lateness)
        else:
            kernel = WindowedAggregate(keys, time, self.window, checked, lateness)
        ports = (self.keyed.stream.producers,)
        return self.keyed._keyed(
            name, kernel, ports, parallelism, precombine, time=time, holds=kernel.holds
        )


def describe(topology: Topology) -> str:
    """The topology as text: chains by wave, their operators, keys and parallelism."""
    plan = topology.plan()
    ops = plan.topology.by_name
    lines = [f"topology {topology.name}: {len(ops)} operators, {plan.waves} waves after the source"]
    for chain in plan.chains:
        where = "source tasks" if chain.is_source else f"{chain.parallelism} partitions"
        lines.append(f"wave {chain.depth}  {chain.name}  ({where})")
        for name in chain.operators:
            op = ops[name]
            key = f"  by {', '.join(op.keys)}" if op.keys else ""
            reads = f"  ← {', '.join(op.producers)}" if op.producers else ""
            lines.append(f"    {op.kind.value:9} {name}{key}{reads}")
        lines += [
            f"    shuffle   {e.producer} → {e.target_op} by {', '.join(e.keys)}"
            for e in chain.outputs
        ]
    return "\n".join(lines)


@contextlib.contextmanager
def _plain_interrupts() -> Iterator[None]:
    """Ctrl-C as Python has it: PySpark's own handler would first cancel the slice in hand."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_sink(name: str, sink: Any) -> None:
    if not isinstance(sink, Sink):
        what = f"the class {sink.__name__}" if isinstance(sink, type) else repr(sink)
        raise TopologyError(
            f"the sink {name!r} is {what}; give an instance of a sink, such as "
            "ab.Parquet(directory), ab.Console() or ab.Memory()",
            operator=name,
        )


def _puts_aside(name: str, on_error: str) -> bool:
    if on_error not in ("fail", "dead_letter"):
        raise TopologyError(
            f'operator {name!r}: on_error is {on_error!r}; give "fail" or "dead_letter"',
            operator=name,
        )
    return on_error == "dead_letter"


def _backups(choice: str | Sequence[str]) -> frozenset[str] | None:
    if isinstance(choice, str):
        if choice not in ("all", "sources"):
            raise ConfigError(
                f'backups is {choice!r}; give "all", "sources" or a list of operator names'
            )
        return None if choice == "all" else frozenset()
    return frozenset(choice)


def _positive_ms(option: str, value: Duration) -> int:
    milliseconds = parse_duration(value) // timedelta(milliseconds=1)
    if milliseconds < 1:
        raise ConfigError(f"{option} is {value}; give at least one millisecond")
    return milliseconds


__all__: Sequence[str] = ["Job", "KeyedStream", "Stream", "Topology", "WindowedStream", "describe"]
