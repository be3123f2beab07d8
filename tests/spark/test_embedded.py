"""Real processes: they join, die and are never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from anabranch.errors import ClusterError, ConfigError
from anabranch.spark import watchdog
from anabranch.spark.embedded import EmbeddedCluster
from anabranch.spark.session import executors


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_every_worker_hosts_one_executor_of_the_session(
    cluster: EmbeddedCluster, spark: SparkSession
) -> None:
    hosted = cluster.executors()
    assert hosted.keys() == executors(spark).keys()
    assert sorted(worker for _, worker in hosted.values()) == sorted(cluster.workers)
    assert spark.range(100).count() == 100


def test_executors_run_the_drivers_python(spark: SparkSession) -> None:
    def interpreter(_: int) -> str:
        return sys.executable

    assert spark.sparkContext.parallelize([0], 1).map(interpreter).collect() == [sys.executable]


def test_a_killed_executor_is_noticed_and_replaced(
    cluster: EmbeddedCluster, spark: SparkSession
) -> None:
    victim, (pid, worker) = next(iter(cluster.executors().items()))
    cluster.kill(pid)
    assert eventually(lambda: victim not in executors(spark), 5)
    assert eventually(lambda: len(executors(spark)) == 3, 60)
    assert victim not in cluster.executors()
    assert worker in {name for _, name in cluster.executors().values()}


def test_an_added_node_joins_and_a_killed_worker_takes_its_executor_along(
    cluster: EmbeddedCluster, spark: SparkSession
) -> None:
    before = set(executors(spark))
    name = cluster.add_node()
    assert name in cluster.workers
    assert eventually(lambda: len(executors(spark)) == 4, 60)
    (newcomer,) = set(executors(spark)) - before
    pid, worker = cluster.executors()[newcomer]
    assert worker == name

    cluster.kill(cluster.workers[name])
    assert eventually(lambda: not Path(f"/proc/{pid}").exists(), 10)
    assert eventually(lambda: set(executors(spark)) == before, 10)
    assert name not in cluster.workers


def test_only_its_own_processes_are_killed(cluster: EmbeddedCluster) -> None:
    with pytest.raises(ClusterError, match="not part of this cluster"):
        cluster.kill(os.getpid())


def test_a_second_session_in_one_process_is_refused(
    cluster: EmbeddedCluster, spark: SparkSession
) -> None:
    with pytest.raises(ClusterError, match="call its stop"):
        cluster.session("another")


@pytest.mark.parametrize(("nodes", "memory_mb"), [(0, 1024), (2, 100)])
def test_impossible_sizes_are_refused(nodes: int, memory_mb: int) -> None:
    with pytest.raises(ConfigError):
        EmbeddedCluster(nodes, memory_mb)


OWNER = """
import sys, time
from anabranch.spark.embedded import EmbeddedCluster

with EmbeddedCluster(nodes=1) as cluster:
    for left in reversed(range(int(sys.argv[1]))):
        spark = cluster.session("owner")
        assert spark.sparkContext.parallelize([1, 2], 2).map(lambda x: x + 1).sum() == 5
        if left:
            spark.stop()
    print(cluster.directory, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("sig", "sessions"), [(signal.SIGKILL, 2), (signal.SIGINT, 1)])
def test_nothing_is_left_when_the_owner_ends(sig: signal.Signals, sessions: int) -> None:
    """Sessions in a row, a quiet terminal, and no process or file after any kind of end."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(sessions)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    assert owner.stderr is not None
    directory = owner.stdout.readline().strip()
    assert directory, owner.stderr.read()
    # Master, worker, driver, executor, its Python daemon and worker.
    assert len(watchdog.members(directory)) >= 5
    owner.send_signal(sig)
    assert eventually(lambda: owner.poll() is not None, 30)
    assert eventually(lambda: not watchdog.members(directory), 5)
    assert eventually(lambda: not Path(directory).exists(), 5)
    stderr = owner.stderr.read()
    if sig == signal.SIGINT:
        assert stderr.rstrip().endswith("KeyboardInterrupt")
    else:
        assert stderr == ""
