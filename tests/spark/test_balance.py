"""Few keys have most of the rows, and other ones later: keys move while the job runs, also where a
node is lost, and every total is right."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import polars as pl
from jobs import final_values, read_output, stream, wait_for, wait_for_nodes, write_rows
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.spark.embedded import EmbeddedCluster

ROW_S = 0.001
KEYS, ROWS = 1_000, 150  # in a file, one every quarter of a second
BALANCE = ab.Balance(interval="2s", cool_down="3s")


class Slow(ab.SliceFunction):
    state = {"total": pl.Int64}  # noqa: RUF012
    output = {"total": pl.Int64}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        time.sleep(ROW_S * given.rows.height)
        sums = given.rows.group_by("k", maintain_order=True).agg(pl.col("v").sum())
        known = sums.join(given.state, on="k", how="left", maintain_order="left")
        new = known.select("k", total=pl.col("total").fill_null(0) + pl.col("v"))
        return ab.SliceResult(output=new, state=new)


def test_keys_move_with_the_stream_and_nothing_is_lost(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    wait_for_nodes(cluster, 3)
    dice = np.random.default_rng(5)
    share = np.arange(1, KEYS + 1) ** -1.2
    frames: list[pl.DataFrame] = []

    def write(first: int) -> None:
        """The most frequent key is `first`, the others follow it."""
        ranks = dice.choice(KEYS, ROWS, p=share / share.sum())
        v = np.arange(ROWS) + ROWS * len(frames)
        frames.append(pl.DataFrame({"k": (ranks * 7 + first) % KEYS, "v": v}))
        write_rows(tmp_path / "in", len(frames), frames[-1])

    def feed(first: int, moves: int) -> None:
        """Until keys have moved that often."""
        deadline = time.monotonic() + 120
        while len(moved(job)) < moves:
            assert job.exception is None, job.exception
            assert time.monotonic() < deadline, job.decisions
            write(first)
            time.sleep(0.25)

    write(0)
    topology = ab.Topology("hot")
    source = topology.source("numbers", stream(tmp_path / "in", "k long, v long", files=100))
    sums = source.key_by("k").process("sum", Slow(), parallelism=3)
    sums.to("out", ab.Parquet(str(tmp_path / "out")))
    job = topology.start(spark, checkpoint=tmp_path / "ck", slice="500ms", balance=BALANCE)
    feed(0, moves=1)
    assert any(d.by == "balancer" and d.kind == "balance" for d in job.decisions)
    cluster.kill(cluster.executors()[next(n for n, role in job.nodes.items() if not role)][0])
    feed(371, moves=2)  # a move before the loss may have been given up, but not these
    read = sum(f.height for f in frames)
    wait_for(lambda: job.exception is not None or sum(job.totals.read.values()) == read)
    job.stop()
    assert job.exception is None
    expected = pl.concat(frames).group_by("k").agg(total=pl.col("v").sum())
    assert final_values(read_output(tmp_path / "out")) == {
        k: {"total": total} for k, total in expected.rows()
    }


def moved(job: ab.Job) -> list[str]:
    return [a.what for a in job.adjustments if "keys of sum moved" in a.what]
