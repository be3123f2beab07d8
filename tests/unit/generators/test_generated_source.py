"""The streaming reader of a generator, without Spark: which rows are there when, and who reads
them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.pandas.types import from_arrow_schema

from anabranch.errors import ConfigError
from anabranch.generators import Generator, Incidents, Tweets
from anabranch.generators.base import TIME
from anabranch.spark import generated as module
from anabranch.spark.generated import GeneratedReader, GeneratedSource, generated


class FakeReader:
    """What `spark.readStream` is asked for."""

    def __init__(self) -> None:
        self.options_given: dict[str, str] = {}

    def format(self, name: str) -> FakeReader:
        assert name == GeneratedSource.name()
        return self

    def schema(self, schema: Any) -> FakeReader:
        self.schema_given = schema
        return self

    def options(self, **options: str) -> FakeReader:
        self.options_given = options
        return self

    def load(self) -> GeneratedReader:
        """Spark makes the source from its options, in another process."""
        source = GeneratedSource(CaseInsensitiveDict(self.options_given))
        return source.streamReader(self.schema_given)


@pytest.fixture
def open_(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(module, "_register", lambda spark: None)

    class Session:
        readStream = FakeReader()  # noqa: N815

    return lambda generator, **options: generated(generator, **options)(Session())


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = 1_000_000
        monkeypatch.setattr(module, "_now_ms", lambda: self.ms)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def batches(reader: Any, limit: int = 20) -> list[list[tuple[int, int]]]:
    """What Spark would read until nothing new comes."""
    found = []
    start = reader.initialOffset()
    for _ in range(limit):
        end = reader.latestOffset(start, None)
        if end == start:
            return found
        found.append([(p.start, p.stop) for p in reader.partitions(start, end)])
        start = end
    raise AssertionError("the stream does not end")


def test_rows_come_by_the_clock(open_: Callable[..., Any], clock: Clock) -> None:
    reader = open_(Tweets(1), rows_per_second=300)
    start = reader.initialOffset()
    assert reader.latestOffset(start, None)["row"] == 0
    clock.ms += 1_500
    first = reader.latestOffset(start, None)
    assert first["row"] == 450
    clock.ms += 3
    assert reader.latestOffset(first, None)["row"] == 450
    clock.ms += 1
    assert reader.latestOffset(first, None)["row"] == 451


def test_a_restarted_reader_goes_on_from_the_offset(
    open_: Callable[..., Any], clock: Clock
) -> None:
    start = open_(Tweets(1), rows_per_second=100).initialOffset()
    clock.ms += 1_000
    end = open_(Tweets(1), rows_per_second=100).latestOffset(start, None)
    clock.ms += 60_000
    reader = open_(Tweets(1), rows_per_second=100)
    assert reader.latestOffset(end, None)["row"] == 6_100
    assert reader.latestOffset(end, None)["began_ms"] == start["began_ms"]


def test_a_clock_that_goes_back_takes_no_row_back(open_: Callable[..., Any], clock: Clock) -> None:
    reader = open_(Tweets(1), rows_per_second=100)
    start = reader.initialOffset()
    clock.ms += 1_000
    end = reader.latestOffset(start, None)
    clock.ms -= 500
    assert reader.latestOffset(end, None) == end


def test_a_bounded_stream_by_the_clock_ends(open_: Callable[..., Any], clock: Clock) -> None:
    reader = open_(Tweets(1), rows_per_second=100, rows=130)
    start = reader.initialOffset()
    clock.ms += 10_000
    end = reader.latestOffset(start, None)
    assert end["row"] == 130
    assert reader.latestOffset(end, None) == end
    shorter = open_(Tweets(1), rows_per_second=100, rows=50)
    assert shorter.latestOffset(end, None) == end


def test_available_now_takes_a_second_per_batch(open_: Callable[..., Any], clock: Clock) -> None:
    reader = open_(Tweets(1), rows_per_second=100, rows=230)
    reader.prepareForTriggerAvailableNow()
    assert batches(reader) == [
        [(0, 50), (50, 100)],
        [(100, 150), (150, 200)],
        [(200, 215), (215, 230)],
    ]


def test_available_now_without_a_rate_is_one_batch(open_: Callable[..., Any]) -> None:
    reader = open_(Tweets(1), rows=7, partitions=3)
    assert batches(reader) == [[(0, 2), (2, 4), (4, 7)]]
    reader.prepareForTriggerAvailableNow()
    assert batches(reader) == [[(0, 2), (2, 4), (4, 7)]]


def test_available_now_of_an_endless_stream_stops_the_clock(
    open_: Callable[..., Any], clock: Clock
) -> None:
    reader = open_(Tweets(1), rows_per_second=100)
    start = reader.initialOffset()
    clock.ms += 2_000
    reader.prepareForTriggerAvailableNow()
    clock.ms += 5_000
    end = reader.latestOffset(start, None)
    assert end["row"] == 200
    assert reader.latestOffset(end, None) == end


def test_fewer_rows_than_partitions(open_: Callable[..., Any]) -> None:
    reader = open_(Tweets(1), rows=2, partitions=5)
    assert batches(reader) == [[(0, 1), (1, 2)]]
    assert reader.partitions({"row": 4}, {"row": 4}) == []


def test_a_partition_reads_its_rows_in_tables_of_limited_size(
    open_: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_PER_TABLE", 30)
    reader = open_(Incidents(4), rows=100)
    (first, second) = reader.partitions({"row": 0}, {"row": 100})
    read = [list(reader.read(p)) for p in (first, second)]
    assert [b.num_rows for b in read[0]] == [30, 20]
    assert pa.Table.from_batches(read[0] + read[1]).equals(Incidents(4).rows(0, 100))


@dataclass(frozen=True)
class Squares(Generator):
    """A generator of a user, in a type that Spark spells differently."""

    schema: ClassVar[pa.Schema] = pa.schema([TIME, ("text", pa.large_string())])

    def columns(self, start: int, stop: int) -> list[pa.Array]:
        return [pa.array([str(i * i) for i in range(start, stop)], pa.large_string())]


def test_a_generator_of_a_user_travels_by_value(open_: Callable[..., Any]) -> None:
    reader = open_(Squares(1), rows=3, partitions=1)
    (batch,) = reader.read(reader.partitions({"row": 0}, {"row": 3})[0])
    assert batch.column("text").to_pylist() == ["0", "1", "4"]
    assert from_arrow_schema(batch.schema) == from_arrow_schema(Squares.schema)
    assert batch.schema.field("text").type == pa.string()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give rows_per_second, or rows"),
        ({"rows": 0}, r"generated\(rows=0\): give at least 1"),
        ({"rows_per_second": 0}, r"generated\(rows_per_second=0\)"),
        ({"rows": 1, "partitions": 0}, r"generated\(partitions=0\)"),
    ],
)
def test_refusals(options: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        generated(Tweets(1), **options)


def test_an_older_pyspark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    monkeypatch.delitem(sys.modules, "anabranch.spark.generated")
    with pytest.raises(ConfigError, match=r"pyspark>=4.2, this is \d"):
        importlib.import_module("anabranch.spark.generated")
