"""Vehicles on a ring road and the incidents there: two streams for one topology."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa

from anabranch.generators.base import TIME, Floats, Generator, Ints, pick, zipf_bounds

SEGMENTS = 200
KINDS = ("crash", "jam", "works")
_FAULTY = 0.02  # the share of reports without a speed, and of incidents without a segment
_INCIDENT_SKEW = 0.8


@dataclass(frozen=True)
class VehiclePositions(Generator):
    """(ts, vehicle, seg, speed): vehicles report in turn, each going round at its own pace.

    A segment has a limit; a vehicle does 60 to 110 % of it. A broken sensor reports -1.
    """

    vehicles: int = 10_000
    segments: int = SEGMENTS

    schema: ClassVar[pa.Schema] = pa.schema(
        [TIME, ("vehicle", pa.int64()), ("seg", pa.int64()), ("speed", pa.float64())]
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.vehicles >= 1, "vehicles", "at least 1")
        self.require(self.segments >= 1, "segments", "at least 1")

    def columns(self, start: int, stop: int) -> list[pa.Array]:
        numbers = np.arange(start, stop, dtype=np.int64)
        vehicles = numbers % self.vehicles
        homes, paces, limits = _road(self)
        driven = numbers / self.rate * paces[vehicles]
        segments = (homes[vehicles] + driven.astype(np.int64)) % self.segments
        draws = self.uniforms("speed", start, stop, 2).reshape(-1, 2)
        speeds = limits[segments] * (0.6 + 0.5 * draws[:, 0])
        speeds[draws[:, 1] < _FAULTY] = -1.0
        return [pa.array(vehicles), pa.array(segments), pa.array(speeds)]


@dataclass(frozen=True)
class Incidents(Generator):
    """(ts, seg, kind): more on some segments than on others (Zipf); a few name none (null)."""

    rate: int = 100
    segments: int = SEGMENTS

    schema: ClassVar[pa.Schema] = pa.schema([TIME, ("seg", pa.int64()), ("kind", pa.string())])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.segments >= 1, "segments", "at least 1")

    def columns(self, start: int, stop: int) -> list[pa.Array]:
        draws = self.uniforms("seg", start, stop, 3).reshape(-1, 3)
        ranks = pick(zipf_bounds(self.segments, _INCIDENT_SKEW), draws[:, 0])
        # Spread the frequent ones over the road.
        segments = np.argsort(self.uniforms("order", 0, self.segments), kind="stable")[ranks]
        kinds = (draws[:, 2] * len(KINDS)).astype(np.int8)
        return [
            pa.array(segments, mask=draws[:, 1] < _FAULTY),
            pa.DictionaryArray.from_arrays(kinds, list(KINDS)).cast(pa.string()),
        ]


@lru_cache(maxsize=4)
def _road(stream: VehiclePositions) -> tuple[Ints, Floats, Floats]:
    """Where each vehicle starts, its segments per second, and the limit of each segment."""
    homes = (stream.uniforms("home", 0, stream.vehicles) * stream.segments).astype(np.int64)
    paces = 0.02 + 0.08 * stream.uniforms("pace", 0, stream.vehicles)
    limits = 30.0 + 100.0 * stream.uniforms("limit", 0, stream.segments)
    return homes, paces, limits
