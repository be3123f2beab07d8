"""What the data-plane benchmarks run: seeded inputs, our topologies, and how a run is watched.

Inputs are Parquet files written before anything is measured; the same files feed both sides. A
batch is what Spark's own streaming query calls one, on both sides, and takes what that query's
progress calls `triggerExecution`: everything from the trigger to the committed batch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from examples.word_count import word_count

import anabranch as ab
from anabranch.api.job import inside
from anabranch.spark import watchdog
from anabranch.spark.cluster import SparkCluster
from benchmarks import report

WORDS = 8  # in a sentence
START = datetime(2026, 1, 1, tzinfo=UTC)
SENTENCES = "ts timestamp, sentence string"
LOCATIONS = "ts timestamp, vehicle long, seg long, speed double"
INCIDENTS = "ts timestamp, seg long, kind string"
SEGMENTS = 200
KEYS, ITEMS = 10_000, 100  # of events
REPEATED, REPEATED_WITHIN = 0.2, 1000  # share of events that come twice, and rows in between
SIDES = ("ours", "theirs")
WATCH_PAUSE_S = 0.05
# Enough of Spark's progress reports for every batch of a run.
SETTINGS = {
    "spark.sql.streaming.numRecentProgressUpdates": "2000",
    "spark.sql.session.timeZone": "UTC",
}


# -- inputs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """`batches` of `rows` rows in `files` files each, every one `seconds` of event time long."""

    batches: int
    rows: int
    files: int
    seconds: float


def _times(shape: Shape, batch: int, rows: int) -> pl.Series:
    start = START + timedelta(seconds=batch * shape.seconds)
    offsets = np.linspace(0, shape.seconds * 1e6, rows, endpoint=False).astype(np.int64)
    return pl.Series("ts", offsets + int(start.timestamp() * 1e6)).cast(pl.Datetime("us", "UTC"))


def _write(frame: pl.DataFrame, directory: Path, batch: int, files: int) -> None:
    """Split a batch over files; Spark takes files by age, so each is a second younger."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(frame.iter_slices(-(-frame.height // files))):
        number = batch * files + i
        path = directory / f"{number:06d}.parquet"
        part.write_parquet(path, compression="zstd")
        os.utime(path, (time.time(), START.timestamp() + number))


def _zipf(rng: np.random.Generator, count: int, of: int) -> npt.NDArray[np.uint32]:
    """Ranks of Zipf draws (exponent 1)."""
    cumulative = np.cumsum(1 / np.arange(1, of + 1))
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return np.asarray(ranks, dtype=np.uint32)


def write_sentences(directory: Path, shape: Shape, vocabulary: int, seed: int = 1) -> Path:
    """Sentences of Zipf words (exponent 1), in the order of their event time."""
    rng = np.random.default_rng(seed)
    words = pl.Series([f"w{i}" for i in range(vocabulary)])
    for batch in range(shape.batches):
        ranks = _zipf(rng, shape.rows * WORDS, vocabulary)
        columns = [words.gather(ranks[i::WORDS]).alias(f"c{i}") for i in range(WORDS)]
        sentence = pl.DataFrame(columns).select(sentence=pl.concat_str(pl.all(), separator=" "))
        frame = sentence.select(_times(shape, batch, shape.rows), "sentence")
        _write(frame, directory, batch, shape.files)
    return directory


def write_traffic(directory: Path, shape: Shape, seed: int = 1) -> Path:
    """Locations, and one incident to every nine of them, on the same roads."""
    rng = np.random.default_rng(seed)
    for batch in range(shape.batches):
        incidents = shape.rows // 10
        n = shape.rows - incidents
        locations = pl.DataFrame(
            [
                _times(shape, batch, n),
                pl.Series("vehicle", rng.integers(0, 10_000, n)),
                pl.Series("seg", rng.integers(0, SEGMENTS, n)),
                pl.Series("speed", rng.normal(80, 20, n)),
            ]
        )
        reported = pl.DataFrame(
            [
                _times(shape, batch, incidents),
                pl.Series("seg", rng.integers(0, SEGMENTS, incidents)),
                pl.Series("kind", rng.choice(["crash", "jam", "works"], incidents)),
            ]
        )
        _write(locations, directory / "locations", batch, shape.files)
        _write(reported, directory / "incidents", batch, shape.files)
    return directory


def write_events(directory: Path, shape: Shape, seed: int = 1) -> Path:
    """Events of Zipf keys in the order of their time; some have the id of one shortly before.

    Times are whole milliseconds, as Spark's watermark is.
    """
    rng = np.random.default_rng(seed)
    keys = pl.Series([f"key-{i}" for i in range(KEYS)])
    for batch in range(shape.batches):
        number = np.arange(batch * shape.rows, (batch + 1) * shape.rows)
        back = rng.integers(1, REPEATED_WITHIN, shape.rows)
        repeats = (rng.random(shape.rows) < REPEATED) & (number >= back)
        frame = pl.DataFrame(
            [
                _times(shape, batch, shape.rows).dt.truncate("1ms"),
                keys.gather(_zipf(rng, shape.rows, KEYS)).alias("key"),
                pl.Series("item", rng.integers(0, ITEMS, shape.rows)),
                pl.Series("value", rng.integers(0, 1 << 31, shape.rows)),
                pl.Series("id", np.where(repeats, number - back, number)),
            ]
        )
        _write(frame, directory, batch, shape.files)
    return directory


def write_keys(
    directory: Path, keys: int, load_rows: int, rows: int, batches: int, seed: int = 1
) -> Path:
    """Every key once, in large batches, then small batches of random ones."""
    rng = np.random.default_rng(seed)
    loads = [np.arange(k, min(k + load_rows, keys)) for k in range(0, keys, load_rows)]
    draws = [rng.integers(0, keys, rows) for _ in range(batches)]
    for batch, key in enumerate(loads + draws):
        _write(pl.DataFrame({"key": key}), directory, batch, files=1)
    return directory


def read_files(spark: Any, directory: Path, columns: str, files: int) -> Any:
    """A stream that takes `files` files per batch."""
    reader = spark.readStream.schema(columns).option("maxFilesPerTrigger", files)
    return reader.parquet(str(directory))


# -- our side ----------------------------------------------------------------------------------


def our_word_count(directory: Path, shape: Shape, out: Path, parallelism: int) -> ab.Topology:
    """G3, as in examples/word_count.py."""
    return word_count(
        lambda spark: read_files(spark, directory, SENTENCES, shape.files),
        ab.Parquet(str(out)),
        parallelism,
    )


def our_traffic(directory: Path, shape: Shape, out: Path) -> ab.Topology:
    """examples/traffic.py with its joined output alone: the peer needs a query per output."""

    def read(name: str, columns: str) -> Any:
        return lambda spark: read_files(spark, directory / name, columns, shape.files)

    topology = ab.Topology("traffic")
    window = ab.hopping("10s", "1s")
    speed = (
        topology.source("locations", read("locations", LOCATIONS), time="ts")
        .filter("moving", pl.col("speed") >= 0)
        .key_by("seg")
        .window(window, time="ts")
        .aggregate("avg_speed", speed=ab.mean("speed"), parallelism=4)
    )
    incident = (
        topology.source("incidents", read("incidents", INCIDENTS), time="ts")
        .filter("known_segment", pl.col("seg").is_not_null())
        .key_by("seg")
        .window(window, time="ts")
        .aggregate("incident_count", incidents=ab.count(), parallelism=2)
    )
    joined = speed.key_by("seg").join_windows(
        "join", incident.key_by("seg"), left=["speed"], right=["incidents"], parallelism=2
    )
    joined.to("joined", ab.Parquet(str(out)))
    return topology


# -- watching a run ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The steady batches of one run: seconds of each; CPU and shuffled bytes per batch."""

    seconds: tuple[float, ...]
    cpu_s: float
    shuffled_bytes: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)


def run_ours(
    cluster: Any, spark: Any, topology: ab.Topology, root: Path, shape: Shape, warmup: int
) -> Run:
    """Start the topology on all that is there, and watch Spark's query under it."""
    job = topology.start(spark, checkpoint=root, available_now=True)
    run = watch(cluster, spark, inside(job).query, shape, warmup)
    job.await_termination()
    return run


def watch(cluster: Any, spark: Any, query: Any, shape: Shape, warmup: int) -> Run:
    """Wait for the end of a query; what its batches took after the first `warmup`."""
    marks: dict[int, tuple[float, int]] = {}
    while True:
        active = query.isActive
        last = query._jsq.lastProgress()
        batch = -1 if last is None else last.batchId()
        if batch >= warmup - 1 and batch not in marks and batch < shape.batches:
            marks[batch] = cpu_seconds(cluster), shuffled_bytes(spark)
        if not active:
            break
        time.sleep(WATCH_PAUSE_S)
    if query.exception() is not None:
        raise query.exception()
    progress = [json.loads(p.json()) for p in query._jsq.recentProgress()]
    seconds = {p["batchId"]: p["durationMs"]["triggerExecution"] / 1000 for p in progress}
    steady = range(warmup, shape.batches)
    first, end = min(marks), max(marks)
    cpu, shuffled = (b - a for a, b in zip(marks[first], marks[end], strict=True))
    span = max(1, end - first)
    return Run(tuple(seconds[b] for b in steady), cpu / span, shuffled / span)


def cpu_seconds(cluster: Any) -> float:
    """CPU time of every process of the cluster, of those they waited for, and of this one."""
    total = time.process_time()
    for pid in watchdog.members(str(cluster.directory)):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def control_bytes(job: ab.Job) -> int:
    """Of requests and reports, since the job started."""
    cluster = inside(job).run.cluster
    assert isinstance(cluster, SparkCluster)
    return cluster.control_bytes


def shuffled_bytes(spark: Any) -> int:
    """Bytes written to Spark's shuffle since the session began."""
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    return sum(listed.apply(i).totalShuffleWrite() for i in range(listed.size()))


def turns(rounds: int) -> Iterator[tuple[int, str]]:
    """Who runs when: both sides in every round, and neither always first."""
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            yield number, side


# -- printing ----------------------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for inputs, outputs and checkpoints, gone at the end."""
    with TemporaryDirectory(prefix="anabranch-benchmark-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def remove(directory: Path) -> None:
    """The peer still tidies its state for a moment when its query has stopped."""
    for _ in range(50):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)
    raise SystemExit(f"{directory} cannot be removed")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def spread(values: list[float]) -> str:
    """Median, and the range of the samples."""
    return f"{statistics.median(values):.3g} [{min(values):.3g}–{max(values):.3g}]"


# Thousands of rows; seconds; per million rows: CPU seconds and megabytes shuffled.
COMPARED = ["side", "k/s", "s/batch", "CPU s/M", "MB/M", "ratio"]


def compared(
    name: str, rows: int, samples: Mapping[str, Sequence[Run]]
) -> tuple[list[list[object]], float]:
    """A line per side (name, batch, then COMPARED), and the ratio of their rates."""
    rates = {side: [rows / 1e3 / r.mean for r in runs] for side, runs in samples.items()}
    ratio = statistics.median(rates["ours"]) / statistics.median(rates["theirs"])
    lines: list[list[object]] = [
        [
            name,
            f"{rows // 1000:,} k",
            side,
            spread(rates[side]),
            spread([r.median for r in runs]),
            statistics.median(1e6 / rows * r.cpu_s for r in runs),
            statistics.median(r.shuffled_bytes / rows for r in runs),
            ratio if side == "ours" else "",
        ]
        for side, runs in samples.items()
    ]
    return lines, ratio


def write_result(
    name: str, title: str, note: str, columns: list[str], rows: Any, *rest: str, how: str = ""
) -> None:
    """docs/results/NAME.md: when, where, how if not by its own benchmark, and the table."""

    def line(cells: Any) -> str:
        return (
            "| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )

    command = f"python -m benchmarks.{how or name}"
    head = f"{time.strftime('%Y-%m-%d')}, {report.machine()}, `{command}`. {note}"
    table = [line(columns), line(["---"] * len(columns)), *map(line, rows)]
    text = [f"# {title}", "", head, "", *table, "", *(part + "\n" for part in rest)]
    report.RESULTS.mkdir(parents=True, exist_ok=True)
    (report.RESULTS / f"{name}.md").write_text("\n".join(text).rstrip() + "\n")
