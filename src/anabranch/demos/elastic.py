"""`anabranch demo --elastic`: the rate rises and falls, the job scales itself, a node is killed.

Paper 000's topology G2 (the sentiment of tweets about hot topics) and its profile of rates. Here
sentiments are kept per user, by a function in plain Python that tolerates a typo: the one operator
with real work. How fast this machine is at it decides the rate. At the end everything is computed
again from the raw files, by code that shares nothing with the operators.
"""

from __future__ import annotations

import contextlib
import re
import string
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from anabranch.api import Job, Topology
from anabranch.control.policies.autoscale import Autoscale
from anabranch.demos.feeding import Feeder
from anabranch.demos.words import all_read, demo_directory, kill_a_node
from anabranch.errors import ConfigError
from anabranch.generators import NEGATIVE, POSITIVE, Tweets
from anabranch.operators.functions import KeyedSlice, SliceFunction, SliceResult
from anabranch.operators.kernels.aggregates import Count
from anabranch.operators.kernels.windows import WINDOW_START, tumbling
from anabranch.sinks import Parquet
from anabranch.terminal.running import StopSignal, summarise, watch
from anabranch.terminal.starting import Startup

if TYPE_CHECKING:
    from anabranch.spark.embedded import EmbeddedCluster

SECONDS = 80
# Paper 000, table 6: 50 k, 120 k, 40 k events/s. (times the first rate, share of the time)
PROFILE = ((1.0, 0.25), (2.4, 0.35), (0.8, 0.40))
WINDOW_S = 2
HOT = 10
SHARE = 0.1  # of a core, for the scores at the first rate
ROWS_PER_TWEET = 0.4  # about hot topics
MOST_TWEETS_PER_S = 10_000
# The nodes share the cores of this machine, so they may not use as much as nodes of their own.
AUTOSCALE = Autoscale(upper=0.2, lower=0.1, interval="4s", cool_down="8s", down_after="8s")
WATCHED = "sentiment"


def sentiments(source: Path, hot_topics: Path, output: Path) -> Topology:
    """G2, as in examples/twitter_sentiment.py but for windows and the last operator."""

    def read(spark: Any) -> Any:
        return spark.readStream.schema("ts timestamp, user long, text string").parquet(str(source))

    # Nested, so that they are sent to nodes by value and they need not import the command line.
    def topics_of(tweets: pl.DataFrame) -> pl.DataFrame:
        start = pl.col("ts").dt.truncate(f"{WINDOW_S}s")
        topic = pl.col("text").str.extract_all(r"#\w+")
        end = start + pl.duration(seconds=WINDOW_S)
        rows = tweets.with_columns(topic=topic, window_start=start, window_end=end)
        return rows.explode("topic").drop_nulls("topic")

    topology = Topology("sentiments", parallelism=1)
    tagged = topology.source("tweets", read, time="ts").flat_map("topics", topics_of)
    hot = (
        tagged.key_by("topic")
        .window(tumbling(f"{WINDOW_S}s"), time="ts")
        .aggregate("hot_topics", n=Count())
        .key_by("window_start", "window_end")
        .top_k("merge", HOT, by="n")
    )
    about_hot = tagged.key_by("topic").join_windows(
        "filter", hot.key_by("topic"), left=["user", "text"], right=["rank"], retain="10m"
    )
    hot.to("hot", Parquet(str(hot_topics)))
    scored = about_hot.key_by("user").process(WATCHED, _sentiment())
    scored.to("scores", Parquet(str(output)))
    return topology


def _sentiment() -> SliceFunction:
    """Counts and scores the tweets of every user. Its class is nested for the same reason."""
    positive, negative = POSITIVE, NEGATIVE

    class Sentiment(SliceFunction):
        state = {"tweets": pl.Int64, "score": pl.Int64}  # noqa: RUF012 - as users write it
        output = {"tweets": pl.Int64, "score": pl.Int64}  # noqa: RUF012

        def process(self, given: KeyedSlice) -> SliceResult:
            points = [self.score(text) for text in given.rows["text"]]
            rows = given.rows.select("user", points=pl.Series(points, dtype=pl.Int64))
            sums = rows.group_by("user", maintain_order=True).agg(
                pl.len().cast(pl.Int64).alias("n"), pl.col("points").sum()
            )
            new = sums.join(given.state, on="user", nulls_equal=True).select(
                "user",
                tweets=pl.col("tweets").fill_null(0) + pl.col("n"),
                score=pl.col("score").fill_null(0) + pl.col("points"),
            )
            return SliceResult(output=new, state=new)

        def score(self, text: str) -> int:
            """+1 for a positive word, -1 for a negative one; one wrong letter does not matter."""
            total = 0
            for word in text.split(" "):
                total += any(self.near(word, known) for known in positive)
                total -= any(self.near(word, known) for known in negative)
            return total

        def near(self, word: str, known: str) -> bool:
            if abs(len(word) - len(known)) > 1:
                return False
            if len(word) == len(known):
                return sum(a != b for a, b in zip(word, known, strict=True)) <= 1
            short, long = sorted((word, known), key=len)
            return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))

    return Sentiment()


class TweetWriter(Feeder):
    """Seeded tweets at the rates of the profile."""

    def __init__(self, directory: Path, duration_s: float, tweets_per_s: float) -> None:
        tweets = Tweets(seed=1)
        made = 0

        def make(times_us: list[int]) -> pa.Table:
            nonlocal made
            columns = tweets.columns(made, made + len(times_us))
            made += len(times_us)
            times = pa.array(times_us, pa.int64()).cast(tweets.schema.field("ts").type)
            return pa.Table.from_arrays([times, *columns], schema=tweets.schema)

        def due_by(seconds: float) -> int:
            rows, left = 0.0, seconds
            for factor, share in PROFILE:
                rows += tweets_per_s * factor * min(left, share * duration_s)
                left = max(0.0, left - share * duration_s)
            return int(rows)

        super().__init__(directory, duration_s, WINDOW_S * 1_000_000, due_by, make)


def affordable_rate() -> float:
    """Tweets per second whose scores take SHARE of a core of this machine."""
    function: Any = _sentiment()
    texts = Tweets(seed=2).columns(0, 500)[1].to_pylist()
    took = []
    for _ in range(3):
        started = time.process_time()
        for text in texts:
            function.score(text)
        took.append((time.process_time() - started) / len(texts))
    return min(MOST_TWEETS_PER_S, SHARE / (min(took) * ROWS_PER_TWEET))


@dataclass(frozen=True, slots=True)
class SentimentRecount:
    """The output against the truth, in scored tweets."""

    windows: int
    tweets: int
    lost: int
    duplicated: int
    wrong_scores: int  # users with the right number of tweets and another score
    wrong_rankings: int  # windows whose hot topics are not the most frequent ones

    @property
    def exact(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong_scores or self.wrong_rankings)


def recount_sentiments(source: Path, hot_topics: Path, output: Path) -> SentimentRecount:
    """Compute everything again from the raw files, for the windows that are closed."""
    window_us = WINDOW_S * 1_000_000
    rows: list[tuple[int, int, str]] = []
    for file in sorted(source.glob("[0-9]*.parquet")):
        table = pq.read_table(file)
        times = table.column("ts").cast(pa.int64()).to_pylist()
        users, texts = table.column("user").to_pylist(), table.column("text").to_pylist()
        rows += [
            (t // window_us * window_us, u, x) for t, u, x in zip(times, users, texts, strict=True)
        ]
        last_us = max(times)
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for start, _, text in rows:
        if start + window_us <= last_us:
            counts[start].update(re.findall(r"#\w+", text))
    hot = _read_hot(hot_topics)
    wrong_rankings = sum(
        sorted(hot.get(w, {}).values()) != sorted(n for _, n in c.most_common(HOT))
        or any(c[topic] != n for topic, n in hot[w].items())
        for w, c in counts.items()
    ) + len(hot.keys() - counts.keys())
    good, bad = _with_typos(POSITIVE), _with_typos(NEGATIVE)
    tweets: Counter[int] = Counter()
    scores: Counter[int] = Counter()
    for start, user, text in rows:
        times_hot = sum(topic in hot.get(start, {}) for topic in re.findall(r"#\w+", text))
        if times_hot and start in counts:
            words = text.split(" ")
            points = sum((w in good) - (w in bad) for w in words)
            tweets[user] += times_hot
            scores[user] += times_hot * points
    found = _read_scores(output)
    got = Counter({user: n for user, (n, _) in found.items()})
    return SentimentRecount(
        windows=len(counts),
        tweets=tweets.total(),
        lost=(tweets - got).total(),
        duplicated=(got - tweets).total(),
        wrong_scores=sum(n == tweets[u] and s != scores[u] for u, (n, s) in found.items()),
        wrong_rankings=wrong_rankings,
    )


def _with_typos(words: tuple[str, ...]) -> set[str]:
    """The words, and whatever is one letter away from one."""
    near = set(words)
    letters = string.ascii_lowercase
    for word in words:
        splits = [(word[:i], word[i:]) for i in range(len(word) + 1)]
        near |= {a + b[1:] for a, b in splits if b}
        near |= {a + c + b[1:] for a, b in splits if b for c in letters}
        near |= {a + c + b for a, b in splits for c in letters}
    return near


def _slices(output: Path) -> list[pa.Table]:
    """In the order of their numbers."""
    files = sorted(output.glob("slice=*/*.parquet"), key=lambda f: int(f.parent.name[6:]))
    return [pq.ParquetFile(f).read() for f in files]


def _read_hot(output: Path) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for table in _slices(output):
        starts = table.column(WINDOW_START).cast(pa.int64()).to_pylist()
        topics, counts = table.column("topic").to_pylist(), table.column("n").to_pylist()
        for start, topic, n in zip(starts, topics, counts, strict=True):
            found[start][topic] = n
    return found


def _read_scores(output: Path) -> dict[int, tuple[int, int]]:
    """The newest of every user."""
    found: dict[int, tuple[int, int]] = {}
    for table in _slices(output):
        columns = (table.column(name).to_pylist() for name in ("user", "tweets", "score"))
        for user, tweets, score in zip(*columns, strict=True):
            found[user] = tweets, score
    return found


def run_elastic_demo(console: Console, seconds: float, nodes: int) -> bool:
    """Run, recount, say how it went; True when nothing was lost or duplicated."""
    if seconds <= 0:
        raise ConfigError(f"--seconds is {seconds}; give at least 1")
    if nodes < 2:
        raise ConfigError(f"--nodes is {nodes}; one is killed, so give at least 2")
    with demo_directory() as root:
        return _run(console, root, seconds, nodes)


def _run(console: Console, root: Path, seconds: float, nodes: int) -> bool:
    source, hot_topics, output = root / "in", root / "hot", root / "scores"
    source.mkdir()
    topology = sentiments(source, hot_topics, output)
    rate = affordable_rate()
    steps = ", then ".join(f"{rate * f:,.0f} for {s * seconds:.0f} s" for f, s in PROFILE)
    console.print(
        f"{nodes} nodes on this machine; tweets per second: {steps} (Ctrl-C ends it early)",
        soft_wrap=True,
    )
    writer = TweetWriter(source, seconds, rate)
    stop = StopSignal()
    from anabranch.spark.embedded import EmbeddedCluster

    with contextlib.ExitStack() as stack:
        with Startup(console).shown():
            cluster = stack.enter_context(EmbeddedCluster(nodes))
            spark = cluster.session(topology.name)
            stack.enter_context(stop.installed())
            job = topology.start(spark, checkpoint=root / "checkpoint", autoscale=AUTOSCALE)
        started = time.monotonic()
        started_ms = time.time_ns() // 1_000_000
        writer.start()
        latest_s = seconds * (PROFILE[0][1] + PROFILE[1][1])
        args = (console, cluster, job, started, latest_s)
        threading.Thread(target=_kill_after_scaling, args=args, daemon=True).start()
        try:
            meter = watch(job, topology.plan(), console, lambda m: all_read(writer, stop, m))
        finally:
            writer.finish()
        elapsed = time.monotonic() - started
    writer.check()
    console.print(summarise(meter, elapsed), soft_wrap=True)
    console.print(_decisions(job, started_ms))
    return _judge(console, recount_sentiments(source, hot_topics, output), output)


def _kill_after_scaling(
    console: Console, cluster: EmbeddedCluster, job: Job, started: float, latest_s: float
) -> None:
    """Right after the job has scaled itself up; if it does not, at the end of the highest rate."""
    while job.is_active and time.monotonic() - started < latest_s:
        if any(
            d.kind == "up" and d.what in (a.what for a in job.adjustments) for d in job.decisions
        ):
            break
        time.sleep(0.02)
    kill_a_node(console, cluster, job)


def _decisions(job: Job, started_ms: int) -> Table:
    table = Table(title="decisions", title_justify="left")
    table.add_column("after", justify="right")
    table.add_column("decision")
    table.add_column("because")
    table.add_column("no slice ran for", justify="right")
    paused = {a.what: a.seconds for a in job.adjustments}
    for made in job.decisions:
        pause = f"{paused[made.what]:.2f} s" if made.what in paused else ""
        table.add_row(f"{(made.at_ms - started_ms) / 1000:.0f} s", made.what, made.why, pause)
    return table


def _judge(console: Console, result: SentimentRecount, output: Path) -> bool:
    console.print(
        f"recount from the raw files: {result.tweets:,} tweets about the hot topics of "
        f"{result.windows} windows: lost {result.lost:,}, duplicated {result.duplicated:,}, "
        f"wrong scores {result.wrong_scores:,}, wrong rankings {result.wrong_rankings:,}",
        style="bold green" if result.exact else "bold red",
        soft_wrap=True,
    )
    console.print(f"output: {output}", soft_wrap=True)
    return result.exact
