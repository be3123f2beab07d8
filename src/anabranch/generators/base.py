"""What every generator is: a table for each range of row numbers, the same whenever it is asked.

Randomness comes from Philox, a generator that can start at any position: row r, drawing w words,
uses words r·w to r·w + w of its column's sequence. So a range needs nothing of the rows before it,
and two ranges that touch give what their union gives.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

START = datetime(2026, 1, 1, tzinfo=UTC)  # the event time of row 0
TIME = pa.field("ts", pa.timestamp("us", "UTC"))
_START_US = int(START.timestamp()) * 1_000_000
_WORDS_PER_COUNTER = 4  # of 64 bits each, per step of Philox


@dataclass(frozen=True)
class Generator(ABC):
    """A stream of rows with an event time `ts`: `rate` of them per second, from START on.

    A generator of your own has a `schema` that begins with `ts`, and `columns`: the values of
    the others, drawn with `uniforms` and with nothing else that could differ between two calls.
    """

    seed: int
    rate: int = 1_000

    schema: ClassVar[pa.Schema]

    def __post_init__(self) -> None:
        self.require(0 <= self.seed < 2**64, "seed", "from 0 to 2^64 - 1")
        self.require(self.rate >= 1, "rate", "at least 1 row per second")

    @abstractmethod
    def columns(self, start: int, stop: int) -> list[pa.Array]:
        """The columns after `ts` of the rows from `start` up to, not including, `stop`."""

    def rows(self, start: int, stop: int) -> pa.Table:
        """The rows from `start` up to, not including, `stop`."""
        if not 0 <= start <= stop:
            raise ConfigError(f"rows {start} to {stop}: give 0 <= start <= stop")
        times = pa.array(self.times_us(start, stop)).cast(TIME.type)
        return pa.Table.from_arrays([times, *self.columns(start, stop)], schema=self.schema)

    def times_us(self, start: int, stop: int) -> Ints:
        """Event times in microseconds since 1970."""
        return _START_US + np.arange(start, stop, dtype=np.int64) * 1_000_000 // self.rate

    def uniforms(self, column: str, start: int, stop: int, width: int = 1) -> Floats:
        """Numbers in [0, 1), `width` per row, one after the other; each `column` has its own."""
        stream = zlib.crc32(f"{type(self).__name__}.{column}".encode())
        return uniforms(self.seed, stream, start * width, stop * width)

    def require(self, holds: bool, field: str, wanted: str) -> None:
        """Refuse a field's value, saying what it may be."""
        if not holds:
            name, value = type(self).__name__, getattr(self, field)
            raise ConfigError(f"{name}({field}={value!r}): give {wanted}", field=field)


def uniforms(seed: int, stream: int, start: int, stop: int) -> Floats:
    """Words `start` to `stop` of the sequence of (seed, stream), as numbers in [0, 1)."""
    counter, skipped = divmod(start, _WORDS_PER_COUNTER)
    key = np.array([seed, stream], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(stop - start + skipped)[skipped:]
    numbers: Floats = (words >> np.uint64(11)).astype(np.float64)  # 53 bits: what a double holds
    return numbers * 2.0**-53


@lru_cache(maxsize=16)
def zipf_bounds(count: int, z: float) -> Floats:
    """Where in [0, 1) the share of each rank ends, when rank r has the weight 1 / r^z."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -z
    bounds = np.cumsum(weights)
    bounds /= bounds[-1]
    bounds.flags.writeable = False  # shared by all callers
    return bounds


def pick(bounds: Floats, draws: Floats) -> Ints:
    """The number of the share that each draw falls into; the last bound is 1."""
    return np.searchsorted(bounds, draws, side="right")
