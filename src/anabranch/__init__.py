"""Anabranch: reliable, elastic, balanced stream processing on PySpark.

Importing this never imports pyspark; `Topology.start` and `EmbeddedCluster` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.api import Job, KeyedStream, Stream, Topology, WindowedStream, describe
from anabranch.control.autoscaler import Autoscale
from anabranch.errors import AnabranchError
from anabranch.operators.aggregates import Count as count  # noqa: N813 - functions to a user
from anabranch.operators.aggregates import Max as max  # noqa: N813
from anabranch.operators.aggregates import Mean as mean  # noqa: N813
from anabranch.operators.aggregates import Min as min  # noqa: N813
from anabranch.operators.aggregates import Sum as sum  # noqa: N813
from anabranch.operators.distinct import CountDistinct as count_distinct  # noqa: N813
from anabranch.operators.functions import KeyedSlice, SliceFunction, SliceResult
from anabranch.operators.row_functions import KeyState, RowFunction
from anabranch.operators.sessions import session
from anabranch.operators.windows import hopping, tumbling
from anabranch.storage.sinks import Console, Delta, ForEachSlice, Memory, Parquet, Postgres
from anabranch.storage.state_reader import read_state

if TYPE_CHECKING:
    from anabranch.spark.embedded import EmbeddedCluster

__version__ = "0.1.0"

__all__ = [
    "AnabranchError",
    "Autoscale",
    "Console",
    "Delta",
    "EmbeddedCluster",
    "ForEachSlice",
    "Job",
    "KeyState",
    "KeyedSlice",
    "KeyedStream",
    "Memory",
    "Parquet",
    "Postgres",
    "RowFunction",
    "SliceFunction",
    "SliceResult",
    "Stream",
    "Topology",
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
    "sum",
    "tumbling",
]


def __getattr__(name: str) -> Any:
    if name == "EmbeddedCluster":
        from anabranch.spark.embedded import EmbeddedCluster

        return EmbeddedCluster
    raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
