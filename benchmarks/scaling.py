"""How the time of a slice of 20,000 rows grows with partitions, operators and keys.

On 2 nodes, one knob at a time: partitions per node of one counter; operators in a chain of maps
and counters that cannot be fused (every counter is a wave of its own); keys in the state, loaded
beforehand in large slices. The figure is the slope on log-log axes: 1 is linear.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import anabranch as ab
from benchmarks import report
from benchmarks.workloads import (
    SETTINGS,
    Run,
    Shape,
    read_files,
    run_ours,
    say,
    scratch,
    spread,
    write_keys,
    write_result,
)

NODES = 2
ROWS = 20_000
KEYS = 10_000  # where they are not the knob
LOAD_ROWS = 500_000  # of a slice that loads keys
COLUMNS_READ = "key long"


@dataclass(frozen=True)
class Sizes:
    """The settings of every knob, and slices per setting."""

    partitions: tuple[int, ...]
    operators: tuple[int, ...]
    keys: tuple[int, ...]
    slices: int
    warmup: int


FULL = Sizes(
    partitions=(1, 4, 16, 64, 256),
    operators=(2, 4, 8, 14, 20),
    keys=(10**4, 10**5, 10**6, 10**7),
    slices=40,
    warmup=15,
)
QUICK = Sizes(
    partitions=(1, 16, 256),
    operators=(2, 8, 20),
    keys=(10**4, 10**5, 10**6),
    slices=14,
    warmup=5,
)


def shift(frame: pl.DataFrame) -> pl.DataFrame:
    """Another key for every row: the planner cannot know where it goes."""
    return frame.select(key=pl.col("key") * 31 % KEYS)


def counters(source: Path, out: Path, partitions: int, depth: int, mapped: bool) -> ab.Topology:
    """`depth` counters in a row, each after a map that changes the key if `mapped`."""
    total = NODES * partitions
    topology = ab.Topology("scaling", key_groups=max(128, total))
    stream = topology.source("keys", lambda s: read_files(s, source, COLUMNS_READ, 1))
    for i in range(depth):
        if mapped:
            stream = stream.map(f"shift_{i}", shift)
        keyed = stream.key_by("key")
        stream = keyed.aggregate(f"counter_{i}", n=ab.count(), parallelism=total)
    stream.filter("none", pl.col("n") < 0).to("out", ab.Parquet(str(out)))
    return topology


@dataclass(frozen=True)
class Point:
    """One setting of one knob."""

    knob: str
    size: int
    run: Run


def measure(sizes: Sizes) -> list[Point]:
    points: list[Point] = []
    with scratch() as root, ab.EmbeddedCluster(NODES, memory_mb=2048) as cluster:
        spark = cluster.session("scaling", SETTINGS)
        for knob in ("partitions", "operators", "keys"):
            for size in getattr(sizes, knob):
                run = _run(cluster, spark, knob, size, sizes, root / "run")
                points.append(Point(knob, size, run))
                say(f"{knob} {size:,}: {run.median:.3f} s")
        spark.stop()
    return points


def _run(cluster: Any, spark: Any, knob: str, size: int, sizes: Sizes, root: Path) -> Run:
    keys = size if knob == "keys" else KEYS
    load = -(-keys // LOAD_ROWS)
    write_keys(root / "in", keys, LOAD_ROWS, ROWS, sizes.slices)
    topology = counters(
        root / "in",
        root / "out",
        partitions=size if knob == "partitions" else 1,
        depth=size // 2 if knob == "operators" else 1,
        mapped=knob == "operators",
    )
    shape = Shape(load + sizes.slices, ROWS, files=1, seconds=1.0)
    run = run_ours(cluster, spark, topology, root / "ck", shape, load + sizes.warmup)
    shutil.rmtree(root)
    return run


def slope(points: list[Point]) -> float:
    """Of the line through the settings on log-log axes."""
    x = np.log([p.size for p in points])
    return float(np.polyfit(x, np.log([p.run.median for p in points]), 1)[0])


def plot(groups: dict[str, list[Point]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True)
    labels = {"partitions": "partitions per node", "operators": "operators", "keys": "keys"}
    for axis, (knob, points) in zip(axes, groups.items(), strict=True):
        axis.loglog([p.size for p in points], [p.run.median for p in points], marker="o")
        axis.set_xlabel(labels[knob])
        axis.set_title(f"slope {slope(points):.2f}")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("seconds per slice")
    figure.tight_layout()
    report.RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(report.RESULTS / "scaling.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer settings and slices")
    quick = parser.parse_args().quick
    points = measure(QUICK if quick else FULL)
    groups = {k: [p for p in points if p.knob == k] for k in ("partitions", "operators", "keys")}
    columns = ["knob", "size", "s/slice", "CPU s/slice"]
    table = [[p.knob, f"{p.size:,}", spread(list(p.run.seconds)), p.run.cpu_s] for p in points]
    report.table(f"Slices of {ROWS:,} rows on {NODES} nodes", columns, table)
    figures = {knob: slope(of) for knob, of in groups.items()}
    if not quick:
        plot(groups)
        note = f"Slices of {ROWS:,} rows on {NODES} nodes; median [least–most]."
        image = "![time per slice](scaling.svg)"
        write_result("scaling", "How a slice grows", note, columns, table, image)
    report.figures(figures)


if __name__ == "__main__":
    main()
