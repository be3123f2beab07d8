"""Every sink, killed between any two of its steps and restarted: each row exactly once.

The dead driver does nothing more; its connections are gone. First each sink by itself, at every
step (by default, every third); then all of them at once below the real driver and nodes, at some
steps of every kind.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.errors import ConfigError, OperatorError
from anabranch.sinks import Home, Sink
from effort import LONG
from flow_topology import build
from oracle import Dataflow, Step
from sink_kinds import KINDS, ByFunction, ByKey, InDelta, InParquet, InPostgres, Kind, needs_server
from sink_starts import start
from sink_steps import Killed, killed_at

sys.path.insert(0, str(Path(__file__).parents[1] / "node"))
from local_run import LocalRun

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


# -- one sink by itself ------------------------------------------------------------------------


class Protocol:
    """What the driver does with one sink; `journal` is what survives it."""

    SLICES = ((), ((1, 10), (2, 20)), ((1, 11),), ((2, 21), (3, 30)))  # the first has no rows

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.journal: list[list[str]] = []
        self.life = 0

    def run(self) -> None:
        self.life += 1
        sink = self.kind.sink("out")
        try:
            sink.bind(Home("job", "out", self.kind.root / "ck"))
            sink.check(SCHEMA)
            newest = self.journal[-1] if self.journal else []
            start(sink, len(self.journal), newest, self.life)
            for number in range(len(self.journal) + 1, len(self.SLICES) + 1):
                self._slice(sink, number)
        finally:
            sink.close()

    def _slice(self, sink: Sink, number: int) -> None:
        staged = []
        for i, (k, v) in enumerate(self.SLICES[number - 1]):
            table = pa.table({"k": [k], "v": [v]}, SCHEMA)
            staged.append(sink.stage("out", table, number, self.life, f"w{i}"))
        self.journal.append([s.path for s in staged if s.path is not None])
        sink.expose(number, self.journal[-1], staged)


def every_step(make: type[Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    calm = make(tmp_path / "calm")
    wanted = calm.wanted([r for s in Protocol.SLICES for r in s])
    with killed_at(monkeypatch, -1) as steps:
        Protocol(calm).run()
    assert calm.rows("out") == wanted
    for step in range(0, len(steps), 1 if LONG else 5):
        protocol = Protocol(make(tmp_path / f"{step}"))
        with killed_at(monkeypatch, step), pytest.raises(Killed):
            protocol.run()
        protocol.run()
        assert protocol.kind.rows("out") == wanted, (step, steps[step])
        staged = list(protocol.kind.root.rglob("*.staged"))
        assert staged == [], step
    return set(steps)


FILES = {"fsync", "mkdir", "replace", "write", "unlink", "rmdir"}


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (InParquet, {"link", "rename", *FILES}),
        (InDelta, {"claim", "open", "commit", *FILES}),
        (ByFunction, FILES),
    ],
)
def test_killed_at_every_step(
    kind: type[Kind], steps: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert every_step(kind, tmp_path, monkeypatch) == steps


@needs_server
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("kind", [InPostgres, ByKey])
def test_killed_at_every_step_of_postgres(
    kind: type[Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert every_step(kind, tmp_path, monkeypatch) == {"connect", "sql", *FILES}


# -- all of them below the driver --------------------------------------------------------------

STEPS = (
    Step("s", "source"),
    Step("odd", "filter", ("s",), 2),
    Step("max", "max", ("odd",), 2),
    *(Step(f"odd{i}", "sink", ("odd",)) for i, _ in enumerate(KINDS[:-1])),
    *(Step(f"max{i}", "sink", ("max",)) for i, _ in enumerate(KINDS)),
)
BATCHES = [
    [{"s": [(i % 3, i + b) for i in range(6)]}, {"s": [(None, 2 * b + 1)]}] for b in range(2)
]


class Job:
    """A topology that ends in every kind of sink, twice: after a source and after a shuffle."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kinds = [kind(root / str(i)) for i, kind in enumerate(KINDS)]

    def work(self) -> None:
        topology = build(Dataflow(STEPS), lambda name: self.kinds[int(name[-1])].sink(name))
        run = None
        try:
            run = LocalRun(topology, self.root / "ck")
            # Spark offers the batch again whose end it was not told about.
            for number in range(max(0, run.next_batch - 1), len(BATCHES)):
                run.feed(BATCHES[number], number)
            run.stop()
        finally:
            if run is not None:
                run.kill()

    def check(self, because: object) -> None:
        oracle, wanted = Dataflow(STEPS), {s.name: [] for s in STEPS if s.what == "sink"}
        for batch in BATCHES:
            rows = [r for task in batch for r in task["s"]]
            for name, found in oracle.run({"s": rows}).items():
                wanted[name] += list(found.elements())
        for name, rows in wanted.items():
            kind = self.kinds[int(name[-1])]
            assert kind.rows(name) == kind.wanted(rows), (because, name)


@needs_server
@pytest.mark.usefixtures("server")
def test_all_sinks_killed_below_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = Job(tmp_path / "calm")
    with killed_at(monkeypatch, -1) as steps:
        calm.work()
    calm.check("calm")
    last = len(steps)
    hit: Counter[str] = Counter()
    for kind in sorted(set(steps)):
        places = [i for i, name in enumerate(steps) if name == kind]
        for step in places[1 :: max(1, len(places) // (2 if LONG else 1))]:
            job = Job(tmp_path / f"{step}")
            with killed_at(monkeypatch, step), pytest.raises(Killed) as killed:
                job.work()
            hit[_first(killed.value)] += 1
            job.work()
            job.check((step, last))
    assert hit.keys() >= {"write", "rename", "sql", "commit", "unlink", "replace"}, hit


def _first(killed: BaseException) -> str:
    """Where the kill hit: what would be done on the way out is killed as well."""
    while isinstance(killed.__context__, Killed):
        killed = killed.__context__
    return str(killed)


def function_job(function: Any) -> ab.Topology:
    topology = ab.Topology("t")
    sink = ab.Memory() if function is None else ab.ForEachSlice(function, arrow=True)
    topology.source("s", None).to("out", sink)
    return topology


def test_a_sink_that_lacks_the_newest_slice_cannot_be_replaced_by_memory(tmp_path: Path) -> None:
    seen: list[int] = []

    def refuse(rows: pa.Table, slice_no: int) -> None:
        raise ValueError("not now")

    run = LocalRun(function_job(refuse), tmp_path)
    with pytest.raises(OperatorError, match="'out' raised on slice 1: ValueError: not now"):
        run.feed(BATCHES[0])
    run.kill()
    with pytest.raises(ConfigError, match="slice 1 has rows for the sink 'out' that were not"):
        LocalRun(function_job(None), tmp_path)
    accept = lambda rows, slice_no: seen.extend(rows.column("v").to_pylist())  # noqa: E731
    LocalRun(function_job(accept), tmp_path).stop()
    assert Counter(seen) == Counter(v for task in BATCHES[0] for _, v in task["s"])
    run = LocalRun(function_job(None), tmp_path)
    run.feed(BATCHES[1])
    run.stop()


def test_readers_may_delete_the_newest_slice_of_a_parquet_sink(tmp_path: Path) -> None:
    def job() -> ab.Topology:
        topology = ab.Topology("t")
        topology.source("s", None).to("out", ab.Parquet(str(tmp_path / "out")))
        return topology

    run = LocalRun(job(), tmp_path / "ck")
    run.feed(BATCHES[0])
    run.kill()
    shutil.rmtree(tmp_path / "out" / "slice=1")
    run = LocalRun(job(), tmp_path / "ck")
    run.feed(BATCHES[1])
    run.kill()
    assert [p.name for p in (tmp_path / "out").glob("slice=*")] == ["slice=2"]
