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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from anabranch.api.job import Job
from anabranch.api.streams import Stream, puts_aside
from anabranch.driver.options import Given, RunOptions, positive_ms
from anabranch.errors import TopologyError
from anabranch.model.duration import Duration, microseconds, parse_duration, spoken
from anabranch.model.given import whole_number
from anabranch.model.graph import (
    DEFAULT_KEY_GROUPS,
    Graph,
    Kind,
    Operator,
    check_name,
    check_operator,
)
from anabranch.model.plan import Plan, compile_plan
from anabranch.operators.described import described
from anabranch.operators.rows.event_time import Timed
from anabranch.operators.rows.failing import DeadLetters
from anabranch.operators.written import (
    column_name,
    no_such_method,
    operator_name,
    source_data,
)
from anabranch.sinks import Sink
from anabranch.storage.files import directory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from anabranch.driver.preparing import JobParts

DEFAULT_PARALLELISM = 2


class Topology:
    """A DAG under construction. `parallelism` is that of operators which do not name their own."""

    def __init__(
        self,
        name: str,
        *,
        key_groups: int = DEFAULT_KEY_GROUPS,
        parallelism: int = DEFAULT_PARALLELISM,
    ) -> None:
        self.name = check_name(name)
        self._key_groups = whole_number("key_groups", key_groups)
        self._parallelism = whole_number("parallelism", parallelism)
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
        operator_name(name, "source", '"orders", read')
        aside = puts_aside(name, on_error)
        delay_us = microseconds(parse_duration(watermark))
        if delay_us and time is None:
            raise TopologyError(
                f"source {name!r}: watermark= says how late rows may be by their event time; name "
                "its column with time=",
                operator=name,
            )
        if aside and time is None:
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
            self._idle_timeouts[name] = positive_ms("idle_timeout", idle_timeout)
        kernel = None
        if time is not None:
            column_name(f"time= of the source {name!r}", time)
            ahead = None if max_ahead is None else microseconds(parse_duration(max_ahead))
            kernel = Timed(time, ahead, refuses_nulls=aside)
        self._add(Operator(name, Kind.SOURCE, kernel=kernel, puts_aside=aside))
        self._sources[name] = source_data(name, data)
        if time is not None:
            self._event_times[name] = time
            self._delays[name] = delay_us
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
        self._check_sink(name, sink)
        self._dead_letters = name
        self._sinks[name] = sink

    def plan(self) -> Plan:
        """Check the topology and compile it to chains and waves."""
        operators = [*self._operators, *self._dead_letter_sink()]
        return compile_plan(Graph.checked(self.name, operators, self._key_groups))

    def parts(self) -> JobParts:
        """All that a driver needs to know of it."""
        from anabranch.driver.preparing import JobParts

        return JobParts(
            plan=self.plan(),
            sources=self._sources,
            event_times=self._event_times,
            watermark_delays_us=self._delays,
            idle_timeouts_ms=self._idle_timeouts,
            sinks=self._sinks,
        )

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
        return [Operator(self._dead_letters, Kind.SINK, (inputs,), DeadLetters(), priority=0)]

    def start(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        *,
        checkpoint: str | Path,
        **options: Unpack[Given],
    ) -> Job:
        """Start the job and return a handle to it.

        `spark` is a session, or a function that makes one: it is called when everything that needs
        no Spark has been checked, and the directory is this job's.

        `checkpoint` is a directory that the driver and all nodes can reach; started again with
        the same one, the job goes on where it was. `available_now` ends the job when all data
        that is there now has been processed. `backups` names the operators that keep their output
        for the recovery of those behind them: "all", "sources" (whose log serves instead), a
        list, or "adaptive": sources only, until two nodes are lost between two checkpoints; then
        all, until nothing waits any more and a checkpoint has followed. What is not kept is
        computed again, which takes longer. With a `recovery_bound`, the
        job measures itself and chooses the cheapest backups that bring any lost node back in
        time. A node that gives no sign of life for `node_timeout` counts as lost; one whose
        process is gone is noticed at once. A slice that takes longer than `slice_timeout` ends the
        run with an error that names the operator that did not return; by default it may take as
        long as it likes, for after a long stop the first one may be large. Without any node the
        run waits for one, no longer than `node_wait` if that is given. With `autoscale`, the job
        measures its CPU and its slices and chooses the parallelism of its operators, and the
        nodes it asks for, by itself. With `balance`, it counts the rows of its keys, and keys move
        from partitions that get more than their share to those that get less. With a
        `parallel_recovery` of 2 or more, a lost partition of
        an operator that only sinks read is rebuilt in this number of parts, each on a node of its
        own, until the next checkpoint makes them one.
        `recovery` is for losses that leave too few nodes for all queries (a query is a sink, with
        its priority, and all that feeds it): "incremental", those queries come back that fit and
        are worth most, the others as nodes come; "blocking", those that are hurt come back when
        there is room for all; "eager", all come back at once on the nodes there are.
        `drop_state` names operators that are not in the topology any more and whose state in the
        checkpoint is given up. With a `state_url` such as "s3://bucket/job", the files of state
        go there, to any store that fsspec knows; `checkpoint` keeps all the rest. `strategy` is
        for experiments: how another system would survive a loss.
        """
        from anabranch.driver.opening import Opening
        from anabranch.spark.settings import require_pyspark

        root = directory(checkpoint, "checkpoint", "and the URL to state_url=")
        chosen = RunOptions.of(options)
        parts = self.parts()
        require_pyspark()
        opening = Opening(parts, root, chosen)
        try:
            opening.ready_for_spark()
            session = spark() if callable(spark) else spark
            from anabranch.spark.job import start_job

            return Job(start_job(session, opening))
        except BaseException:
            opening.close()
            raise

    def run(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        *,
        checkpoint: str | Path,
        **options: Unpack[Given],
    ) -> Job:
        """`start`, then wait for the end; raises what ended the job. Options as for `start`."""
        job = self.start(spark, checkpoint=checkpoint, **options)
        with _plain_interrupts():
            try:
                job.await_termination()
            except KeyboardInterrupt:
                job.stop()
        return job

    def _check_sink(self, name: Any, sink: Any) -> None:
        operator_name(name, "to", '"out", ab.Console()')
        if not isinstance(sink, Sink):
            what = f"the class {sink.__name__}" if isinstance(sink, type) else repr(sink)
            raise TopologyError(
                f"the sink {name!r} is {what}; give an instance of a sink, such as "
                "ab.Parquet(directory), ab.Console() or ab.Memory()",
                operator=name,
            )
        other = next((n for n, s in self._sinks.items() if s is sink), name)
        if other != name:
            raise TopologyError(
                f"the sinks {other!r} and {name!r} are one object; make one for each, or unite "
                "their streams",
                operator=name,
            )

    if not TYPE_CHECKING:  # a checker knows all names there are

        def __getattr__(self, name: str) -> Any:
            """What a stream has says so."""
            of_stream = not name.startswith("_") and hasattr(Stream, name)
            hint = (
                f'it is a stream\'s: topology.source("in", read).{name}(...)' if of_stream else ""
            )
            raise no_such_method("a Topology", name, hint)

    def _add(self, operator: Operator) -> None:
        check_name(operator.name)
        check_operator(operator, self._key_groups)
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

    def _described(self, op: Operator) -> str:
        """What an operator does, beside its key."""
        name = op.name
        if op.kind is Kind.SINK:
            kind, target = type(self._sinks[name]).__name__, self._sinks[name].target
            return f"{kind} {target}" if target else kind
        if op.kind is not Kind.SOURCE:
            return described(op.kernel)
        if name not in self._event_times:
            return ""
        idle = self._idle_timeouts.get(name)
        return (
            f"time {self._event_times[name]}, watermark {spoken(self._delays[name])}"
            f"{f', idle after {spoken(1000 * idle)}' if idle else ''}"
        )

    def _named(self, name: str) -> Operator:
        return next(o for o in self._operators if o.name == name)

    def _replace(self, operator: Operator) -> None:
        self._operators = [operator if o.name == operator.name else o for o in self._operators]


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
