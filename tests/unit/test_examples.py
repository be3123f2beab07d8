"""The examples without Spark, through losses and restarts, against plain recomputations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from examples import distinct_count, hashtags, top_topics, traffic, twitter_sentiment
from tests.unit.generators.example_oracles import (
    check_distinct_count,
    check_hashtags,
    check_top_topics,
    check_traffic,
    check_twitter_sentiment,
)

import anabranch as ab
from anabranch.cli.loading import load_topology
from anabranch.generators import Incidents, SkewedKeys, Tweets, VehiclePositions
from anabranch.testing import Idle, Lose, Restart, play

ROWS = 3_000
TWEETS = Tweets(seed=11, rate=50, users=300, topics=60)
POSTS = SkewedKeys(seed=11, rate=50, keys=200, shift_every=700)


def outputs(
    topology: ab.Topology, sources: Mapping[str, pa.Table], slices: int
) -> dict[str, list[dict[str, Any]]]:
    """Rows per sink, in the order they came; a node is lost and the driver restarted on the way."""
    steps: list[Any] = [
        {name: _share(table, number, slices) for name, table in sources.items()}
        for number in range(slices)
    ]
    steps[slices // 3 : slices // 3] = [Lose()]
    steps[slices // 2 + 1 : slices // 2 + 1] = [Restart(nodes=3)]
    out: dict[str, list[dict[str, Any]]] = {name: [] for name in topology._sinks}
    for shown in play(topology, [*steps, Idle()]):
        for name, rows in shown.items():
            out[name] += rows.to_dicts()
    return out


def _share(table: pa.Table, number: int, slices: int) -> pa.Table:
    start, stop = (table.num_rows * n // slices for n in (number, number + 1))
    return table.slice(start, stop - start)


@pytest.mark.parametrize("slices", [2, 7])
class TestExamples:
    tweets = TWEETS.rows(0, ROWS)
    posts = POSTS.rows(0, ROWS)

    def test_distinct_count(self, slices: int) -> None:
        topology = distinct_count.distinct_count(None, ab.Memory())
        out = outputs(topology, {"tweets": self.tweets}, slices)
        check_distinct_count(self.tweets.to_pylist(), out["totals"])

    def test_twitter_sentiment(self, slices: int) -> None:
        topology = twitter_sentiment.twitter_sentiment(None, ab.Memory(), ab.Memory())
        out = outputs(topology, {"tweets": self.tweets}, slices)
        check_twitter_sentiment(self.tweets.to_pylist(), out["hot"], out["sentiments"])

    def test_hashtags(self, slices: int) -> None:
        topology = hashtags.hashtags(None, lambda query: ab.Memory())
        out = outputs(topology, {"tweets": self.tweets}, slices)
        check_hashtags(self.tweets.to_pylist(), out)

    def test_top_topics(self, slices: int) -> None:
        topology = top_topics.top_topics(None, ab.Memory())
        out = outputs(topology, {"posts": self.posts}, slices)
        check_top_topics(self.posts.to_pylist(), out["ranking"])

    def test_traffic(self, slices: int) -> None:
        streams = {
            "locations": VehiclePositions(seed=11, rate=50, segments=8).rows(0, 1_000),
            "incidents": Incidents(seed=11, rate=5, segments=8).rows(0, 100),
        }
        topology = traffic.traffic(None, None, ab.Memory(), ab.Memory(), ab.Memory())
        out = outputs(topology, streams, slices)
        check_traffic(*(table.to_pylist() for table in streams.values()), out)


def test_the_fifteen_queries_stay_apart() -> None:
    """Each has partitions of its own, so that it can be lost and recovered by itself."""
    chains = load_topology("examples.hashtags:topology").plan().node_chains
    assert [c.name for c in chains] == [f"O{i}" for i in range(15)]
    assert [c.sinks for c in chains] == [(f"Q{i}",) for i in range(15)]


@pytest.mark.parametrize(
    "name",
    ["word_count", "traffic", "distinct_count", "twitter_sentiment", "hashtags", "top_topics"],
)
def test_the_command_line_finds_every_example(name: str) -> None:
    assert f"topology {name}:" in ab.describe(load_topology(f"examples.{name}:topology"))
