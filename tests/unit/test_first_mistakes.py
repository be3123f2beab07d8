"""What a new user writes in the first ten minutes: taken where it can be meant, else refused in a
sentence that says what to change, in the line that has the mistake."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import anabranch as ab
from anabranch.errors import ConfigError, TopologyError, UserError
from anabranch.model.duration import parse_duration
from anabranch.testing import play

SHARED = ab.Memory()


def read(spark: Any) -> Any:
    raise AssertionError("nothing is read here")


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
        # the name comes first, and is one
        (lambda s: s.map(lambda f: f), r"map takes the operator's name first .*write \.map\("),
        *(
            (
                lambda s, given=given: s.to("out", ab.Memory(), priority=given),
                rf"the sink 'out' has the priority {given!r}; give a whole number, 1 or more",
            )
            for given in (0, -1, True, 1.5, "high", None)
        ),
        (lambda s: s.to(ab.Memory()), r"to takes the operator's name first"),
        (lambda s: s.topology.source(read, "in"), r"source takes the operator's name first"),
        (lambda s: s.key_by("k").aggregate(ab.count()), r"aggregate takes the operator's name fir"),
        (lambda s: s.filter("my filter", "v > 1"), r"'my filter' cannot be used: start with a let"),
        (lambda s: s.filter("f", "v > 1").filter("f", "v > 2"), r"two operators are named 'f'"),
        (lambda s: ab.Topology("my job"), r"'my job' cannot be used"),
        # sources
        (lambda s: s.topology.source("b", "/data"), r"'b' is '/data' \(str\); give a Spark strea"),
        (lambda s: s.topology.source("b", pl.DataFrame({"a": [1]})), r"testing\.play"),
        (
            lambda s: s.topology.source("b", read, time=pl.col("ts")),
            r"time= of the source 'b' is",
        ),
        (lambda s: s.topology.source("b", read, watermark="5s"), r"watermark= says .* with time="),
        # functions and columns
        (lambda s: s.map("m"), r"'m': map takes a name and a function .*but got None"),
        (lambda s: s.map("m", pl.col("v")), r"expressions go into \.select"),
        (lambda s: s.flat_map("m", "v"), r"flat_map takes a name and a function .*got 'v' \(str"),
        (lambda s: s.key_by(lambda row: row["k"]), r"takes names of columns, but got the function"),
        (lambda s: s.key_by("k").aggregate("c", ab.count()), r"has no name; name what comes out"),
        (lambda s: s.key_by("k").aggregate("c", n=ab.sum(pl.col("v"))), r"the column of n is the"),
        (lambda s: s.key_by("k").top_k("t", 3, by=pl.col("v")), r"by= of 't' is the Polars expr"),
        (lambda s: s.key_by("k").process("p", lambda f: f), r"an instance of a subclass of Slice"),
        (lambda s: s.enrich("e", {"k": [1]}, on="k"), r"enrich takes .*but got dict"),
        # numbers
        (lambda s: s.key_by("k").aggregate("c", n=ab.count(), parallelism="2"), r"parallelism '2'"),
        (lambda s: s.key_by("k").aggregate("c", n=ab.count(), parallelism=999), r"from 1 to 128"),
        # two of something
        (lambda s: s.union(stream()), r"union takes streams of one topology"),
        (
            lambda s: s.key_by("k").join_windows("j", stream().key_by("k"), left="v", right="v"),
            r"join_windows takes streams of one topology",
        ),
        (lambda s: s.key_by("k").join_windows("j", s, left="v", right="v"), r"other\.key_by\('k'"),
        (lambda s: [s.to(n, SHARED) for n in "ab"], r"'a' and 'b' are one object; make one for"),
        (lambda s: ab.describe(s), r"describe takes a topology, but got a Stream"),
        (lambda s: ab.describe(s.topology), r"no sink; end at least one stream with \.to\("),
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


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda s: s.where("v > 1"), r"a Stream has no 'where'; write \.filter\("),
        (lambda s: s.withColumn("w", 1), r"write \.select\(\"name\", pl\.all\(\), column=expr"),
        (lambda s: s.groupBy("k"), r"write \.key_by\("),
        (lambda s: s.count(), r"write \.key_by\(columns\)\.aggregate\("),
        (lambda s: s.key_by("k").sum("v"), r"a keyed stream has no 'sum'; write \.aggregate\("),
        (lambda s: s.key_by("k").filter("f", "v > 1"), r"call \.filter\(\.\.\.\) before \.key_by"),
        (lambda s: s.writeStream, r"write \.to\("),
        (lambda s: s.topology.filter("f", "v > 1"), r"it is a stream's: topology\.source\("),
        (
            lambda s: s.key_by("k").window(ab.tumbling("1s"), time="ts").to("out", ab.Memory()),
            r"a windowed stream has no 'to'; a window has \.aggregate\(",
        ),
    ],
)
def test_what_has_another_name_here(write: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(AttributeError, match=sentence):
        write(stream(time="ts"))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda: ab.tumbling(5), r"5 is not a duration; write a number and a unit"),
        (lambda: ab.tumbling("5 sceonds"), r"'5 sceonds' is not a duration"),
        (lambda: ab.hopping("5s", "10s"), r"the slide at most the size"),
        (lambda: ab.Topology("t", parallelism="4"), r"parallelism is '4'; give a whole number"),
        (lambda: ab.Topology("t", key_groups=0), r"key_groups is 0; give at least 1"),
        (lambda: stream().key_by("k").top_k("t", "3", by="v"), r"k of top_k is '3'; give a whole"),
        (lambda: ab.Autoscale(max_nodes="3"), r"max_nodes of autoscale is '3'"),
        (lambda: ab.Balance(theta_max="0.2"), r"theta_max='0\.2'; give shares of the mean load"),
        (lambda: ab.Autoscale(min_nodes=3, max_nodes=2), r"no less for max_nodes than for min_no"),
        (lambda: ab.Memory().rows(), r"call rows\(\) after topology\.run"),
        (lambda: ab.Parquet("s3://bucket/out"), r"URL \(s3://…\), but has to be a .*ab\.Delta"),
        (lambda: ab.Parquet(3), r"the path of a Parquet sink is 3; name a directory"),
        (lambda: ab.Delta(Path("s3://bucket/t")), r"or the URL as a string"),
        (lambda: ab.Postgres("postgresql://host/d", 3), r"the table of a Postgres sink is 3"),
        (lambda: ab.ForEachSlice("print"), r"ForEachSlice was given a str; give a function"),
        (lambda: ab.read_state("gs://bucket/job", "count"), r"URL \(gs://…\), but has to be a di"),
        (lambda: play(stream(), [ROWS]), r"a Stream is no topology"),
        (lambda: play(ended(), ROWS), r"the steps are a dict; give a list of steps"),
        (lambda: play(ended(), [{"inn": ROWS["in"]}]), r"there is no source 'inn'; .* has in"),
        (lambda: play(ended(), [{"in": {"k": "a"}}]), r"rows of a source are a dict; give a list"),
        (
            lambda: play(ended(), [ROWS, {"in": [{"k": "a", "w": 1}]}]),
            r"column 'w' is not among \['k', 'v'\]",
        ),
    ],
)
def test_a_value_that_cannot_be_meant(write: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        write()


def ended() -> ab.Topology:
    made = stream()
    made.to("out", ab.Memory())
    topology: ab.Topology = made.topology
    return topology


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"checkpoint": "s3://bucket/job"}, r"URL \(s3://…\), .*give a path, and the URL to sta"),
        ({"checkpoint": Path("hdfs://host/job")}, r"URL \(hdfs://…\), but has to be a directory"),
        ({"checkpoint": "file:///data/job"}, r"URL \(file://…\), .*; give '/data/job'"),
        ({"checkpoint": 3}, r"checkpoint is 3; name a directory"),
        ({"checkpoint": " "}, r"checkpoint is ' '; name a directory"),
        ({"slice": 1}, r"1 is not a duration"),
        ({"max_rows_per_slice": "5"}, r"max_rows_per_slice is '5'; give a whole number, or None"),
        ({"backups": "none"}, r"backups is 'none'; give \"all\", \"sources\", \"adaptive\" or a l"),
        (
            {"backups": "adaptive", "recovery_bound": "2s"},
            r"backups is \"adaptive\", but with a recovery_bound the job .*; give one of the two",
        ),
        (
            {"backups": "adaptive", "strategy": "SC"},
            r"backups is \"adaptive\", but strategy 'SC' says itself .*; give one of the two",
        ),
        ({"recovery": "fast"}, r"recovery is 'fast'; there are incremental, blocking, eager"),
        ({"recovery": None}, r"recovery is None; there are incremental, blocking, eager"),
        ({"autoscale": 3}, r"autoscale is 3; give True, False or ab\.Autoscale"),
        ({"balance": "yes"}, r"balance is 'yes'; give True, False or ab\.Balance"),
        ({}, r"spark is None, which is no Spark session; .*EmbeddedCluster"),
    ],
)
def test_options_of_a_run(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Before anything is started, or written."""
    with pytest.raises(ConfigError, match=sentence):
        ended().run(None, **{"checkpoint": tmp_path / "ck", **options})  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class GivesOne(ab.RowFunction):
    output = {"n": pl.Int64}  # noqa: RUF012 - as users write it

    def on_row(self, row: Any, state: Any) -> Any:
        return {"n": 1}


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda s: s.map("m", lambda frame: None), r"'m': the function returned None; return a p"),
        (lambda s: s.map("m", lambda frame: frame.lazy()), r"a LazyFrame; .*call \.collect\(\)"),
        (lambda s: s.map("m", lambda row: row["v"]), r"'m': the function returned a Series"),
        (lambda s: s.map("m", lambda: 1), r"'m': .*takes 0 positional arguments but 1 was given"),
        (
            lambda s: s.filter("f", lambda frame: frame.filter(pl.col("v") > 1)),
            r"'f': a filter's predicate gave DataFrame; it must give a Boolean column",
        ),
        (lambda s: s.filter("f", "vv > 1"), r"'f': .*unable to find column \"vv\"; valid column"),
        (lambda s: s.select("s", "vv"), r"'s': .*unable to find column \"vv\""),
        (lambda s: s.key_by("kk").aggregate("a", n=ab.count()), r"'a': key column 'kk' is not in"),
        (lambda s: s.key_by("k").aggregate("a", n=ab.sum("vv")), r"'a': sum needs column 'vv', bu"),
        (lambda s: s.key_by("k").aggregate("a", n=ab.sum("k")), r"'a': sum\('k'\): .*so cast it"),
        (lambda s: s.key_by("k").aggregate("a", k=ab.count()), r"'k' would be two columns"),
        (lambda s: s.key_by("k").process("p", GivesOne()), r"'p' .*on_row returned one row; yield"),
        (
            lambda s: s.union(s.select("slim", "k")),
            r"unites 'in' \(k: .*, v: .*\) and 'slim' \(k: .*\); give both the same columns",
        ),
    ],
)
def test_a_mistake_that_only_the_rows_show(build: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        given(build)
    assert "\n" not in str(error.value)
