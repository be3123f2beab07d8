"""The driver of `correlated` as a process that can be killed:
python -m benchmarks.correlated_driver ROOT MASTER NODES PLAN, the last being JSON.

Into ROOT/told it writes a line per look: which queries are live, and where partitions live. It
stops the job when there is a file ROOT/stop and all rows are read.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import anabranch as ab
from anabranch.api.job import inside
from anabranch.spark.settings import SETTINGS
from benchmarks import workloads
from benchmarks.correlated_jobs import CASES, Costs

LOOK_S = 0.25
MEMORY = "1024m"  # of a node


def session(master: str) -> Any:
    from pyspark.sql import SparkSession

    settings = {
        **SETTINGS,
        **workloads.SETTINGS,
        "spark.executor.memory": MEMORY,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    builder: Any = SparkSession.builder
    return builder.master(master).appName("correlated").config(map=settings).getOrCreate()


def look(job: ab.Job) -> dict[str, Any]:
    """What the parent is told of."""
    placement, newest = inside(job).run.controller.placement, job.last_progress
    owners = placement.owners.items() if placement is not None else ()
    return {
        "at": time.time(),
        "slice": newest.slice if newest is not None else 0,
        "seconds": newest.seconds if newest is not None else 0.0,
        "cut": newest.checkpoint_slice if newest is not None else 0,
        "live": sum(q.state == "live" for q in job.status().queries),
        "queries": len(job.status().queries),
        "recovering": job.is_recovering,
        "homes": {str(p): str(o.node) for p, o in owners},
        "nodes": job.nodes,
    }


def main() -> None:
    root, master, nodes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    given = json.loads(sys.argv[4])
    spark = session(master)
    while spark.sparkContext._jsc.sc().getExecutorIds().size() < nodes:
        time.sleep(0.02)
    topology = CASES[given["case"]].build(root, Costs(*given["costs"]))
    job = topology.start(spark, checkpoint=root / "ck", **given["options"])
    stop = root / "stop"
    while job.is_active and not stop.exists():
        with (root / "told").open("a") as told:
            told.write(json.dumps(look(job)) + "\n")
        time.sleep(LOOK_S)
    job.stop()
    if job.exception is not None:
        raise job.exception


if __name__ == "__main__":
    main()
