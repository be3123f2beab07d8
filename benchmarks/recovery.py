"""A node is killed under load: how long until the stream is on schedule again, side by side.

The windowed word count (G3) on 3 nodes, a slice a second, a file of sentences every second; the
executor that holds a part of the counter gets SIGKILL. Both sides are watched in the same way,
through the progress of Spark's own query: a batch is out when it is committed, and on schedule when
its newest rows were written as shortly before as in the batches before the kill. Structured
Streaming runs once with Spark's default locality wait and once with none; its better one counts.
Our output is counted again from the raw files.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

import anabranch as ab
from benchmarks import peers, report
from benchmarks.kills import check_words, words_topology
from benchmarks.workloads import SETTINGS, START, Shape, say, scratch, spread, write_result

NODES = 3
WORDS = 8
VOCABULARY = 5_000
FILES = 1_000_000  # per batch: all there are
AFTER_S = 15.0  # a kill's effects are looked for this long
BETWEEN_S = 20.0  # two kills; a new executor joins in about five
SETTLE = 12  # batches, until a fresh application is warm
SIDES = ("ours", "theirs", "theirs, no locality wait")


@dataclass(frozen=True)
class Batch:
    """Written by the source's clock, committed by the query's; seconds since the epoch."""

    began: float
    committed: float
    newest_row: float

    @property
    def lag(self) -> float:
        return self.committed - self.newest_row


@dataclass(frozen=True)
class Outcome:
    """What one kill did. Seconds after the kill, and slices."""

    first_output: float
    on_schedule: float
    worst_slice: float
    slices_late: int


class Writer:
    """A file of `rows` sentences at every full second; remembers when each was there."""

    def __init__(self, directory: Path, rows: int) -> None:
        self._directory, self._rows = directory, rows
        self.times: list[float] = []
        self.frames: list[pl.DataFrame] = []
        self._ended = threading.Event()
        directory.mkdir(parents=True)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        due = time.time()
        while not self._ended.wait(max(0.0, due - time.time())):
            self._write()
            due += 1.0

    def _write(self) -> None:
        number = len(self.times)
        dice = random.Random(number)
        start = int(START.timestamp() * 1e6) + number * 1_000_000
        ts = pl.int_range(start, start + 1_000_000, 1_000_000 // self._rows, eager=True)
        words = [f"w{min(int(dice.paretovariate(0.7)), VOCABULARY)}" for _ in range(WORDS * 50)]
        sentences = [" ".join(dice.sample(words, WORDS)) for _ in range(self._rows)]
        frame = pl.DataFrame(
            {"ts": ts[: self._rows].cast(pl.Datetime("us", "UTC")), "sentence": sentences}
        )
        hidden = self._directory / f".{number:06d}.parquet"
        frame.write_parquet(hidden)
        hidden.rename(self._directory / f"{number:06d}.parquet")
        self.times.append(time.time())
        self.frames.append(frame)

    def finish(self) -> pl.DataFrame:
        self._ended.set()
        self._thread.join()
        return pl.concat(self.frames)

    def written_at(self, rows: int) -> float:
        """When the last of the first `rows` rows was there."""
        return self.times[max(0, rows // self._rows - 1)]


def batches(query: Any, writer: Writer) -> list[Batch]:
    """All batches with rows, from the query's progress."""
    found, rows = [], 0
    for text in query._jsq.recentProgress():
        progress = json.loads(text.json())
        if not progress["numInputRows"]:
            continue
        rows += progress["numInputRows"]
        began = pl.Series([progress["timestamp"]]).str.to_datetime(time_zone="UTC")[0].timestamp()
        took = progress["durationMs"]["triggerExecution"] / 1000
        found.append(Batch(began, began + took, writer.written_at(rows)))
    return found


def outcome(found: list[Batch], killed: float, until: float) -> Outcome:
    """Compare the batches after a kill with the ten before it."""
    before = [b for b in found if b.committed < killed][-10:]
    after = [b for b in found if killed <= b.committed <= until]
    usual = max(b.lag for b in before)
    late = [b for b in after if b.lag > usual + 0.5]
    end = max((b.committed for b in late), default=killed)
    back = min((b.committed for b in after if b.committed > end), default=until)
    worst = max((b.committed - b.began for b in after), default=until - killed)
    extra = max((b.lag - usual for b in after), default=until - killed)
    first = min((b.committed for b in after), default=until)
    return Outcome(first - killed, back - killed, worst, max(0, round(extra)))


def run_side(
    side: str, rate: int, kills: int, root: Path, interval: str
) -> tuple[list[Outcome], tuple[int, int]]:
    """One application with several kills; for ours also what was lost and duplicated."""
    writer = Writer(root / "in", rate)
    settings = SETTINGS if side == "ours" else peers.settings(NODES)
    if side.endswith("wait"):
        settings = {**settings, "spark.locality.wait": "0", "spark.locality.wait.process": "0"}
    with ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("recovery", settings)
        job: ab.Job | None = None
        if side == "ours":
            job = words_topology(root).start(
                spark, checkpoint=root / "ck", checkpoint_interval=interval
            )
            query = job._driver._query
        else:
            frame = peers.word_count(spark, root / "in", Shape(0, 0, FILES, 0.0))
            query = (
                frame.writeStream.format("parquet")
                .option("path", str(root / "out"))
                .option("checkpointLocation", str(root / "ck"))
                .trigger(processingTime="1 second")
                .start()
            )
        _await(lambda: len(batches(query, writer)) >= SETTLE, 180.0)
        moments = []
        for number in range(kills):
            time.sleep(BETWEEN_S - AFTER_S if number else 0.0)
            cluster.kill(_victim(cluster, job, number), signal.SIGKILL)
            moments.append(time.time())
            time.sleep(AFTER_S)
        raw = writer.finish()
        _await(lambda: _rows(query) >= raw.height)
        found = batches(query, writer)
        job.stop() if job is not None else query.stop()
        spark.stop()
    outcomes = [outcome(found, t, t + AFTER_S) for t in moments]
    if job is None:
        return outcomes, (0, 0)
    expected, got = check_words(root, raw)
    return outcomes, ((expected - got).total(), (got - expected).total())


def _victim(cluster: Any, job: ab.Job | None, number: int) -> int:
    executors = cluster.executors()
    if job is not None:
        mapping = job._driver.controller.mapping
        assert mapping is not None
        counters = [o.node for p, o in mapping.owners.items() if p.chain == "counter"]
        return int(executors[counters[number % len(counters)]][0])
    return int(list(executors.values())[number % len(executors)][0])


def _rows(query: Any) -> int:
    return sum(json.loads(p.json())["numInputRows"] for p in query._jsq.recentProgress())


def _await(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 kills a side at one rate")
    quick = parser.parse_args().quick
    rates, kills = ((1_000,), 2) if quick else ((500, 1_000, 2_000), 4)
    samples: dict[tuple[int, str], list[Outcome]] = {}
    lost = duplicated = 0
    with scratch() as root:
        for rate in rates:
            for side in SIDES:
                say(f"{side} at {rate:,} sentences/s")
                where = root / f"{rate}-{SIDES.index(side)}"
                samples[rate, side], wrong = run_side(side, rate, kills, where, "5s")
                lost, duplicated = lost + wrong[0], duplicated + wrong[1]
                for o in samples[rate, side]:
                    say(f"  first {o.first_output:.2f} s, on schedule {o.on_schedule:.2f} s")
        by_interval = {} if quick else _intervals(root)
    _report(samples, by_interval, lost, duplicated, quick)


def _intervals(root: Path) -> dict[str, list[Outcome]]:
    found = {}
    for interval in ("1s", "10s", "30s"):
        say(f"ours, a checkpoint every {interval}")
        where = root / f"interval-{interval}"
        found[interval], _ = run_side("ours", 1_000, 2, where, interval)
    return found


def _report(
    samples: dict[tuple[int, str], list[Outcome]],
    by_interval: dict[str, list[Outcome]],
    lost: int,
    duplicated: int,
    quick: bool,
) -> None:
    columns = ["rate", "side", "kills", "first output s", "on schedule s", "worst slice s", "late"]

    def row(rate: str, side: str, os_: list[Outcome]) -> list[object]:
        return [
            rate,
            side,
            len(os_),
            spread([o.first_output for o in os_]),
            spread([o.on_schedule for o in os_]),
            spread([o.worst_slice for o in os_]),
            statistics.median(o.slices_late for o in os_),
        ]

    rows = [row(f"{rate:,}", side, found) for (rate, side), found in samples.items()]
    rows += [row(f"checkpoint {i}", "ours", found) for i, found in by_interval.items()]
    report.table("A killed node", columns, rows)
    if not quick:
        note = "3 nodes, slices of 1 s, a checkpoint every 5 s; median [least–most] over the kills."
        write_result("recovery", "A killed node", note, columns, rows)
    side = {s: [o for (_, x), found in samples.items() if x == s for o in found] for s in SIDES}
    median = {s: statistics.median(o.on_schedule for o in found) for s, found in side.items()}
    theirs = min(median[s] for s in SIDES[1:])
    ours = side["ours"]
    report.figures(
        {
            "vs_structured_streaming": median["ours"] / theirs,
            "seconds_median": median["ours"],
            "first_output_median": statistics.median(o.first_output for o in ours),
            "worst_slice_s": max(o.worst_slice for o in ours),
            "slices_late_median": statistics.median(o.slices_late for o in ours),
            "lost": lost,
            "duplicated": duplicated,
        }
    )


if __name__ == "__main__":
    main()
