"""The same queries in Structured Streaming, with the settings that suit it best.

Its session takes Spark's own defaults where Anabranch's differ (locality, retries, Arrow batches),
as many shuffle partitions as we have partitions, and RocksDB with a changelog for its state.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

from benchmarks.workloads import (
    INCIDENTS,
    LOCATIONS,
    SENTENCES,
    SETTINGS,
    Run,
    Shape,
    read_files,
    watch,
)

_STATE = "spark.sql.streaming.stateStore"


def settings(parallelism: int) -> dict[str, str]:
    """A session for the peer on an EmbeddedCluster."""
    return {
        **SETTINGS,
        "spark.locality.wait": "3s",
        "spark.locality.wait.process": "3s",
        "spark.shuffle.reduceLocality.enabled": "true",
        "spark.scheduler.revive.interval": "1s",
        "spark.shuffle.io.retryWait": "5s",
        "spark.cleaner.periodicGC.interval": "30min",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
        "spark.sql.shuffle.partitions": str(parallelism),
        f"{_STATE}.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
    }


def check_packages() -> None:
    """Say now, not after minutes, what the Python operator lacks."""
    for package in ("pandas", "google.protobuf"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise SystemExit(
                f"transformWithStateInPandas needs {package}: "
                "pip install 'pandas<3' 'protobuf>=6.33'"
            ) from None


def _words(spark: Any, directory: Path, shape: Shape) -> Any:
    sentences = read_files(spark, directory, SENTENCES, shape.files)
    words = sentences.select("ts", F.explode(F.split("sentence", " ")).alias("word"))
    return words.withWatermark("ts", "0 seconds")


def word_count(spark: Any, directory: Path, shape: Shape) -> Any:
    """G3 in native SQL."""
    words = _words(spark, directory, shape)
    return words.groupBy(F.window("ts", "30 seconds"), "word").agg(F.count("*").alias("n"))


def python_word_count(spark: Any, directory: Path, shape: Shape) -> Any:
    """G3 with the Python operator: words split in SQL, counted in transformWithStateInPandas."""
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    # Inside the function, so that it is sent to the executors by value.
    class Counter(StatefulProcessor):  # type: ignore[misc]
        """A count per (window end, word); the end's timer emits it."""

        def init(self, handle: Any) -> None:
            self._handle = handle
            self._count = handle.getValueState("n", "n long")

        def handleInputRows(  # noqa: N802
            self, key: Any, rows: Iterator[Any], timerValues: Any
        ) -> Iterator[Any]:
            found = self._count.get()
            if found is None:
                self._handle.registerTimer(int(key[0]))
            self._count.update(((found[0] if found else 0) + sum(len(r) for r in rows),))
            yield from ()

        def handleExpiredTimer(  # noqa: N802
            self, key: Any, timerValues: Any, expiredTimerInfo: Any
        ) -> Iterator[Any]:
            row = {"window_end": [key[0]], "word": [key[1]], "n": [self._count.get()[0]]}
            self._count.clear()
            yield pd.DataFrame(row)

    words = _words(spark, directory, shape)
    end = (F.unix_millis(F.window("ts", "30 seconds").end)).alias("window_end")
    keyed = words.select("ts", end, "word").groupBy("window_end", "word")
    output = "window_end long, word string, n long"
    return keyed.transformWithStateInPandas(Counter(), output, "Append", "EventTime")


def traffic(spark: Any, directory: Path, shape: Shape) -> Any:
    """The traffic topology's joined output."""

    def read(name: str, columns: str) -> Any:
        frame = read_files(spark, directory / name, columns, shape.files)
        return frame.withWatermark("ts", "0 seconds")

    window = F.window("ts", "10 seconds", "1 second")
    speed = (
        read("locations", LOCATIONS)
        .where("speed >= 0")
        .groupBy(window, "seg")
        .agg(F.avg("speed").alias("speed"))
    )
    incidents = (
        read("incidents", INCIDENTS)
        .where("seg is not null")
        .groupBy(window, "seg")
        .agg(F.count("*").alias("incidents"))
    )
    return speed.join(incidents, ["window", "seg"])


def run_peer(
    cluster: Any,
    spark: Any,
    frame: Any,
    out: Path,
    root: Path,
    shape: Shape,
    warmup: int,
    mode: str = "append",
) -> Run:
    """Write the query's rows to Parquet files until all that is there is processed.

    Spark's streaming file sink only appends; a query in update mode writes a directory per batch.
    """

    def write(batch: Any, number: int) -> None:
        batch.write.parquet(str(out / f"batch={number}"))

    writer = frame.writeStream.format("parquet").option("path", str(out))
    if mode == "update":
        writer = frame.writeStream.foreachBatch(write)
    query = (
        writer.option("checkpointLocation", str(root))
        .outputMode(mode)
        .trigger(availableNow=True)
        .start()
    )
    return watch(cluster, spark, query, shape, warmup)
