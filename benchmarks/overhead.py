"""What safety costs: backups and checkpoints on against off, and against waiting for checkpoints.

Three parts. Throughput and slice time of words counted by second and then in all, with backups and
a checkpoint every two seconds, against neither, in interleaved pairs. What travels and what is kept
when checkpoints, and with them trimming, come every 1 to 5 seconds: requests and reports, and the
packets of the shuffle, both counted as bytes on the wire, and the same of active replication (AR),
which sends every packet to a second node as well. And how much later events come out because of
checkpoints, by size of the state: changes written in the background as we do, or the whole state
waited for as Spark Streaming does (SC). What the waiting alone costs is measured as well, by an SC
that writes only changes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
from examples.word_count import split_words

import anabranch as ab
from anabranch.api.job import inside
from anabranch.control.policies.strategies import STRATEGIES
from anabranch.driver.progress import Progress
from benchmarks import heavy, report
from benchmarks.recovery import FILES, Batch, Writer, _await, batches
from benchmarks.workloads import (
    SENTENCES,
    SETTINGS,
    Shape,
    control_bytes,
    read_files,
    say,
    scratch,
    shuffled_bytes,
    spread,
    write_result,
    write_sentences,
)

NODES = 2
VOCABULARY = 100_000
RATE = 1_000  # events a second, while traffic is counted
LIVE_RATE = 2_000  # … while latencies are measured, after a while
FILE_S = 0.2  # … in a file each
CHECKPOINT_S = 5
WARMUP_S = 2
CHANGES = "SC, changes only"
WAYS = ("ours", "SC", CHANGES)
STRATEGIES[CHANGES] = replace(STRATEGIES["SC"], whole=False)
# Student's t for a two-sided interval of 95 %, by the number of samples.
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    pairs: int
    large: Shape  # for throughput
    small: Shape  # for the time of a slice
    warmup: int
    intervals: tuple[int, ...]  # seconds
    watched_s: float
    states: tuple[int, ...]  # words, a kilobyte each
    rounds: int
    live_s: int  # per round, state and way to checkpoint


FULL = Sizes(
    pairs=5,
    large=Shape(12, 400_000, 2, 10.0),
    small=Shape(60, 2_000, 1, 1.0),
    warmup=4,
    intervals=(1, 2, 3, 4, 5),
    watched_s=20.0,
    states=(200, 20_000, 200_000, 2_000_000),
    rounds=2,
    live_s=55,
)
QUICK = Sizes(
    pairs=2,
    large=Shape(6, 100_000, 2, 10.0),
    small=Shape(24, 2_000, 1, 1.0),
    warmup=3,
    intervals=(1, 5),
    watched_s=12.0,
    states=(200_000,),
    rounds=1,
    live_s=18,
)
ON = {"checkpoint_interval": "2s"}
OFF = {"checkpoint_interval": "10000s", "backups": "sources"}


def two_levels(directory: Path, files: int, out: Path) -> ab.Topology:
    """The output of the first level goes through a shuffle, so it is backed up."""
    topology = ab.Topology("two_levels")
    sentences = topology.source(
        "sentences", lambda spark: read_files(spark, directory, SENTENCES, files), time="ts"
    )
    words = sentences.flat_map("splitter", split_words).key_by("word")
    by_second = words.window(ab.tumbling("1s"), time="ts")
    counted = by_second.aggregate("by_second", n=ab.count(), parallelism=NODES)
    totals = counted.key_by("word").aggregate("total", n=ab.sum("n"), parallelism=NODES + 1)
    totals.to("out", ab.Parquet(str(out)))
    return topology


# -- throughput and slice time -----------------------------------------------------------------


def run_to_end(spark: Any, topology: ab.Topology, root: Path, **options: Any) -> ab.Job:
    job = topology.start(spark, checkpoint=root, available_now=True, **options)
    job.await_termination()
    return job


def word_counts(spark: Any, root: Path, sizes: Sizes) -> dict[str, list[tuple[float, float]]]:
    """Per setting and round: rows per second of large slices, seconds of small ones."""
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for name, options in (("on", ON), ("off", OFF)):  # the first run of a JVM is another thing
        once(spark, root, sizes, root / f"warm-{name}", options)
    for number in range(sizes.pairs):
        for name in ("on", "off") if number % 2 == 0 else ("off", "on"):
            options = ON if name == "on" else OFF
            found[name].append(once(spark, root, sizes, root / f"{number}-{name}", options))
            rate, seconds = found[name][-1]
            say(f"{name}: {rate:,.0f} rows/s, {seconds:.3f} s")
    return found


def once(
    spark: Any, root: Path, sizes: Sizes, where: Path, options: dict[str, str]
) -> tuple[float, float]:
    large = two_levels(root / "large", sizes.large.files, where / "large-out")
    job = run_to_end(spark, large, where / "large", **options)
    steady = job.recent_progress[sizes.warmup : sizes.large.batches]
    rate = sum(p.rows_in for p in steady) / sum(p.seconds for p in steady)
    small = two_levels(root / "small", sizes.small.files, where / "small-out")
    job = run_to_end(spark, small, where / "small", **options)
    took = [p.seconds for p in job.recent_progress if p.rows_in][2 * sizes.warmup :]
    return rate, statistics.fmean(took)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The geometric mean of paired ratios and its interval of 95 %."""
    logs = [math.log(r) for r in ratios]
    mean = statistics.fmean(logs)
    half = T95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


# -- traffic by trimming interval --------------------------------------------------------------

EVENTS = "id long, key long, text string"
TEXT = 156  # with two numbers, an event has 172 bytes, as in paper 000


class PassOn(ab.SliceFunction):
    output = {"key": pl.Int64, "text": pl.String}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        return ab.SliceResult(output=given.rows.select("id", "key", "text"))


class Tally(ab.SliceFunction):
    state = {"n": pl.Int64}  # noqa: RUF012
    output = {"n": pl.Int64}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        counted = given.rows.group_by("key", maintain_order=True).agg(added=pl.len())
        known = counted.join(given.state, on="key", maintain_order="left")
        n = pl.col("n").fill_null(0) + pl.col("added").cast(pl.Int64)
        new = known.select("key", n=n)
        return ab.SliceResult(output=new, state=new)


def events_topology(root: Path) -> ab.Topology:
    """Every event goes through two shuffles as it is."""
    topology = ab.Topology("events")
    events = topology.source("events", lambda s: read_files(s, root / "in", EVENTS, FILES))
    passed = events.key_by("id").process("pass_on", PassOn(), parallelism=NODES)
    counted = passed.key_by("key").process("tally", Tally(), parallelism=NODES)
    counted.to("out", ab.Parquet(str(root / "out")))
    return topology


def write_events(directory: Path, number: int) -> None:
    dice = random.Random(number)
    texts = [dice.randbytes(TEXT // 2).hex() for _ in range(RATE)]
    ids = pl.int_range(number * RATE, (number + 1) * RATE, eager=True)
    frame = pl.DataFrame({"id": ids, "key": ids * 31 % 1_000, "text": texts})
    hidden = directory / f".{number:06d}.parquet"
    frame.write_parquet(hidden)
    hidden.rename(directory / f"{number:06d}.parquet")


@dataclass(frozen=True)
class Traffic:
    """Bytes per second on the wire, and bytes of kept output."""

    control: float
    data: float
    kept: float
    kept_most: float


def traffic(
    spark: Any, root: Path, seconds: int, watched_s: float, strategy: str = "ours"
) -> Traffic:
    """Run live with a checkpoint every so many seconds, and count."""
    (root / "in").mkdir(parents=True)
    writer = Writer(lambda number: write_events(root / "in", number))
    job = events_topology(root).start(
        spark, checkpoint=root / "ck", checkpoint_interval=f"{seconds}s", strategy=strategy
    )
    # Until trimming has come to its usual depth:
    _await(lambda: len(job.recent_progress) >= 3 * seconds and _is_copied(job, strategy), 120.0)
    began, control, data = time.monotonic(), *_sent(spark, job)
    first = len(job.recent_progress)
    time.sleep(watched_s)
    took, after = time.monotonic() - began, _sent(spark, job)
    kept = [float(p.backup_bytes) for p in job.recent_progress[first:]]
    writer.finish()
    job.stop()
    return Traffic(
        (after[0] - control) / took, (after[1] - data) / took, statistics.fmean(kept), max(kept)
    )


def _is_copied(job: ab.Job, strategy: str) -> bool:
    """Has every partition its copy, where it shall have one?"""
    placement = inside(job).run.controller.placement
    return strategy != "AR" or (
        placement is not None and set(placement.copies) == set(placement.owners)
    )


def _sent(spark: Any, job: ab.Job) -> tuple[int, int]:
    return control_bytes(job), shuffled_bytes(spark)


# -- delay by checkpoints ----------------------------------------------------------------------


def added_latency(spark: Any, root: Path, words: int, sizes: Sizes) -> dict[str, list[float]]:
    """Per way to checkpoint and round: seconds by which checkpoints make the mean event later.

    As in figure 10b of paper 000: the state is filled first, then 2,000 events come every second,
    with a checkpoint every five. Rounds go through the ways forth and back.
    """
    heavy.fill(root / "in", words)
    run_to_end(spark, heavy.topology(root, 0.0, 1), root / "ck", checkpoint_interval="10000s")
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    times: dict[int, float] = {}  # of all files
    added_live(spark, root, words, "ours", sizes.live_s // 2, times)  # memory and code get warm
    for number in range(sizes.rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            found[way].append(added_live(spark, root, words, way, sizes.live_s, times))
            say(f"{words:,} KB, {way}: {found[way][-1]:.3f} s")
    return found


def added_live(
    spark: Any, root: Path, words: int, way: str, seconds: int, times: dict[int, float]
) -> float:
    """Write files steadily, after those of `times`, and look when they are out."""
    first = len(times)
    job = heavy.topology(root, 0.0).start(
        spark,
        checkpoint=root / "ck",
        slice="100ms",  # one after the other
        checkpoint_interval=f"{CHECKPOINT_S}s",
        strategy=way,
    )

    def write(number: int) -> None:
        rows = heavy.marked(first + number, int(LIVE_RATE * FILE_S), words)
        heavy.write(root / "in", f"{first + number:06d}", rows, costs=False)

    writer = Writer(write, FILE_S)
    time.sleep(seconds)
    writer.finish()
    times |= enumerate(writer.times, first)

    def out() -> list[Batch]:
        return batches(inside(job).query, times, root / "ck" / "spark" / "sources" / "0")

    _await(lambda: any(b.newest_file == len(times) - 1 for b in out()), 120.0)
    found = out()
    job.stop()
    return added_by_checkpoints(found, job.recent_progress, times)


def added_by_checkpoints(
    out: list[Batch], progress: Sequence[Progress], times: dict[int, float]
) -> float:
    """The mean time until an event is out, above that of events no checkpoint can have held up.

    Free are slices outside of checkpoints. Those are from the slice that seals until after the
    first that knows of the files, which has what came meanwhile.
    """
    slices = [p for p in progress if p.processing_ms >= progress[0].processing_ms + 1000 * WARMUP_S]
    known = {p.checkpoint_slice: p.slice for p in reversed(slices)}  # the first that knows
    known.pop(slices[0].checkpoint_slice)  # from before
    held = {n for sealed, end in known.items() for n in range(sealed, end + 2)}
    slice_of = {p.batch: p.slice for p in slices}
    free, all_ = [], []
    for before, batch in pairwise(out):
        if batch.number in slice_of:
            files = range(before.newest_file + 1, batch.newest_file + 1)
            latencies = [batch.committed - times[n] for n in files]
            all_ += latencies
            free += latencies if slice_of[batch.number] not in held else []
    return statistics.fmean(all_) - statistics.fmean(free)


# -- the whole ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 pairs, 2 intervals, smaller state")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    added: dict[int, dict[str, list[float]]] = {}
    sent: dict[int, Traffic] = {}
    with scratch() as root, ab.EmbeddedCluster(NODES, memory_mb=2048) as cluster:
        write_sentences(root / "large", sizes.large, VOCABULARY)
        write_sentences(root / "small", sizes.small, VOCABULARY)
        spark = cluster.session("overhead", SETTINGS)
        pairs = word_counts(spark, root, sizes)
        for seconds in sizes.intervals:
            sent[seconds] = traffic(spark, root / f"trim-{seconds}", seconds, sizes.watched_s)
            say(f"a checkpoint every {seconds} s: {sent[seconds]}")
        copied = traffic(spark, root / "copied", max(sizes.intervals), sizes.watched_s, "AR")
        say(f"active replication: {copied}")
        for words in sizes.states:
            added[words] = added_latency(spark, root / f"words-{words}", words, sizes)
        spark.stop()
    _report(pairs, sent, copied, added, quick)


def _report(
    pairs: dict[str, list[tuple[float, float]]],
    sent: dict[int, Traffic],
    copied: Traffic,
    added: dict[int, dict[str, list[float]]],
    quick: bool,
) -> None:
    both = list(zip(pairs["on"], pairs["off"], strict=True))
    ratio, low, high = interval([on[0] / off[0] for on, off in both])
    slower = interval([on[1] / off[1] for on, off in both])
    control = statistics.median(t.control / t.data for t in sent.values())
    columns = ["what", "value", "of"]
    rows: list[list[object]] = [
        ["throughput, on ÷ off", ratio, f"95 %: {low:.3f} to {high:.3f}"],
        ["slice time, on ÷ off", slower[0], f"95 %: {slower[1]:.3f} to {slower[2]:.3f}"],
        ["slice time on, s", statistics.median(p[1] for p in pairs["on"]), spread_of(pairs["on"])],
    ]
    for seconds, t in sent.items():
        rows += [
            [f"control bytes/s, trimming every {seconds} s", t.control, f"data {t.data:,.0f}/s"],
            [
                f"kept output, trimming every {seconds} s",
                t.kept,
                f"≤ {t.kept_most:,.0f}",
            ],
        ]
    alone = sent[max(sent)].data
    rows.append(["data bytes/s of active replication", copied.data, f"ours {alone:,.0f}/s"])
    for words, found in added.items():
        of = "; ".join(f"{way} {spread([1000 * s for s in found[way]])}" for way in WAYS)
        ours, theirs = (statistics.fmean(found[way]) for way in ("ours", "SC"))
        what = f"latency added by checkpoints, {megabytes(words):,.1f} MB, ms"
        rows.append([what, 1000 * ours, of])
    report.table("What safety costs", columns, rows)
    figures = {
        "throughput_on_off": ratio,
        "throughput_on_off_high": high,
        "checkpoint_delay_vs_sync": ours / theirs,  # of the largest state
        "control_bytes_per_data_byte": control,
    }
    if not quick:
        note = (
            f"{NODES} nodes; {len(both)} interleaved pairs of applications; {RATE:,} events/s "
            f"while traffic is counted. What active replication sends in addition is "
            f"{(copied.data - alone) / sent[max(sent)].control:,.0f} times our control bytes.\n\n"
            "Latency is the mean over all events, above that of events outside of checkpoints in "
            "the same run; a checkpoint of 2 GB takes SC longer than the five seconds between two, "
            "so its events queue up. Below a few milliseconds is noise, negative values are."
        )
        _plot(sent, added, report.RESULTS / "overhead.svg")
        picture = "![latency by size of the state, and what trimming leaves](overhead.svg)"
        rest = f"`{json.dumps(figures)}`"
        write_result("overhead", "What safety costs", note, columns, rows, picture, rest)
    report.figures(figures)


def _plot(sent: dict[int, Traffic], added: dict[int, dict[str, list[float]]], path: Path) -> None:
    """Figures 10b and 11 of paper 000."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, (delay, kept) = plt.subplots(1, 2, figsize=(9, 3.2))
    for way in WAYS:
        seconds = [statistics.fmean(found[way]) for found in added.values()]
        delay.plot([megabytes(w) for w in added], seconds, marker="o", label=way)
    delay.set(xscale="log", xlabel="state, MB", ylabel="added latency, s")
    delay.set_yscale("symlog", linthresh=0.01)
    delay.legend(frameon=False)
    kept.plot([*sent], [t.kept_most / 1e6 for t in sent.values()], marker="o")
    kept.set(xlabel="seconds between checkpoints", ylabel="kept output at most, MB", ylim=0)
    for axis in (delay, kept):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def megabytes(words: int) -> float:
    return words * heavy.NOTE_BYTES / 1e6


def spread_of(found: list[tuple[float, float]]) -> str:
    return spread([seconds for _, seconds in found])


if __name__ == "__main__":
    main()
