"""The start of a run on Spark: its sources, its nodes, and the query that offers batches."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from anabranch.driver.opening import Opening
from anabranch.driver.preparing import prepare
from anabranch.driver.reading import Reading
from anabranch.driver.run import Run, RunJob
from anabranch.driver.starting import announce
from anabranch.errors import ClusterError
from anabranch.model.slices import SliceRecord
from anabranch.spark.cluster import SparkCluster
from anabranch.spark.session import (
    check_executors,
    check_session,
    close_callbacks,
    first_line,
    shares_files,
    ship_package,
)
from anabranch.spark.shipping import pickle_spec
from anabranch.spark.sources import arrow_schema, open_sources, unite
from anabranch.storage.spark_offsets import refuse_misfit_offsets


def start_job(spark: SparkSession, opening: Opening) -> Reading:
    """Check what Spark has to say, take over, restore, replay, then begin to read."""
    announce("opening the sources")
    check_session(spark)
    close_callbacks(spark)
    parts = opening.parts
    frames = open_sources(spark, parts.sources)
    schemas = {n: arrow_schema(spark, f, n) for n, f in frames.items()}
    stream = unite(frames)
    opening.bind_sinks(spark)  # before nodes get their copies
    united = arrow_schema(spark, stream, parts.plan.graph.name)
    prepared = prepare(parts, opening.root, opening.options, schemas, united)
    spec = pickle_spec(prepared.spec)
    run = Run(
        RunJob.of(opening, prepared, spec),
        partial(_connect, spark, opening, spec),
        closing=opening.close,
    )
    reading = Reading(run, first_line, partial(_hush_queries, spark))
    try:
        opening.runs(run)
        announce("starting to read")
        _begin(reading, stream, opening)
        announce("waiting for the first slice")
    except BaseException:
        reading.close()
        raise
    return reading


def _connect(
    spark: SparkSession, opening: Opening, spec: bytes, newest: SliceRecord | None
) -> SparkCluster:
    """Warm every executor of the session: they are the nodes."""
    refuse_misfit_offsets(opening.root, newest)
    announce("starting Python on the nodes")
    if not shares_files(spark):
        ship_package(spark)
        check_executors(spark)
    limit_ms = opening.options.slice_timeout_ms
    return SparkCluster(
        spark,
        str(opening.root),
        spec,
        opening.parts.plan.waves,
        opening.options.node_timeout_ms / 1000,
        None if limit_ms is None else limit_ms / 1000,
    )


def _begin(reading: Reading, stream: DataFrame, opening: Opening) -> None:
    """Start the query that offers batches, and follow it."""
    options = opening.options
    trigger: dict[str, Any] = (
        {"availableNow": True}
        if options.available_now
        else {"processingTime": f"{options.slice_interval_ms} milliseconds"}
    )
    writer = (
        stream.writeStream.foreachBatch(reading.on_batch)
        # Spark's default file system may be another one. Hadoop decodes no escapes in a path.
        .option("checkpointLocation", f"file://{opening.root}/spark")
        .queryName(opening.parts.plan.graph.name)
        .trigger(**trigger)
    )
    try:
        query = writer.start()
    except Exception as e:
        raise ClusterError(
            f"Spark could not begin to read {reading.run.reads}: {first_line(e)}"
        ) from e
    reading.follow(query)
    if not options.available_now:
        reading.tick(options.slice_interval_ms / 1000)


def _hush_queries(spark: SparkSession) -> None:
    """A query is about to end by an exception of ours: Spark need not print its trace."""
    with contextlib.suppress(Exception):  # Spark may be gone
        log4j = spark._jvm.org.apache.logging.log4j
        for name in ("sql.execution.streaming", "api.python.PythonForeachWriter"):
            log4j.core.config.Configurator.setLevel(f"org.apache.spark.{name}", log4j.Level.OFF)
