"""An operator is scaled 1 → 2 → 4 → 2 → 1 while the stream runs, side by side.

A counter of words with a small and a large state, 2,000 words a second, a slice a second; a second
query on the same stream is not involved. Structured Streaming has one way: stop the query,
repartition its checkpoint offline, start it again. Both sides are watched through the progress of
Spark's own query: the interruption is how much longer than usual no batch was committed. Our counts
are checked against the raw input at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import anabranch as ab
from anabranch.api.job import inside
from benchmarks import peers, report
from benchmarks.recovery import FILES, Batch, _await
from benchmarks.workloads import SETTINGS, read_files, say, scratch, write_result

NODES = 4
RATE = 2_000  # words per second
KEY_BYTES = 1_000  # of a word: a large state without many millions of keys
LOAD_KEYS = 50_000  # in a file of the first load
TARGETS = (2, 4, 2, 1)
COLUMNS = "word string, bucket long"
SETTLE = 10  # batches in a row that are on schedule, before anything is measured
STEADY_S = 2.5  # the lag of such a batch


@dataclass(frozen=True)
class Sizes:
    """State in keys of about a kilobyte; seconds."""

    states: tuple[tuple[str, int], ...]
    calm_s: float
    after_s: float  # a scaling's effects are looked for this long
    theirs: tuple[int, ...]


FULL = Sizes((("10mb", 10_000), ("1gb", 1_000_000)), 30.0, 12.0, (2, 4))
QUICK = Sizes((("10mb", 10_000), ("1gb", 100_000)), 12.0, 6.0, (2,))


class Feed:
    """First every word once, then RATE random ones every second; remembers when each was there."""

    def __init__(self, directory: Path, keys: int) -> None:
        self._directory, self._keys = directory, keys
        self._dice = np.random.default_rng(1)
        pads = self._dice.integers(97, 123, (97, KEY_BYTES - 9), dtype=np.uint8)
        self._pads = pl.Series([bytes(p).decode() for p in pads])
        self._numbers: list[np.ndarray[Any, Any]] = []
        self.rows = 0
        self._written: list[tuple[int, float]] = []  # rows up to here were there at this time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        directory.mkdir(parents=True)

    def load(self, first: int) -> int:
        """Write the words from this one on that fit in a file; the first that is left."""
        last = min(first + LOAD_KEYS, self._keys)
        self._write(np.arange(first, last))
        return last

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        due = time.time()
        while not self._ended.wait(max(0.0, due - time.time())):
            self._write(self._dice.integers(0, self._keys, RATE))
            due += 1.0

    def _write(self, numbers: np.ndarray[Any, Any]) -> None:
        frame = pl.DataFrame(
            {
                "word": pl.Series(numbers).cast(pl.String).str.zfill(9)
                + self._pads.gather(numbers % 97),
                "bucket": pl.Series(numbers % 1_000, dtype=pl.Int64),
            }
        )
        name = f"{len(self._written):06d}.parquet"
        frame.write_parquet(self._directory / f".{name}", compression="lz4")
        (self._directory / f".{name}").rename(self._directory / name)
        self.rows += len(numbers)
        self._numbers.append(numbers)
        self._written.append((self.rows, time.time()))

    def finish(self) -> np.ndarray[Any, Any]:
        """The number of times every word was written."""
        self._ended.set()
        self._thread.join()
        return np.bincount(np.concatenate(self._numbers), minlength=self._keys)

    def written_at(self, rows: int) -> float:
        return next((at for upto, at in self._written if upto >= rows), time.time())


class Watch:
    """The batches of a query and of those that were started again after it."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._queries: list[Any] = []

    def add(self, query: Any) -> None:
        self._queries.append(query)

    @property
    def rows(self) -> int:
        return sum(p["numInputRows"] for p in self._progress())

    def _progress(self) -> list[dict[str, Any]]:
        return [json.loads(p.json()) for q in self._queries for p in q._jsq.recentProgress()]

    def batches(self) -> list[Batch]:
        found, rows = [], 0
        for progress in self._progress():
            rows += progress["numInputRows"]
            if progress["numInputRows"]:
                stamp = pl.Series([progress["timestamp"]]).str.to_datetime(time_zone="UTC")[0]
                began = stamp.timestamp()
                took = progress["durationMs"]["triggerExecution"] / 1000
                found.append(Batch(began, began + took, self._feed.written_at(rows)))
        return found

    @property
    def steady(self) -> bool:
        newest = self.batches()[-SETTLE:]
        return len(newest) == SETTLE and all(b.lag < STEADY_S for b in newest)

    def has_more_than(self, batches: int) -> bool:
        return len(self.batches()) > batches

    def gap(self, since: float, until: float) -> float:
        """How much longer than usual nothing came out."""
        out = [b.committed for b in self.batches()]
        usual = statistics.median(b - a for a, b in pairwise([t for t in out if t < since][-11:]))
        times = [*[t for t in out if t < since][-1:], *(t for t in out if since <= t <= until)]
        return max([b - a for a, b in pairwise(times)] or [until - since]) - usual


def counters(root: Path) -> ab.Topology:
    topology = ab.Topology("counters")
    words = topology.source("words", lambda s: read_files(s, root / "in", COLUMNS, FILES))
    counted = words.key_by("word").aggregate("counter", n=ab.count(), parallelism=1)
    counted.select("short", pl.col("word").str.slice(0, 9), "n").to("counts", _parquet(root, "out"))
    other = words.key_by("bucket").aggregate("other", n=ab.count(), parallelism=2)
    other.to("others", _parquet(root, "others"))
    return topology


def _parquet(root: Path, name: str) -> ab.Parquet:
    return ab.Parquet(str(root / name))


def load(feed: Feed, watch: Watch, keys: int) -> None:
    """Fill the state, file by file, then begin the stream."""
    first = 0
    while first < keys:
        first = feed.load(first)
        _await(lambda: watch.rows >= feed.rows, 120.0)
    feed.start()
    _await(lambda: watch.steady, 90.0)


@dataclass(frozen=True)
class Scaled:
    """One scaling. Seconds."""

    what: str
    until_done: float  # from the request
    pause: float  # for which no slice ran
    gap: float  # for how much longer than usual nothing came out


def run_ours(
    root: Path, keys: int, sizes: Sizes
) -> tuple[list[Scaled], tuple[float, float], tuple[int, int]]:
    """The scalings; p99 of the slices before and while scaling; wrong counts."""
    feed = Feed(root / "in", keys)
    watch = Watch(feed)
    with ab.EmbeddedCluster(NODES, memory_mb=1536) as cluster:
        spark = cluster.session("rescale", SETTINGS)
        job = counters(root).start(spark, checkpoint=root / "ck")
        watch.add(inside(job).query)
        load(feed, watch, keys)
        _await(lambda: _cut_covers(job, keys), 120.0)
        began = job.last_progress
        time.sleep(sizes.calm_s)
        calm = job.last_progress
        assert began is not None
        assert calm is not None
        scaled = [scale(job, watch, target, sizes.after_s) for target in TARGETS]
        seconds = {p.slice: p.seconds for p in job.recent_progress}
        before = [s for n, s in seconds.items() if began.slice < n <= calm.slice]
        during = [s for n, s in seconds.items() if n > calm.slice]
        expected = feed.finish()
        _await(lambda: watch.rows >= feed.rows)
        job.stop()
        spark.stop()
    return scaled, (_p99(before), _p99(during)), _wrong(root / "out", expected)


def _cut_covers(job: ab.Job, keys: int) -> bool:
    """Has a checkpoint the whole first load?"""
    cut = inside(job).run.controller.cut
    slices = {p.slice: p.state_rows for p in job.recent_progress}
    return cut is not None and slices.get(cut.slice, 0) >= keys


def scale(job: ab.Job, watch: Watch, target: int, after_s: float) -> Scaled:
    asked, before = time.time(), len(job.adjustments)
    job.scale("counter", target)
    _await(lambda: len(job.adjustments) > before, 120.0)
    done = time.time()
    time.sleep(after_s)
    adjustment = job.adjustments[before]
    gap = watch.gap(asked, done + after_s)
    say(f"  {adjustment}; {done - asked:.1f} s after the request, interrupted for {gap:.2f} s")
    return Scaled(f"→ {target}", done - asked, adjustment.seconds, gap)


def run_theirs(root: Path, keys: int, sizes: Sizes) -> list[Scaled]:
    feed = Feed(root / "in", keys)
    watch = Watch(feed)
    with ab.EmbeddedCluster(NODES, memory_mb=1536) as cluster:
        spark = cluster.session("rescale", peers.settings(1))

        def start(partitions: int) -> Any:
            spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
            counted = read_files(spark, root / "in", COLUMNS, FILES).groupBy("word").count()

            def write(batch: Any, number: int) -> None:
                batch.selectExpr("substring(word, 1, 9)", "count").write.parquet(
                    str(root / "out" / str(number)), mode="overwrite"
                )

            writer = counted.writeStream.foreachBatch(write).outputMode("update")
            writer = writer.option("checkpointLocation", str(root / "ck"))
            query = writer.trigger(processingTime="1 second").start()
            watch.add(query)
            return query

        query, now = start(1), 1
        load(feed, watch, keys)
        scaled = []
        for target in sizes.theirs:
            asked = time.time()
            _stop_between_batches(query)
            while not _is_whole(root / "ck"):  # it stopped within a batch after all: once more
                seen = len(watch.batches())
                query = start(now)
                _await(partial(watch.has_more_than, seen + SETTLE), 180.0)
                asked = time.time()
                _stop_between_batches(query)
            spark._streamingCheckpointManager.repartition(str(root / "ck"), target)
            query, now = start(target), target
            seen = len(watch.batches())
            _await(partial(watch.has_more_than, seen), 180.0)
            done = time.time()
            _await(lambda: watch.steady, 60.0)
            gap = watch.gap(asked, time.time())
            say(f"  theirs → {target}: {done - asked:.1f} s, interrupted for {gap:.2f} s")
            scaled.append(Scaled(f"→ {target}", done - asked, done - asked, gap))
        feed.finish()
        query.stop()
        spark.stop()
    return scaled


def _is_whole(checkpoint: Path) -> bool:
    """A checkpoint whose last batch is not committed cannot be repartitioned."""

    def newest(kind: str) -> int:
        return max(int(p.name) for p in (checkpoint / kind).iterdir() if p.name.isdigit())

    return newest("offsets") == newest("commits")


def _stop_between_batches(query: Any) -> None:
    deadline = time.monotonic() + 30.0
    while query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(0.002)
    query.stop()


def _p99(values: list[float]) -> float:
    return float(np.quantile(values, 0.99))


def _wrong(out: Path, expected: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Words whose last count is too small, and too large."""
    frames = [
        pl.read_parquet(f, hive_partitioning=False).with_columns(
            slice=pl.lit(int(f.parent.name.removeprefix("slice=")))
        )
        for f in sorted(out.glob("slice=*/*.parquet"))
    ]
    last = pl.concat(frames).sort("slice").group_by("word").agg(pl.last("n"))
    got = np.zeros_like(expected)
    got[last["word"].cast(pl.Int64).to_numpy()] = last["n"].to_numpy()
    return int(np.sum(got < expected)), int(np.sum(got > expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a large state of 100 MB")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    rows: list[list[object]] = []
    figures: dict[str, float | int] = {}
    p99s, ratios = [], []
    with scratch() as root:
        for name, keys in sizes.states:
            say(f"ours, {keys:,} words of {KEY_BYTES:,} bytes")
            ours, (before, during), wrong = run_ours(root / f"ours-{name}", keys, sizes)
            if wrong != (0, 0):
                raise SystemExit(f"wrong counts: {wrong}")
            say(f"theirs, {keys:,} words")
            theirs = run_theirs(root / f"theirs-{name}", keys, sizes)
            size = f"{keys * KEY_BYTES / 1e6:,.0f} MB"
            for side, scaled in (("ours", ours), ("theirs", theirs)):
                rows += [[size, side, s.what, s.until_done, s.pause, s.gap] for s in scaled]
            worst = max(s.gap for s in ours)
            figures[f"slices_late_{name}"] = max(0, round(worst))
            p99s.append(during / before)
            ratios.append(max(worst, 0.0) / statistics.median(s.gap for s in theirs))
            rows.append([size, "p99 of a slice, calm → scaling", f"{before:.3f} → {during:.3f}"])
            rows[-1] += [""] * 3
    columns = ["state", "side", "scaling", "done after s", "no slice for s", "interrupted s"]
    report.table("An operator is scaled", columns, rows)
    if not quick:
        note = f"{NODES} nodes, {RATE:,} words/s, slices of 1 s."
        write_result("rescale", "An operator is scaled while the stream runs", note, columns, rows)
    figures["uninvolved_p99"] = max(p99s)
    figures["vs_structured_streaming"] = max(ratios)
    report.figures(figures)


if __name__ == "__main__":
    main()
