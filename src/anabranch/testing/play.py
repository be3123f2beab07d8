"""Playing steps: a job on a cluster in this process, and a clock of its own."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Unpack, assert_never

import polars as pl
import pyarrow as pa

from anabranch.api import Topology
from anabranch.control.controller import Controller
from anabranch.driver.clock import Clock
from anabranch.driver.history import History
from anabranch.driver.opening import Opening
from anabranch.driver.options import Given, RunOptions
from anabranch.driver.preparing import prepare
from anabranch.driver.progress import Totals
from anabranch.driver.run import Run, RunJob
from anabranch.errors import ConfigError
from anabranch.model.events import (
    DrainRequested,
    Idled,
    NodesJoined,
    ScaleRequested,
    StopRequested,
)
from anabranch.model.plan import Plan, compile_plan
from anabranch.operators.rows.event_time import Timed
from anabranch.sinks import Memory
from anabranch.testing.local import LocalCluster, united
from anabranch.testing.steps import Drain, Idle, Join, Lose, Restart, Rows, Scale, Step

Output = dict[str, pl.DataFrame]
_SPEC = b"the job itself"  # in place of a pickled one: hosts in this process share the object


def play(
    topology: Topology,
    steps: Sequence[Step],
    *,
    nodes: int = 2,
    schemas: Mapping[str, pa.Schema] | None = None,
    start: datetime | None = None,
    **options: Unpack[Given],
) -> list[Output]:
    """Run the steps; per step, the rows that reached each sink because of it.

    Schemas of sources are taken from the first rows given for them, unless named. Options are those
    of `Topology.start`, but for those that only a cluster can mean.
    """
    if isinstance(steps, Mapping) or not isinstance(steps, Iterable):
        raise ConfigError(
            f"the steps are a {type(steps).__name__}; give a list of steps, one per slice"
        )
    known = {n: _table(rows, None).schema for n, rows in _first_rows(steps).items()}
    known |= schemas or {}
    _refuse_unknown(known, _topologies(topology, steps))
    # A host's thread may still write a checkpoint when the last step is done.
    with tempfile.TemporaryDirectory(prefix="anabranch-play-", ignore_cleanup_errors=True) as root:
        job = LocalJob(topology, Path(root), known, nodes, start, **options)
        try:
            return [job.step(step) for step in steps]
        finally:
            job.close()


def _topologies(first: Topology, steps: Sequence[Step]) -> list[Topology]:
    """All that run, one after the other."""
    later = [s.topology for s in steps if isinstance(s, Restart)]
    return [t for t in (first, *later) if isinstance(t, Topology)]


def _refuse_unknown(named: Iterable[str], topologies: Sequence[Topology]) -> None:
    known = dict.fromkeys(s for t in topologies for s in t._sources)
    unknown = [name for name in named if name not in known]
    if unknown and known:
        has = ", ".join(known)
        raise ConfigError(f"there is no source {unknown[0]!r}; the topology has {has}")


def _first_rows(steps: Sequence[Step]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for step in steps:
        if isinstance(step, Mapping):
            for name, rows in step.items():
                if len(rows):
                    found.setdefault(name, rows)
    return found


class LocalJob:
    """A topology that runs here, on a directory, step by step."""

    def __init__(
        self,
        topology: Topology,
        root: Path,
        schemas: Mapping[str, pa.Schema],
        nodes: int = 2,
        start: datetime | None = None,
        **options: Unpack[Given],
    ) -> None:
        self._root = root
        self._options = _fit(options)
        self._schemas = dict(schemas)
        self._timeless = start is None
        self.now_ms = 0 if start is None else int(start.timestamp() * 1000)
        self._clusters: list[LocalCluster] = []
        self._start(topology, nodes)

    def _start(self, topology: Topology, nodes: int) -> None:
        self._topology = topology
        self._sinks = {name: Memory() for name in self._checked(topology)._sinks}
        plan = topology.plan()
        parts = replace(
            topology.parts(), plan=_unbounded(plan) if self._timeless else plan, sinks=self._sinks
        )
        schemas = {n: self._schemas[n] for n in parts.sources}
        opening = Opening(parts, self._root, self._options)
        try:
            self.prepared = prepared = prepare(
                parts, self._root.absolute(), self._options, schemas, united(schemas)
            )
            self.cluster = LocalCluster(nodes, load=lambda _: prepared.spec)
            self._clusters.append(self.cluster)
            clock = Clock(lambda: self.now_ms * 1_000_000, lambda: self.now_ms, time.sleep)
            self.run = Run(
                replace(RunJob.of(opening, prepared, _SPEC), validate=True),
                lambda newest: self.cluster,
                clock=clock,
                behind=False,
                closing=opening.close,
            )
        except BaseException:
            opening.close()
            raise
        newest = self.controller.newest
        self._batch = newest.batch + 1 if newest and newest.batch is not None else 0

    def _checked(self, topology: Topology) -> Topology:
        if not isinstance(topology, Topology):
            kind = type(topology).__name__
            raise ConfigError(f"a {kind} is no topology; give the Topology itself")
        missing = [n for n in topology._sources if n not in self._schemas]
        if missing:
            raise ConfigError(
                f"no rows were given for source {missing[0]!r}; give it a schema: "
                f"schemas={{{missing[0]!r}: pa.schema(...)}}"
            )
        return topology

    @property
    def controller(self) -> Controller:
        return self.run.controller

    @property
    def history(self) -> History:
        return self.run.history

    @property
    def totals(self) -> Totals:
        """What became of all rows since the start, or the last `Restart`."""
        return self.history.totals

    def step(self, step: Step) -> Output:
        """Do one step; what reached the sinks."""
        before = self._newest
        match step:
            case Lose():
                self.cluster.kill(*self.cluster.nodes[: step.nodes], reason="it was told to die")
                self.cluster.join(step.nodes)
                self._joined()
            case Restart():
                return self._restart(step)
            case Idle():
                self.now_ms += int(step.seconds * 1000)
                self.run.take(Idled(self.now_ms))
            case Scale():
                self.run.take(ScaleRequested(step.operator, step.parallelism, self.now_ms))
                self._settle()
            case Join():
                self.cluster.join(step.nodes)
                self._joined()
                self._settle()
            case Drain():
                assert self.controller.placement is not None
                owners = [o.node for o in self.controller.placement.owners.values()]
                fullest = max(self.cluster.nodes, key=owners.count)
                self.run.take(DrainRequested(fullest, self.now_ms))
                self._settle()
            case Mapping():
                self._feed(step)
            case _:
                assert_never(step)
        return self._shown(before)

    def _restart(self, step: Restart) -> Output:
        shown = self.stop() if step.stopped else {}
        self.run.close()
        _fit(step.options)
        self._options = replace(self._options, **step.options)
        self._start(step.topology or self._topology, step.nodes or len(self.cluster.nodes))
        self._options = replace(self._options, drop_state=())
        return {**self._shown(self._newest), **shown}

    def _joined(self) -> None:
        self.run.take(NodesJoined(self.cluster.nodes, self.now_ms))

    def _settle(self) -> None:
        """Let the job idle until a change of its placement is made."""
        while self.controller.adjusting:
            self.now_ms += 1
            self.run.take(Idled(self.now_ms))

    def stop(self) -> Output:
        """A graceful end: close what the watermark allows, checkpoint."""
        before = self._newest
        self.run.take(StopRequested(self.now_ms))
        self.run.close()
        return self._shown(before)

    def close(self) -> None:
        """End as it is; when this returns, nothing is written to the directory any more."""
        self.run.close()
        for cluster in self._clusters:
            cluster.close()

    def _feed(self, rows: Mapping[str, Rows]) -> None:
        _refuse_unknown(rows, [self._topology])
        tables = {n: _table(given, self._schemas[n]) for n, given in rows.items()}
        self.now_ms += self._options.slice_interval_ms
        while not self.run.offer(self._batch, [tables]):
            if self.run.error is not None:
                raise self.run.error
        self._batch += 1

    @property
    def _newest(self) -> int:
        return self.controller.newest.number if self.controller.newest else 0

    def _shown(self, after: int) -> Output:
        """What reached the sinks after a slice."""
        found = {}
        for name, sink in self._sinks.items():
            frame = pl.from_arrow(sink.rows(after))
            assert isinstance(frame, pl.DataFrame)
            found[name] = frame
        return found


def _fit(given: Given) -> RunOptions:
    """Options, unless they mean nothing here."""
    options = RunOptions.of(given)
    strange = [
        o for o in ("available_now", "node_timeout", "node_wait", "slice_timeout") if o in given
    ]
    if strange:
        raise ConfigError(
            f"{strange[0]} is about a cluster and the sources it reads, which a test in this "
            "process has not; leave it out"
        )
    return options


def _unbounded(plan: Plan) -> Plan:
    """The plan with sources that take any event time: the clock is not one to compare it with."""
    graph = plan.graph
    operators = tuple(
        replace(o, kernel=replace(o.kernel, max_ahead_us=None))
        if isinstance(o.kernel, Timed)
        else o
        for o in graph.operators
    )
    return compile_plan(replace(graph, operators=operators))


def _table(rows: Rows, schema: pa.Schema | None) -> pa.Table:
    if isinstance(rows, pl.DataFrame):
        rows = rows.to_arrow()
    if not isinstance(rows, pa.Table):
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise ConfigError(
                f"rows of a source are a {type(rows).__name__}; give a list of dicts, a Polars "
                "frame or an Arrow table"
            )
        with _said(rows):
            given = [dict(r) for r in rows]
            strange = {c for r in given for c in r} - set(schema.names if schema else ())
            if schema is not None and strange:
                raise ValueError(f"column {min(strange)!r} is not among {schema.names}")
            return pa.Table.from_pylist(given, schema)
    return rows.cast(schema) if schema is not None else rows


@contextlib.contextmanager
def _said(rows: Any) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise ConfigError(f"these rows are no table: {e}; the first is {rows[:1]!r}") from e
