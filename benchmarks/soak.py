"""Ten thousand small slices on 3 nodes: what grows?

Counts per key in windows of 30 s, with 200 rows and one second of event time per slice, so that
the state is soon constant. Every few seconds: resident memory by kind of process, open file
descriptors, objects the driver's JVM keeps for Python, and bytes of shuffle files on disk.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from py4j.java_gateway import JavaObject

import anabranch as ab
from anabranch.spark import watchdog
from benchmarks import report
from benchmarks.workloads import SETTINGS, say, scratch, write_result

NODES = 3
ROWS, KEYS = 200, 1_000
SLICES, QUICK_SLICES = 10_000, 600
SAMPLES = 200  # points of the plot
MB = 1e6


@dataclass(frozen=True)
class Level:
    """One sample; memory in MB."""

    slice: int
    driver_jvm: float
    driver_python: float
    executors: float
    nodes: float
    python_workers: float
    descriptors: int
    gateway_objects: int
    shuffle_mb: float

    @property
    def memory(self) -> float:
        parts = (self.driver_jvm, self.driver_python, self.executors, self.nodes)
        return sum(parts) + self.python_workers


MEMORY = ("driver_jvm", "driver_python", "executors", "nodes", "python_workers")


def topology(out: Path) -> ab.Topology:
    """Spark's rate source by batches: no input files that would pile up by themselves."""

    def read(spark: Any) -> Any:
        rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS)
        frame = rate.option("advanceMillisPerBatch", 1_000).load()
        return frame.selectExpr("timestamp AS ts", f"value % {KEYS} AS key")

    built = ab.Topology("soak")
    (
        built.source("numbers", read, time="ts")
        .filter("valid", pl.col("key").is_not_null())
        .key_by("key")
        .window(ab.tumbling("30s"), time="ts")
        .aggregate("counter", n=ab.count(), parallelism=2 * NODES)
        .to("counts", ab.Parquet(str(out)))
    )
    return built


def measure(slices: int) -> tuple[list[Level], float]:
    """Levels over the run, and its seconds per slice."""
    levels: list[Level] = []
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("soak", SETTINGS)
        started = time.monotonic()
        job = topology(root / "out").start(spark, checkpoint=root / "checkpoint", slice="100ms")
        due = 1
        while job.is_active and (done := _slices(job)) < slices:
            if done >= due:
                levels.append(sample(cluster, spark, done))
                due = done + max(1, slices // SAMPLES)
                if len(levels) % 20 == 0:
                    say(f"slice {done:,} of {slices:,}: {levels[-1].memory:,.0f} MB")
            time.sleep(0.2)
        if job.exception is not None:
            raise job.exception
        per_slice = (time.monotonic() - started) / max(1, _slices(job))
        job.stop()
        levels.append(sample(cluster, spark, slices))
        spark.stop()
    return levels, per_slice


def _slices(job: ab.Job) -> int:
    return job.last_progress.slice if job.last_progress is not None else 0


def sample(cluster: Any, spark: Any, done: int) -> Level:
    kinds = dict.fromkeys(MEMORY, 0.0)
    kinds["driver_python"] = _resident_mb(os.getpid())
    descriptors = _descriptors(os.getpid())
    for pid in watchdog.members(str(cluster.directory)):
        kind = _kind(pid)
        if kind is not None:
            kinds[kind] += _resident_mb(pid)
            descriptors += _descriptors(pid)
    return Level(
        slice=done,
        descriptors=descriptors,
        gateway_objects=_gateway_objects(spark),
        shuffle_mb=_shuffle_bytes(cluster.directory) / MB,
        **kinds,
    )


def _kind(pid: int) -> str | None:
    """What a process of the cluster is, by its command; None for master and workers."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        command += Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return None
    for mark, kind in (
        ("CoarseGrainedExecutorBackend", "executors"),
        ("SparkSubmit", "driver_jvm"),
        ("anabranch-node", "nodes"),
        ("worker_daemon", "python_workers"),
    ):
        if mark in command:
            return kind
    return None


def _resident_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def _descriptors(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def _gateway_objects(spark: Any) -> int:
    """Objects the JVM holds because Python refers, or once referred, to them."""
    server = JavaObject("GATEWAY_SERVER", spark.sparkContext._gateway._gateway_client)
    return int(server.getGateway().getBindings().size())


def _shuffle_bytes(directory: Path) -> int:
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            if name.startswith("shuffle_"):
                try:
                    total += (Path(parent) / name).stat().st_size
                except OSError:
                    continue
    return total


def growth_pct(levels: list[Level], name: str) -> float:
    """Least-squares growth over the second half of the run, in % of its level there."""
    half = levels[len(levels) // 2 :]
    x = np.array([level.slice for level in half], float)
    y = np.array([getattr(level, name) for level in half], float)
    if len(half) < 2 or not y.mean():
        return 0.0
    return float(100 * np.polyfit(x, y, 1)[0] * (x[-1] - x[0]) / y.mean())


def plot(levels: list[Level]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    panels = [
        (MEMORY, "resident, MB"),
        (("descriptors",), "open descriptors"),
        (("gateway_objects",), "objects held for Python"),
        (("shuffle_mb",), "shuffle files, MB"),
    ]
    slices = [level.slice for level in levels]
    for axis, (names, label) in zip(axes.flat, panels, strict=True):
        for name in names:
            axis.plot(slices, [getattr(level, name) for level in levels], label=name)
        axis.set_ylabel(label)
        axis.set_xlabel("slice")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    report.RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(report.RESULTS / "soak.svg")


COLUMNS = ["what", "first", "half-way", "end", "growth, 2nd half %"]


def rows(levels: list[Level]) -> list[list[object]]:
    first, half, end = levels[0], levels[len(levels) // 2], levels[-1]
    names = ["memory", *(f.name for f in fields(Level) if f.name != "slice")]
    return [
        [n, *(float(getattr(x, n)) for x in (first, half, end)), growth_pct(levels, n)]
        for n in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SLICES} slices")
    quick = parser.parse_args().quick
    slices = QUICK_SLICES if quick else SLICES
    levels, per_slice = measure(slices)
    table = rows(levels)
    report.table(f"{slices:,} slices, {per_slice:.3f} s each", COLUMNS, table)
    if not quick:
        plot(levels)
        note = f"{slices:,} slices of {ROWS} rows on {NODES} nodes, {per_slice:.3f} s each."
        image = "![levels over the run](soak.svg)"
        write_result("soak", "What a long run leaves behind", note, COLUMNS, table, image)
    report.figures(
        {
            "memory_growth_pct": growth_pct(levels, "memory"),
            "shuffle_bytes_end": int(levels[-1].shuffle_mb * MB),
        }
    )


if __name__ == "__main__":
    main()
