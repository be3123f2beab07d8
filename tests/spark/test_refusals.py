"""What cannot work is refused with one sentence; what fails on the way loses nothing committed."""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from jobs import final_values, numbers, read_output, run_to_end, stream
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.errors import (
    CheckpointLockedError,
    CheckpointMismatchError,
    ConfigError,
    OperatorError,
    StorageError,
    TopologyError,
)
from anabranch.storage.journal import DirectoryLock


def topology(
    data: Any,
    out: Path,
    *,
    name: str = "sums",
    operator: str = "sum",
    aggregate: Any = None,
    function: Any = None,
    key: str = "k",
) -> ab.Topology:
    made = ab.Topology(name)
    source: Any = made.source("numbers", data)
    if function is not None:
        source = source.map("mapped", function)
    aggregates = {"total": aggregate or ab.sum("v")}
    source.key_by(key).aggregate(operator, **aggregates).to("out", ab.Parquet(str(out)))
    return made


@pytest.fixture(scope="module")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a job that ended, its input and its output."""
    root = tmp_path_factory.mktemp("written")
    numbers(root / "in", files=1, rows=30)
    run_to_end(topology(data(root), root / "out"), spark, root / "ck")
    return root


def data(root: Path) -> Any:
    return stream(root / "in", "k long, v long")


def test_a_directory_in_use(spark: SparkSession, written: Path) -> None:
    lock = DirectoryLock(written / "ck")
    try:
        with pytest.raises(CheckpointLockedError, match="in use by process"):
            topology(data(written), written / "out").start(spark, checkpoint=written / "ck")
    finally:
        lock.release()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "other"}, "written by topology 'sums', this one is 'other'"),
        ({"operator": "renamed"}, "operator 'sum' is now called 'renamed'"),
        (
            {"aggregate": ab.mean("v")},
            "operator 'sum' has other settings: setting 'aggregates.total' was Sum, is Mean",
        ),
        ({"key": "v"}, "operator 'sum' has another key"),
    ],
)
def test_another_topology(
    spark: SparkSession, written: Path, change: dict[str, Any], words: str
) -> None:
    changed = topology(data(written), written / "out", **change)
    with pytest.raises(CheckpointMismatchError, match=words):
        changed.start(spark, checkpoint=written / "ck")


def test_output_of_another_job(spark: SparkSession, written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to another job"):
        topology(data(written), written / "out").start(spark, checkpoint=tmp_path / "new")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("rm -r offsets commits", "ends with batch 0, but Spark's offsets are gone"),
        ("touch offsets/1 commits/1", "ends with batch 0, but Spark has committed batch 1"),
        ("touch offsets/1 offsets/2", "ends with batch 0, but Spark's offsets go on to batch 2"),
    ],
)
def test_a_journal_and_offsets_that_do_not_belong_together(
    spark: SparkSession, written: Path, tmp_path: Path, damage: str, words: str
) -> None:
    subprocess.run(["cp", "-r", written / "ck", tmp_path / "ck"], check=True)
    subprocess.run(damage.split(), cwd=tmp_path / "ck" / "spark", check=True)
    with pytest.raises(StorageError, match=words):
        topology(data(written), written / "out").start(spark, checkpoint=tmp_path / "ck")


def test_a_directory_of_this_machine_beside_another_default_file_system(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also one that was begun before, and whose name has what a URI would escape."""
    numbers(tmp_path / "in", files=1, rows=30)
    made = topology(stream(Path(f"file:{tmp_path / 'in'}"), "k long, v long"), tmp_path / "out")
    run_to_end(made, spark, tmp_path / "a name %41")
    numbers(tmp_path / "in", files=1, rows=30, start=1)
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    before = hadoop.get("fs.defaultFS")
    hadoop.set("fs.defaultFS", "hdfs://127.0.0.1:1")
    try:
        run_to_end(made, spark, tmp_path / "a name %41")
    finally:
        hadoop.set("fs.defaultFS", before)
    totals = final_values(read_output(tmp_path / "out"))
    assert sum(r["total"] for r in totals.values()) == sum(range(60))


def test_a_copied_checkpoint_directory_goes_on(
    spark: SparkSession, written: Path, tmp_path: Path
) -> None:
    subprocess.run(["cp", "-r", written, tmp_path / "copy"], check=True)
    copy = tmp_path / "copy"
    before = final_values(read_output(copy / "out"))
    # Spark remembers files by path: the input stays where it was.
    numbers(written / "in", files=1, rows=30, start=1)
    run_to_end(topology(data(written), copy / "out"), spark, copy / "ck")
    after = final_values(read_output(copy / "out"))
    assert before.keys() <= after.keys()
    assert sum(r["total"] for r in after.values()) == sum(range(60))


@pytest.mark.parametrize(
    ("columns", "change", "words"),
    [
        ("k long, v string", {}, "operator 'sum': .*'v'"),
        ("k long, w long", {}, "operator 'sum': .*column 'v'"),
        ("j long, v long", {}, "operator 'sum': key column 'k' is not in the input"),
        ("k map<string,int>, v long", {}, "'k'"),
    ],
)
def test_columns_that_do_not_fit(
    spark: SparkSession, tmp_path: Path, columns: str, change: dict[str, Any], words: str
) -> None:
    (tmp_path / "in").mkdir()
    wrong = topology(stream(tmp_path / "in", columns), tmp_path / "out", **change)
    with pytest.raises(TopologyError, match=words):
        wrong.start(spark, checkpoint=tmp_path / "ck")
    assert not (tmp_path / "ck").exists()


def test_an_event_time_that_is_none(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for column, words in (("when", "needs column 'when'"), ("v", "is int64; cast it")):
        made = ab.Topology("timed")
        source = made.source("numbers", data(tmp_path), time=column)
        source.to("out", ab.Parquet(str(tmp_path / "out")))
        with pytest.raises(TopologyError, match=words):
            made.start(spark, checkpoint=tmp_path / "ck")


def test_two_sinks_in_one_directory(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    made = ab.Topology("twice")
    source = made.source("numbers", data(tmp_path))
    source.to("one", ab.Parquet(str(tmp_path / "out")))
    source.to("two", ab.Parquet(str(tmp_path / "out")))
    with pytest.raises(TopologyError, match="'one' and 'two' write to the same directory"):
        made.start(spark, checkpoint=tmp_path / "ck")


def raising(spark: SparkSession) -> Any:
    return {}["bucket"]


def reader(name: str, **options: str) -> Any:
    return lambda spark: spark.readStream.format(name).options(**options).load()


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (
            lambda spark: spark.readStream.schema("v long").parquet("/no/such/place"),
            r"'numbers' cannot be read: .*Path does not exist: .*/no/such/place.*; make the dir",
        ),
        (
            lambda spark: spark.readStream.json(str(Path(__file__).parent)),
            r"'numbers' cannot be read: Schema must be.*spark\.readStream\.schema\(",
        ),
        (
            reader("kafka", subscribe="x"),
            r"'numbers' .*--packages org\.apache\.spark:spark-sql-kafka-0-10_2\.13:\d+\.\d",
        ),
        (reader("frob"), r"'numbers' .*Failed to find the data source: frob.*--packages GROUP"),
        (lambda spark: spark.readStream.table("gone"), r"'numbers' .*`gone` cannot be found"),
        (
            lambda spark: reader("rate")(spark).select("frob"),
            r"'numbers' .*`frob` cannot be resolved",
        ),
        (raising, r"function of the source 'numbers' raised KeyError: 'bucket'; it is called with"),
        (lambda: None, r"function of the source 'numbers' raised TypeError: .*with the Spark sess"),
        (lambda spark: None, r"'numbers' is None of its function; give a Spark streaming"),
        (lambda spark: spark.readStream.format("rate"), r"is a DataStreamReader .*with \.load\(\)"),
        (
            lambda spark: spark.range(3),
            r"'numbers' is a batch DataFrame; read it with spark\.readS",
        ),
        ([1], r"'numbers' is \[1\] \(list\); give a Spark streaming"),
    ],
)
def test_a_source_that_cannot_be_read(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str], read: Any, words: str
) -> None:
    """One line, and nothing else on the screen."""
    with pytest.raises(TopologyError, match=words) as refusal:
        topology(read, tmp_path / "out").start(spark, checkpoint=tmp_path / "ck")
    assert "\n" not in str(refusal.value)
    assert "trace" not in "".join(capfd.readouterr())
    assert "py4j" not in "".join(traceback.format_exception(refusal.value))
    assert not (tmp_path / "ck").exists()


def fails_on_40(frame: pl.DataFrame) -> pl.DataFrame:
    if (frame["v"] == 40).any():
        raise ValueError("forty is too much")
    return frame


def keeps(frame: pl.DataFrame) -> pl.DataFrame:
    return frame


def test_a_function_that_raises_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    raw = numbers(tmp_path / "in", files=4, rows=15)
    failing = topology(data(tmp_path), tmp_path / "out", function=fails_on_40)
    job = failing.start(spark, checkpoint=tmp_path / "ck", available_now=True)
    with pytest.raises(OperatorError) as caught:
        job.await_termination(240)
    message = str(caught.value)
    failed = int(message.removeprefix("slice ").partition(",")[0])
    assert "'mapped'" in message
    assert "forty is too much" in message
    assert "\n" not in message
    seen = read_output(tmp_path / "out")
    assert failed > 1
    assert set(seen["slice"]) == set(range(1, failed))
    fixed = topology(data(tmp_path), tmp_path / "out", function=keeps)
    run_to_end(fixed, spark, tmp_path / "ck")
    got = final_values(read_output(tmp_path / "out"))
    wanted = raw.group_by("k").agg(total=pl.col("v").sum())
    assert got == {k: {"total": t} for k, t in wanted.rows()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, where the machine lets us mount one."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_loses_nothing(spark: SparkSession, tmp_path: Path, small_disk: Path) -> None:
    raw = numbers(tmp_path / "in", files=3, rows=20)
    made = topology(data(tmp_path), tmp_path / "out")
    ballast = small_disk / "ballast"
    job = made.start(spark, checkpoint=small_disk / "ck", slice="100ms")

    def fill(progress: Any) -> None:
        if progress.slice == 2:
            with ballast.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

    job.on_progress(fill)
    with pytest.raises((StorageError, ab.AnabranchError)) as caught:
        job.await_termination(240)
        pytest.fail("the disk was never full")
    print(caught.value)
    ballast.unlink()
    run_to_end(topology(data(tmp_path), tmp_path / "out"), spark, small_disk / "ck")
    got = final_values(read_output(tmp_path / "out"))
    wanted = raw.group_by("k").agg(total=pl.col("v").sum())
    assert got == {k: {"total": t} for k, t in wanted.rows()}
