"""The examples on real executors, fed by generators, against plain recomputations of their rows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from examples.distinct_count import distinct_count
from examples.hashtags import hashtags
from examples.top_topics import top_topics
from examples.traffic import traffic
from examples.twitter_sentiment import twitter_sentiment
from jobs import read_output, run_to_end, wait_for
from pyspark.sql import SparkSession
from tests.unit.cli.test_readme import saved
from tests.unit.generators import example_oracles
from tests.unit.test_tutorial import blocks, run_page

import anabranch as ab
from anabranch.errors import ClusterError
from anabranch.generators import Generator, Incidents, SkewedKeys, Tweets, VehiclePositions
from anabranch.generators.base import TIME
from anabranch.spark.generated import generated

ROWS = 3_000  # a minute of event time, in three batches
TWEETS = Tweets(seed=5, rate=50, users=300, topics=60)


def patiently(run: Callable[[], Any]) -> Any:
    """Spark gives the Python process of a source ten seconds to start, however busy the machine is,
    and fails the query else: start again, as a user would."""
    for attempts_left in (3, 2, 1, 0):
        try:
            return run()
        except ClusterError as e:
            if "failed to connect back" not in e.message or not attempts_left:
                raise
    raise AssertionError


def finish(topology: ab.Topology, spark: SparkSession, checkpoint: Path) -> Any:
    return patiently(lambda: run_to_end(topology, spark, checkpoint))


def play(generator: Generator, rows: int = ROWS) -> Any:
    return generated(generator, rows=rows, rows_per_second=rows // 3)


def raw(generator: Generator, rows: int = ROWS) -> list[dict[str, Any]]:
    return list(generator.rows(0, rows).to_pylist())


def shown(directory: Path) -> list[dict[str, Any]]:
    return read_output(directory).sort("slice", maintain_order=True).to_dicts()


def sinks(root: Path, *names: str) -> dict[str, ab.Parquet]:
    return {name: ab.Parquet(str(root / name)) for name in names}


def rows_of(out: Mapping[str, ab.Parquet]) -> dict[str, list[dict[str, Any]]]:
    return {name: shown(Path(sink.path)) for name, sink in out.items()}


def test_distinct_count(spark: SparkSession, tmp_path: Path) -> None:
    out = sinks(tmp_path, "totals")
    job = finish(distinct_count(play(TWEETS), out["totals"]), spark, tmp_path / "ck")
    assert [p.rows_in for p in job.recent_progress if p.rows_in] == [1_000] * 3
    example_oracles.check_distinct_count(raw(TWEETS), rows_of(out)["totals"])


def test_twitter_sentiment(spark: SparkSession, tmp_path: Path) -> None:
    out = sinks(tmp_path, "hot", "sentiments")
    finish(twitter_sentiment(play(TWEETS), *out.values()), spark, tmp_path / "ck")
    example_oracles.check_twitter_sentiment(raw(TWEETS), *rows_of(out).values())


def test_hashtags(spark: SparkSession, tmp_path: Path) -> None:
    out = sinks(tmp_path, *(f"Q{i}" for i in range(15)))
    finish(hashtags(play(TWEETS), out.__getitem__), spark, tmp_path / "ck")
    example_oracles.check_hashtags(raw(TWEETS), rows_of(out))


def test_top_topics(spark: SparkSession, tmp_path: Path) -> None:
    posts = SkewedKeys(seed=5, rate=50, keys=200, shift_every=700)
    out = sinks(tmp_path, "ranking")
    finish(top_topics(play(posts), out["ranking"]), spark, tmp_path / "ck")
    example_oracles.check_top_topics(raw(posts), rows_of(out)["ranking"])


def test_traffic_from_two_generated_streams(spark: SparkSession, tmp_path: Path) -> None:
    positions = VehiclePositions(seed=5, rate=50, segments=8)
    incidents = Incidents(seed=5, rate=5, segments=8)
    out = sinks(tmp_path, "speeds", "counts", "joined")
    topology = traffic(play(positions, 1_200), play(incidents, 120), *out.values())
    finish(topology, spark, tmp_path / "ck")
    example_oracles.check_traffic(raw(positions, 1_200), raw(incidents, 120), rows_of(out))


@dataclass(frozen=True)
class Squares(Generator):
    """A user's own: executors cannot import this module."""

    schema: ClassVar[pa.Schema] = pa.schema([TIME, ("n", pa.int64())])

    def columns(self, start: int, stop: int) -> list[pa.Array]:
        return [pa.array([i * i for i in range(start, stop)])]


def run_live(spark: SparkSession, root: Path) -> None:
    """Until 200 more rows are through."""
    topology = ab.Topology("squares")
    source = topology.source("squares", generated(Squares(seed=1), rows_per_second=200))
    source.to("out", ab.Parquet(str(root / "out")))
    job = topology.start(spark, checkpoint=root / "ck", slice="200ms")
    wait_for(lambda: sum(p.rows_in for p in job.recent_progress) >= 200 or not job.is_active)
    job.stop()
    job.await_termination()


def test_a_live_stream_goes_on_after_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    for _ in range(2):
        patiently(lambda: run_live(spark, tmp_path))
    got = [row["n"] for row in shown(tmp_path / "out")]
    assert len(got) >= 400
    assert got == [n * n for n in range(len(got))]


def test_the_tutorial_from_top_to_bottom(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def shared_cluster(nodes: int) -> Iterator[Any]:
        yield SimpleNamespace(session=lambda name: spark)

    run = ab.Topology.run
    monkeypatch.setattr(ab.Topology, "run", lambda *a, **b: patiently(lambda: run(*a, **b)))
    monkeypatch.setattr(ab, "EmbeddedCluster", shared_cluster, raising=False)
    monkeypatch.chdir(tmp_path)
    _, ran = run_page(lambda block: block.mark != "file: orders.py")
    assert ran == len(blocks()) - 1


WHOLE_WINDOW = re.compile(r"  sensor=(\d), .*, readings=1000, degrees=26$", re.MULTILINE)


def test_the_readme_example_as_printed(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It prints what five sensors have measured in five seconds."""
    printed = ""

    def shows_a_whole_window() -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        assert job.is_active, job.exception
        return set(WHOLE_WINDOW.findall(printed)) == set("01234")

    topology = saved(tmp_path, monkeypatch)
    job = topology.start(spark, checkpoint=tmp_path / "checkpoints" / "sensors")
    try:
        wait_for(shows_a_whole_window)
    finally:
        job.stop()
