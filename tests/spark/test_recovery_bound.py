"""A job with a recovery bound says how long a lost node will be missed; then one is killed."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
from jobs import final_values, read_output, stream, wait_for, wait_for_nodes, write_rows
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.api.job import inside
from anabranch.spark.embedded import EmbeddedCluster

ROWS = 40  # in a file
COST_S = 0.004  # a row, so that a slice takes 0.16 s of CPU to replay
CHECKPOINT_S = 4.0
SLICES = 25  # so that the prediction has been renewed once


class CostlySum(ab.SliceFunction):
    state = {"total": pl.Int64}  # noqa: RUF012
    output = {"total": pl.Int64}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        until = time.process_time() + COST_S * given.rows.height
        while time.process_time() < until:
            pass
        sums = given.rows.group_by("k", maintain_order=True).agg(pl.col("v").sum())
        known = sums.join(given.state, on="k", maintain_order="left")
        new = known.select("k", total=pl.col("total").fill_null(0) + pl.col("v"))
        return ab.SliceResult(output=new, state=new)


def test_a_lost_node_is_back_about_when_it_was_predicted(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    wait_for_nodes(cluster, 3)
    frames: list[pl.DataFrame] = []

    def write() -> None:
        v = pl.int_range(len(frames) * ROWS, (len(frames) + 1) * ROWS, eager=True)
        frames.append(pl.DataFrame({"k": v % 3, "v": v}))
        write_rows(tmp_path / "in", len(frames), frames[-1])

    write()
    topology = ab.Topology("bounded")
    source = topology.source("numbers", stream(tmp_path / "in", "k long, v long"))
    summed = source.key_by("k").process("sum", CostlySum(), parallelism=1)
    summed.to("out", ab.Parquet(str(tmp_path / "out")))
    job = topology.start(
        spark,
        checkpoint=tmp_path / "ck",
        slice="300ms",
        checkpoint_interval=f"{CHECKPOINT_S}s",
        recovery_bound="5s",
    )

    def done() -> int:
        return sum(p.rows_in for p in job.recent_progress)

    def age() -> float:
        newest = job.last_progress
        return newest.checkpoint_age_s or 0.0 if newest is not None else 0.0

    def fed() -> bool:
        if done() >= len(frames) * ROWS:
            write()
        measured = len(job.recent_progress) >= SLICES
        predicted = inside(job).run.history.predicted is not None
        return measured and predicted and age() > 0.7 * CHECKPOINT_S

    wait_for(fed)
    before = len(job.recoveries)
    placement = inside(job).run.controller.placement
    node = next(o.node for p, o in placement.owners.items() if p.chain == "sum")
    cluster.kill(cluster.executors()[node][0])
    wait_for(lambda: len(job.recoveries) > before)
    wait_for(lambda: done() >= len(frames) * ROWS)
    job.stop()
    assert job.exception is None
    expected = pl.concat(frames).group_by("k").agg(total=pl.col("v").sum())
    assert final_values(read_output(tmp_path / "out")) == {
        k: {"total": total} for k, total in expected.rows()
    }
    recovery = job.recoveries[before]
    assert recovery.nodes == (node,)
    assert recovery.to_slice > recovery.from_slice
    print(recovery)
    assert recovery.predicted_s is not None
    # The prediction is for the end of the interval and a core of its own: neither is exact here.
    assert recovery.total_s / 5 < recovery.predicted_s < 5 * recovery.total_s
