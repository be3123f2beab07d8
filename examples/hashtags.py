"""Fifteen queries on hashtags that share their work (the topology of the recovery experiments).

Source → Parser → O0 … O4, sliding windows of five sizes; O5 … O14 each follow two of them, every
pair once, and keep the highest rate of each hashtag. The papers' figure is lost in our copies:
that O5 … O14 follow the ten pairs is our reading.

anabranch run examples.hashtags:topology --nodes 3 --checkpoint /tmp/hashtags
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations
from typing import Any

import polars as pl

import anabranch as ab
from anabranch.generators import Tweets
from anabranch.spark.generated import generated

OUTPUT = os.environ.get("HASHTAGS_OUTPUT", "/tmp/hashtags/out")
SIZES_S = (5, 10, 15, 20, 30)
SLIDE = "5s"


def parse(tweets: pl.DataFrame) -> pl.DataFrame:
    tags = pl.col("text").str.extract_all(r"#\w+")
    return tweets.select("ts", hashtag=tags).explode("hashtag").drop_nulls("hashtag")


def hashtags(tweets: Any, sink: Callable[[str], Any], parallelism: int = 1) -> ab.Topology:
    """The topology on any source of (ts, user, text); `sink` makes one of the name of a query."""
    topology = ab.Topology("hashtags", parallelism=parallelism)
    parsed = topology.source("tweets", tweets, time="ts").flat_map("parser", parse)
    rates = []
    for i, size in enumerate(SIZES_S):
        counts = (
            parsed.key_by("hashtag")
            .window(ab.hopping(f"{size}s", SLIDE), time="ts")
            .aggregate(f"O{i}", n=ab.count())
        )
        counts.to(f"Q{i}", sink(f"Q{i}"))
        # Per second, so that windows of different sizes compare.
        rates.append(counts.select(f"rate{i}", "hashtag", (pl.col("n") / size).alias("per_second")))
    for i, (one, other) in enumerate(combinations(rates, 2), start=len(SIZES_S)):
        peaks = one.union(other).key_by("hashtag")
        peaks.aggregate(f"O{i}", peak=ab.max("per_second")).to(f"Q{i}", sink(f"Q{i}"))
    return topology


topology = hashtags(
    generated(Tweets(seed=1), rows_per_second=1_000), lambda query: ab.Parquet(f"{OUTPUT}/{query}")
)
