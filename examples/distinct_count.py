"""G1: how many different users tweeted in the last 10 seconds, every 2 seconds.

Source → Filter → HopWindow, DistinctCount (γ partitions) → Sum (one). No user is in two parts, so
the sum over the parts of their distinct users is the number of distinct users.

anabranch run examples.distinct_count:topology --nodes 3 --checkpoint /tmp/distinct-count
"""

from __future__ import annotations

import os
from typing import Any

import polars as pl

import anabranch as ab
from anabranch.generators import Tweets
from anabranch.spark.generated import generated

OUTPUT = os.environ.get("DISTINCT_COUNT_OUTPUT", "/tmp/distinct-count/out")
PARTS = 64


def distinct_count(tweets: Any, sink: Any, parallelism: int = 4) -> ab.Topology:
    """The topology on any source of (ts, user, text)."""
    topology = ab.Topology("distinct_count")
    (
        topology.source("tweets", tweets, time="ts")
        .filter("with_topic", pl.col("text").str.contains("#", literal=True))
        .select("parts", "ts", "user", (pl.col("user") % PARTS).alias("part"))
        .key_by("part")
        .window(ab.hopping("10s", "2s"), time="ts")
        .aggregate("distinct", users=ab.count_distinct("user"), parallelism=parallelism)
        .key_by("window_start", "window_end")
        .aggregate("sum", users=ab.sum("users"), parallelism=1, ttl="1m", time="window_end")
        .to("totals", sink)
    )
    return topology


topology = distinct_count(generated(Tweets(seed=1), rows_per_second=1_000), ab.Parquet(OUTPUT))
