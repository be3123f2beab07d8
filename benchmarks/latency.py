"""Time of a small slice, from trigger to committed, side by side with Structured Streaming.

Slices of 2,000 events, one second of event time each, back to back on 3 nodes of one core: the
windowed word count (G3) and the joined output of the traffic topology. Every sample is a fresh
application; the slices after its warm-up count, with everything in them.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import anabranch as ab
from benchmarks import peers, report
from benchmarks.workloads import (
    SETTINGS,
    SIDES,
    Run,
    Shape,
    our_traffic,
    our_word_count,
    remove,
    run_ours,
    say,
    scratch,
    spread,
    turns,
    write_result,
    write_sentences,
    write_traffic,
)

NODES = PARALLELISM = 3
EVENTS = 2_000
VOCABULARY = 10_000
QUERIES = ("g3", "traffic")


@dataclass(frozen=True)
class Sizes:
    """Rounds, and slices per application and query."""

    rounds: int
    slices: dict[str, int]
    warmup: int


FULL = Sizes(rounds=5, slices={"g3": 100, "traffic": 100}, warmup=40)
QUICK = Sizes(rounds=1, slices={"g3": 44, "traffic": 26}, warmup=12)
Samples = dict[tuple[str, str], list[Run]]  # (query, side) → one run per round


def measure(sizes: Sizes) -> Samples:
    samples: Samples = {(q, side): [] for q in QUERIES for side in SIDES}
    shapes = {q: Shape(sizes.slices[q], EVENTS, files=1, seconds=1.0) for q in QUERIES}
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        write_sentences(root / "g3", shapes["g3"], VOCABULARY)
        write_traffic(root / "traffic", shapes["traffic"])
        for number, side in turns(sizes.rounds):
            conf = SETTINGS if side == "ours" else peers.settings(PARALLELISM)
            spark = cluster.session(side, conf)
            for query, shape in shapes.items():
                run = _run(cluster, spark, side, query, root, shape, sizes.warmup)
                samples[query, side].append(run)
                say(f"round {number + 1}/{sizes.rounds} {query} {side}: {run.median:.3f} s")
            spark.stop()
    return samples


def _run(
    cluster: Any, spark: Any, side: str, query: str, root: Path, shape: Shape, warmup: int
) -> Run:
    source, out, checkpoint = root / query, root / "run" / "out", root / "run" / "checkpoint"
    if side == "ours":
        topology = (
            our_word_count(source, shape, out, PARALLELISM)
            if query == "g3"
            else our_traffic(source, shape, out)
        )
        run = run_ours(cluster, spark, topology, checkpoint, shape, warmup)
    else:
        frame = (peers.word_count if query == "g3" else peers.traffic)(spark, source, shape)
        run = peers.run_peer(cluster, spark, frame, out, checkpoint, shape, warmup)
    remove(root / "run")
    return run


COLUMNS = ["query", "side", "slices", "median s", "p99 s", "CPU s/slice"]


def rows(samples: Samples) -> tuple[list[list[object]], dict[str, float]]:
    table: list[list[object]] = []
    medians, tails = {}, {}
    for (query, side), runs in samples.items():
        pooled = [s for r in runs for s in r.seconds]
        medians[query, side] = statistics.median(r.median for r in runs)
        tails[query, side] = float(np.percentile(pooled, 99))
        cpu = spread([r.cpu_s for r in runs])
        median = spread([r.median for r in runs])
        table.append([query, side, len(pooled), median, tails[query, side], cpu])
    figures = {
        "g3_median": medians["g3", "ours"] / medians["g3", "theirs"],
        "g3_p99": tails["g3", "ours"] / tails["g3", "theirs"],
        "traffic_median": medians["traffic", "ours"] / medians["traffic", "theirs"],
    }
    return table, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of fewer slices")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    table, figures = rows(measure(sizes))
    report.table(f"Slices of {EVENTS:,} events on {NODES} nodes", COLUMNS, table)
    if not quick:
        note = f"Median of {sizes.rounds} interleaved applications [least–most]; p99 of all slices."
        ratios = "Ours ÷ theirs: " + ", ".join(f"{k} {v:.3g}" for k, v in figures.items()) + "."
        title = "Latency beside Structured Streaming"
        write_result("latency", title, note, COLUMNS, table, ratios)
    report.figures(figures)


if __name__ == "__main__":
    main()
