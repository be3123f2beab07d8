"""Every stateful operator by itself, side by side with the same query in Structured Streaming.

Events of 10,000 Zipf keys in slices of 100,000 and of 1,000,000 rows, ten seconds of event time
each; Parquet files in and out, 2 nodes of one core, 2 partitions; our source log and checkpoints
are on. The peer's queries are native SQL, no Python in them. Every sample is a fresh application
that runs all operators; the rate is that of the batches after the warm-up. Both sides must give
the same rows, or the run ends with a sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
from pyspark.sql import functions as F

import anabranch as ab
from benchmarks import peers, report
from benchmarks.workloads import (
    COMPARED,
    SETTINGS,
    SIDES,
    Run,
    Shape,
    compared,
    read_files,
    remove,
    run_ours,
    say,
    scratch,
    turns,
    write_events,
    write_result,
)

NODES = PARALLELISM = 2
EVENT_SECONDS = 10.0  # of one batch
FILES = 4  # of one batch: every core reads
K = 3
# No two events are exactly this far apart: Spark would join them, we would not.
GAP_US = 2_000_500
Source = Callable[[str, int], Any]  # name, seconds rows may be late → our stream, or the peer's


@dataclass(frozen=True)
class Query:
    """An operator, as a topology and as SQL. `key` tells the rows of an answer apart where newer
    ones replace older ones; a query without a key only appends. `same` names the columns that
    must agree, where not all do."""

    columns: str
    ours: Callable[[Source], ab.Stream]
    theirs: Callable[[Source], Any]
    key: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("events",)


def _keyed(**aggregates: Any) -> Callable[[Source], ab.Stream]:
    return lambda source: source("events", 0).key_by("key").aggregate("operator", **aggregates)


def _grouped(*aggregates: Any) -> Callable[[Source], Any]:
    return lambda source: source("events", 0).groupBy("key").agg(*aggregates)


def _windowed(window: Any, **aggregates: Any) -> Callable[[Source], ab.Stream]:
    def build(source: Source) -> ab.Stream:
        events: ab.Stream = source("events", 0)
        windows = events.key_by("key").window(window, time="ts")
        return windows.aggregate("operator", **aggregates)

    return build


def _in_windows(window: Any, name: str, *aggregates: Any) -> Callable[[Source], Any]:
    def build(source: Source) -> Any:
        counted = source("events", 0).groupBy(window, "key").agg(*aggregates)
        return _bounds(counted, name)

    return build


def _bounds(frame: Any, name: str = "window") -> Any:
    bounds = (F.col(f"{name}.{end}").alias(f"window_{end}") for end in ("start", "end"))
    return frame.select("*", *bounds).drop(name)


def _our_top(k: int) -> Callable[[Source], ab.Stream]:
    return lambda source: source("events", 0).key_by("key").top_k("operator", k, by="value")


def _their_distinct_count(source: Source) -> Any:
    """Spark has no streaming count(DISTINCT); size(collect_set) measured the same or slower."""
    pairs = source("events", 0).dropDuplicates(["key", "item"])
    return pairs.groupBy("key").agg(F.count("*").alias("n"))


def _our_dedup(source: Source) -> ab.Stream:
    events: ab.Stream = source("events", 10)
    return events.key_by("id").deduplicate("operator", within="10s", time="ts")


def _their_dedup(source: Source) -> Any:
    return source("events", 10).dropDuplicatesWithinWatermark(["id"])


def _our_join(source: Source) -> ab.Stream:
    def side(name: str, **aggregates: Any) -> ab.KeyedStream:
        events: ab.Stream = source(name, 0)
        windows = events.key_by("key").window(ab.tumbling("10s"), time="ts")
        return windows.aggregate(f"{name}_windows", **aggregates).key_by("key")

    left, right = side("left", n=ab.count()), side("right", total=ab.sum("value"))
    return left.join_windows("operator", right, left=["n"], right=["total"])


def _their_join(source: Source) -> Any:
    def side(name: str, aggregate: Any) -> Any:
        return source(name, 0).groupBy(F.window("ts", "10 seconds"), "key").agg(aggregate)

    left = side("left", F.count("*").alias("n"))
    right = side("right", F.sum("value").alias("total"))
    return _bounds(left.join(right, ["window", "key"]))


def queries() -> dict[str, Query]:
    """Built where there is a Spark session: its column functions need one."""
    n = F.count("*").alias("n")
    return {
        "count": Query("key string", _keyed(n=ab.count()), _grouped(n), ("key",)),
        "sum": Query(
            "key string, value long",
            _keyed(total=ab.sum("value")),
            _grouped(F.sum("value").alias("total")),
            ("key",),
        ),
        "min_max_mean": Query(
            "key string, value long",
            _keyed(least=ab.min("value"), most=ab.max("value"), mean=ab.mean("value")),
            _grouped(
                F.min("value").alias("least"),
                F.max("value").alias("most"),
                F.avg("value").alias("mean"),
            ),
            ("key",),
        ),
        "distinct_count": Query(
            "key string, item long",
            _keyed(n=ab.count_distinct("item")),
            _their_distinct_count,
            ("key",),
        ),
        "tumbling": Query(
            "ts timestamp, key string",
            _windowed(ab.tumbling("10s"), n=ab.count()),
            _in_windows(F.window("ts", "10 seconds"), "window", n),
        ),
        "hopping": Query(
            "ts timestamp, key string",
            _windowed(ab.hopping("10s", "2s"), n=ab.count()),
            _in_windows(F.window("ts", "10 seconds", "2 seconds"), "window", n),
        ),
        "session": Query(
            "ts timestamp, key string",
            _windowed(ab.session(timedelta(microseconds=GAP_US)), n=ab.count()),
            _in_windows(F.session_window("ts", f"{GAP_US} microseconds"), "session_window", n),
        ),
        "top_1": Query(
            "key string, value long",
            _our_top(1),
            _grouped(F.max("value").alias("value")),
            ("key",),
        ),
        "top_k": Query(
            "key string, value long",
            _our_top(K),
            _grouped(F.max_by("value", "value", K).alias("value")),
            ("key",),
        ),
        "deduplication": Query(
            "ts timestamp, id long, key string, value long",
            _our_dedup,
            _their_dedup,
            same=("id",),  # Spark does not say which of several rows passes
        ),
        "join": Query(
            "ts timestamp, key string, value long",
            _our_join,
            _their_join,
            sources=("left", "right"),
        ),
    }


# The peer's queries in words.
NATIVE = {
    "count": "groupBy, count; update mode",
    "sum": "groupBy, sum; update mode",
    "min_max_mean": "groupBy, min, max, avg; update mode",
    "distinct_count": "dropDuplicates, groupBy, count; update mode",
    "tumbling": "window, groupBy, count; append mode",
    "hopping": "window with a slide, groupBy, count; append mode",
    "session": "session_window, groupBy, count; append mode",
    "top_1": "groupBy, max; update mode",
    "top_k": f"groupBy, max_by with k = {K}; update mode",
    "deduplication": "dropDuplicatesWithinWatermark; append mode",
    "join": "window, groupBy on both sides, stream-stream join; append mode",
}


@dataclass(frozen=True)
class Size:
    """Slices of so many rows."""

    rows: int
    batches: int
    warmup: int

    def shape(self, query: Query) -> Shape:
        """Of one source: several share the rows of a slice."""
        count = len(query.sources)
        return Shape(self.batches, self.rows // count, FILES // count, EVENT_SECONDS)


FULL = {"": Size(100_000, batches=8, warmup=4), "_1m": Size(1_000_000, batches=4, warmup=2)}
QUICK = {"": Size(100_000, batches=4, warmup=2), "_1m": Size(1_000_000, batches=3, warmup=1)}
Samples = dict[tuple[str, str], list[Run]]  # (operator and size, side) → one run per round
Answer = dict[str, int]  # rows, and per column a sum of hashes


def measure(sizes: dict[str, Size], rounds: int) -> tuple[Samples, dict[str, list[Answer]]]:
    samples: Samples = {}
    answers: dict[str, list[Answer]] = {}
    with scratch() as root, ab.EmbeddedCluster(NODES, memory_mb=2048) as cluster:
        for suffix, size in sizes.items():
            say(f"writing the input of {size.rows:,} rows a slice")
            for name in ("events", "left", "right"):
                halves = 1 if name == "events" else 2
                shape = Shape(size.batches, size.rows // halves, FILES // halves, EVENT_SECONDS)
                write_events(root / f"in{suffix}" / name, shape, seed=len(name))
        for number, side in turns(rounds):
            conf = SETTINGS if side == "ours" else peers.settings(PARALLELISM)
            spark = cluster.session(side, conf)
            for suffix, size in sizes.items():
                for name, query in queries().items():
                    source, out = root / f"in{suffix}", root / "run"
                    run = _run(cluster, spark, side, source, query, size, out)
                    answers.setdefault(name + suffix, []).append(answer_of(out / "out", query))
                    remove(out)
                    samples.setdefault((name + suffix, side), []).append(run)
                    rate = size.rows / run.mean
                    say(f"round {number + 1}/{rounds} {name}{suffix} {side}: {rate:,.0f}/s")
            spark.stop()
    return samples, answers


def _run(
    cluster: Any, spark: Any, side: str, directory: Path, query: Query, size: Size, root: Path
) -> Run:
    shape, out, checkpoint = size.shape(query), root / "out", root / "checkpoint"

    def frame(name: str) -> Any:
        return read_files(spark, directory / name, query.columns, shape.files)

    timed = "ts " in query.columns
    if side == "ours":
        topology = ab.Topology("operator", parallelism=PARALLELISM)

        def stream(name: str, late: int) -> ab.Stream:
            time = {"time": "ts", "watermark": f"{late}s"} if timed else {}
            return topology.source(name, lambda _: frame(name), **time)

        query.ours(stream).to("out", ab.Parquet(str(out)))
        return run_ours(cluster, spark, topology, checkpoint, shape, size.warmup)

    def watermarked(name: str, late: int) -> Any:
        return frame(name).withWatermark("ts", f"{late} seconds") if timed else frame(name)

    their = query.theirs(watermarked)
    mode = "update" if query.key else "append"
    return peers.run_peer(cluster, spark, their, out, checkpoint, shape, size.warmup, mode)


def answer_of(out: Path, query: Query) -> Answer:
    """A digest of the rows of a run, in any order; of updates, the newest of each key."""
    frames = []
    for file in sorted(out.rglob("*.parquet")):
        batch = file.parent.name.rpartition("=")[2] if query.key else "0"
        rows = pl.read_parquet(file, hive_partitioning=False).with_columns(batch=int(batch))
        frames.append(rows)
    frame = pl.concat(frames)
    if query.key:
        frame = frame.filter(pl.col("batch") == pl.col("batch").max().over(query.key))
    frame = frame.select(query.same) if query.same else frame.drop("batch", "rank", strict=False)
    lists = [name for name, kind in frame.schema.items() if kind == pl.List]
    frame = frame.explode(lists) if lists else frame
    frame = frame.with_columns(pl.selectors.temporal().cast(pl.Datetime("us", "UTC")))
    hashes = {name: int(frame[name].hash().sum()) for name in sorted(frame.columns)}
    whole = frame.select(sorted(frame.columns)).hash_rows()
    return {"rows": frame.height, **hashes, "whole rows": int(whole.sum())}


def check(answers: dict[str, list[Answer]]) -> None:
    """Every run of an operator must have given the same rows, and some."""
    for name, given in answers.items():
        differ = [what for what in given[0] if len({a.get(what) for a in given}) > 1]
        if differ or not given[0]["rows"]:
            raise SystemExit(
                f"{name}: the answers differ in {', '.join(differ)} ({[a['rows'] for a in given]} "
                "rows); one side is wrong, or the two queries are not the same"
            )


COLUMNS = ["operator", "slice", *COMPARED]


def rows(sizes: dict[str, Size], samples: Samples) -> tuple[list[list[object]], dict[str, float]]:
    table: list[list[object]] = []
    figures: dict[str, float] = {}
    for name in dict.fromkeys(name for name, _ in samples):
        suffix = next(s for s in sorted(sizes, reverse=True) if name.endswith(s))
        size = sizes[suffix]
        mine = {side: samples[name, side] for side in SIDES}
        lines, figures[name] = compared(name.removesuffix(suffix), size.rows, mine)
        table += lines
    return table, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer batches")
    quick = parser.parse_args().quick
    sizes, rounds = (QUICK, 1) if quick else (FULL, 3)
    samples, answers = measure(sizes, rounds)
    table, figures = rows(sizes, samples)
    report.table("Operators beside Structured Streaming", COLUMNS, table)
    check(answers)
    if not quick:
        note = (
            f"2 nodes, 2 partitions, 10,000 Zipf keys; median [least–most] of {rounds} interleaved "
            "applications; both sides gave the same rows. k/s: thousands of rows a second; CPU "
            "seconds of all processes and megabytes shuffled are per million rows."
        )
        peer = ["The queries of Structured Streaming, all native:", ""]
        peer += [f"- {name}: {query}" for name, query in NATIVE.items()]
        title = "Operators beside Structured Streaming"
        write_result("operators", title, note, COLUMNS, table, "\n".join(peer))
    report.figures(figures)


if __name__ == "__main__":
    main()
