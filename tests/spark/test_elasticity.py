"""A running job is scaled and its nodes come and go, with kills right before and after; every
slice of every sink still has exactly the rows of an undisturbed computation."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import wait_for
from pyspark.sql import SparkSession
from test_node_kills import Running, disturbed

import anabranch as ab
from anabranch.spark.embedded import EmbeddedCluster


def adjusted(running: Running, operator: str, parallelism: int) -> None:
    """Scale, and wait until it is done."""
    running.job.scale(operator, parallelism)
    wait_for(lambda: len(running.placement.partitions(operator)) == parallelism)


def test_scaled_up_and_down_under_kills(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    running = Running(cluster, spark, tmp_path)
    running.slices(2)
    adjusted(running, "sum", 6)
    killed = running.placement.owners[running.placement.partitions("sum")[-1]].node
    disturbed(running, lambda: cluster.kill(running.executor(killed)), killed)  # right after it
    assert len(running.placement.partitions("sum")) == 6  # the scaling is not undone
    adjusted(running, "most", 5)
    running.slices(2)
    running.job.scale("sum", 2)
    cluster.kill(running.node_process(running.placement.nodes[0]))  # in the middle of it
    wait_for(lambda: len(running.placement.partitions("sum")) == 2)
    adjusted(running, "most", 1)
    running.end()


def test_nodes_leave_and_come(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    running = Running(cluster, spark, tmp_path)
    running.slices(2)
    with pytest.raises(ab.AnabranchError, match="there is no node 'nobody'"):
        running.job.drain("nobody")
    recoveries = len(running.job.recoveries)
    first = running.placement.nodes[0]
    running.job.drain(first)
    wait_for(lambda: first not in running.placement.nodes)
    wait_for(lambda: first not in cluster.executors())  # it was released
    running.slices(2)
    assert len(running.job.recoveries) == recoveries  # nothing was lost
    killed = running.placement.nodes[0]
    cluster.kill(running.executor(killed))
    running.job.add_nodes(1)  # besides the one that takes the place of the killed one
    wait_for(lambda: len(running.placement.nodes) == 3)  # and each has its share
    assert killed not in running.placement.nodes
    running.slices(2)
    running.end()
