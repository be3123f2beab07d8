"""`ab.spark_session`: the one way to a session that is fit for a job, wherever it runs.

Without a master it starts a cluster on this machine, which ends with the block. Whatever can be
refused without a JVM is refused by the call itself, before the block is entered.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.driver.starting import announce
from anabranch.errors import ClusterError, ConfigError
from anabranch.spark.java import find_java, said_by_java
from anabranch.spark.master import check_master
from anabranch.spark.settings import (
    OWNED,
    SETTINGS,
    checked_conf,
    megabytes,
    require_pyspark,
    users_defaults,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXECUTORS_TIMEOUT_S = 120.0  # a cluster manager may have to start containers first
DEFAULT_NODES = 3
DEFAULT_MEMORY = "1g"


def spark_session(
    master: str | None = None,
    *,
    nodes: int = DEFAULT_NODES,
    memory: str = DEFAULT_MEMORY,
    packages: Sequence[str] | str = (),
    name: str = "anabranch",
    **conf: Any,
) -> AbstractContextManager[SparkSession]:
    """A Spark session with `nodes` executors, for a `with` block.

        with ab.spark_session(nodes=3, memory="2g") as spark:
            topology.run(spark, checkpoint="checkpoints/words")

    On a cluster of this machine or, with a `master`, on one you have. `memory` is that of each
    executor; `packages` are Maven coordinates; `conf` are settings of Spark, as
    `**{"spark.sql.shuffle.partitions": 8}`. The user's `spark-defaults.conf` counts as well. What
    Anabranch itself must decide is refused.
    """
    require_pyspark()
    if nodes < 1:
        raise ConfigError(f"a cluster needs at least one node: nodes={nodes}")
    size = megabytes(memory)
    wanted = checked_conf(conf, packages, embedded=master is None)
    find_java()
    if master is None:
        return _on_this_machine(nodes, size, name, wanted)
    check_master(master)
    return _on(master, nodes, size, name, wanted)


@contextlib.contextmanager
def _on_this_machine(
    nodes: int, memory_mb: int, name: str, conf: Mapping[str, str]
) -> Iterator[SparkSession]:
    from anabranch.spark.embedded import EmbeddedCluster

    with EmbeddedCluster(nodes, memory_mb, conf) as cluster:
        yield cluster.session(name)


@contextlib.contextmanager
def _on(
    master: str, nodes: int, memory_mb: int, name: str, conf: Mapping[str, str]
) -> Iterator[SparkSession]:
    announce(f"connecting to {master}")
    with tempfile.TemporaryDirectory(prefix="anabranch-driver-") as directory:
        log = Path(directory) / "driver.log"
        spark = _connect(master, nodes, memory_mb, name, conf, log)
        try:
            _await_executors(spark, master, nodes)
            yield spark
        finally:
            spark.stop()


def _connect(
    master: str, nodes: int, memory_mb: int, name: str, conf: Mapping[str, str], log: Path
) -> SparkSession:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    os.environ.setdefault("JAVA_HOME", str(find_java().home))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if SparkContext._active_spark_context is not None:
        raise ClusterError("this process has a Spark session already: call its stop() first")
    settings = {
        **ours(),
        "spark.master": master,
        "spark.app.name": name,
        "spark.executor.memory": f"{memory_mb}m",
        "spark.cores.max": str(nodes),
        "spark.executor.instances": str(nodes),
        **conf,
    }
    spark_conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    try:
        # What Spark says while it fails is told in one sentence.
        with log.open("ab") as errors:
            gateway = SparkContext._gateway or launch_gateway(spark_conf, {"stderr": errors})
        spark = SparkSession(SparkContext(conf=spark_conf, gateway=gateway))
    except Exception as e:
        raise ClusterError(f"there is no Spark session on {master}: {said_by_java(e, log)}") from e
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def ours() -> dict[str, str]:
    """Our settings, without those for which the user's spark-defaults.conf has another value and
    may."""
    users = users_defaults()
    return {k: v for k, v in SETTINGS.items() if k in OWNED or k not in users}


def _await_executors(spark: SparkSession, master: str, nodes: int) -> None:
    from anabranch.spark.session import check_session, executors

    check_session(spark)
    deadline = time.monotonic() + EXECUTORS_TIMEOUT_S
    told = -1
    while (joined := len(executors(spark))) < nodes:
        if joined != told:
            announce(f"waiting for nodes, {joined} of {nodes} are there")
            told = joined
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{joined} of {nodes} executors joined from {master} within "
                f"{EXECUTORS_TIMEOUT_S:.0f} s; free some of its cores, or ask for fewer --nodes"
            )
        time.sleep(0.1)
