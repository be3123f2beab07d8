"""A machine that is cut off and comes back, and a disk that is full: nothing is lost or counted
twice.

Cut off means here that everything on a node is stopped: its worker, its executor, its Python
workers and its node process. Its connections stay open and carry nothing, as behind a network that
drops packets. When it comes back, all of it is as alive as before, and does not know that it was
given up.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from jobs import final_values, numbers, read_output, stream, wait_for, wait_for_nodes
from pyspark.sql import SparkSession
from test_node_kills import Running, disturbed

import anabranch as ab
from anabranch.api.job import inside
from anabranch.model.commands import RunSlice
from anabranch.node.process import client
from anabranch.spark import watchdog
from anabranch.spark.embedded import EmbeddedCluster
from anabranch.spark.session import executors
from effort import LONG

DISK_MB = 16


def processes_of(cluster: EmbeddedCluster, executor: int) -> list[int]:
    """The executor, its node process and all below it."""
    below = {executor, client.node_process(executor)}
    for pid in sorted(watchdog.members(str(cluster.directory))):
        try:
            parent = client.parent(pid)
        except OSError:
            continue  # it has just ended
        if parent in below:
            below.add(pid)
    return sorted(below)


@pytest.mark.skipif(not LONG, reason="stops a whole machine for many seconds")
def test_a_node_that_was_cut_off_comes_back_and_is_refused(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path
) -> None:
    wait_for_nodes(cluster, 3)
    running = Running(cluster, spark, tmp_path)
    running.slices(2)
    name = cluster.add_node()  # a machine of its own
    wait_for(lambda: name in (worker for _, worker in cluster.executors().values()))
    node = next(n for n, (_, worker) in cluster.executors().items() if worker == name)
    wait_for(lambda: node in running.placement.nodes)
    executor, _ = cluster.executors()[node]
    zombie = running.node_process(node)
    machine = [cluster.workers[name], *processes_of(cluster, executor)]
    assert zombie in machine
    assert len(machine) >= 4  # with a Python worker

    def alive() -> list[int]:
        return list(watchdog.members(str(cluster.directory)))

    def cut_off() -> None:
        effects = inside(running.job).run.effects
        wait_for(lambda: isinstance(effects.doing, RunSlice))  # in the middle of something
        for pid in machine:
            cluster.kill(pid, signal.SIGSTOP)

    recovery = disturbed(running, cut_off, node)
    assert "silent" in recovery.reason
    assert zombie in alive()
    for pid in machine[1:]:  # its worker, which would kill it on Spark's behalf, stays away
        cluster.kill(pid, signal.SIGCONT)
    wait_for(lambda: zombie not in alive())  # it ended itself
    assert executor in alive()
    running.slices(2)
    assert node not in running.placement.nodes
    cluster.kill(machine[0], signal.SIGCONT)
    wait_for(lambda: executor not in alive())
    wait_for(lambda: len(executors(spark)) == 4)  # it has another one
    cluster.kill(machine[0])
    for pid, worker in cluster.executors().values():
        if worker == name:
            cluster.kill(pid)
    running.end()
    wait_for(lambda: len(cluster.executors()) == 3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_ends_the_run_and_a_restart_goes_on(
    spark: SparkSession, tmp_path: Path, small_disk: Path
) -> None:
    raw = [numbers(tmp_path / "in", files=6, rows=40)]

    def start() -> ab.Job:
        topology = ab.Topology("sums")
        rows = topology.source("numbers", stream(tmp_path / "in", "k long, v long"))
        sums = rows.key_by("k").aggregate("sum", total=ab.sum("v"))
        sums.to("out", ab.Parquet(str(tmp_path / "out")))
        return topology.start(spark, checkpoint=small_disk / "ck", slice="200ms")

    job = start()
    wait_for(lambda: sum(p.rows_in for p in job.recent_progress) == 240)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError as full:
            assert full.strerror == "No space left on device"
    raw.append(numbers(tmp_path / "in", files=6, rows=40, start=6))
    wait_for(lambda: not job.is_active)
    assert job.exception is not None
    assert "No space left on device" in job.exception.message
    ballast.unlink()
    again = start()
    wait_for(lambda: sum(p.rows_in for p in again.recent_progress) >= 240)
    again.stop()
    assert again.exception is None
    expected = pl.concat(raw).group_by("k").agg(total=pl.col("v").sum())
    found = final_values(read_output(tmp_path / "out"))
    assert found == {k: {"total": total} for k, total in expected.rows()}
