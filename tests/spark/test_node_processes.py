"""Node processes outlive what ends Spark's Python workers, and keep their state: many slices, a
cancelled Spark job, an operator that raises and, in `make test-long`, more than an idle minute."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from jobs import final_values, numbers, read_output, stream, wait_for
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.api.job import inside
from anabranch.errors import OperatorError
from effort import LONG

SLICES = 1_000 if LONG else 40
ROWS = 3  # in each: a file is a batch, and a batch a slice
IDLE_S = 90  # Spark ends workers idle for a minute, looks every ten seconds, has no setting


def processes(job: Any) -> dict[str, tuple[int, str]]:
    run = inside(job).run
    assert run.controller.placement is not None
    reports = run.cluster.ask(run.caller.poll(run.controller.placement.nodes))
    return {str(r.node): (r.pid, r.incarnation) for r in reports}


def read(job: Any) -> int:
    """Rows that are in slices; there may be slices without any."""
    rows: int = job.totals.read.get("numbers", 0)
    return rows


def python_workers(spark: SparkSession) -> set[int]:
    def pid(_: Any) -> Any:
        import os

        yield os.getpid()

    return set(spark.sparkContext.parallelize(range(3), 3).mapPartitions(pid).collect())


def cancel_a_job(spark: SparkSession) -> None:
    """Somebody's job on all nodes, cancelled while it runs: Spark kills its workers."""
    context = spark.sparkContext

    def sleep(_: Any) -> Any:
        import time

        time.sleep(60)
        yield 0

    def run() -> None:
        context.setJobGroup("victim", "a job to cancel", interruptOnCancel=True)
        with pytest.raises(Exception, match="ancel"):
            context.parallelize(range(3), 3).mapPartitions(sleep).collect()

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: any(active(context, job) for job in jobs_of(context)))
    context.cancelJobGroup("victim")
    wait_for(lambda: not thread.is_alive())


def jobs_of(context: Any) -> list[int]:
    return list(context.statusTracker().getJobIdsForGroup("victim"))


def active(context: Any, job: int) -> bool:
    """Is a task of it running?"""
    tracker = context.statusTracker()
    known = tracker.getJobInfo(job)
    stages = [tracker.getStageInfo(s) for s in known.stageIds] if known else []
    return any(s is not None and s.numActiveTasks for s in stages)


def raises(frame: pl.DataFrame) -> pl.DataFrame:
    if frame.height:
        raise ValueError("no rows, please")
    return frame


def fail_an_operator(spark: SparkSession, root: Path, data: Any) -> None:
    failing = ab.Topology("failing")
    source = failing.source("numbers", data).map("raises", raises)
    source.key_by("k").aggregate("count", n=ab.count()).to("out", ab.Memory())
    job = failing.start(spark, checkpoint=root / "failing", available_now=True)
    with pytest.raises(OperatorError, match="no rows, please"):
        job.await_termination(240)


def let_workers_end(spark: SparkSession, job: Any) -> None:
    """Idle until Spark has ended its Python workers; a last checkpoint may come first."""
    for _ in range(2):
        slices = -1
        while job.last_progress.slice != slices:
            slices = job.last_progress.slice
            time.sleep(12)  # longer than the checkpoint interval
        workers = python_workers(spark)
        time.sleep(IDLE_S)
        if not workers & python_workers(spark):
            return
    raise AssertionError("Spark kept its idle workers: nothing was tested")


@pytest.mark.timeout(900)
def test_node_processes_keep_their_state(spark: SparkSession, tmp_path: Path) -> None:
    raw = [numbers(tmp_path / "in", files=SLICES, rows=ROWS)]
    data = stream(tmp_path / "in", "k long, v long")
    topology = ab.Topology("long_lived")
    totals = topology.source("numbers", data).key_by("k").aggregate("sum", total=ab.sum("v"))
    totals.to("out", ab.Parquet(str(tmp_path / "out")))
    job = topology.start(spark, checkpoint=tmp_path / "ck", slice="1ms")
    wait_for(lambda: read(job) >= 2 * ROWS)
    before = processes(job)
    for files in range(2, SLICES, 20):  # so many at a time: all of them take longer than one wait
        wait_for(lambda files=files: read(job) >= files * ROWS)  # type: ignore[misc]
    wait_for(lambda: read(job) == SLICES * ROWS)
    assert processes(job) == before

    if LONG:
        let_workers_end(spark, job)
    cancel_a_job(spark)
    fail_an_operator(spark, tmp_path, data)
    assert processes(job) == before

    raw.append(numbers(tmp_path / "in", files=2, rows=ROWS, start=SLICES))
    wait_for(lambda: read(job) == (SLICES + 2) * ROWS)
    assert processes(job) == before
    job.stop()
    assert job.exception is None
    wanted = pl.concat(raw).group_by("k").agg(total=pl.col("v").sum())
    assert final_values(read_output(tmp_path / "out")) == {
        k: {"total": t} for k, t in wanted.rows()
    }
