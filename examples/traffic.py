"""Traffic: average speed and incidents per road segment, and their join (8 queries).

Locations S1 → O1 → O3 average speed; incidents S2 → O2 → O4 count; O3, O4 → O5 join. Windows of
10 s that slide by 1 s; O3 has 4 partitions, O4 and O5 have 2: eight output partitions.
"""

from __future__ import annotations

import os
from typing import Any

import polars as pl

import anabranch as ab

INPUT = os.environ.get("TRAFFIC_INPUT", "/tmp/traffic/in")
OUTPUT = os.environ.get("TRAFFIC_OUTPUT", "/tmp/traffic/out")


def traffic(locations: Any, incidents: Any, speeds: Any, counts: Any, joined: Any) -> ab.Topology:
    """The topology on locations (ts, vehicle, seg, speed) and incidents (ts, seg, kind)."""
    topology = ab.Topology("traffic")
    window = ab.hopping("10s", "1s")
    speed = (
        topology.source("locations", locations, time="ts")
        .filter("moving", pl.col("speed") >= 0)
        .key_by("seg")
        .window(window, time="ts")
        .aggregate("avg_speed", speed=ab.mean("speed"), parallelism=4)
    )
    incident = (
        topology.source("incidents", incidents, time="ts")
        .filter("known_segment", pl.col("seg").is_not_null())
        .key_by("seg")
        .window(window, time="ts")
        .aggregate("incident_count", incidents=ab.count(), parallelism=2)
    )
    both = speed.key_by("seg").join_windows(
        "join", incident.key_by("seg"), left=["speed"], right=["incidents"], parallelism=2
    )
    speed.to("speeds", speeds)
    incident.to("counts", counts)
    both.to("joined", joined)
    return topology


def _read(name: str, columns: str) -> Any:
    return lambda spark: spark.readStream.schema(columns).parquet(f"{INPUT}/{name}")


topology = traffic(
    _read("locations", "ts timestamp, vehicle long, seg long, speed double"),
    _read("incidents", "ts timestamp, seg long, kind string"),
    ab.Parquet(f"{OUTPUT}/speeds"),
    ab.Parquet(f"{OUTPUT}/counts"),
    ab.Parquet(f"{OUTPUT}/joined"),
)
