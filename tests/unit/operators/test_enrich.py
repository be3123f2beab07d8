from __future__ import annotations

import itertools
import pickle
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import Row

import anabranch as ab
from anabranch.errors import TopologyError
from anabranch.node.arrow.schemas import infer_schemas
from anabranch.operators.kernels import enrich
from anabranch.operators.kernels.enrich import Enrich

STREAM = pa.schema([("a", pa.int32()), ("b", pa.string()), ("n", pa.int64())])
TABLE = pa.table(
    {
        "a": pa.array([1, 2, 2, None], pa.int64()),
        "b": ["x", "x", None, None],
        "name": ["one", "two", "lost", "lost"],
        "size": pa.array([1.5, None, 0.0, 0.0]),
    }
)


def stream_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(STREAM)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, STREAM, strict=True)], STREAM)


keys = st.tuples(
    st.one_of(st.none(), st.integers(-2, 3)), st.sampled_from([None, "", "x", "a longer name"])
)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(keys, st.integers(0, 9), max_size=8),
    st.lists(st.tuples(keys, st.integers(0, 9)), max_size=12),
    st.lists(st.integers(0, 12), max_size=2),
)
def test_against_a_dict(
    static: dict[tuple[Any, Any], int], rows: list[tuple[tuple[Any, Any], int]], cuts: list[int]
) -> None:
    own = pa.table(
        {
            "b": pa.array([b for _, b in static], pa.string()),
            "v": pa.array(list(static.values()), pa.int8()),
            "a": pa.array([a for a, _ in static], pa.int64()),
        }
    )
    table = stream_of([(*key, n) for key, n in rows])
    found = {key: v for key, v in static.items() if None not in key}
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    for how in ("left", "inner"):
        kernel = pickle.loads(pickle.dumps(Enrich.of(own, ["a", "b"], None, how)))
        pieces = [
            kernel.process(table.slice(low, high - low)) for low, high in itertools.pairwise(edges)
        ] or [kernel.process(table)]
        result = pa.concat_tables(pieces)
        assert result.schema == kernel.output_schema(STREAM)
        expected = [(*key, n, found.get(key)) for key, n in rows if how == "left" or key in found]
        assert list(zip(*result.to_pydict().values(), strict=True)) == expected


def test_columns_are_chosen_and_keep_their_types() -> None:
    rows = stream_of([(2, "x", 7), (9, "x", 8), (2, None, 9)])
    kernel = Enrich.of(TABLE, ["a", "b"], ["size", "name"], "left")
    result = kernel.process(rows)
    assert result.schema.names == ["a", "b", "n", "size", "name"]
    assert result.column("name").to_pylist() == ["two", None, None]
    assert result.column("size").to_pylist() == [None, None, None]
    frame = pl.from_arrow(TABLE)
    assert isinstance(frame, pl.DataFrame)
    assert Enrich.of(frame, ["a", "b"], ["size", "name"], "left").process(rows).equals(result)
    nothing = Enrich.of(TABLE.slice(0, 0), ["a", "b"], None, "inner")
    assert nothing.process(rows).num_rows == 0
    assert nothing.process(rows).schema == nothing.output_schema(STREAM)


class SparkFrame:
    """What enrich asks of a Spark DataFrame."""

    isStreaming = False  # noqa: N815

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.columns = table.schema.names

    def select(self, *columns: str) -> SparkFrame:
        return SparkFrame(self.table.select(list(columns)))

    def limit(self, rows: int) -> SparkFrame:
        return SparkFrame(self.table.slice(0, rows))

    def toArrow(self) -> pa.Table:  # noqa: N802
        return self.table


def test_a_topology_that_enriches(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = ab.Topology("t")
    rows = topology.source("rows", None)
    named = rows.enrich("named", SparkFrame(TABLE), on=["a", "b"], columns=["name"], how="inner")
    keyed = named.key_by("a").deduplicate("first")
    keyed.enrich("again", pl.DataFrame({"n": [1], "m": [2]}), on="n").key_by("a").aggregate(
        "count", k=ab.count()
    ).to("out", ab.Memory())
    plan = topology.plan()
    schemas, _ = infer_schemas(plan.graph, {"rows": STREAM}, topology._sinks)
    assert schemas["named"].names == ["a", "b", "n", "name"]
    assert plan.by_name["first"].operators == ("first", "again", "count", "out")  # the key stays
    monkeypatch.setattr(enrich, "MAX_ROWS", 3)  # the fourth has a null key
    with pytest.raises(TopologyError, match=r"operator 'more': .* more than 3 rows"):
        rows.enrich("more", SparkFrame(TABLE), on=["a", "b"])


def refused(words: str, data: Any, on: list[str], columns: Any = None, how: str = "left") -> None:
    with pytest.raises(TopologyError, match=words):
        Enrich.of(data, on, columns, how).output_schema(STREAM)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("1 rows too many.*{'a': 2} occurs again in row 2", TABLE, ["a"], ["name"])
    refused("'left' or 'inner'", TABLE, ["a", "b"], how="outer")
    refused("at least one column in on", TABLE, [])
    refused("needs column 'c' of the table, which has", TABLE, ["c"])
    refused("needs column 'c' of the table, which has", TABLE, ["a"], ["c"])
    refused("add column 'a' twice", TABLE, ["a"], ["a"])
    refused("got dict", {"a": 1}, ["a"])
    refused("'a': the stream has int32, the table large_string", pl.DataFrame({"a": ["1"]}), ["a"])
    refused("'n', which the stream has already", pl.DataFrame({"a": [1], "n": [1]}), ["a"])
    refused("enrich needs column 'z'", pl.DataFrame({"z": [1]}), ["z"])
    refused("cannot be a key", pl.DataFrame({"a": [[1]]}), ["a"])
    moving = SparkFrame(TABLE)
    moving.isStreaming = True
    refused("streaming DataFrame; read it with spark.read", moving, ["a"])
    monkeypatch.setattr(enrich, "MAX_BYTES", 1 << 20)
    large = pl.DataFrame({"a": range(1 << 17), "b": range(1 << 17)})
    refused("131,072 rows and 2.0 MB.* join it in Spark", large, ["a"])
