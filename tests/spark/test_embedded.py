"""Real processes: they join, die and are never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import wait_for
from pyspark.sql import SparkSession

from anabranch.errors import ClusterError, ConfigError
from anabranch.spark import watchdog
from anabranch.spark.embedded import EmbeddedCluster
from anabranch.spark.session import executors


def test_every_node_is_an_executor_of_the_session(
    cluster: EmbeddedCluster, spark: SparkSession
) -> None:
    hosted = cluster.executors()
    assert len(hosted) == 3
    assert hosted.keys() == executors(spark).keys()
    assert {worker for _, worker in hosted.values()} == cluster.workers.keys()
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
    wait_for(lambda: victim not in executors(spark))
    wait_for(lambda: len(executors(spark)) == 3)
    assert victim not in cluster.executors()
    assert worker in {name for _, name in cluster.executors().values()}


def test_an_added_node_joins_and_a_killed_worker_takes_its_executor_along(
    cluster: EmbeddedCluster, spark: SparkSession
) -> None:
    before = set(executors(spark))
    name = cluster.add_node()
    assert name in cluster.workers
    wait_for(lambda: len(executors(spark)) == 4)
    (newcomer,) = set(executors(spark)) - before
    pid, worker = cluster.executors()[newcomer]
    assert worker == name

    cluster.kill(cluster.workers[name])
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    wait_for(lambda: set(executors(spark)) == before)
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
from pathlib import Path
from anabranch.spark import archive
from anabranch.spark.embedded import EmbeddedCluster

archive.MAKE_TIMEOUT_S = 600.0  # on a busy machine, too

def uses_the_archive(pid):
    return sys.argv[2] in Path(f"/proc/{pid}/maps").read_text()

with EmbeddedCluster(nodes=1) as cluster:
    for left in reversed(range(int(sys.argv[1]))):
        spark = cluster.session("owner")
        assert spark.sparkContext.parallelize([1, 2], 2).map(lambda x: x + 1).sum() == 5
        # What the user's spark-defaults.conf says, but not what is Anabranch's to decide.
        assert spark.conf.get("spark.sql.shuffle.partitions") == "7"
        assert spark.sparkContext.getConf().get("spark.executor.cores") == "1"
        assert spark.range(3).count() == 3
        if left:
            spark.stop()  # its JVM archives the classes that it has loaded
        elif sys.argv[1] == "2":
            assert uses_the_archive(spark.sparkContext._gateway.proc.pid)
            ((executor, _),) = cluster.executors().values()
            assert uses_the_archive(executor)
            worker = cluster.add_node()
            assert uses_the_archive(cluster.workers[worker])
    print(cluster.directory, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("sig", "sessions"), [(signal.SIGKILL, 2), (signal.SIGINT, 1)])
def test_nothing_is_left_when_the_owner_ends(
    sig: signal.Signals, sessions: int, tmp_path: Path
) -> None:
    """Sessions in a row, the second with the classes of the first, a quiet terminal, and no process
    or file after any kind of end."""
    defaults = tmp_path / "spark-defaults.conf"
    defaults.write_text("spark.sql.shuffle.partitions 7\nspark.executor.cores 4\n")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(sessions), str(tmp_path / "anabranch")],
        env={**os.environ, "SPARK_CONF_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
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
    wait_for(lambda: owner.poll() is not None)
    wait_for(lambda: not watchdog.members(directory))
    wait_for(lambda: not Path(directory).exists())
    stderr = owner.stderr.read()
    if sig == signal.SIGINT:
        assert stderr.rstrip().endswith("KeyboardInterrupt")
    else:
        assert stderr == ""
