"""G2: the sentiment of tweets about the ten hottest topics of every 10 seconds.

Source → HotTopics (5) → HTMerge (1) → Filter (5) → Sentiment → Sink, and Source → Filter: tweets
wait at the filter until their window closes and its hot topics are known.

anabranch run examples.twitter_sentiment:topology --nodes 3 --checkpoint /tmp/twitter-sentiment
"""

from __future__ import annotations

import os
from typing import Any

import polars as pl

import anabranch as ab
from anabranch.generators import NEGATIVE, POSITIVE, Tweets
from anabranch.spark.generated import generated

OUTPUT = os.environ.get("TWITTER_SENTIMENT_OUTPUT", "/tmp/twitter-sentiment/out")
HOT = 10


def topics_of(tweets: pl.DataFrame) -> pl.DataFrame:
    """A row per hashtag of a tweet, with the window that the tweet is in."""
    start = pl.col("ts").dt.truncate("10s")
    return (
        tweets.select(
            "ts",
            "text",
            topic=pl.col("text").str.extract_all(r"#\w+"),
            window_start=start,
            window_end=start + pl.duration(seconds=10),
        )
        .explode("topic")
        .drop_nulls("topic")
    )


def score(tweets: pl.DataFrame) -> pl.DataFrame:
    """+1 for a positive word, -1 for a negative one."""
    word = pl.element()
    value = word.is_in(POSITIVE).cast(pl.Int64) - word.is_in(NEGATIVE).cast(pl.Int64)
    words = pl.col("text").str.split(" ")
    return tweets.select("topic", score=words.list.eval(value).list.sum())


def twitter_sentiment(
    tweets: Any, topics: Any, sentiments: Any, parallelism: tuple[int, int, int] = (5, 5, 10)
) -> ab.Topology:
    """The topology on any source of (ts, user, text); its sinks get hot topics and sentiments.

    `parallelism` is that of the hot topics, of the filter and of the sentiments."""
    topology = ab.Topology("twitter_sentiment")
    tagged = topology.source("tweets", tweets, time="ts").flat_map("topics", topics_of)
    hot = (
        tagged.key_by("topic")
        .window(ab.tumbling("10s"), time="ts")
        .aggregate("hot_topics", n=ab.count(), parallelism=parallelism[0])
        .key_by("window_start", "window_end")
        .top_k("merge", HOT, by="n", parallelism=1)
    )
    about_hot = tagged.key_by("topic").join_windows(
        "filter", hot.key_by("topic"), left=["text"], right=["rank"], parallelism=parallelism[1]
    )
    sentiment = (
        about_hot.map("score", score)
        .key_by("topic")
        .aggregate(
            "sentiment", tweets=ab.count(), score=ab.mean("score"), parallelism=parallelism[2]
        )
    )
    hot.to("hot", topics)
    sentiment.to("sentiments", sentiments)
    return topology


topology = twitter_sentiment(
    generated(Tweets(seed=1), rows_per_second=1_000),
    ab.Parquet(f"{OUTPUT}/hot"),
    ab.Parquet(f"{OUTPUT}/sentiments"),
)
