"""The examples without Spark: real operators, one partition each, against plain recomputations."""

from __future__ import annotations

from collections import defaultdict
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
from anabranch.control.watermark import WatermarkTracker
from anabranch.generators import Incidents, SkewedKeys, Tweets, VehiclePositions
from anabranch.node.schemas import build_programs, infer_schemas
from anabranch.operators.base import SliceTime
from anabranch.operators.canonical import canonical_table

ROWS = 3_000
TWEETS = Tweets(seed=11, rate=50, users=300, topics=60)
POSTS = SkewedKeys(seed=11, rate=50, keys=200, shift_every=700)


def run_in_one_partition(
    topology: ab.Topology, sources: Mapping[str, pa.Table], slices: int
) -> dict[str, list[dict[str, Any]]]:
    """Rows per sink: every chain with one partition, slice after slice, then one to close."""
    plan = topology.plan()
    tables = {name: canonical_table(table) for name, table in sources.items()}
    schemas = {name: table.schema for name, table in tables.items()}
    programs = build_programs(plan, *infer_schemas(plan.topology, schemas, topology._sinks))
    states = {name: program.new_states() for name, program in programs.items()}
    watermark = WatermarkTracker(topology._delays)
    out: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(slices + 1):
        share = {n: t.slice(*_share(t.num_rows, number, slices)) for n, t in tables.items()}
        sent: dict[int, list[pa.Table]] = {}
        for chain in plan.chains:
            rows = {n: share[n] for n in chain.operators if n in share}
            when = SliceTime(number, watermark.watermark_us, 0)
            result = programs[chain.name].run(rows, sent, states[chain.name], when)
            for name, change in result.changes.items():
                states[chain.name][name].install(change)
            sent |= {edge: [table] for edge, table in result.edges.items()}
            for name, table in result.sinks.items():
                out[name] += table.to_pylist()
        latest = {
            n: int(share[n].column(column)[-1].cast(pa.int64()).as_py())
            for n, column in topology._event_times.items()
            if share[n].num_rows
        }
        watermark.observe(latest, batch_end=True)
    return out


def _share(rows: int, number: int, slices: int) -> tuple[int, int]:
    """Offset and length of slice `number`; nothing is left for the one after the last."""
    start, stop = (rows * min(n, slices) // slices for n in (number, number + 1))
    return start, stop - start


@pytest.mark.parametrize("slices", [1, 7])
class TestExamples:
    tweets = TWEETS.rows(0, ROWS)
    posts = POSTS.rows(0, ROWS)

    def test_distinct_count(self, slices: int) -> None:
        topology = distinct_count.distinct_count(None, ab.Memory())
        out = run_in_one_partition(topology, {"tweets": self.tweets}, slices)
        check_distinct_count(self.tweets.to_pylist(), out["totals"])

    def test_twitter_sentiment(self, slices: int) -> None:
        topology = twitter_sentiment.twitter_sentiment(None, ab.Memory(), ab.Memory())
        out = run_in_one_partition(topology, {"tweets": self.tweets}, slices)
        check_twitter_sentiment(self.tweets.to_pylist(), out["hot"], out["sentiments"])

    def test_hashtags(self, slices: int) -> None:
        topology = hashtags.hashtags(None, lambda query: ab.Memory())
        out = run_in_one_partition(topology, {"tweets": self.tweets}, slices)
        check_hashtags(self.tweets.to_pylist(), out)

    def test_top_topics(self, slices: int) -> None:
        topology = top_topics.top_topics(None, ab.Memory())
        out = run_in_one_partition(topology, {"posts": self.posts}, slices)
        check_top_topics(self.posts.to_pylist(), out["ranking"])

    def test_traffic(self, slices: int) -> None:
        streams = {
            "locations": VehiclePositions(seed=11, rate=50, segments=8).rows(0, 1_000),
            "incidents": Incidents(seed=11, rate=5, segments=8).rows(0, 100),
        }
        topology = traffic.traffic(None, None, ab.Memory(), ab.Memory(), ab.Memory())
        out = run_in_one_partition(topology, streams, slices)
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
