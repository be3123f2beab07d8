"""A batch that has piled up comes as several slices, so that a loss in the middle of it waits for
seconds only; its rows wait, as for a service."""

from __future__ import annotations

import time
from pathlib import Path

import polars as pl
import pytest
from jobs import final_values, read_output, stream, wait_for, wait_for_nodes, write_rows
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.control import schedule
from anabranch.spark.embedded import EmbeddedCluster

ROW_S = 0.002
KEYS = 12
FEW, MANY = 60, 6_000  # rows; the many take 4 s on three nodes, if keys are even


class Slow(ab.SliceFunction):
    state = {"total": pl.Int64}  # noqa: RUF012
    output = {"total": pl.Int64}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        time.sleep(ROW_S * given.rows.height)
        sums = given.rows.group_by("k", maintain_order=True).agg(pl.col("v").sum())
        known = sums.join(given.state, on="k", maintain_order="left")
        new = known.select("k", total=pl.col("total").fill_null(0) + pl.col("v"))
        return ab.SliceResult(output=new, state=new)


def test_a_node_is_lost_in_the_middle_of_one(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "LONG_S", 1.0)
    wait_for_nodes(cluster, 3)
    frames: list[pl.DataFrame] = []

    def write(rows: int) -> None:
        start = sum(f.height for f in frames)
        v = pl.int_range(start, start + rows, eager=True)
        frames.append(pl.DataFrame({"k": v % KEYS, "v": v}))
        write_rows(tmp_path / "in", len(frames), frames[-1])

    write(FEW)
    topology = ab.Topology("piled")
    source = topology.source("numbers", stream(tmp_path / "in", "k long, v long"))
    source.key_by("k").process("sum", Slow(), parallelism=6).to(
        "out", ab.Parquet(str(tmp_path / "out"))
    )
    job = topology.start(spark, checkpoint=tmp_path / "ck", slice="200ms")

    def done() -> int:
        return sum(p.rows_in for p in job.recent_progress)

    for _ in range(3):
        wait_for(lambda: done() == sum(f.height for f in frames))
        write(FEW)
    wait_for(lambda: done() == sum(f.height for f in frames))
    small = len(job.recent_progress)
    before = done()
    write(MANY)
    wait_for(lambda: done() > before)
    assert done() < before + MANY, "it came as one slice"
    cluster.kill(cluster.executors()[next(n for n, role in job.nodes.items() if not role)][0])
    wait_for(lambda: done() == before + MANY)
    job.stop()
    assert job.exception is None
    assert len([p for p in job.recent_progress[small:] if p.rows_in]) > 2
    expected = pl.concat(frames).group_by("k").agg(total=pl.col("v").sum())
    assert final_values(read_output(tmp_path / "out")) == {
        k: {"total": total} for k, total in expected.rows()
    }
