"""What a new user writes in the first ten minutes: taken where it can be meant, else refused in a
sentence that says what to change, in the line that has the mistake."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import polars as pl
import pytest

import anabranch as ab
from anabranch.errors import TopologyError
from anabranch.model.duration import parse_duration
from anabranch.testing import play


def stream(**options: Any) -> Any:  # Any: half of what follows is no legal call
    return ab.Topology("t").source("in", None, **options)


# -- forms that Polars and Spark users know -----------------------------------------------------

ROWS = {"in": [{"k": "a", "v": 1}, {"k": "b", "v": 2}, {"k": None, "v": None}]}


def given(build: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    made = stream()
    build(made).to("out", ab.Memory())
    return [row for out in play(made.topology, [ROWS]) for row in out["out"].rows()]


@pytest.mark.parametrize(
    "build",
    [
        lambda s: s.filter("f", "v > 1"),
        lambda s: s.filter("f", "v > 1 AND k = 'b'"),
        lambda s: s.filter("f", pl.col("v") > 1),
        lambda s: s.filter("f", lambda frame: frame["v"] > 1),
    ],
)
def test_a_predicate_is_an_expression_sql_or_a_function(build: Callable[[Any], Any]) -> None:
    assert given(build) == [("b", 2)]


@pytest.mark.parametrize(
    "build",
    [
        lambda s: s.select("s", "k", pl.col("v").mul(2).alias("w")),
        lambda s: s.select("s", "k", "v * 2 AS w"),
        lambda s: s.select("s", ["k", "v * 2 as w"]),
        lambda s: s.select("s", "k", w=pl.col("v") * 2),
        lambda s: s.select("s", "k", w="v * 2"),
    ],
)
def test_columns_are_names_expressions_sql_or_keywords(build: Callable[[Any], Any]) -> None:
    assert given(build) == [("a", 2), ("b", 4), (None, None)]


def test_a_keyword_may_rename_a_column() -> None:
    assert given(lambda s: s.select("s", x="k")) == [("a",), ("b",), (None,)]


def test_a_key_may_be_a_list() -> None:
    assert stream().key_by(["a", "b"]).keys == stream().key_by("a", "b").keys == ("a", "b")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10 seconds", timedelta(seconds=10)),
        ("1 second", timedelta(seconds=1)),
        ("5 minutes", timedelta(minutes=5)),
        ("90 min", timedelta(minutes=90)),
        ("1.5 Hours", timedelta(minutes=90)),
        ("2 days", timedelta(days=2)),
        ("250 milliseconds", timedelta(milliseconds=250)),
        ("250ms", timedelta(milliseconds=250)),
        ("3us", timedelta(microseconds=3)),
        ("1m", timedelta(minutes=1)),
    ],
)
def test_durations_as_spark_users_write_them(text: str, meant: timedelta) -> None:
    assert parse_duration(text) == meant


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda s: s.filter("v > 1"), r"'v > 1': filter takes a name and a predicate"),
        (lambda s: s.filter(pl.col("v") > 1), r"filter takes the operator's name first"),
        (lambda s: s.filter("f", 3), r"but got 3 \(int\)"),
        (lambda s: s.filter("f", "v >> > 1"), r"'v >> > 1' is no SQL that Polars knows"),
        (lambda s: s.select("s"), r"select takes a name and the columns it keeps"),
        (lambda s: s.select(pl.col("v")), r"select takes the operator's name first"),
        (lambda s: s.select("s", 3), r"not as 3 \(int\)"),
        (lambda s: s.key_by(), r"key_by needs at least one column"),
        (lambda s: s.key_by(pl.col("k")), r"key_by takes names of columns, but got the Polars"),
        (lambda s: s.key_by("k").aggregate("c"), r"'c' has nothing to aggregate"),
        (lambda s: s.key_by("k").aggregate("c", n=ab.count), r"n=ab.count is not called; write n="),
        (
            lambda s: s.key_by("k").aggregate("c", n=ab.count_distinct),
            r"write n=ab.count_distinct\(column\)",
        ),
        (
            lambda s: s.key_by("k").aggregate("c", n=pl.len()),
            r"n is the Polars expression .*no agg",
        ),
        (lambda s: s.key_by("k").aggregate("c", n="v"), r"n is 'v' \(str\), which is no aggregate"),
        (lambda s: s.aggregate("c", n=ab.count()), r"aggregate works by key: .*\.key_by\("),
        (lambda s: s.window(ab.tumbling("1s"), time="ts"), r"window works by key"),
        (lambda s: s.deduplicate("d"), r"deduplicate works by key"),
        (lambda s: s.key_by("k").window("10s", time="ts"), r"a window is ab.tumbling\(size\)"),
        (lambda s: s.to("out", "/tmp/out"), r"'out' is '/tmp/out'; give an instance of a sink"),
        (lambda s: s.to("out", ab.Memory), r"'out' is the class Memory; give an instance"),
        (lambda s: s.topology.dead_letters("dead", "x"), r"'dead' is 'x'; give an instance"),
        (lambda s: s.union("other"), r"union takes streams, but got str"),
    ],
)
def test_a_mistake_is_told_where_it_is_made(write: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(TopologyError, match=sentence):
        write(stream())


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.key_by("k").window(ab.tumbling("1s"), time="ts").aggregate("op", n=ab.count()),
        lambda s: s.key_by("k").window(ab.session("1s"), time="ts").aggregate("op", n=ab.count()),
        lambda s: s.key_by("k").deduplicate("op", within="1s", time="ts"),
        lambda s: s.key_by("k").aggregate("op", ttl="1s", time="ts", n=ab.count()),
        lambda s: s.key_by("k").top_k("op", 3, by="v", ttl="1s", time="ts"),
    ],
)
def test_event_time_needs_a_source_that_names_it(write: Callable[[Any], Any]) -> None:
    with pytest.raises(TopologyError, match=r"'op' goes by the event time 'ts'.*'in' names none"):
        write(stream())
    with pytest.raises(TopologyError, match=r"'in' names none"):  # behind other operators, too
        write(stream().filter("f", "v > 1").select("s", "k", "v", "ts"))
    write(stream(time="ts"))


def test_a_stream_still_lacks_what_nobody_has() -> None:
    with pytest.raises(AttributeError, match="a Stream has no 'frobnicate'"):
        stream().frobnicate()
    assert not hasattr(stream(), "frobnicate")
