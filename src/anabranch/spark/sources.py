"""Sources: any number of Spark streaming DataFrames as one streaming query.

Several sources are united into one query, each as one nullable struct column, so that Spark keeps
the offsets of all of them in one atomic batch: a slice takes a batch, or nothing, from each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import pyarrow as pa
import pyspark
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming import DataStreamReader

from anabranch.errors import AnabranchError, TopologyError
from anabranch.spark.session import first_line

_PACKAGES = "anabranch run --packages {} …, or spark.jars.packages of a session of your own"
_KAFKA = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
# What Spark says of a source that it cannot open, and what helps.
_HINTS = {
    "[KAFKA_DATA_SOURCE_NOT_ENABLED]": f"give its package: {_PACKAGES.format(_KAFKA)}",
    "[DATA_SOURCE_NOT_FOUND]": "correct the name, or give its package: "
    + _PACKAGES.format("GROUP:NAME:VERSION"),
    "[PATH_NOT_FOUND]": "make the directory first, or correct the path",
    "Schema must be specified": 'name its columns: spark.readStream.schema("user string, n long")',
}


def open_sources(spark: SparkSession, sources: Mapping[str, Any]) -> dict[str, DataFrame]:
    """The DataFrame of every source, made now where a function was given."""
    opened: dict[str, DataFrame] = {}
    for name, data in sources.items():
        frame = _made(spark, name, data) if callable(data) else data
        if not hasattr(frame, "isStreaming"):
            load = "; end it with .load()" if isinstance(frame, DataStreamReader) else ""
            raise TopologyError(
                f"the source {name!r} is {_shown(frame)}{' of its function' * callable(data)}; "
                "give a Spark streaming DataFrame, or a function that takes the session and "
                f"returns one{load}",
                operator=name,
            )
        if not frame.isStreaming:
            raise TopologyError(
                f"the source {name!r} is a batch DataFrame; read it with spark.readStream",
                operator=name,
            )
        opened[name] = frame
    return opened


def _made(spark: SparkSession, name: str, function: Callable[[SparkSession], Any]) -> Any:
    """What the function of a source gives; what it raises becomes a sentence."""
    spark_log = PySparkLogger.getLogger("DataFrameQueryContextLogger")  # prints the whole trace
    before, spark_log.disabled = spark_log.disabled, True
    try:
        return function(spark)
    except AnabranchError:
        raise
    except (PySparkException, Py4JError) as e:
        said = first_line(e)
        hint = next((h for words, h in _HINTS.items() if words in said), "")
        raise TopologyError(
            f"the source {name!r} cannot be read: {said}{hint and '; ' + hint}", operator=name
        ) from None  # Spark's trace, and Java's, would stand before the sentence
    except Exception as e:
        raise TopologyError(
            f"the function of the source {name!r} raised {type(e).__name__}: {e}; it is called "
            "with the Spark session and returns a streaming DataFrame",
            operator=name,
        ) from e
    finally:
        spark_log.disabled = before


def _shown(value: Any) -> str:
    """None and other mistakes, as a user would call them."""
    return "None" if value is None else f"a {type(value).__name__}"


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
