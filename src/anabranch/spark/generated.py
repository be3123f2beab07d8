"""A generator as a Spark stream, through PySpark's Python data sources.

    topology.source("tweets", generated(Tweets(seed=1), rows_per_second=1000))

An offset is a row number, so a batch can be read again exactly: by another executor, or by the
next run on the same checkpoint directory. It also carries when the stream began: rows come on
time after a restart, too, together with those of the time in between.
"""

from __future__ import annotations

import base64
import functools
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from anabranch.errors import ConfigError
from anabranch.generators import Generator
from anabranch.spark.session import shares_files, ship_package
from anabranch.spark.shipping import pickle_job

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:
    raise ConfigError(
        f"generated sources need pyspark>=4.2, this is {pyspark.__version__}: install a newer one"
    ) from None

ROWS_PER_TABLE = 50_000  # what a reader holds at a time
_FORMAT = "anabranch_generated"


def generated(
    generator: Generator,
    *,
    rows_per_second: int | None = None,
    rows: int | None = None,
    partitions: int = 2,
) -> Callable[[SparkSession], DataFrame]:
    """A source that plays a generator: `rows_per_second` from its first start on, `rows` in all.

    Without `rows_per_second` all rows are there at once. A stream with an end does not wait for
    the clock under `available_now`: each batch takes what would come in one second.
    """
    for name, value in (("rows_per_second", rows_per_second), ("rows", rows)):
        if value is not None and value < 1:
            raise ConfigError(f"generated({name}={value}): give at least 1", option=name)
    if partitions < 1:
        raise ConfigError(f"generated(partitions={partitions}): give at least 1")
    if rows_per_second is None and rows is None:
        raise ConfigError("generated(): give rows_per_second, or rows for a stream that ends")
    options = {
        "rows_per_second": str(rows_per_second or 0),
        "rows": str(rows or 0),
        "partitions": str(partitions),
    }

    def read(spark: SparkSession) -> DataFrame:
        _register(spark)
        pickled = base64.b64encode(pickle_job(generator)).decode()
        schema = from_arrow_schema(generator.schema)
        reader = spark.readStream.format(_FORMAT).schema(schema)
        return reader.options(generator=pickled, **options).load()

    return read


def _register(spark: SparkSession) -> None:
    if spark not in _registered:
        if not shares_files(spark):
            ship_package(spark)  # before: what is registered names the files it needs
        spark.dataSource.register(GeneratedSource)
        _registered.add(spark)


_registered: WeakSet[Any] = WeakSet()


class GeneratedSource(DataSource):  # type: ignore[misc]
    """Named by `_FORMAT`; its options are strings, the generator a pickle."""

    @classmethod
    def name(cls) -> str:
        return _FORMAT

    def streamReader(self, schema: StructType) -> GeneratedReader:  # noqa: N802
        given = self.options
        return GeneratedReader(
            given["generator"],
            schema,
            rows_per_second=int(given["rows_per_second"]) or None,
            rows=int(given["rows"]) or None,
            partitions=int(given["partitions"]),
        )


@dataclass
class RowRange(InputPartition):  # type: ignore[misc]
    start: int
    stop: int


class GeneratedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Decides which rows are there by now. `read` runs on executors, the rest on the driver."""

    def __init__(
        self,
        pickled: str,
        schema: StructType,
        *,
        rows_per_second: int | None,
        rows: int | None,
        partitions: int,
    ) -> None:
        self._pickled = pickled  # as it came: its class may not be importable on the driver's side
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._rows_per_second = rows_per_second
        self._rows = rows
        self._partitions = partitions
        self._by_clock = True
        self._clock_stopped_ms: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"row": 0, "began_ms": _now_ms()}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._by_clock = self._rows is None
        self._clock_stopped_ms = _now_ms()

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:  # noqa: N802
        rate, end = self._rows_per_second, self._rows
        row: int
        if rate is None:
            assert end is not None
            row = end
        elif self._by_clock:
            row = ((self._clock_stopped_ms or _now_ms()) - start["began_ms"]) * rate // 1000
        else:
            row = start["row"] + rate
        row = row if end is None else min(row, end)
        # Never back, though clocks may go, and a restarted stream may be given an earlier end.
        return {**start, "row": max(row, start["row"])}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[RowRange]:
        """Contiguous shares in the order of the rows, none empty."""
        first, count = start["row"], end["row"] - start["row"]
        parts = min(self._partitions, count)
        cuts = [first + count * i // parts for i in range(parts + 1)] if parts else []
        return [RowRange(a, b) for a, b in pairwise(cuts)]

    def read(self, partition: RowRange) -> Iterator[pa.RecordBatch]:
        generator = _unpickled(self._pickled)
        for start in range(partition.start, partition.stop, ROWS_PER_TABLE):
            table = generator.rows(start, min(start + ROWS_PER_TABLE, partition.stop))
            yield from table.cast(self._schema).combine_chunks().to_batches()


@functools.lru_cache(maxsize=8)
def _unpickled(text: str) -> Generator:
    """Once per Python worker."""
    generator: Generator = pickle.loads(base64.b64decode(text))
    gc.freeze()  # as in `tasks`: PySpark collects garbage after every task
    return generator


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
