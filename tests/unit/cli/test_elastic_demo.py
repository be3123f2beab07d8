"""The elastic demo's judge must see what is wrong, and agree with a topology that is right."""

from __future__ import annotations

import itertools
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.demos.elastic import (
    PROFILE,
    TweetWriter,
    _sentiment,
    _with_typos,
    recount_sentiments,
    sentiments,
)
from anabranch.generators import NEGATIVE, POSITIVE, Tweets
from anabranch.testing import Idle, Lose, Scale, play

RATE = 500


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The topology's own output on five seconds of tweets, with a scaling and a lost node."""
    root = tmp_path_factory.mktemp("elastic")
    (root / "in").mkdir()
    generator = Tweets(seed=1, rate=RATE)
    batches = [generator.rows(n * RATE, (n + 1) * RATE) for n in range(5)]
    for n, table in enumerate(batches):
        pq.write_table(table, root / "in" / f"{n:06d}.parquet")
    topology = sentiments(root / "in", root / "hot", root / "scores")
    steps = [{"tweets": t} for t in batches]
    outputs = play(topology, [*steps[:3], Scale("sentiment", 3), Lose(), *steps[3:], Idle()])
    for number, output in enumerate(outputs):
        for name in ("hot", "scores"):
            if output[name].height:
                path = root / name / f"slice={number}"
                path.mkdir(parents=True)
                output[name].write_parquet(path / "part.parquet")
    return root


def test_the_recount_agrees_with_the_operators(exact: Path) -> None:
    found = recount_sentiments(exact / "in", exact / "hot", exact / "scores")
    assert found.exact
    assert found.windows == 2  # of two seconds; the third is open
    assert found.tweets > 500


def test_the_recount_sees_what_is_wrong(exact: Path, tmp_path: Path) -> None:
    (last,) = sorted((exact / "scores").glob("*/*.parquet"))[-1:]
    scores = pl.read_parquet(last)

    def recounted(changed: pl.DataFrame) -> tuple[int, int, int]:
        there = tmp_path / str(len(list(tmp_path.iterdir())))
        for file in (exact / "scores").glob("*/*.parquet"):
            target = there / file.parent.name
            target.mkdir(parents=True)
            (changed if file == last else pl.read_parquet(file)).write_parquet(target / "p.parquet")
        found = recount_sentiments(exact / "in", exact / "hot", there)
        assert not found.exact
        return found.lost, found.duplicated, found.wrong_scores

    first = pl.int_range(pl.len()) == 0
    assert recounted(scores.with_columns(pl.col("tweets") - first.cast(pl.Int64))) == (1, 0, 0)
    assert recounted(scores.with_columns(pl.col("tweets") + 2 * first.cast(pl.Int64))) == (0, 2, 0)
    assert recounted(scores.with_columns(pl.col("score") + first.cast(pl.Int64))) == (0, 0, 1)
    assert not recount_sentiments(exact / "in", tmp_path / "none", exact / "scores").exact


def test_scores_tolerate_a_typo_as_the_recount_does() -> None:
    function = _sentiment()
    good, bad = _with_typos(POSITIVE), _with_typos(NEGATIVE)
    for word in ("good", "goo", "goood", "gold", "geld", "bad", "bed", "sadd", "a", "", "#topic1"):
        assert function.score(word) == (word in good) - (word in bad), word  # type: ignore[attr-defined]
    for a, b in itertools.product("abgdo", repeat=2):
        word = f"g{a}{b}d"
        assert function.score(word) == (word in good) - (word in bad), word  # type: ignore[attr-defined]


def test_the_writer_follows_the_profile(tmp_path: Path) -> None:
    writer = TweetWriter(tmp_path, 100.0, 10.0)
    assert sum(share for _, share in PROFILE) == pytest.approx(1)
    assert [writer._due_by(s) for s in (0, 25, 60, 100, 200)] == [0, 250, 1090, 1410, 1410]
    table = writer._make([1, 2, 3])
    assert table.schema.field("ts").type == pa.timestamp("us", "UTC")
    assert table.num_rows == 3
