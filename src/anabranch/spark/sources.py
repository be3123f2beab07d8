"""Sources: any number of Spark streaming DataFrames as one streaming query.

Several sources are united into one query, each as one nullable struct column, so that Spark keeps
the offsets of all of them in one atomic batch: a slice takes a batch, or nothing, from each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from anabranch.errors import TopologyError

SourceData = DataFrame | Callable[[SparkSession], DataFrame]


def open_sources(spark: SparkSession, sources: Mapping[str, Any]) -> dict[str, DataFrame]:
    """The DataFrame of every source, made now where a function was given."""
    opened: dict[str, DataFrame] = {}
    for name, data in sources.items():
        frame = data(spark) if callable(data) else data
        if not hasattr(frame, "isStreaming"):
            raise TopologyError(
                f"the source {name!r} is a {type(frame).__name__}; give a Spark streaming "
                "DataFrame, or a function that takes the session and returns one",
                operator=name,
            )
        if not frame.isStreaming:
            raise TopologyError(
                f"the source {name!r} is a batch DataFrame; read it with spark.readStream",
                operator=name,
            )
        opened[name] = frame
    return opened


def unite(frames: Mapping[str, DataFrame]) -> DataFrame:
    """One DataFrame for all sources: itself for one, a struct column each for several."""
    if len(frames) == 1:
        return next(iter(frames.values()))
    columns = list(frames)
    parts = []
    for name, frame in frames.items():
        parts.append(
            frame.select(
                *[
                    F.struct(*[frame[c] for c in frame.columns]).alias(other)
                    if other == name
                    else F.lit(None).cast(frames[other].schema).alias(other)
                    for other in columns
                ]
            )
        )
    return reduce(DataFrame.union, parts)


def arrow_schema(spark: SparkSession, frame: DataFrame, name: str) -> pa.Schema:
    """The schema Spark's Arrow batches of this DataFrame have."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    large = spark.conf.get("spark.sql.execution.arrow.useLargeVarTypes", "false") == "true"
    try:
        return to_arrow_schema(frame.schema, timezone=zone, prefers_large_types=large)
    except Exception as e:
        raise TopologyError(
            f"the source {name!r} has a column Arrow cannot carry: {e}; cast or drop it",
            operator=name,
        ) from e
