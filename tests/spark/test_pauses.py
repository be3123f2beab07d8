"""A driver that is stopped for longer than the time-out of its nodes finds all of them alive."""

from __future__ import annotations

import subprocess
from pathlib import Path

import polars as pl
from jobs import final_values, numbers, read_output, stream, wait_for
from pyspark.sql import SparkSession

import anabranch as ab

TIMEOUT_S, PAUSE_S = 4, 9


def stop_this_process(spark: SparkSession) -> None:
    """It, and the JVM it drives, for a while."""
    java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    script = f"kill -STOP {java} $PPID; sleep {PAUSE_S}; kill -CONT $PPID {java}"
    subprocess.run(["sh", "-c", script], check=True)


def test_a_pause_of_the_driver_loses_no_node(spark: SparkSession, tmp_path: Path) -> None:
    raw = [numbers(tmp_path / "in", files=2, rows=10)]
    topology = ab.Topology("paused")
    source = topology.source("numbers", stream(tmp_path / "in", "k long, v long"))
    totals = source.key_by("k").aggregate("sum", total=ab.sum("v"))
    totals.to("out", ab.Parquet(str(tmp_path / "out")))
    job = topology.start(
        spark, checkpoint=tmp_path / "ck", slice="100ms", node_timeout=f"{TIMEOUT_S}s"
    )
    wait_for(lambda: job.totals.read.get("numbers") == 20)
    stop_this_process(spark)
    raw.append(numbers(tmp_path / "in", files=2, rows=10, start=2))
    wait_for(lambda: job.totals.read.get("numbers") == 40)
    job.stop()
    assert [r.reason for r in job.recoveries] == ["start"]
    wanted = pl.concat(raw).group_by("k").agg(total=pl.col("v").sum())
    assert final_values(read_output(tmp_path / "out")) == {
        k: {"total": t} for k, t in wanted.rows()
    }
