"""Anabranch: reliable, elastic, balanced stream processing on PySpark.

Importing this never imports pyspark; `Topology.start`, `spark_session` and `EmbeddedCluster` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.api import Job, KeyedStream, Stream, Topology, WindowedStream, describe
from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.balance import Balance
from anabranch.driver.progress import Progress, Totals
from anabranch.driver.queries import CapacityStatus, QueryStatus
from anabranch.driver.status import JobStatus, NodeStatus, OperatorStatus
from anabranch.errors import (
    AdjustmentError,
    AnabranchError,
    CheckpointLockedError,
    CheckpointMismatchError,
    ClusterError,
    ConfigError,
    EnvironmentFault,
    InvariantError,
    OperatorError,
    PlanningError,
    StorageError,
    TopologyError,
    UserError,
)
from anabranch.model.recovery import Adjustment, Recovery
from anabranch.model.scaling import Decision
from anabranch.operators.functions import KeyedSlice, SliceFunction, SliceResult
from anabranch.operators.functions.row_functions import KeyState, RowFunction
from anabranch.operators.kernels.aggregates import Count as count  # noqa: N813 - functions to a user
from anabranch.operators.kernels.aggregates import Max as max  # noqa: N813
from anabranch.operators.kernels.aggregates import Mean as mean  # noqa: N813
from anabranch.operators.kernels.aggregates import Min as min  # noqa: N813
from anabranch.operators.kernels.aggregates import Sum as sum  # noqa: N813
from anabranch.operators.kernels.distinct import CountDistinct as count_distinct  # noqa: N813
from anabranch.operators.kernels.sessions import session
from anabranch.operators.kernels.windows import hopping, tumbling
from anabranch.sinks import Console, Delta, ForEachSlice, Memory, Parquet, Postgres, Sink
from anabranch.spark.settings import require_pyspark
from anabranch.spark.starting import spark_session
from anabranch.upgrade.state_reader import read_state

if TYPE_CHECKING:
    from anabranch.spark.embedded import EmbeddedCluster

__version__ = "0.1.0"

__all__ = [
    "Adjustment",
    "AdjustmentError",
    "AnabranchError",
    "Autoscale",
    "Balance",
    "CapacityStatus",
    "CheckpointLockedError",
    "CheckpointMismatchError",
    "ClusterError",
    "ConfigError",
    "Console",
    "Decision",
    "Delta",
    "EmbeddedCluster",
    "EnvironmentFault",
    "ForEachSlice",
    "InvariantError",
    "Job",
    "JobStatus",
    "KeyState",
    "KeyedSlice",
    "KeyedStream",
    "Memory",
    "NodeStatus",
    "OperatorError",
    "OperatorStatus",
    "Parquet",
    "PlanningError",
    "Postgres",
    "Progress",
    "QueryStatus",
    "Recovery",
    "RowFunction",
    "Sink",
    "SliceFunction",
    "SliceResult",
    "StorageError",
    "Stream",
    "Topology",
    "TopologyError",
    "Totals",
    "UserError",
    "WindowedStream",
    "count",
    "count_distinct",
    "describe",
    "hopping",
    "max",
    "mean",
    "min",
    "read_state",
    "session",
    "spark_session",
    "sum",
    "tumbling",
]


def __getattr__(name: str) -> Any:
    if name == "EmbeddedCluster":
        require_pyspark()
        from anabranch.spark.embedded import EmbeddedCluster

        return EmbeddedCluster
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
