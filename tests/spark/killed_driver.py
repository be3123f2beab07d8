"""One life of the driver that is killed: python -m killed_driver ROOT MASTER NODES."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import stream
from pyspark.sql import SparkSession
from test_driver_kills import STEPS

import anabranch as ab
from anabranch.spark.session import SETTINGS
from flow_topology import build
from oracle import Dataflow


def session(master: str, nodes: int) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("killed")
    settings = {
        **SETTINGS,
        "spark.cores.max": str(nodes),
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main() -> None:
    root, master, nodes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    spark = session(master, nodes)
    while spark.sparkContext._jsc.sc().getExecutorIds().size() < nodes:
        pass
    topology = build(
        Dataflow(STEPS),
        lambda name: ab.Parquet(str(root / name)),
        data=lambda name: stream(root / "in", "k long, v long"),
    )
    job = topology.start(
        spark, checkpoint=root / "ck", available_now=True, checkpoint_interval="500ms"
    )
    job.await_termination()


if __name__ == "__main__":
    main()
