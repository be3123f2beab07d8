"""The sum adds up: every row that is read, or made by an operator, is somewhere.

For each example, with rows out of order, a lost node and a restart on the way: what the totals say
is compared with what was fed and with what reached the sinks, operator by operator.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from examples import (
    distinct_count,
    hashtags,
    top_topics,
    traffic,
    twitter_sentiment,
    word_count,
)

import anabranch as ab
from anabranch.driver.cluster import Ran, RecoveryJob, SliceJob
from anabranch.driver.progress import Totals
from anabranch.generators import Incidents, SkewedKeys, Tweets, VehiclePositions
from anabranch.model.graph import Kind, Operator
from anabranch.operators.base import LateRows
from anabranch.operators.kernels.aggregates import Count
from anabranch.operators.kernels.enrich import Enrich
from anabranch.operators.kernels.stateless import Filter, Map, Select
from anabranch.operators.kernels.windows import WindowedAggregate
from anabranch.operators.rows.failing import DeadLetters
from anabranch.terminal.meter import Meter
from anabranch.terminal.running import summarise
from anabranch.testing import Idle, LocalJob, Lose, Restart
from anabranch.testing.local import LocalCluster
from effort import LONG

SLICES = 5
TWEETS = Tweets(seed=5, rate=10, users=100, topics=30).rows(0, 1_200)
POSTS = SkewedKeys(seed=5, rate=10, keys=60, shift_every=700).rows(0, 1_200)
SENTENCES = pa.table({"ts": TWEETS.column("ts"), "sentence": TWEETS.column("text")})
Sources = Mapping[str, pa.Table]


def memory(_: str = "") -> ab.Memory:
    return ab.Memory()


EXAMPLES: dict[str, tuple[ab.Topology, Sources]] = {
    "word_count": (word_count.word_count(None, memory()), {"sentences": SENTENCES}),
    "top_topics": (top_topics.top_topics(None, memory()), {"posts": POSTS}),
    "distinct_count": (distinct_count.distinct_count(None, memory()), {"tweets": TWEETS}),
    "twitter_sentiment": (
        twitter_sentiment.twitter_sentiment(None, memory(), memory()),
        {"tweets": TWEETS},
    ),
    "hashtags": (hashtags.hashtags(None, memory), {"tweets": TWEETS}),
    "traffic": (
        traffic.traffic(None, None, memory(), memory(), memory()),
        {
            "locations": VehiclePositions(seed=5, rate=10, segments=8).rows(0, 600),
            "incidents": Incidents(seed=5, rate=1, segments=8).rows(0, 60),
        },
    ),
}


def audited(topology: ab.Topology) -> ab.Topology:
    """With late rows kept, and a count of rows beside every windowed aggregate; uncombined, so
    that what a node receives can be counted."""
    for op in [o for o in topology._operators if o.kind is Kind.KEYED]:
        topology._replace(replace(op, precombine=False))
        if not isinstance(op.kernel, WindowedAggregate) or f"probe.{op.name}" in topology._sinks:
            continue
        stream = ab.Stream(topology, (op.name,))
        stream.late(f"late.{op.name}").to(f"kept.{op.name}", ab.Memory())
        counting = replace(op, name=f"probed.{op.name}")
        counting = replace(
            counting, kernel=replace(op.kernel, aggregates={"n": Count()}), precombine=False
        )
        topology._add(counting)
        ab.Stream(topology, (counting.name,)).to(f"probe.{op.name}", ab.Memory())
    return topology


def disordered(table: pa.Table) -> pl.DataFrame:
    """Every 37th row comes last."""
    frame = pl.DataFrame(table).with_row_index("n")
    return pl.concat([frame.filter(pl.col("n") % 37 > 0), frame.filter(pl.col("n") % 37 == 0)])


def steps_of(sources: Sources) -> list[Any]:
    steps: list[Any] = [{} for _ in range(SLICES)]
    for name, table in sources.items():
        frame = disordered(table).drop("n")
        for i, step in enumerate(steps):
            start, stop = (frame.height * n // SLICES for n in (i, i + 1))
            step[name] = frame[start:stop]
    steps[4:4] = [Restart(nodes=3)]
    steps[2:2] = [Lose()]
    return steps


def closing(sources: Sources) -> dict[str, pl.DataFrame]:
    later = pl.col("ts") + dt.timedelta(days=1)
    return {n: pl.DataFrame(t.slice(0, 1)).with_columns(later) for n, t in sources.items()}


def add(totals: list[Totals]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for field in fields(Totals):
        found[field.name] = Counter()
        for each in totals:
            found[field.name].update(getattr(each, field.name))
    return found


@pytest.mark.parametrize("name", list(EXAMPLES)[:: 1 if LONG else 2])
def test_it_adds_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology, sources = EXAMPLES[name]
    audited(topology)
    received: Counter[str] = Counter()
    run = LocalCluster.run

    def counted(self: LocalCluster, job: SliceJob | RecoveryJob) -> Ran:
        ran = run(self, job)
        if isinstance(job, SliceJob):
            for report in ran.reports:
                for partition, state in report.partitions.items():
                    received[partition.chain] += state.rows_in
        return ran

    monkeypatch.setattr(LocalCluster, "run", counted)
    job = LocalJob(topology, tmp_path, {n: t.schema for n, t in sources.items()})
    lives, reached = [job.totals], Counter[str]()
    windows: Counter[str] = Counter()

    def do(step: Any) -> None:
        for sink, rows in job.step(step).items():
            reached[sink] += rows.height
            if sink.startswith("probe."):
                windows[sink] += rows["n"].sum()
        if job.totals is not lives[-1]:
            lives.append(job.totals)

    for step in steps_of(sources):
        do(step)
    open_until = add(lives)
    do(closing(sources))
    do(Idle())
    totals = add(lives)
    assert totals["read"] == {n: t.num_rows + 1 for n, t in sources.items()}
    assert sum(totals["late"].values()) > 0
    plan = topology.plan()
    for op in plan.graph.operators:
        check(op, totals, reached)
        if op.name.startswith("probed."):
            counted_rows = windows[f"probe.{op.name.removeprefix('probed.')}"]
            given = sum(open_until["made"][p] for p in op.producers)
            check_windows(op, given - totals["late"][op.name], counted_rows)
            assert totals["late"][op.name] == totals["late"][op.name.removeprefix("probed.")]
    for chain in plan.node_chains:
        sent = {(e.producer, e.target_op, e.port) for e in chain.inputs}
        assert received[chain.name] == sum(totals["made"][p] for p, _, _ in sent), chain.name


def check(op: Operator, totals: dict[str, Counter[str]], reached: Counter[str]) -> None:
    given = sum(totals["made"][p] for p in op.producers)
    made, late, dead = (totals[what][op.name] for what in ("made", "late", "dead"))
    if op.kind is Kind.SOURCE:
        assert totals["read"][op.name] == made + dead, op.name
    elif isinstance(op.kernel, DeadLetters):
        assert totals["to_sinks"][op.name] == reached[op.name] == sum(totals["dead"].values())
    elif op.kind is Kind.SINK:
        assert totals["to_sinks"][op.name] == reached[op.name] == given - dead, op.name
    elif isinstance(op.kernel, LateRows):
        assert made == totals["late"][op.producers[0]], op.name
    elif isinstance(op.kernel, Select | Map) or (
        isinstance(op.kernel, Enrich) and op.kernel.how == "left"
    ):
        assert given == made + dead, op.name
    elif isinstance(op.kernel, Filter | Enrich):
        assert given >= made + dead, op.name
    elif op.kind is Kind.KEYED:
        assert given >= late + dead, op.name


def check_windows(op: Operator, taken: int, counted: int) -> None:
    """Rows that were not late are in a window: in one if they follow each other, else in up to as
    many as overlap."""
    overlap = -(-op.kernel.window.size_us // op.kernel.window.slide_us)
    assert taken <= counted <= taken * overlap, op.name
    if overlap == 1:
        assert counted == taken, op.name


def test_dead_letters_and_late_rows_in_the_summary(tmp_path: Path) -> None:
    def refuse_sevens(frame: pl.DataFrame) -> pl.DataFrame:
        if (frame["v"] == 7).any():
            raise ValueError("seven")
        return frame

    topology = ab.Topology("summed")
    rows = topology.source("rows", None, time="ts", on_error="dead_letter")
    sound = rows.map("sound", refuse_sevens, on_error="dead_letter")
    counts = sound.key_by("v").window(ab.tumbling("10s"), time="ts").aggregate("n", n=ab.count())
    counts.to("out", ab.Memory())
    counts.late("late").to("too_late", ab.Memory())
    topology.dead_letters("dead", ab.Memory())
    schema = pa.schema([("ts", pa.timestamp("us", "UTC")), ("v", pa.int64())])
    job = LocalJob(topology, tmp_path, {"rows": schema})
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    reached: Counter[str] = Counter()
    for number in range(4):
        moments = [100 * number, 3, None, 100 * number + 1]
        values = [7, number, 2, 3]
        step = {
            "rows": [
                {"ts": None if s is None else start + dt.timedelta(seconds=s), "v": v}
                for s, v in zip(moments, values, strict=True)
            ]
        }
        for each in (step, Lose()):
            reached.update({sink: rows.height for sink, rows in job.step(each).items()})
    for op in topology.plan().graph.operators:
        check(op, add([job.totals]), reached)
    meter = Meter()
    meter.observe(job.history.progress)
    meter.totals = job.totals
    text = summarise(meter, 1.0)
    assert "read: rows 16\n" in text
    assert "late: n 2\n" in text
    assert "dead letters: rows 4, sound 4\n" in text
    assert f"to sinks: dead 8, out {reached['out']}, too_late 2\n" in text
