"""Keys with a skew that shifts: the synthetic stream of paper 002, section 5.1.

How often each key occurs comes from `planning.key_histories`, the same that the balance planners
are measured with; this draws rows by it. The load of a partition is meant literally: that of a
keyed operator with `partitions` partitions, keyed by `key`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa

from anabranch.generators.base import TIME, Floats, Generator, Ints, pick
from anabranch.model.graph import DEFAULT_KEY_GROUPS
from anabranch.model.placement import even_groups
from anabranch.operators.rows.hashing import key_groups
from anabranch.planning.workloads.key_histories import shifted, zipf_counts

VALUES = 1_000  # values are 0 to 999


@dataclass(frozen=True)
class SkewedKeys(Generator):
    """(ts, key, value): `keys` keys, Zipf with skew `z`.

    After every `shift_every` rows, keys swap frequencies until some partition's load has changed
    by the share `f`. A shift starts from the one before: reading on is cheap, jumping far ahead
    computes the shifts in between.
    """

    keys: int = 10_000
    z: float = 0.8
    f: float = 0.1
    shift_every: int = 100_000
    partitions: int = 10

    schema: ClassVar[pa.Schema] = pa.schema([TIME, ("key", pa.int64()), ("value", pa.int64())])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.keys >= 1, "keys", "at least 1")
        self.require(0 <= self.z < np.inf, "z", "a skew of at least 0")
        self.require(0 <= self.f < np.inf, "f", "a share of at least 0")
        self.require(self.shift_every >= 1, "shift_every", "at least 1 row")
        self.require(
            1 <= self.partitions <= DEFAULT_KEY_GROUPS, "partitions", f"1 to {DEFAULT_KEY_GROUPS}"
        )

    def columns(self, start: int, stop: int) -> list[pa.Array]:
        draws = self.uniforms("key", start, stop)
        keys = np.empty(stop - start, dtype=np.int64)
        begin = start
        while begin < stop:
            interval = begin // self.shift_every
            end = min(stop, (interval + 1) * self.shift_every)
            share = slice(begin - start, end - start)
            keys[share] = pick(_history(self).bounds(interval), draws[share])
            begin = end
        values = (self.uniforms("value", start, stop) * VALUES).astype(np.int64)
        return [pa.array(keys), pa.array(values)]

    def frequencies(self, interval: int) -> Floats:
        """The share of each key in rows interval·shift_every and on, until the next shift."""
        return _history(self).frequencies(interval)


class _History:
    """The frequencies of the interval asked for last: the next one is a shift away."""

    def __init__(self, stream: SkewedKeys) -> None:
        self._stream = stream
        numbers = pa.table({"key": np.arange(stream.keys)})
        partition_of = np.array(even_groups(DEFAULT_KEY_GROUPS, stream.partitions))
        self._partitions: Ints = partition_of[key_groups(numbers, ["key"], DEFAULT_KEY_GROUPS)]
        first = zipf_counts(np.random.default_rng([stream.seed, 0]), stream.keys, stream.z, 1.0)
        self._first = self._last = 0, first
        self._bounds: tuple[int, Floats] = -1, first

    def frequencies(self, interval: int) -> Floats:
        stream = self._stream
        number, counts = self._last if self._last[0] <= interval else self._first
        while number < interval:
            number += 1
            rng = np.random.default_rng([stream.seed, number])
            counts = shifted(rng, counts, self._partitions, stream.partitions, stream.f)
        counts.flags.writeable = False  # the next shift starts from them
        self._last = number, counts
        return counts

    def bounds(self, interval: int) -> Floats:
        if self._bounds[0] != interval:
            bounds = np.cumsum(self.frequencies(interval))
            self._bounds = interval, bounds / bounds[-1]
        return self._bounds[1]


@lru_cache(maxsize=4)
def _history(stream: SkewedKeys) -> _History:
    return _History(stream)
