"""The table of operators on real executors: all of them in one job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from jobs import read_output, stream, wait_for, wait_for_nodes, write_rows
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.api.job import inside
from anabranch.errors import ClusterError
from anabranch.spark.embedded import EmbeddedCluster
from anabranch.testing import Idle, Lose, Restart, Step
from operator_cases import (
    CASES,
    COLUMNS,
    STEPS,
    Case,
    Outputs,
    Row,
    operator_gives_what_its_model_says,
    topology,
)

test_operator_gives_what_its_model_says = operator_gives_what_its_model_says


class SparkRun:
    """The steps of the table, done to a job on a cluster."""

    def __init__(self, cluster: EmbeddedCluster, spark: SparkSession, root: Path) -> None:
        self._cluster, self._spark, self._root = cluster, spark, root
        self._files = 0
        (root / "in").mkdir()
        self._start()

    def _start(self) -> None:
        events = stream(self._root / "in", COLUMNS)
        whole = topology(CASES, events, lambda name: ab.Parquet(str(self._root / name)))
        options: dict[str, Any] = {"slice": "100ms", "checkpoint_interval": "1s"}
        self._job = whole.start(self._spark, checkpoint=self._root / "ck", **options)
        self._rows = 0  # that this run has to take in

    def step(self, step: Step) -> None:
        match step:
            case Lose():
                for node in self._controller.placement.nodes[: step.nodes]:
                    self._cluster.kill(self._cluster.executors()[node][0])
            case Restart():
                self._crash()
                self._start()
            case Idle():
                newest = self._controller.newest
                wait_for(
                    lambda: (c := self._controller.cut) is not None and c.slice >= newest.number
                )
            case {"events": rows}:
                write_rows(self._root / "in", self._files, rows)
                self._files += 1
                self._rows += rows.height
                wait_for(lambda: self._taken >= self._rows)

    @property
    def _controller(self) -> Any:
        return inside(self._job).run.controller

    @property
    def _taken(self) -> int:
        assert self._job.exception is None, self._job.exception
        return sum(p.rows_in for p in self._job.recent_progress)

    def _crash(self) -> None:
        """End the driver as it is: no last slice, no checkpoint."""
        reading = inside(self._job)
        reading.run.abort(ClusterError("killed by the test"))
        reading.query.stop()
        wait_for(lambda: not self._job.is_active)

    def end(self) -> None:
        recovered = [r.reason for r in self._job.recoveries]
        self._job.stop()
        assert self._job.exception is None
        assert len(recovered) == 2, recovered  # its start, and the node it lost


@pytest.fixture(scope="session")
def outputs(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Outputs:
    root = tmp_path_factory.mktemp("operators")
    wait_for_nodes(cluster, 3)
    run = SparkRun(cluster, spark, root)
    for step in STEPS:
        run.step(step)
    run.end()

    def rows(case: Case) -> list[Row]:
        return read_output(root / case.name).drop("slice").rows()

    return rows


def test_a_static_table_may_be_a_spark_frame(spark: SparkSession) -> None:
    titles = spark.createDataFrame([(1, "one"), (3, "three")], "item int, title string")
    kernel = ab.Topology("t").source("s", None).enrich("titled", titles, on="item").topology
    (titled,) = [o.kernel for o in kernel._operators if o.name == "titled"]
    given = pl.DataFrame({"item": [3, 2, 1]}).to_arrow()
    assert titled.process(given).column("title").to_pylist() == ["three", None, "one"]
