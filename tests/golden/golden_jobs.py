"""The jobs of the golden directories: what they were given, what they must give when they go on.

`operators` and `joins` have state of every kind, two cuts (full files, then deltas) and slices
after them that a restart replays; `operators` also changed its placement and had two drivers.
`sinks` has batches of several source tasks and slices, and was killed when its newest slice was
journalled and no sink had shown it. Inputs and topologies are what the files in the numbered
directories were made with: they never change. Oracles are slow models that know nothing of slices,
files or restarts.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from local_run import LocalRun

import anabranch as ab
from anabranch.driver import notes
from anabranch.driver.endpoint import ENDPOINT, Endpoint
from anabranch.model.commands import NoteBackups
from anabranch.model.events import NodesPolled
from anabranch.model.ids import PartitionId
from anabranch.testing import Idle, LocalJob, Scale, Step
from operator_cases import (
    NEVER,
    SCHEMA,
    START,
    Event,
    Model,
    Quiet,
    Row,
    Slices,
    added_by,
    counted,
    distinct,
    extremes,
    firsts,
    firsts_within,
    joined,
    quiet,
    ranked,
    running,
    seconds,
    sessions,
    totalled,
    windowed,
)

# -- operators ---------------------------------------------------------------------------------

DELAY_S = 3
OPERATORS_MODELS: Mapping[str, Model] = {
    "count": running(counted),
    "distinct": running(distinct),
    "tumbling": windowed(4, 4, totalled),
    "outer": added_by(8, windowed(1, 1, counted)),
    "session": sessions(1, totalled),
    "top": ranked(2),
    "once": firsts,
    "quiet": quiet(2),
}


def operators_topology() -> ab.Topology:
    """All operators but the first on one partition."""
    topology = ab.Topology("golden", key_groups=4)
    events = topology.source("events", None, time="ts", watermark=f"{DELAY_S}s")
    keyed, one = events.key_by("k"), 1
    windows = keyed.window(ab.tumbling("4s"), time="ts")
    inner = keyed.window(ab.tumbling("1s"), time="ts")
    per_second = inner.aggregate("inner", n=ab.count(), parallelism=one)
    outer = per_second.key_by("k").window(ab.tumbling("8s"), time="window_start")
    made = {
        "count": keyed.aggregate("count", n=ab.count(), parallelism=2),
        "distinct": keyed.aggregate("distinct", n=ab.count_distinct("item"), parallelism=one),
        "tumbling": windows.aggregate("tumbling", total=ab.sum("v"), parallelism=one),
        "outer": outer.aggregate("outer", n=ab.sum("n"), parallelism=one),
        "session": keyed.window(ab.session("1s"), time="ts").aggregate(
            "session", total=ab.sum("v"), parallelism=one
        ),
        "top": keyed.top_k("top", 2, by="v", parallelism=one),
        "once": events.key_by("k", "item").deduplicate("once", parallelism=one),
        "quiet": keyed.process("quiet", Quiet(), time="ts", parallelism=one),
    }
    for name, stream in made.items():
        stream.to(f"{name}.out", ab.Memory())
    return topology


JOINS_MODELS: Mapping[str, Model] = {
    "both": joined(windowed(4, 4, counted), windowed(4, 4, totalled, lambda e: e.v > 4)),
    "brief": running(extremes, 4),
    "apart": firsts_within(3),
    "hops": windowed(4, 2, distinct),
}


def joins_topology() -> ab.Topology:
    topology = ab.Topology("golden", key_groups=2)
    events = topology.source("events", None, time="ts", watermark=f"{DELAY_S}s")
    keyed, one = events.key_by("k"), 1
    large = events.filter("large", pl.col("v") > 4).key_by("k")
    left = keyed.window(ab.tumbling("4s"), time="ts").aggregate("l", n=ab.count(), parallelism=one)
    right = large.window(ab.tumbling("4s"), time="ts").aggregate(
        "r", total=ab.sum("v"), parallelism=one
    )
    statistics = {"least": ab.min("v"), "most": ab.max("v"), "mean": ab.mean("v")}
    hops = keyed.window(ab.hopping("4s", "2s"), time="ts")
    made = {
        "both": left.key_by("k").join_windows(
            "both", right.key_by("k"), left=["n"], right=["total"], parallelism=one
        ),
        "brief": keyed.aggregate("brief", ttl="4s", time="ts", parallelism=one, **statistics),
        "apart": keyed.deduplicate("apart", within="3s", time="ts", parallelism=one),
        "hops": hops.aggregate("hops", n=ab.count_distinct("item"), parallelism=one),
    }
    for name, stream in made.items():
        stream.to(f"{name}.out", ab.Memory())
    return topology


def _events(number: int) -> list[Event]:
    """Four seconds, the third event out of order; a null among the keys."""
    keys = ["a", "b", None, "a", "c"]
    return [
        Event(
            START + seconds(4 * number + 0.9 * i - (2 if i == 2 else 0)),
            keys[(number + i) % 5],
            (7 * number + 3 * i) % 11,
            (number + i) % 3,
        )
        for i in range(4)
    ]


def _rows(number: int) -> Step:
    return {"events": pl.DataFrame(_events(number), SCHEMA, orient="row")}


Lives = tuple[tuple[Step, ...], ...]
# Until all that is closed is out: a window behind a window waits for a slice.
CLOSE: tuple[Step, ...] = (Idle(), Idle())


@dataclass(frozen=True)
class Played:
    """A job of the test driver: what it was, what it gives, and what it had when it was killed."""

    topology: Callable[[], ab.Topology]
    models: Mapping[str, Model]
    lives: Lives
    then: tuple[Step, ...]  # what it is given when it goes on

    def make(self, root: Path) -> None:
        for steps in self.lives:
            life = Life(root, self)
            life.steps(steps)
            life.job.run.holding.remember(MEMORY)
            notes.write_prediction(life.job.run.holding.store, PREDICTED)
            life.job.close()

    def oracle(self) -> dict[str, Counter[Row]]:
        """What follows the golden slices: all that the models give, but for what they gave
        before."""
        before = tuple(step for life in self.lives for step in life)
        return {
            name: Counter(model(_given((*before, *self.then)))) - Counter(model(_given(before)))
            for name, model in self.models.items()
        }


class Life:
    """A life of a job on a directory; a checkpoint is on disk before the next step."""

    def __init__(self, root: Path, played: Played) -> None:
        self._sinks = tuple(played.models)
        schema = pl.DataFrame([], SCHEMA).to_arrow().schema
        self.job = LocalJob(played.topology(), root, {"events": schema}, 2)

    def steps(self, steps: tuple[Step, ...]) -> dict[str, list[Row]]:
        """What reached each sink."""
        found: dict[str, list[Row]] = {name: [] for name in self._sinks}
        for step in steps:
            for sink, rows in self.job.step(step).items():
                found[sink.removesuffix(".out")] += rows.rows()
            self._await_cut()
        return found

    def _await_cut(self) -> None:
        job = self.job
        while job.controller.ledgers.checkpoints.in_flight:
            reports = job.cluster.ask(job.run.caller.poll(job.cluster.nodes))
            job.run.take(NodesPolled(tuple(reports), job.now_ms))


MEMORY: Mapping[str, Any] = {"holds": {"count": (1_767_225_600_000, 2)}, "decisions": []}
PREDICTED = NoteBackups(
    frozenset({PartitionId("count", 0)}),
    {PartitionId("count", 0): 0.5, PartitionId("top", 0): 1.25},
    None,
)


def _given(steps: tuple[Step, ...]) -> Slices:
    watermark, found = NEVER, Slices()
    numbers = iter(range(99))
    for step in steps:
        if isinstance(step, Scale):
            continue
        events = [] if isinstance(step, Idle) else _events(next(numbers))
        found.append((events, watermark))
        watermark = max([watermark, *(e.ts - seconds(DELAY_S) for e in events)])
    return found


PLAYED = {
    "operators": Played(
        operators_topology,
        OPERATORS_MODELS,
        (
            (_rows(0), _rows(1), Idle(10), _rows(2), Scale("count", 1), _rows(3)),
            (_rows(4), *CLOSE),
        ),
        (_rows(5), Idle(10), _rows(6), _rows(7), Idle(10), Idle()),
    ),
    "joins": Played(
        joins_topology,
        JOINS_MODELS,
        ((_rows(0), _rows(1), Idle(10), _rows(2), Idle(10), _rows(3), *CLOSE),),
        (_rows(4), _rows(5), _rows(6), Idle(), Idle()),
    ),
}


# -- sinks -------------------------------------------------------------------------------------

Pair = tuple[int | None, int]
BATCHES: tuple[list[dict[str, list[Pair]]], ...] = (
    [{"s": [(1, 10), (2, 20), (None, 5)]}, {"s": [(1, 1)]}],
    [{"s": [(2, 2), (3, 30)]}, {"s": []}],
    [{"s": [(1, 7), (3, 3)]}, {"s": [(None, 1)]}],
)
LATER: list[dict[str, list[Pair]]] = [{"s": [(1, 100), (4, 4)]}, {"s": [(2, 200)]}]
PARQUET = ("raw", "sums")


class SinksJob:
    """A life of the job on a directory, which its Parquet sinks lie in: so it can be copied whole.
    The function refuses slice `fails`, which then stays journalled and not shown."""

    def __init__(self, root: Path, fails: int | None = None) -> None:
        self.told: dict[int, list[Pair]] = {}
        self._fails = fails
        topology = ab.Topology("golden", key_groups=4)
        rows = topology.source("s", None)
        rows.to("told", ab.ForEachSlice(self._tell, arrow=True))
        rows.to("raw", ab.Parquet(str(root / "raw")))
        sums = rows.key_by("k").aggregate("sum", v=ab.sum("v"), parallelism=1)
        sums.to("sums", ab.Parquet(str(root / "sums")))
        self.run = LocalRun(topology, root, 2, checkpoint_interval="300h", max_rows_per_slice=2)

    def _tell(self, rows: pa.Table, slice_no: int) -> None:
        if slice_no == self._fails:
            raise RuntimeError("the function refuses the slice")
        self.told[slice_no] = [(r["k"], r["v"]) for r in rows.to_pylist()]


def make_sinks(root: Path) -> None:
    first = SinksJob(root)
    first.run.feed(BATCHES[0])
    first.run.stop()
    second = SinksJob(root)
    second.run.feed(BATCHES[1])
    newest = second.run.controller.newest
    assert newest is not None
    second._fails = newest.number + 1
    try:
        second.run.feed(BATCHES[2])
    except ab.AnabranchError:
        second.run.kill()
    endpoint = Endpoint(root, None)  # type: ignore[arg-type]
    left = (root / ENDPOINT).read_bytes()
    endpoint.close()
    (root / ENDPOINT).write_bytes(left)  # as a killed driver leaves it


def shown(root: Path, sink: str) -> dict[int, list[Pair]]:
    """By slice, what a reader of Parquet finds."""
    found: dict[int, list[Pair]] = {}
    for path in sorted((root / sink).glob("slice=*/*.parquet")):
        rows = pq.ParquetFile(path).read().to_pylist()
        number = int(path.parent.name.removeprefix("slice="))
        found.setdefault(number, []).extend((r["k"], r["v"]) for r in rows)
    return found


def summed(slices: Mapping[int, list[Pair]]) -> Iterator[tuple[int, Counter[Pair]]]:
    """The sums of the keys of each slice, after it."""
    totals: Counter[int | None] = Counter()
    for number in sorted(slices):
        for key, value in slices[number]:
            totals[key] += value
        yield number, Counter((k, totals[k]) for k in {k for k, _ in slices[number]})


JOBS: Mapping[str, Callable[[Path], None]] = {
    **{name: played.make for name, played in PLAYED.items()},
    "sinks": make_sinks,
}


def make(root: Path, jobs: Iterable[str] = JOBS) -> None:
    """A directory for each, below `root`, without what nobody reads: locks, halves of files and the
    journal's segment before the newest."""
    for name in jobs:
        JOBS[name](root / name)
        older = sorted((root / name).glob("journal/*.jsonl"))[:-1]
        for unread in (root / name / "lock", *older, *(root / name).rglob("*.tmp")):
            unread.unlink(missing_ok=True)
        for empty in sorted((root / name).rglob("*"), reverse=True):
            if empty.is_dir() and not any(empty.iterdir()):
                shutil.rmtree(empty)
