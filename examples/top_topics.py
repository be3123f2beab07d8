"""The ten most frequent topics of every 10 seconds, on a skewed stream whose skew shifts.

Topic extraction → topic count → top 10.

anabranch run examples.top_topics:topology --nodes 3 --checkpoint /tmp/top-topics
"""

from __future__ import annotations

import os
from typing import Any

import polars as pl

import anabranch as ab
from anabranch.generators import SkewedKeys
from anabranch.spark.generated import generated

OUTPUT = os.environ.get("TOP_TOPICS_OUTPUT", "/tmp/top-topics/out")
K = 10


def top_topics(posts: Any, sink: Any, parallelism: int = 4) -> ab.Topology:
    """The topology on any source of (ts, key, value)."""
    topology = ab.Topology("top_topics")
    (
        topology.source("posts", posts, time="ts")
        .select("extract", "ts", pl.format("topic {}", "key").alias("topic"))
        .key_by("topic")
        .window(ab.tumbling("10s"), time="ts")
        .aggregate("count", n=ab.count(), parallelism=parallelism)
        .key_by("window_start", "window_end")
        .top_k("top", K, by="n", parallelism=1)
        .to("ranking", sink)
    )
    return topology


topology = top_topics(generated(SkewedKeys(seed=1), rows_per_second=1_000), ab.Parquet(OUTPUT))
