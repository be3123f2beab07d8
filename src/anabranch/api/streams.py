"""Streams: what a topology's operators read and give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import polars as pl

from anabranch.errors import TopologyError
from anabranch.model.duration import Duration, microseconds, parse_duration
from anabranch.model.graph import (
    Hold,
    Kind,
    Operator,
)
from anabranch.operators.base import LateRows
from anabranch.operators.functions import SliceFunction, state_fields
from anabranch.operators.kernels.aggregates import Aggregate, KeyedAggregate
from anabranch.operators.kernels.dedup import Deduplicate
from anabranch.operators.kernels.enrich import Enrich
from anabranch.operators.kernels.join import WindowJoin
from anabranch.operators.kernels.process import KeyedProcess
from anabranch.operators.kernels.sessions import Session, SessionAggregate
from anabranch.operators.kernels.stateless import Filter, FlatMap, Map, Select
from anabranch.operators.kernels.topk import TopK
from anabranch.operators.kernels.windows import WINDOW_END, WINDOW_START, Window, WindowedAggregate
from anabranch.operators.state.ttl import Ttl
from anabranch.operators.written import (
    aggregates_of,
    column_name,
    column_names,
    columns_of,
    function_of,
    key_columns,
    no_such_method,
    operator_name,
    predicate_of,
    sink_priority,
    window_of,
)
from anabranch.sinks import Sink

if TYPE_CHECKING:
    from anabranch.api.topology import Topology

_ALL = "_all"  # a constant column: the key of operators over a whole stream


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
        function: Callable[[Any], Any] | None = None,
        *,
        deterministic: bool = True,
        on_error: str = "fail",
    ) -> Stream:
        """A function from a Polars frame to a frame (or Arrow table) with as many rows.

        Before the first keyed operator a frame has the rows of one source task, behind it those
        of one partition; never count on its being all of a slice.
        """
        operator_name(name, "map", '"upper", function')
        kernel = Map(function_of(name, function, "map"))
        return self._stateless(name, kernel, deterministic, on_error)

    def flat_map(
        self,
        name: str,
        function: Callable[[Any], Any] | None = None,
        *,
        deterministic: bool = True,
        on_error: str = "fail",
    ) -> Stream:
        """A function from a Polars frame to a frame (or Arrow table) with any number of rows;
        frames as for `map`."""
        operator_name(name, "flat_map", '"split", function')
        kernel = FlatMap(function_of(name, function, "flat_map"))
        return self._stateless(name, kernel, deterministic, on_error)

    def enrich(
        self,
        name: str,
        table: Any,
        *,
        on: str | Sequence[str],
        columns: str | Sequence[str] | None = None,
        how: str = "left",
    ) -> Stream:
        """Add columns of a static table (all others, if not named) to rows with the same key.

        The table is a batch Spark DataFrame, an Arrow table or a Polars frame with every key once.
        It is taken now and travels with the job. Rows without a match get nulls; with
        `how="inner"` they are dropped. A null key has no match.
        """
        operator_name(name, "enrich", '"priced", prices, on="item"')
        keys = list(column_names(f"on= of {name!r}", on))
        kept = None if columns is None else column_names(f"columns= of {name!r}", columns)
        try:
            kernel = Enrich.of(table, keys, kept, how)
        except TopologyError as e:
            raise TopologyError(f"operator {name!r}: {e.message}", **e.fields) from e
        return self._stateless(name, kernel)

    def union(self, *others: Stream) -> Stream:
        """The rows of several streams with the same columns."""
        streams = (self, *others)
        for other in others:
            if not isinstance(other, Stream):
                raise TopologyError(f"union takes streams, but got {type(other).__name__}")
            self._same_topology(other, "union")
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

    if not TYPE_CHECKING:  # a checker knows all names there are

        def __getattr__(self, name: str) -> Any:
            """What only a keyed stream has says so."""
            if name.startswith("_") or not callable(getattr(KeyedStream, name, None)):
                raise no_such_method("a Stream", name)
            raise TopologyError(
                f'{name} works by key: name the key first, as in .key_by("user").{name}(...)'
            )

    def top_k(self, name: str, k: int, *, by: str, descending: bool = True) -> Stream:
        """The k rows of the whole stream with the largest value of `by`, and their `rank`.

        One partition keeps the ranking; what feeds it sends at most k rows per part and slice.
        """
        operator_name(name, "top_k", '"largest", 10, by="amount"')
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
        operator_name(name, "late", '"too_late"')
        operator = self.topology._named(self.producers[0])
        if len(self.producers) > 1 or not hasattr(operator.kernel, "late_schema"):
            raise TopologyError(
                f"operator {name!r}: no row is late for {' and '.join(self.producers)}; take "
                ".late(...) of windowed aggregates, deduplicate(within=...) or join_windows",
                operator=name,
            )
        self.topology._replace(replace(operator, precombine=False))
        return replace(self._stateless(name, LateRows()), updated_by=None)

    def to(
        self, name: str, sink: Sink | None = None, *, priority: int = 1, on_error: str = "fail"
    ) -> None:
        """End the stream in a sink. After losses that leave too few nodes for all, sinks with more
        `priority` together come back first. `on_error` as for a source, for rows that a PostgreSQL
        sink or its server refuses."""
        self.topology._check_sink(name, sink)
        assert sink is not None
        aside = puts_aside(name, on_error)
        if aside and not sink.tells_rows:
            raise TopologyError(
                f"the sink {name!r}: a {type(sink).__name__} sink takes all rows of a slice or "
                'none, so on_error="dead_letter" has no meaning for it; leave it out',
                operator=name,
            )
        kernel = sink if aside else None
        worth = sink_priority(name, priority)
        self.topology._add(
            Operator(name, Kind.SINK, (self.producers,), kernel, puts_aside=aside, priority=worth)
        )
        self.topology._sinks[name] = sink

    def _same_topology(self, other: Stream, method: str) -> None:
        if other.topology is not self.topology:
            raise TopologyError(
                f"{method} takes streams of one topology, but {' and '.join(other.producers)} is "
                f"in another ({other.topology.name!r}); declare both with the same Topology object"
            )

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
                puts_aside=puts_aside(name, on_error),
                gives_late=isinstance(kernel, LateRows),
            )
        )
        return Stream(self.topology, (name,), self.updated_by)


@dataclass(frozen=True)
class KeyedStream:
    """A stream and its key: what stateful operators take."""

    stream: Stream
    keys: tuple[str, ...]

    if not TYPE_CHECKING:  # a checker knows all names there are

        def __getattr__(self, name: str) -> Any:
            """What belongs before the key says so."""
            before = not name.startswith("_") and callable(getattr(Stream, name, None))
            hint = f"call .{name}(...) before .key_by(...), or behind an operator" if before else ""
            raise no_such_method("a keyed stream", name, hint)

    def aggregate(
        self,
        name: str,
        *unnamed: Any,
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
        operator_name(name, "aggregate", '"counts", n=ab.count()')
        self._refuse_updates(name)
        lives = Ttl.of(ttl, time)
        kernel = KeyedAggregate(self.keys, aggregates_of(name, aggregates, unnamed), lives)
        ports = (self.stream.producers,)
        results = self._keyed(name, kernel, ports, parallelism, precombine, time=time)
        return replace(results, updated_by=name)

    def window(
        self, window: Window | Session, *, time: str, lateness: Duration = "0s"
    ) -> WindowedStream:
        """Cut the stream into event-time windows (tumbling, hopping, session) by column `time`."""
        column_name("time= of a window", time)
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
        operator_name(name, "deduplicate", '"firsts"')
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
        operator_name(name, "top_k", '"largest", 10, by="amount"')
        column_name(f"by= of {name!r}", by)
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
                "change is to count, say so with .changes()",
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
        operator_name(name, "process", '"balances", Balance()')
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
            puts_aside=puts_aside(name, on_error),
            time=time,
            holds=((None, hold),),
        )

    def join_windows(
        self,
        name: str,
        other: KeyedStream,
        *,
        left: str | Sequence[str],
        right: str | Sequence[str],
        parallelism: int | None = None,
        retain: Duration = "1m",
    ) -> Stream:
        """Join two streams of windowed aggregates on key and window.

        `left` and `right` name the columns to keep of each. A row waits for its partner until
        the watermark is `retain` past the end of its window.
        """
        operator_name(name, "join_windows", '"both", other, left=["n"], right=["total"]')
        if not isinstance(other, KeyedStream):
            raise TopologyError(
                f"operator {name!r} joins with a {type(other).__name__}; key it too: "
                f"other.key_by({', '.join(map(repr, self.keys))})",
                operator=name,
            )
        self.stream._same_topology(other.stream, "join_windows")
        if self.keys != other.keys:
            raise TopologyError(
                f"operator {name!r} joins streams keyed by {self.keys} and {other.keys}; "
                "key both by the same columns",
                operator=name,
            )
        self._refuse_updates(name)
        other._refuse_updates(name)
        mine = column_names(f"left= of {name!r}", left)
        theirs = column_names(f"right= of {name!r}", right)
        kernel = WindowJoin(self.keys, mine, theirs, parse_duration(retain))
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
            column_name(f"time= of {name!r}", time)
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

    if not TYPE_CHECKING:  # a checker knows all names there are

        def __getattr__(self, name: str) -> Any:
            hint = 'a window has .aggregate("counts", n=ab.count()) only; other operators follow it'
            raise no_such_method("a windowed stream", name, "" if name.startswith("_") else hint)

    def aggregate(
        self,
        name: str,
        *unnamed: Any,
        parallelism: int | None = None,
        precombine: bool = True,
        **aggregates: Aggregate,
    ) -> Stream:
        """One row per key and window, once the watermark has passed the window's end."""
        operator_name(name, "aggregate", '"counts", n=ab.count()')
        self.keyed._refuse_updates(name)
        keys, time, lateness = self.keyed.keys, self.time, self.lateness
        checked = aggregates_of(name, aggregates, unnamed)
        kernel: SessionAggregate | WindowedAggregate
        if isinstance(self.window, Session):
            kernel = SessionAggregate(keys, time, self.window, checked, lateness)
        else:
            kernel = WindowedAggregate(keys, time, self.window, checked, lateness)
        ports = (self.keyed.stream.producers,)
        return self.keyed._keyed(
            name, kernel, ports, parallelism, precombine, time=time, holds=kernel.holds
        )


def puts_aside(name: str, on_error: str) -> bool:
    if on_error not in ("fail", "dead_letter"):
        raise TopologyError(
            f'operator {name!r}: on_error is {on_error!r}; give "fail" or "dead_letter"',
            operator=name,
        )
    return on_error == "dead_letter"
