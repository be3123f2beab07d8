"""PySpark's daemon, which forks Python workers, with everything a wave needs imported before.

A worker then starts in milliseconds instead of a second of imports: what counts right after a loss,
when a cancelled job has ended the workers of healthy nodes. The executor's node process is forked
from it too, first of all. Used by `EmbeddedCluster`; elsewhere it needs Anabranch installed on the
nodes and the setting `spark.python.daemon.module`.
"""

from __future__ import annotations

import pyspark.worker  # noqa: F401

import anabranch.spark.tasks  # noqa: F401
from anabranch.node.process import server

if __name__ == "__main__":
    from pyspark.daemon import manager

    server.fork()
    manager()
