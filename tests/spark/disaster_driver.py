"""A driver of the job of test_disaster, as a process that can be killed:
python -m disaster_driver ROOT MASTER NODES.

It writes a line per slice into ROOT/slices, and stops when there is a file ROOT/stop.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import polars as pl
from jobs import stream
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.api.job import inside
from anabranch.spark.session import SETTINGS

# At 80 rows/s 1.5 nodes: too much for one of the four, which has room for a and d.
ROW_S = {"a": 0.0015, "b": 0.008, "c": 0.008, "d": 0.0015}
NODES = 4
WHOLE = "d"  # of one partition: the node that has it is spared


class Waits(ab.SliceFunction):
    """For every row the sum of its key so far; a row takes a while, as a call to a service does."""

    state = {"before": pl.Int64}  # noqa: RUF012
    output = {"v": pl.Int64, "total": pl.Int64}  # noqa: RUF012

    def __init__(self, row_s: float) -> None:
        self.row_s = row_s

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        time.sleep(self.row_s * given.rows.height)
        known = given.rows.sort("v").join(given.state, on="k", how="left", maintain_order="left")
        so_far = pl.col("before").fill_null(0) + pl.col("v").cum_sum().over("k")
        shown = known.select("k", "v", total=so_far)
        newest = shown.group_by("k", maintain_order=True).last()
        return ab.SliceResult(output=shown, state=newest.select("k", before="total"))


def topology(root: Path) -> ab.Topology:
    """Four queries; those with more priority are not the cheapest."""
    made = ab.Topology("disaster")
    source = made.source("numbers", stream(root / "in", "k long, v long", files=100))
    for priority, (name, row_s) in enumerate(ROW_S.items(), 1):
        keyed = source.select(f"s_{name}", "k", "v").key_by("k")
        sums = keyed.process(name, Waits(row_s), parallelism=1 if name == WHOLE else NODES)
        sums.to(f"out_{name}", ab.Parquet(str(root / f"out_{name}")), priority=priority)
    return made


def session(master: str) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("disaster")
    settings = {
        **SETTINGS,
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def home(job: ab.Job) -> str:
    """The node of the query with one partition; "": it has none."""
    placement = inside(job).run.controller.placement
    owners = placement.owners.items() if placement is not None else ()
    return next((str(o.node) for p, o in owners if p.chain == WHOLE), "")


def main() -> None:
    root, master, nodes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    spark = session(master)
    while spark.sparkContext._jsc.sc().getExecutorIds().size() < nodes:
        time.sleep(0.01)
    job = topology(root).start(
        spark, checkpoint=root / "ck", slice="500ms", checkpoint_interval="3s"
    )

    def tell(progress: ab.Progress) -> None:
        line = {
            "slice": progress.slice,
            "waiting": progress.waiting,
            "home": home(job),
            "why": job.status().partial_plan,
        }
        with (root / "slices").open("a") as file:
            file.write(json.dumps(line) + "\n")

    job.on_progress(tell)
    while not (root / "stop").exists() and job.is_active:
        time.sleep(0.05)
    job.stop()
    if job.exception is not None:
        raise job.exception


if __name__ == "__main__":
    main()
