"""What the example topologies must give, recomputed from the generators' rows in plain Python.

Each check takes the raw rows and, per sink, the rows it got in the order of their slices. A window
counts when it ends at or before the watermark: the time of the last row, since no delay is given.
"""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from anabranch.generators import NEGATIVE, POSITIVE

Rows = Sequence[Mapping[str, Any]]
Span = tuple[dt.datetime, dt.datetime]
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def windows(ts: dt.datetime, size_s: int, slide_s: int, watermark: dt.datetime) -> Iterator[Span]:
    """Closed windows that hold `ts`; they start at multiples of the slide since 1970."""
    slide, size = dt.timedelta(seconds=slide_s), dt.timedelta(seconds=size_s)
    start = ts - (ts - EPOCH) % slide
    while start + size > ts:
        if start + size <= watermark:
            yield start, start + size
        start -= slide


def tags(text: str) -> list[str]:
    return re.findall(r"#\w+", text)


def last_by(rows: Rows, key: str) -> dict[Any, Mapping[str, Any]]:
    return {row[key]: row for row in rows}


def span(row: Mapping[str, Any]) -> Span:
    return row["window_start"], row["window_end"]


def check_distinct_count(tweets: Rows, totals: Rows) -> None:
    users: dict[Span, set[int]] = defaultdict(set)
    for tweet in tweets:
        if "#" in tweet["text"]:
            for window in windows(tweet["ts"], 10, 2, tweets[-1]["ts"]):
                users[window].add(tweet["user"])
    assert len(users) > 10
    assert len(totals) == len(users)
    assert {span(row): row["users"] for row in totals} == {w: len(u) for w, u in users.items()}


def check_ranking(counts: Mapping[Span, Counter[str]], ranking: Rows, k: int) -> None:
    """The k most frequent topics of every window; which of equals come last is open."""
    assert len(counts) > 2
    found: dict[Span, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for row in ranking:
        found[span(row)][row["rank"]] = row
    assert found.keys() == counts.keys()
    for window, topics in counts.items():
        ranked = [found[window][rank + 1] for rank in range(len(found[window]))]
        assert len({row["topic"] for row in ranked}) == len(ranked)
        assert [(row["topic"], row["n"]) for row in ranked] == [
            (row["topic"], topics[row["topic"]]) for row in ranked
        ]
        assert [row["n"] for row in ranked] == [n for _, n in topics.most_common(k)]


def check_twitter_sentiment(tweets: Rows, hot: Rows, sentiments: Rows) -> None:
    counts: dict[Span, Counter[str]] = defaultdict(Counter)
    for tweet in tweets:
        for window in windows(tweet["ts"], 10, 10, tweets[-1]["ts"]):
            counts[window].update(tags(tweet["text"]))
    check_ranking(counts, hot, 10)
    is_hot = {(span(row), row["topic"]) for row in hot}
    scores: dict[str, list[int]] = defaultdict(list)
    for tweet in tweets:
        words = tweet["text"].split(" ")
        score = sum(w in POSITIVE for w in words) - sum(w in NEGATIVE for w in words)
        for window in windows(tweet["ts"], 10, 10, tweets[-1]["ts"]):
            for topic in tags(tweet["text"]):
                if (window, topic) in is_hot:
                    scores[topic].append(score)
    assert len(scores) >= 10
    got = last_by(sentiments, "topic")
    assert {t: row["tweets"] for t, row in got.items()} == {t: len(s) for t, s in scores.items()}
    for topic, values in scores.items():
        assert abs(got[topic]["score"] - sum(values) / len(values)) < 1e-9


def check_hashtags(tweets: Rows, queries: Mapping[str, Rows]) -> None:
    sizes = (5, 10, 15, 20, 30)
    peaks: list[dict[str, float]] = []
    for i, size in enumerate(sizes):
        counts: Counter[tuple[str, Span]] = Counter()
        for tweet in tweets:
            for window in windows(tweet["ts"], size, 5, tweets[-1]["ts"]):
                counts.update((tag, window) for tag in tags(tweet["text"]))
        got = queries[f"Q{i}"]
        assert len(got) == len(counts) > 50
        assert {(row["hashtag"], span(row)): row["n"] for row in got} == counts
        peaks.append({})
        for (tag, _), n in counts.items():
            peaks[i][tag] = max(peaks[i].get(tag, 0.0), n / size)
    for i, (one, other) in enumerate(combinations(peaks, 2), start=5):
        expected = {t: max(one.get(t, 0.0), other.get(t, 0.0)) for t in {*one, *other}}
        newest = last_by(queries[f"Q{i}"], "hashtag")
        assert newest.keys() == expected.keys()
        for tag, peak in expected.items():
            assert abs(newest[tag]["peak"] - peak) < 1e-9


def check_top_topics(posts: Rows, ranking: Rows) -> None:
    counts: dict[Span, Counter[str]] = defaultdict(Counter)
    for post in posts:
        for window in windows(post["ts"], 10, 10, posts[-1]["ts"]):
            counts[window][f"topic {post['key']}"] += 1
    check_ranking(counts, ranking, 10)


def check_traffic(positions: Rows, incidents: Rows, outputs: Mapping[str, Rows]) -> None:
    watermark = min(positions[-1]["ts"], incidents[-1]["ts"])
    speeds: dict[tuple[int, Span], list[float]] = defaultdict(list)
    counts: Counter[tuple[int, Span]] = Counter()
    for row in positions:
        if row["speed"] >= 0:
            for window in windows(row["ts"], 10, 1, watermark):
                speeds[row["seg"], window].append(row["speed"])
    for row in incidents:
        if row["seg"] is not None:
            counts.update((row["seg"], w) for w in windows(row["ts"], 10, 1, watermark))
    means = {at: sum(values) / len(values) for at, values in speeds.items()}
    joined = {at: (means[at], counts[at]) for at in means.keys() & counts.keys()}
    assert len(joined) > 50
    for name in ("speeds", "counts", "joined"):
        expected: Mapping[Any, Any] = {"speeds": means, "counts": counts, "joined": joined}[name]
        got = {(row["seg"], span(row)): row for row in outputs[name]}
        assert len(outputs[name]) == len(got)
        assert got.keys() == expected.keys()
        for at, row in got.items():
            assert name == "counts" or abs(row["speed"] - means[at]) < 1e-9
            assert name == "speeds" or row["incidents"] == counts[at]
