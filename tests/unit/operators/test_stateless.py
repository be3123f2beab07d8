from __future__ import annotations

import datetime as dt
import itertools
import pickle
import re
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from anabranch.errors import OperatorError, TopologyError
from anabranch.operators.kernels.stateless import Filter, FlatMap, Map, Select
from anabranch.operators.rows.canonical import canonical, canonical_table

TABLE = pa.table({"text": ["a b", "c", None], "n": pa.array([1, 2, None], pa.int32())})


def checked(operator: Any, table: pa.Table = TABLE) -> list[dict[str, Any]]:
    """The rows, after a check that the schema is the promised one, with and without rows."""
    result = operator.process(table)
    assert result.schema == operator.output_schema(table.schema)
    assert operator.process(table.slice(0, 0)).schema == result.schema
    rows: list[dict[str, Any]] = result.to_pylist()
    return rows


def test_filter_by_expression_and_by_function() -> None:
    for predicate in (pl.col("n") > 1, lambda frame: frame["n"] > 1):
        assert checked(Filter(predicate)) == [{"text": "c", "n": 2}]
    assert len(checked(Filter(pl.lit(True)))) == 3
    assert checked(Filter(pl.lit(False))) == []


@pytest.mark.parametrize("values", list(itertools.product([True, False, None], repeat=3)))
def test_a_null_predicate_keeps_no_row_however_rows_are_cut(values: tuple[Any, ...]) -> None:
    table = pa.table({"a": pa.array(values, pa.bool_()), "row": [0, 1, 2]})
    for predicate in (pl.col("a"), lambda frame: frame.get_column("a")):
        kernel = Filter(predicate)
        for cuts in ([3], [1, 2], [2, 1], [1, 1, 1]):
            kept, start = [], 0
            for rows in cuts:
                kept += kernel.process(table.slice(start, rows)).column("row").to_pylist()
                start += rows
            assert kept == [i for i, value in enumerate(values) if value is True]


def test_select_names_and_expressions() -> None:
    by_name = Select(["n"])
    assert by_name.keeps_columns
    assert checked(by_name) == [{"n": 1}, {"n": 2}, {"n": None}]
    computed = Select(["text", (pl.col("n") * 2).alias("twice")])
    assert not computed.keeps_columns
    assert checked(computed)[1] == {"text": "c", "twice": 4}
    assert Select("n") == Select(("n",))


def test_map_and_flat_map() -> None:
    double = Map(lambda frame: frame.with_columns(n=pl.col("n") * 2))
    assert [row["n"] for row in checked(double)] == [2, 4, None]
    split = FlatMap(lambda frame: frame.select(word=pl.col("text").str.split(" ")).explode("word"))
    assert [row["word"] for row in checked(split)] == ["a", "b", "c", None]
    arrow = FlatMap(lambda frame: pa.table({"s": pa.array(["x"] * frame.height, pa.string())}))
    assert [row["s"] for row in checked(arrow)] == ["x"] * 3


def test_one_spelling_of_every_type() -> None:
    moment = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    table = pa.table(
        {
            "view": pa.array(["a"], pa.string_view()),
            "dictionary": pa.array(["a"]).dictionary_encode(),
            "bytes": pa.array([b"a"], pa.binary(1)),
            "moment": pa.array([moment], pa.timestamp("ns", "UTC")),
            "words": pa.array([["a"]], pa.list_(pa.string())),
            "record": pa.array([{"x": "a"}]),
            "day": pa.array([moment.date()], pa.date64()),
        }
    )
    result = canonical_table(table)
    assert result.schema == canonical(table.schema)
    assert result.schema.field("view").type == pa.large_string()
    assert result.schema.field("dictionary").type == pa.large_string()
    assert result.schema.field("moment").type == pa.timestamp("us", "UTC")
    assert result.schema.field("words").type == pa.large_list(pa.large_string())
    assert canonical_table(result) is result
    through_polars = Map(lambda frame: frame).process(table)
    assert through_polars.equals(result)


def refused_schema(operator: Any, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        operator.output_schema(TABLE.schema)


def test_refused_when_the_topology_is_built() -> None:
    refused_schema(Filter(pl.col("absent") > 1), "(?s)absent.*accept an empty frame")
    refused_schema(Filter(pl.col("n") + 1), "Boolean")
    refused_schema(Select(["absent"]), "absent")
    refused_schema(Map(lambda frame: frame.row(0)), "accept an empty frame")
    refused_schema(FlatMap(lambda frame: frame.to_dicts()), "return a polars.DataFrame")


def test_refused_while_it_runs() -> None:
    with pytest.raises(OperatorError, match="3 rows and gave 1"):
        Map(lambda frame: frame.head(1)).process(TABLE)
    with pytest.raises(OperatorError, match="ZeroDivisionError"):
        FlatMap(lambda frame: frame.head(1 // (3 - frame.height))).process(TABLE)
    with pytest.raises(OperatorError, match="3 rows and gave 1"):
        Filter(lambda frame: pl.Series([True])).process(TABLE)
    with pytest.raises(OperatorError, match="one row for every row"):
        Select([pl.col("n").sum()]).process(TABLE)


def by_rows(some: pl.DataFrame) -> Map:
    """A function that gives `some` once there are rows."""
    return Map(lambda frame: some if frame.height else frame)


def test_a_function_must_keep_the_schema_it_showed() -> None:
    promised = pl.DataFrame({"text": ["x"] * 3, "n": [1, 2, 3]}, schema_overrides={"n": pl.Int32})
    refused = {
        "column 'n' must be int32, but came as int64": promised.cast({"n": pl.Int64}),
        "column 'text' must be large_string, but came as int32": promised.select(
            text=pl.col("n"), n=pl.col("n")
        ),
        "lacks column 'n' (int32); it has ['text']": promised.drop("n"),
        "a column 'm' that was not expected; expected are ['text', 'n']": promised.with_columns(
            m=pl.lit(1)
        ),
    }
    for words, some in refused.items():
        with pytest.raises(OperatorError, match=re.escape(words)):
            by_rows(some).process(TABLE)
        with pytest.raises(OperatorError, match=re.escape(words)):
            FlatMap(by_rows(some).function).process(TABLE)
    assert checked(by_rows(promised.select("n", "text")))[0] == {"text": "x", "n": 1}
    nulls = promised.with_columns(text=pl.lit(None))
    assert checked(by_rows(nulls))[0] == {"text": None, "n": 1}


def test_what_a_function_promised_travels_with_it() -> None:
    calls = []

    def function(frame: pl.DataFrame) -> pl.DataFrame:
        calls.append(frame.height)
        return frame

    kernel = Map(function)
    kernel.output_schema(TABLE.schema)
    kernel.process(TABLE)
    kernel.process(TABLE)
    assert calls == [0, 3, 3]
    shipped = pickle.loads(pickle.dumps(replace_function(kernel, str)))
    assert shipped._learned == kernel._learned
    assert shipped == Map(str)


def replace_function(kernel: Map, function: Any) -> Map:
    """The kernel with a function that can be pickled by name."""
    copy = Map(function)
    copy._learned.update(kernel._learned)
    return copy


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(TopologyError, match="more than once"):
        canonical(pa.schema([("a", pa.int64()), ("a", pa.int64())]))
