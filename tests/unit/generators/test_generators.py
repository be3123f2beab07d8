"""Generators against plain recomputations, row by row; ranges; golden rows; refusals."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import plain_rows
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import ConfigError
from anabranch.generators import (
    NEGATIVE,
    POSITIVE,
    START,
    Generator,
    Incidents,
    Sentences,
    SkewedKeys,
    Tweets,
    VehiclePositions,
)
from anabranch.generators.base import uniforms
from anabranch.generators.text import ordinary_words
from anabranch.model.placement import even_groups
from anabranch.operators.rows.hashing import key_groups

SMALL: list[tuple[Any, Callable[[Any, int], tuple[Any, ...]]]] = [
    (Sentences(seed=3, rate=7, words=3, vocabulary=20_000), plain_rows.sentence),
    (Sentences(seed=3, z=0.0, vocabulary=5), plain_rows.sentence),
    (Tweets(seed=2**63 + 1, users=50, topics=9), plain_rows.tweet),
    (VehiclePositions(seed=1, rate=3, vehicles=17, segments=5), plain_rows.position),
    (Incidents(seed=0, segments=12), plain_rows.incident),
    (SkewedKeys(seed=5, keys=300, shift_every=11, partitions=4), plain_rows.keyed),
]
KINDS = [Sentences, Tweets, VehiclePositions, Incidents, SkewedKeys]


def values(table: pa.Table) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


@pytest.mark.parametrize(("generator", "plain"), SMALL, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("start", [0, 1, 97, 10**9 + 3])
def test_rows_are_what_a_plain_computation_gives(
    generator: Generator, plain: Callable[[Any, int], tuple[Any, ...]], start: int
) -> None:
    if isinstance(generator, SkewedKeys) and start > 1000:
        start = 500  # every shift before it must be computed
    stop = start + 40
    table = generator.rows(start, stop)
    assert table.schema.equals(generator.schema)
    times = [int(t) for t in table.column("ts").cast(pa.int64()).to_pylist()]
    assert times == [plain_rows.time_us(generator, row) for row in range(start, stop)]
    assert values(table.drop_columns("ts")) == [plain(generator, r) for r in range(start, stop)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**64 - 1),
    cuts=st.lists(st.integers(0, 2_000), min_size=2, max_size=6).map(sorted),
)
def test_touching_ranges_give_what_their_union_gives(
    kind: type[Generator], seed: int, cuts: list[int]
) -> None:
    generator: Any = kind(seed)
    if kind is SkewedKeys:
        generator = SkewedKeys(seed, keys=50, f=0.01, shift_every=700, partitions=3)
    whole = generator.rows(cuts[0], cuts[-1])
    backwards = [generator.rows(a, b) for a, b in reversed(list(pairwise(cuts)))]
    assert pa.concat_tables(reversed(backwards)).equals(whole)


GOLDEN = {
    Sentences: [
        ("bije baba cado baga babe coka bace pijo",),
        ("babo gelu poba baba babe bate baci bafu",),
    ],
    Tweets: [
        (5316, "vuwo bace babo buvo baga baba win great #topic16"),
        (6554, "diso cefi cexa bala baje cita good"),
    ],
    VehiclePositions: [(0, 154, 70.77027233763533), (3456, 100, 66.69392128239033)],
    Incidents: [(105, "crash"), (4, "works")],
    SkewedKeys: [(9507, 176), (5917, 89)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_golden_rows(kind: type[Generator]) -> None:
    """A change of these changes every published figure and every expected output."""
    generator = kind(7)
    got = [values(generator.rows(row, row + 1).drop_columns("ts"))[0] for row in (0, 123_456)]
    assert got == GOLDEN[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_other_rows(kind: type[Generator]) -> None:
    one, other = (kind(seed).rows(0, 100) for seed in (1, 2))
    assert one.column("ts").equals(other.column("ts"))
    assert not one.equals(other)


def test_event_times_follow_the_rate() -> None:
    times = Sentences(seed=1, rate=3).rows(0, 7).column("ts").to_pylist()
    assert times[0] == START
    assert times[3] == START + timedelta(seconds=1)
    assert times[6] == START + timedelta(seconds=2)
    assert times[1] == START + timedelta(microseconds=333_333)


def test_columns_are_independent_of_each_other() -> None:
    draws = [uniforms(1, stream, 0, 20_000) for stream in (0, 1)]
    assert abs(np.corrcoef(*draws)[0, 1]) < 0.03
    for column in draws:
        assert column.min() >= 0
        assert column.max() < 1
        assert abs(column.mean() - 0.5) < 0.01


def test_no_ordinary_word_bears_a_sentiment() -> None:
    words = ordinary_words(10_000).to_pylist()
    assert len(set(words)) == 10_000
    assert not set(words) & {*POSITIVE, *NEGATIVE}


def test_words_follow_zipf() -> None:
    rows = Sentences(seed=4, vocabulary=100).rows(0, 20_000)
    words = pc.split_pattern(rows.column("sentence"), " ").combine_chunks().flatten()
    counts = {c["values"]: c["counts"] for c in pc.value_counts(words).to_pylist()}
    first, tenth = (counts[ordinary_words(100)[r].as_py()] for r in (0, 9))
    assert first / tenth == pytest.approx(10, rel=0.1)


def test_tweets_of_a_topic_feel_as_its_mood_says() -> None:
    tweets = Tweets(seed=4, topics=20)
    good = dict.fromkeys(range(20), 0)
    felt = dict(good)
    tags = 0
    for text in tweets.rows(0, 30_000).column("text").to_pylist():
        words = text.split(" ")
        topics = [int(w.removeprefix("#topic")) for w in words if w.startswith("#")]
        tags += len(topics)
        if topics:
            good[topics[0]] += sum(w in POSITIVE for w in words)
            felt[topics[0]] += sum(w in POSITIVE or w in NEGATIVE for w in words)
    assert tags / 30_000 == pytest.approx(1.0, abs=0.03)
    for topic in range(3):
        assert good[topic] / felt[topic] == pytest.approx(tweets.mood()[topic], abs=0.04)


def test_keys_occur_as_often_as_their_frequencies_say() -> None:
    stream = SkewedKeys(seed=1, keys=100, shift_every=200_000)
    for interval in (0, 3):
        rows = stream.rows(interval * 200_000, (interval + 1) * 200_000)
        seen = np.bincount(rows.column("key").to_numpy(), minlength=100) / 200_000
        expected = stream.frequencies(interval)
        deviation = np.sqrt(expected * (1 - expected) / 200_000)
        assert (np.abs(seen - expected) < 5 * deviation).all()
    assert np.sort(expected)[::-1] == pytest.approx(
        np.arange(1, 101) ** -0.8 / (np.arange(1, 101) ** -0.8).sum()
    )


def test_a_shift_changes_the_load_of_a_partition_by_f() -> None:
    stream = SkewedKeys(seed=2, keys=5_000, f=0.2, partitions=8)
    groups = key_groups(pa.table({"key": np.arange(5_000)}), ["key"], 128)
    partition_of = np.array(even_groups(128, 8))[groups]
    before = np.bincount(partition_of, stream.frequencies(0), 8)
    for interval in (1, 2, 3):
        after = np.bincount(partition_of, stream.frequencies(interval), 8)
        assert np.abs(after - before).max() >= 0.2 * before.mean()
        before = after


def test_frequencies_are_the_same_in_any_order() -> None:
    stream = SkewedKeys(seed=3, keys=200)
    forward = [stream.frequencies(i).tolist() for i in range(5)]
    assert [stream.frequencies(i).tolist() for i in (4, 1, 3, 0, 2)] == [
        forward[i] for i in (4, 1, 3, 0, 2)
    ]
    with pytest.raises(ValueError, match="read-only"):
        stream.frequencies(2)[0] = 1.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sentences(seed=-1), r"Sentences\(seed=-1\): give from 0 to 2\^64 - 1"),
        (lambda: Tweets(seed=1, rate=0), r"Tweets\(rate=0\): give at least 1 row per second"),
        (lambda: Sentences(seed=1, words=0), "words=0"),
        (lambda: Sentences(seed=1, vocabulary=0), "vocabulary=0"),
        (lambda: Sentences(seed=1, z=-1.0), "z=-1.0"),
        (lambda: Tweets(seed=1, users=0), "users=0"),
        (lambda: Tweets(seed=1, topics=0), "topics=0"),
        (lambda: Tweets(seed=1, z=float("nan")), "z=nan"),
        (lambda: VehiclePositions(seed=1, vehicles=0), "vehicles=0"),
        (lambda: VehiclePositions(seed=1, segments=0), "segments=0"),
        (lambda: Incidents(seed=1, segments=0), "segments=0"),
        (lambda: SkewedKeys(seed=1, keys=0), "keys=0"),
        (lambda: SkewedKeys(seed=1, z=-0.1), "z=-0.1"),
        (lambda: SkewedKeys(seed=1, f=-0.1), "f=-0.1"),
        (lambda: SkewedKeys(seed=1, shift_every=0), "shift_every=0"),
        (lambda: SkewedKeys(seed=1, partitions=129), "partitions=129"),
        (lambda: Tweets(seed=1).rows(5, 4), "rows 5 to 4"),
        (lambda: Tweets(seed=1).rows(-1, 4), "rows -1 to 4"),
    ],
)
def test_refusals(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
