"""Nodes are killed, stopped and lose their processes while a job runs; every slice of every sink
still has exactly the rows of an undisturbed computation.

The topology has an operator behind another one's shuffle and sinks at three depths. Which rows make
a slice is read from the sink that gets them as they are; the rest is recomputed from there.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from jobs import numbers, stream, wait_for, wait_for_nodes
from pyspark.sql import SparkSession
from test_driver_kills import STEPS, check_output

import anabranch as ab
from anabranch.api.job import inside
from anabranch.node.process import client
from anabranch.spark.embedded import EmbeddedCluster
from flow_topology import build
from oracle import Dataflow

NODE_TIMEOUT_S = 5  # a starved node must not look lost


class Running:
    """A job whose input grows until it is told to end."""

    def __init__(self, cluster: EmbeddedCluster, spark: SparkSession, root: Path, **options: Any):
        self.cluster, self.root = cluster, root
        self.frames = [numbers(root / "in", files=3, rows=40)]
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        topology = build(
            Dataflow(STEPS),
            lambda name: ab.Parquet(str(root / name)),
            data=lambda name: stream(root / "in", "k long, v long"),
        )
        self.job = topology.start(
            spark,
            checkpoint=root / "ck",
            slice="200ms",
            checkpoint_interval="2s",
            **{"node_timeout": f"{NODE_TIMEOUT_S}s", **options},
        )

    def _write(self) -> None:
        for number in itertools.count(3):
            while not self._ended.wait(0.3) and self.backlog > 200:
                pass  # a slow machine must not fall behind for ever
            if self._ended.is_set():
                return
            self.frames.append(numbers(self.root / "in", 1, 40, start=number))

    @property
    def backlog(self) -> int:
        """Rows written and not yet in a slice."""
        done = sum(p.rows_in for p in self.job.recent_progress) if hasattr(self, "job") else 0
        return sum(f.height for f in self.frames) - done

    @property
    def ready(self) -> list[str]:
        return [node for node, role in self.job.nodes.items() if role != "joining"]

    @property
    def placement(self) -> Any:
        return inside(self.job).run.controller.placement

    def slices(self, more: int) -> None:
        """Wait until so many more slices have happened."""
        newest = self.job.last_progress
        goal = (newest.slice if newest else 0) + more
        wait_for(lambda: (p := self.job.last_progress) is not None and p.slice >= goal)

    def on_all_nodes(self) -> None:
        """Nodes that the test before has killed may join only now, and get their share."""
        wait_for_nodes(self.cluster, 3)
        wait_for(lambda: self.placement is not None and len(self.placement.nodes) >= 3)
        self.slices(2)

    def executor(self, node: str) -> int:
        return self.cluster.executors()[node][0]

    def node_process(self, node: str) -> int:
        return client.node_process(self.executor(node))

    def end(self) -> None:
        self.slices(2)
        self._ended.set()
        self._writer.join()
        wait_for(lambda: self.backlog == 0)
        self.job.stop()
        assert self.job.exception is None
        check_output(self.root, pl.concat(self.frames))


@pytest.fixture(autouse=True)
def nothing_goes_on(spark: SparkSession) -> Iterator[None]:
    """A test that failed must not leave its job to the next."""
    yield
    for query in spark.streams.active:
        query.stop()


def disturbed(running: Running, disturb: Callable[[], None], *nodes: str) -> Any:
    """Do it, and see that it was noticed; the recovery from it, of these nodes."""
    before = len(running.job.recoveries)
    disturb()
    made: list[Any] = []

    def recovered() -> bool:
        new = running.job.recoveries[before:]
        made[:] = [r for r in new if not nodes or set(nodes) & set(r.nodes)]
        return bool(made)

    wait_for(recovered)
    running.slices(2)
    return made[0]


def test_whatever_happens_to_nodes_every_slice_is_right(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    running = Running(cluster, spark, tmp_path)
    running.slices(3)
    first, *_ = running.placement.nodes
    recovery = disturbed(running, lambda: cluster.kill(running.node_process(first)))
    if "silent" in recovery.reason:  # on a starved machine its next process may come too late
        first = running.placement.nodes[0]
    assert first in running.placement.nodes  # its executor is as good as before
    disturbed(running, lambda: cluster.kill(running.executor(first)), first)
    assert first not in running.placement.nodes
    wait_for(lambda: len(running.ready) >= 3)  # a new node has joined
    node = running.placement.nodes[0]
    hung = running.executor(node)
    recovery = disturbed(running, lambda: os.kill(hung, signal.SIGSTOP), node)
    assert "silent" in recovery.reason
    wait_for(lambda: not Path(f"/proc/{hung}").exists())  # the zombie was killed
    wait_for(lambda: len(running.ready) >= 3)

    def two() -> None:
        for node in running.placement.nodes[:2]:
            cluster.kill(running.executor(node))

    disturbed(running, two)
    running.end()


def test_all_nodes_at_once_and_no_backups_but_the_log(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    running = Running(cluster, spark, tmp_path, backups="sources")
    running.on_all_nodes()
    victim = next(o.node for p, o in running.placement.owners.items() if p.chain == "most")
    recovery = disturbed(running, lambda: cluster.kill(running.executor(victim)), victim)
    assert recovery.shadows > 0

    def everybody() -> None:
        for pid, _ in list(cluster.executors().values()):
            cluster.kill(pid)

    disturbed(running, everybody)
    running.end()


def test_a_copy_takes_over(cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path) -> None:
    running = Running(cluster, spark, tmp_path, strategy="AR")
    running.on_all_nodes()

    def copied() -> bool:
        placement = running.placement
        return placement is not None and placement.copies.keys() == placement.owners.keys()

    wait_for(copied)
    running.slices(2)
    victim = next(o.node for p, o in running.placement.owners.items() if p.chain == "sum")
    recovery = disturbed(running, lambda: cluster.kill(running.executor(victim)), victim)
    assert recovery.promoted
    assert not recovery.partitions
    wait_for(copied)  # made anew
    running.end()


def test_a_lost_partition_comes_back_in_two(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    running = Running(cluster, spark, tmp_path, parallel_recovery=2)
    running.on_all_nodes()
    before = len(running.placement.partitions("most"))
    victim = next(o.node for p, o in running.placement.owners.items() if p.chain == "most")
    recovery = disturbed(running, lambda: cluster.kill(running.executor(victim)), victim)
    assert {p.index for p in recovery.partitions if p.chain == "most"} >= {before}
    wait_for(lambda: len(running.placement.partitions("most")) == before)  # one again
    running.end()
