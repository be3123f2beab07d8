"""What safety costs: backups and checkpoints on against off, and against waiting for checkpoints.

Throughput and slice time of the windowed word count (G3) with backups and a checkpoint every two
seconds, against neither, in interleaved pairs; bytes of requests and reports per byte of packets;
and the time that a slice which seals a checkpoint takes longer than its neighbours, written in the
background as we do and waited for as a synchronous system does (SC), by size of the state.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

import anabranch as ab
from benchmarks import report
from benchmarks.workloads import (
    SETTINGS,
    Shape,
    our_word_count,
    read_files,
    say,
    scratch,
    spread,
    write_keys,
    write_result,
    write_sentences,
)

NODES = 2
VOCABULARY = 10_000
ROW_BYTES = 40  # of state, about, of one key of the counter
LOAD_ROWS = 500_000


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    pairs: int
    large: Shape  # for throughput
    small: Shape  # for the time of a slice
    warmup: int
    states: tuple[int, ...]  # keys


FULL = Sizes(
    pairs=5,
    large=Shape(10, 400_000, 2, 10.0),
    small=Shape(60, 2_000, 1, 1.0),
    warmup=4,
    states=(5_000, 500_000, 5_000_000),
)
QUICK = Sizes(
    pairs=2,
    large=Shape(6, 200_000, 2, 10.0),
    small=Shape(24, 2_000, 1, 1.0),
    warmup=3,
    states=(5_000, 500_000),
)
ON = {"checkpoint_interval": "2s"}
OFF = {"checkpoint_interval": "10000s", "backups": "sources"}


def slices(spark: Any, topology: ab.Topology, root: Path, options: dict[str, Any]) -> ab.Job:
    job = topology.start(spark, checkpoint=root, available_now=True, **options)
    job.await_termination()
    return job


def word_counts(spark: Any, root: Path, sizes: Sizes) -> dict[str, list[tuple[float, float]]]:
    """Per setting and round: rows per second of large slices, seconds of small ones."""
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for number in range(sizes.pairs):
        for name in ("on", "off") if number % 2 == 0 else ("off", "on"):
            options = ON if name == "on" else OFF
            where = root / f"{number}-{name}"
            large = _word_count(spark, root / "large", where / "l", sizes.large, options)
            steady = large.recent_progress[sizes.warmup : sizes.large.batches]
            rate = sum(p.rows_in for p in steady) / sum(p.seconds for p in steady)
            small = _word_count(spark, root / "small", where / "s", sizes.small, options)
            took = [p.seconds for p in small.recent_progress if p.rows_in][2 * sizes.warmup :]
            found[name].append((rate, statistics.median(took)))
            say(f"{name}: {rate:,.0f} rows/s, {found[name][-1][1]:.3f} s")
            if name == "on":
                _control.append(_control_share(small))
    return found


_control: list[float] = []


def _control_share(job: ab.Job) -> float:
    data = sum(p.packet_bytes for p in job.recent_progress)
    return float(job._driver._runner.control_bytes / data)


def _word_count(spark: Any, data: Path, where: Path, shape: Shape, options: Any) -> ab.Job:
    topology = our_word_count(data, shape, where / "out", NODES)
    return slices(spark, topology, where / "ck", options)


def added_delay(spark: Any, data: Path, where: Path, strategy: str) -> float:
    """Seconds that a slice with a checkpoint is later than one without, from end to end."""
    topology = ab.Topology("keys")
    rows = topology.source("keys", lambda s: read_files(s, data, "key long", 1))
    counted = rows.key_by("key").aggregate("count", n=ab.count(), parallelism=NODES)
    counted.filter("none", pl.col("n") < 0).to("out", ab.Memory())
    job = slices(spark, topology, where, {"checkpoint_interval": "1500ms", "strategy": strategy})
    steady = [p for p in job.recent_progress if 0 < p.rows_in <= 2_000][3:]
    ends = [p.processing_ms / 1000 for p in steady]
    gaps = [b - a for a, b in pairwise(ends)]
    marks = [p.checkpoint_slice for p in steady]
    moved = [a != b for a, b in pairwise(marks)]
    usual = [gap for gap, sealed in zip(gaps, moved, strict=True) if not sealed]
    sealing = [gap for gap, sealed in zip(gaps, moved, strict=True) if sealed]
    if not usual or not sealing:
        return 0.0
    return max(0.0, statistics.fmean(sealing) - statistics.median(usual))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 pairs, smaller state")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    delays: list[tuple[int, float, float]] = []
    with scratch() as root, ab.EmbeddedCluster(NODES, memory_mb=2048) as cluster:
        write_sentences(root / "large", sizes.large, VOCABULARY)
        write_sentences(root / "small", sizes.small, VOCABULARY)
        spark = cluster.session("overhead", SETTINGS)
        pairs = word_counts(spark, root, sizes)
        for keys in sizes.states:
            data = write_keys(root / f"keys-{keys}", keys, LOAD_ROWS, 1_000, 40)
            ours, theirs = (
                added_delay(spark, data, root / f"{s}-{keys}", s) for s in ("ours", "SC")
            )
            say(f"{keys:,} keys: {ours:.3f} s later, waited for {theirs:.3f} s")
            delays.append((keys, ours, theirs))
        spark.stop()
    _report(pairs, delays, quick)


def _report(
    pairs: dict[str, list[tuple[float, float]]], delays: list[tuple[int, float, float]], quick: bool
) -> None:
    ratios = [on[0] / off[0] for on, off in zip(pairs["on"], pairs["off"], strict=True)]
    slower = [on[1] / off[1] for on, off in zip(pairs["on"], pairs["off"], strict=True)]
    rows: list[list[object]] = [
        ["throughput, on ÷ off", spread(ratios)],
        ["slice time, on ÷ off", spread(slower)],
        ["control bytes per byte of packets", spread(_control)],
    ]
    rows += [
        [f"later by a checkpoint of {k * ROW_BYTES / 1e6:,.1f} MB, s", f"{a:.3f}, SC {b:.3f}"]
        for k, a, b in delays
    ]
    columns = ["what", "median [least–most]"]
    report.table("What safety costs", columns, rows)
    if not quick:
        note = f"{NODES} nodes; {len(ratios)} interleaved pairs of applications."
        write_result("overhead", "What safety costs", note, columns, rows)
    largest = delays[-1]
    report.figures(
        {
            "throughput_on_off": statistics.median(ratios),
            "checkpoint_delay_vs_sync": largest[1] / largest[2] if largest[2] else 0.0,
            "control_bytes_per_data_byte": statistics.median(_control),
        }
    )


if __name__ == "__main__":
    main()
