"""Input, and ways to run a topology to its end, for tests on real executors."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.spark.embedded import EmbeddedCluster

PATIENCE_S = 240.0  # until something counts as not happening
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def write_rows(directory: Path, number: int, rows: pl.DataFrame) -> None:
    """One Parquet file of a stream's input, visible at once."""
    directory.mkdir(parents=True, exist_ok=True)
    hidden = directory / f".{number:05d}.tmp"
    pq.write_table(rows.to_arrow(), hidden)
    # Spark takes files in the order of their times, in milliseconds.
    os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
    hidden.rename(directory / f"{number:05d}.parquet")


def stream(directory: Path, columns: str, files: int = 1) -> Any:
    """A source that reads so many files a batch, in the order they were written."""
    return lambda spark: (
        spark.readStream.schema(columns).option("maxFilesPerTrigger", files).parquet(str(directory))
    )


def numbers(directory: Path, files: int, rows: int, keys: int = 7, start: int = 0) -> pl.DataFrame:
    """Files of (k, v); returns all rows of them."""
    frames = []
    for number in range(start, start + files):
        v = pl.int_range(number * rows, (number + 1) * rows, eager=True)
        frame = pl.DataFrame({"k": v * 31 % keys, "v": v})
        write_rows(directory, number, frame)
        frames.append(frame)
    return pl.concat(frames)


def wait_for(condition: Callable[[], bool]) -> None:
    """However slow the machine is just now: a test that waits in vain fails anyway."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def wait_for_nodes(cluster: EmbeddedCluster, count: int) -> None:
    """So many executors at least: the test before may have killed some."""
    try:
        wait_for(lambda: len(cluster.executors()) >= count)
    except AssertionError:
        logs = "\n".join(cluster.tail(name) for name in ("master", *cluster.workers, "driver"))
        raise AssertionError(f"only {cluster.executors()} of {count} nodes came:\n{logs}") from None


def run_to_end(topology: ab.Topology, spark: SparkSession, checkpoint: Path, **options: Any) -> Any:
    job = topology.start(spark, checkpoint=checkpoint, available_now=True, **options)
    assert job.await_termination(240), "the job did not end"
    return job


def read_output(directory: Path) -> pl.DataFrame:
    """All exposed rows with their slice, read without the product's code."""
    files = sorted(directory.glob("slice=*/*.parquet"))
    frames = [
        pl.read_parquet(f, glob=False, hive_partitioning=False).with_columns(
            slice=pl.lit(int(f.parent.name.removeprefix("slice=")))
        )
        for f in files
    ]
    if not frames:
        return pl.DataFrame()
    times = pl.selectors.datetime(time_zone="*")
    return pl.concat(frames).with_columns(times.dt.convert_time_zone("UTC"))


def final_values(output: pl.DataFrame, key: str = "k") -> dict[Any, Any]:
    """The newest row of every key."""
    newest = output.sort("slice").group_by(key, maintain_order=True).last().drop("slice")
    return {row[key]: {c: v for c, v in row.items() if c != key} for row in newest.to_dicts()}
