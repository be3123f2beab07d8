"""Sentences per second of the windowed word count (G3), side by side with Structured Streaming.

Sentences of 8 Zipf words, windows of 30 s in event time, Parquet files in and out, 2 nodes of one
core, 2 partitions; our source log and checkpoints are on. Every sample is a fresh application that
runs all cases; the rate is that of the batches after the warm-up, with everything in them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anabranch as ab
from benchmarks import peers, report
from benchmarks.workloads import (
    COMPARED,
    SETTINGS,
    SIDES,
    Run,
    Shape,
    compared,
    our_word_count,
    remove,
    run_ours,
    say,
    scratch,
    turns,
    write_result,
    write_sentences,
)

NODES = PARALLELISM = 2
EVENT_SECONDS = 10.0  # of one batch: a window closes with every third
FILES = 4  # of one batch: every core reads


@dataclass(frozen=True)
class Case:
    """One input and the peer's query on it."""

    rows: int
    vocabulary: int
    batches: int
    warmup: int
    peer: Callable[[Any, Path, Shape], Any] = peers.word_count

    @property
    def shape(self) -> Shape:
        return Shape(self.batches, self.rows, FILES, EVENT_SECONDS)


FULL = {
    "native_1m": Case(1_000_000, 10_000, batches=12, warmup=5),
    "native_100k": Case(100_000, 10_000, batches=50, warmup=20),
    "native_1m_keys": Case(1_000_000, 1_000_000, batches=9, warmup=3),
    "python_stateful": Case(400_000, 10_000, 4, 1, peers.python_word_count),
}
QUICK = {
    "native_1m": Case(1_000_000, 10_000, batches=5, warmup=2),
    "native_100k": Case(100_000, 10_000, batches=14, warmup=7),
    "native_1m_keys": Case(1_000_000, 1_000_000, batches=3, warmup=1),
    "python_stateful": Case(50_000, 10_000, 3, 1, peers.python_word_count),
}
Samples = dict[tuple[str, str], list[Run]]  # (case, side) → one run per round


def measure(cases: dict[str, Case], rounds: int) -> Samples:
    samples: Samples = {(name, side): [] for name in cases for side in SIDES}
    with scratch() as root, ab.EmbeddedCluster(NODES, memory_mb=2048) as cluster:
        for name, case in cases.items():
            say(f"writing the input of {name}")
            write_sentences(root / name, case.shape, case.vocabulary)
        for number, side in turns(rounds):
            conf = SETTINGS if side == "ours" else peers.settings(PARALLELISM)
            spark = cluster.session(side, conf)
            for name, case in cases.items():
                run = _run(cluster, spark, side, root / name, case, root / "run")
                samples[name, side].append(run)
                say(f"round {number + 1}/{rounds} {name} {side}: {case.rows / run.mean:,.0f}/s")
            spark.stop()
    return samples


def _run(cluster: Any, spark: Any, side: str, source: Path, case: Case, root: Path) -> Run:
    shape, warmup = case.shape, case.warmup
    if side == "ours":
        topology = our_word_count(source, shape, root / "out", PARALLELISM)
        run = run_ours(cluster, spark, topology, root / "checkpoint", shape, warmup)
    else:
        frame = case.peer(spark, source, shape)
        out, checkpoint = root / "out", root / "checkpoint"
        run = peers.run_peer(cluster, spark, frame, out, checkpoint, shape, warmup)
    remove(root)
    return run


COLUMNS = ["case", "batch", *COMPARED]


def rows(cases: dict[str, Case], samples: Samples) -> tuple[list[list[object]], dict[str, float]]:
    table: list[list[object]] = []
    figures: dict[str, float] = {}
    for name, case in cases.items():
        lines, figures[name] = compared(name, case.rows, {s: samples[name, s] for s in SIDES})
        table += lines
    return table, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer and smaller batches")
    quick = parser.parse_args().quick
    peers.check_packages()
    cases, rounds = (QUICK, 1) if quick else (FULL, 5)
    table, figures = rows(cases, measure(cases, rounds))
    report.table("Throughput of the windowed word count", COLUMNS, table)
    if not quick:
        note = (
            f"2 nodes, 2 partitions; median [least–most] of {rounds} interleaved applications. "
            "k/s: thousands of sentences a second; CPU seconds of all processes and megabytes "
            "shuffled are per million sentences."
        )
        write_result("throughput", "Throughput beside Structured Streaming", note, COLUMNS, table)
    report.figures(figures)


if __name__ == "__main__":
    main()
