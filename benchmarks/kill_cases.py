"""What `kills` runs: the example topologies and one of running sums, on files that keep coming.

A case has its topology, the rows of its n-th file per source, and a check that counts all output
again from the raw files, by other means than the product's: what was expected, what was found.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import polars as pl
from examples.distinct_count import distinct_count
from examples.hashtags import SIZES_S, hashtags
from examples.top_topics import K, top_topics
from examples.traffic import traffic
from examples.twitter_sentiment import HOT, twitter_sentiment
from examples.word_count import word_count

import anabranch as ab
from anabranch.generators import (
    NEGATIVE,
    POSITIVE,
    Generator,
    Incidents,
    SkewedKeys,
    Tweets,
    VehiclePositions,
)
from benchmarks.workloads import INCIDENTS, LOCATIONS, SENTENCES, START, read_files

ROWS = 400  # in a file: one second of event time
NODES = 3
FILES_PER_BATCH = 2
TWEETS = Tweets(seed=5, rate=ROWS, users=300, topics=60)
POSTS = SkewedKeys(seed=5, rate=ROWS, keys=200, shift_every=7_000)
POSITIONS = VehiclePositions(seed=5, rate=ROWS, segments=20)
REPORTS = Incidents(seed=5, rate=40, segments=20)

Rows = Counter[tuple[Any, ...]]
Raw = Mapping[str, pl.DataFrame]  # by source


@dataclass(frozen=True)
class Case:
    """`check` gives expected and found rows; equal ones count as often as they occur."""

    build: Callable[[Path], ab.Topology]
    make: Callable[[int], dict[str, pl.DataFrame]]
    check: Callable[[Path, Raw], tuple[Rows, Rows]]


def source(root: Path, name: str, columns: str, files: int = FILES_PER_BATCH) -> Any:
    return lambda spark: read_files(spark, root / "in" / name, columns, files)


def sink(root: Path, name: str = "out") -> ab.Parquet:
    return ab.Parquet(str(root / name))


def of_second(generator: Generator, number: int) -> pl.DataFrame:
    """The generator's rows of one second."""
    rate = generator.rate
    return pl.DataFrame(pl.from_arrow(generator.rows(number * rate, (number + 1) * rate)))


def by_slice(directory: Path) -> pl.DataFrame:
    """All rows that a Parquet sink shows, with their slice, in its order."""
    frames = [
        pl.read_parquet(f, glob=False, hive_partitioning=False).with_columns(
            slice=pl.lit(int(f.parent.name.removeprefix("slice=")))
        )
        for f in directory.glob("slice=*/*.parquet")
    ]
    return pl.concat(frames).sort("slice", maintain_order=True)


def windowed(rows: pl.DataFrame, size_s: int, slide_s: int, upto: Any) -> pl.DataFrame:
    """Every row once per window that holds it and has ended by `upto`; its start in seconds."""
    first = pl.col("ts").dt.epoch("s") // slide_s * slide_s
    starts = [first - i * slide_s for i in range(size_s // slide_s)]
    every = rows.with_columns(start=pl.concat_list(starts)).explode("start")
    return every.filter(pl.col("start") + size_s <= int(upto.timestamp()))


def start_of(name: str = "window_start") -> pl.Expr:
    return pl.col(name).dt.epoch("s")


def near(found: float, expected: float | None) -> float:
    """Sums of floats may differ by their order: equal if they are nearly so."""
    return expected if expected is not None and abs(found - expected) < 1e-9 else found


# -- words -------------------------------------------------------------------------------------


def words_topology(root: Path, files: int = FILES_PER_BATCH) -> ab.Topology:
    return word_count(source(root, "sentences", SENTENCES, files), sink(root), NODES)


def sentences(number: int) -> dict[str, pl.DataFrame]:
    dice = random.Random(number)
    words = [" ".join(f"w{dice.randrange(200)}" for _ in range(8)) for _ in range(ROWS)]
    start = int(START.timestamp() * 1e6) + number * 1_000_000
    ts = pl.int_range(start, start + 1_000_000, 1_000_000 // ROWS, eager=True)
    frame = pl.DataFrame({"ts": ts.cast(pl.Datetime("us", "UTC")), "sentence": words})
    return {"sentences": frame}


def check_words(root: Path, raw: Raw) -> tuple[Rows, Rows]:
    rows = raw["sentences"].select("ts", word=pl.col("sentence").str.split(" ")).explode("word")
    closed = windowed(rows, 30, 30, rows["ts"].max())
    expected = closed.group_by("start", "word").agg(n=pl.len()).rows()
    found = by_slice(root / "out").select(start_of(), "word", "n")
    return Counter(expected), Counter(found.rows())


# -- running sums ------------------------------------------------------------------------------


def sums_topology(root: Path) -> ab.Topology:
    """Every slice depends on all before it, in order."""
    topology = ab.Topology("sums")
    rows = topology.source("rows", source(root, "rows", "k long, v long"))
    rows.to("raw", sink(root, "raw"))
    sums = rows.key_by("k").aggregate("sum", v=ab.sum("v"), parallelism=4)
    sums.to("sums", sink(root, "sums"))
    spread = sums.changes().select("spread", (pl.col("k") % 11).alias("k"), "v")
    most = spread.key_by("k").aggregate("most", v=ab.max("v"), n=ab.count(), parallelism=3)
    most.to("out", sink(root))
    return topology


def pairs(number: int) -> dict[str, pl.DataFrame]:
    v = pl.int_range(number * ROWS, (number + 1) * ROWS, eager=True)
    return {"rows": pl.DataFrame({"k": v * 31 % 97, "v": v})}


def check_sums(root: Path, raw: Raw) -> tuple[Rows, Rows]:
    """Every slice of every sink, recomputed in order from the rows that the slice got."""
    got = by_slice(root / "raw")
    expected: Rows = Counter(("raw", *row) for row in raw["rows"].rows())
    found: Rows = Counter(("raw", k, v) for k, v in got.select("k", "v").rows())
    sums: dict[int, int] = {}
    most: dict[int, tuple[int, int]] = {}
    for (number,), rows in sorted(got.partition_by("slice", as_dict=True).items()):
        for k, v in rows.select("k", "v").rows():
            sums[k] = sums.get(k, 0) + v
        touched = {k: sums[k] for k in rows["k"].unique()}
        for k, v in touched.items():
            largest, n = most.get(k % 11, (v, 0))
            most[k % 11] = (max(v, largest), n + 1)
        expected.update(("sums", number, k, v) for k, v in touched.items())
        expected.update(("out", number, k, *most[k]) for k in {k % 11 for k in touched})
    found.update(
        ("sums", s, k, v) for s, k, v in by_slice(root / "sums").select("slice", "k", "v").rows()
    )
    found.update(("out", *r) for r in by_slice(root / "out").select("slice", "k", "v", "n").rows())
    return expected, found


# -- traffic -----------------------------------------------------------------------------------


def traffic_topology(root: Path) -> ab.Topology:
    locations = source(root, "locations", LOCATIONS)
    outputs = [sink(root, name) for name in ("speeds", "counts", "joined")]
    return traffic(locations, source(root, "incidents", INCIDENTS), *outputs)


def traffic_rows(number: int) -> dict[str, pl.DataFrame]:
    return {"locations": of_second(POSITIONS, number), "incidents": of_second(REPORTS, number)}


def check_traffic(root: Path, raw: Raw) -> tuple[Rows, Rows]:
    upto = pl.concat(frame.select(pl.max("ts")) for frame in raw.values())["ts"].min()
    at = ("start", "seg")
    moving = windowed(raw["locations"].filter(pl.col("speed") >= 0), 10, 1, upto)
    speeds = {(s, g): v for s, g, v in moving.group_by(at).agg(pl.mean("speed")).rows()}
    reported = windowed(raw["incidents"].drop_nulls("seg"), 10, 1, upto)
    counts = {(s, g): n for s, g, n in reported.group_by(at).agg(pl.len()).rows()}
    expected: Rows = Counter(("speeds", *k, v) for k, v in speeds.items())
    expected.update(("counts", *k, n) for k, n in counts.items())
    expected.update(("joined", *k, speeds[k], counts[k]) for k in speeds.keys() & counts.keys())
    found: Rows = Counter()
    for s, g, v in by_slice(root / "speeds").select(start_of(), "seg", "speed").rows():
        found["speeds", s, g, near(v, speeds.get((s, g)))] += 1
    for row in by_slice(root / "counts").select(start_of(), "seg", "incidents").rows():
        found["counts", *row] += 1
    joined = by_slice(root / "joined").select(start_of(), "seg", "speed", "incidents")
    for s, g, v, n in joined.rows():
        found["joined", s, g, near(v, speeds.get((s, g))), n] += 1
    return expected, found


# -- tweets ------------------------------------------------------------------------------------

TWEET = "ts timestamp, user long, text string"


def tweets(number: int) -> dict[str, pl.DataFrame]:
    return {"tweets": of_second(TWEETS, number)}


def tagged(raw: Raw) -> pl.DataFrame:
    tags = pl.col("text").str.extract_all(r"#\w+").alias("tag")
    return raw["tweets"].with_columns(tags).explode("tag").drop_nulls("tag")


def check_distinct(root: Path, raw: Raw) -> tuple[Rows, Rows]:
    rows = raw["tweets"].filter(pl.col("text").str.contains("#", literal=True))
    closed = windowed(rows, 10, 2, raw["tweets"]["ts"].max())
    expected = closed.group_by("start").agg(pl.n_unique("user")).rows()
    return Counter(expected), Counter(by_slice(root / "out").select(start_of(), "users").rows())


def ranked(counts: pl.DataFrame, topic: str, ranking: pl.DataFrame, k: int) -> tuple[Rows, Rows]:
    """Ranks and frequencies by window; which of equally frequent topics comes first is open."""
    largest = counts.sort("n", descending=True).group_by("start").head(k)
    expected: Rows = Counter()
    for (start,), rows in largest.partition_by("start", as_dict=True).items():
        ns = sorted(rows["n"], reverse=True)
        expected.update((start, rank, n) for rank, n in enumerate(ns, start=1))
    known = {(start, t): n for start, t, n in counts.select("start", topic, "n").rows()}
    found: Rows = Counter()
    for start, rank, t, n in ranking.select(start_of(), "rank", "topic", "n").rows():
        found[start, rank, n if known.get((start, t)) == n else None] += 1
    return expected, found


def check_topics(root: Path, raw: Raw) -> tuple[Rows, Rows]:
    named = raw["posts"].with_columns(topic=pl.format("topic {}", "key"))
    closed = windowed(named, 10, 10, named["ts"].max())
    counts = closed.group_by("start", "topic").agg(n=pl.len())
    return ranked(counts, "topic", by_slice(root / "out"), K)


def check_sentiment(root: Path, raw: Raw) -> tuple[Rows, Rows]:
    """The hot topics of every window, and the final sentiment about each of them."""
    closed = windowed(tagged(raw), 10, 10, raw["tweets"]["ts"].max())
    hot = by_slice(root / "hot")
    counts = closed.group_by("start", "tag").agg(n=pl.len())
    expected, found = ranked(counts, "tag", hot, HOT)
    chosen = set(hot.select(start_of(), "topic").rows())
    scores: dict[str, list[int]] = {}
    for start, topic, text in closed.select("start", "tag", "text").rows():
        if (start, topic) in chosen:
            words = text.split(" ")
            score = sum(w in POSITIVE for w in words) - sum(w in NEGATIVE for w in words)
            scores.setdefault(topic, []).append(score)
    means = {t: sum(s) / len(s) for t, s in scores.items()}
    expected.update((t, len(scores[t]), mean) for t, mean in means.items())
    final = by_slice(root / "sentiments").group_by("topic", maintain_order=True).last()
    for t, n, score in final.select("topic", "tweets", "score").rows():
        found[t, n, near(score, means.get(t))] += 1
    return expected, found


def check_hashtags(root: Path, raw: Raw) -> tuple[Rows, Rows]:
    """Five queries count hashtags by windows; ten keep the highest rate of two of them."""
    tags, upto = tagged(raw), raw["tweets"]["ts"].max()
    expected: Rows = Counter()
    found: Rows = Counter()
    peaks: list[dict[str, float]] = []
    for i, size in enumerate(SIZES_S):
        counts = windowed(tags, size, 5, upto).group_by("start", "tag").agg(n=pl.len())
        expected.update((i, *row) for row in counts.select("start", "tag", "n").rows())
        shown = by_slice(root / f"Q{i}").select(start_of(), "hashtag", "n")
        found.update((i, *row) for row in shown.rows())
        rates = counts.group_by("tag").agg(pl.max("n") / size)
        peaks.append(dict(rates.rows()))
    for i, (one, other) in enumerate(combinations(peaks, 2), start=len(SIZES_S)):
        best = {t: max(one.get(t, 0.0), other.get(t, 0.0)) for t in {*one, *other}}
        expected.update((i, t, peak) for t, peak in best.items())
        final = by_slice(root / f"Q{i}").group_by("hashtag", maintain_order=True).last()
        for t, peak in final.select("hashtag", "peak").rows():
            found[i, t, near(peak, best.get(t))] += 1
    return expected, found


CASES = {
    "word_count": Case(words_topology, sentences, check_words),
    "sums": Case(sums_topology, pairs, check_sums),
    "traffic": Case(traffic_topology, traffic_rows, check_traffic),
    "distinct_count": Case(
        lambda root: distinct_count(source(root, "tweets", TWEET), sink(root)),
        tweets,
        check_distinct,
    ),
    "top_topics": Case(
        lambda root: top_topics(
            source(root, "posts", "ts timestamp, key long, value long"), sink(root)
        ),
        lambda number: {"posts": of_second(POSTS, number)},
        check_topics,
    ),
    "twitter_sentiment": Case(
        lambda root: twitter_sentiment(
            source(root, "tweets", TWEET), sink(root, "hot"), sink(root, "sentiments")
        ),
        tweets,
        check_sentiment,
    ),
    "hashtags": Case(
        lambda root: hashtags(source(root, "tweets", TWEET), lambda query: sink(root, query)),
        tweets,
        check_hashtags,
    ),
}
