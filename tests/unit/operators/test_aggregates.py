from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row, plain_value

from anabranch.errors import OperatorError, TopologyError
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels import aggregates
from anabranch.operators.kernels.aggregates import KeyedAggregate, count, mean
from anabranch.operators.kernels.windows import WindowedAggregate, hopping
from anabranch.operators.rows.hashing import key_groups
from effort import examples

SCHEMA = pa.schema(
    [("s", pa.string()), ("f", pa.float64()), ("i", pa.int32()), ("x", pa.float64())]
)
KERNEL = KeyedAggregate(
    ("s", "f"),
    {
        "rows": count(),
        "present": count("i"),
        "total": aggregates.sum("i"),
        "least": aggregates.min("i"),
        "most": aggregates.max("x"),
        "low": aggregates.min("x"),
        "sum_x": aggregates.sum("x"),
        "avg": mean("i"),
    },
)

nan = float("nan")
halves = st.one_of(st.none(), st.just(nan), st.integers(-8, 8).map(lambda n: n / 2))
records = st.tuples(
    st.sampled_from([None, "", "a", "b", "long key that fills words"]),
    st.sampled_from([None, nan, 0.0, -0.0, 1.5]),
    st.one_of(st.none(), st.integers(-5, 5)),
    halves,
)
slices = st.tuples(
    st.lists(records, max_size=12),
    st.lists(st.integers(0, 12), max_size=3),
    st.sampled_from(["", "", "seal", "restore", "split"]),
)


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def expected_row(key: Row, history: list[Row]) -> Row:
    ints = [i for _, _, i, _ in history if i is not None]
    reals = [x for _, _, _, x in history if x is not None]
    numbers = [x for x in reals if not math.isnan(x)]
    return (
        *key,
        len(history),
        len(ints),
        sum(ints) if ints else None,
        min(ints, default=None),
        max(numbers) if numbers else ("nan" if reals else None),
        min(numbers) if numbers else ("nan" if reals else None),
        plain_value(float(sum(reals))) if reals else None,
        sum(ints) / len(ints) if ints else None,
    )


def group_of(row: Row) -> int:
    return int(key_groups(table_of([row]), ("s", "f"), GROUPS)[0])


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(slices, max_size=8))
def test_against_a_dict_of_histories(script: list[tuple[list[Row], list[int], str]]) -> None:
    run = KernelRun(KERNEL, SCHEMA)
    histories: dict[Row, list[Row]] = {}
    for rows, cuts, action in script:
        changed: dict[Row, Row] = {}
        for row in rows:
            key = (row[0], plain_value(row[1]))
            histories.setdefault(key, []).append(row)
            changed.setdefault(key, row)
        expected: dict[int, list[Row]] = {}
        for key, row in changed.items():
            expected.setdefault(group_of(row), []).append(expected_row(key, histories[key]))
        assert run.run((table_of(rows),), None, cuts) == expected
        run.act(action)
    assert sum(p.state.rows for p in run.partitions) == len(histories)


def test_integer_sums_are_exact() -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
    kernel = KeyedAggregate(("k",), {"total": aggregates.sum("v")})
    state = kernel.new_state(4, schema)
    table = pa.table({"k": [1, 1, 1], "v": [2**62, 1, -5]}, schema)
    result = kernel.compute(state, (kernel.combine(0, table),), SliceTime(0, None, 0))
    assert result.output.to_pylist() == [{"k": 1, "total": 2**62 - 4}]


EDGE = 2**63 - 1
near_the_edge = st.one_of(
    st.integers(-(2**63), EDGE), st.integers(EDGE - 3, EDGE), st.integers(-3, 3)
)


@settings(max_examples=examples(45), deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 1), near_the_edge), max_size=4), max_size=4),
    st.sampled_from(["sum", "mean"]),
)
def test_an_integer_sum_is_exact_or_refused(slices: list[list[tuple[int, int]]], kind: str) -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
    kernel = KeyedAggregate(("k",), {"total": getattr(aggregates, kind)("v")})
    state = kernel.new_state(4, schema)
    totals: dict[int, int] = {}
    for rows in slices:
        table = pa.table([[k for k, _ in rows], [v for _, v in rows]], schema)
        sums = {key: sum(v for k, v in rows if k == key) for key, _ in rows}
        after = {key: totals.get(key, 0) + part for key, part in sums.items()}
        if any(not -EDGE - 1 <= total <= EDGE for total in [*sums.values(), *after.values()]):
            with pytest.raises(OperatorError, match=rf"{kind}\('v'\).* left the range of 64-bit"):
                kernel.compute(state, (kernel.combine(0, table),), SliceTime(0, None, 0))
            return
        totals |= after
        result = kernel.compute(state, (kernel.combine(0, table),), SliceTime(0, None, 0))
        state.install(result.change)
        if kind == "sum":
            output = zip(*result.output.to_pydict().values(), strict=True)
            assert dict(output) == {key: totals[key] for key in sums}


def test_panes_of_a_window_may_not_overflow_together() -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us")), ("v", pa.int64())])
    kernel = WindowedAggregate(("k",), "t", hopping("4us", "2us"), {"n": aggregates.sum("v")})
    state = kernel.new_state(4, schema)
    table = pa.table([[1, 1], [0, 2], [EDGE, 1]], schema)
    state.install(kernel.compute(state, (kernel.combine(0, table),), SliceTime(0, None, 0)).change)
    empty = kernel.combine(0, table.slice(0, 0))
    with pytest.raises(OperatorError, match=r"sum\('v'\) of a key has left the range"):
        kernel.compute(state, (empty,), SliceTime(1, 4, 0))


def test_min_and_max_keep_the_type_of_times() -> None:
    schema = pa.schema([("k", pa.string()), ("d", pa.date32()), ("t", pa.timestamp("ms", "UTC"))])
    kernel = KeyedAggregate(("k",), {"d": aggregates.max("d"), "t": aggregates.min("t")})
    table = pa.table({"k": ["a", "a", "b"], "d": [1, 5, None], "t": [7, None, None]}, schema)
    state = kernel.new_state(4, schema)
    output = kernel.compute(state, (kernel.combine(0, table),), SliceTime(0, None, 0)).output
    assert output.schema == kernel.output_schema(schema)
    assert output.column("d").cast(pa.int32()).to_pylist() == [5, None]
    assert output.column("t").cast(pa.int64()).to_pylist() == [7_000, None]


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0]])
@pytest.mark.parametrize("cut", [1, 2])
def test_min_and_max_know_one_zero_in_whatever_order(zeros: list[float], cut: int) -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.float64())])
    kernel = KeyedAggregate(("k",), {"low": aggregates.Min("v"), "high": aggregates.Max("v")})
    state = kernel.new_state(GROUPS, schema)
    for start in range(0, 2, cut):
        table = pa.table([[7] * cut, zeros[start : start + cut]], schema=schema)
        computed = kernel.compute(state, (kernel.combine(0, table),), SliceTime(1, None, 0))
        state.install(computed.change)
    row = computed.output.to_pylist()[0]
    assert [math.copysign(1, row[name]) for name in ("low", "high")] == [1, 1]


def test_nothing_changes_before_install() -> None:
    state = KERNEL.new_state(GROUPS, SCHEMA)
    combined = KERNEL.combine(0, table_of([("a", 0.0, 1, 1.0)]))
    KERNEL.compute(state, (combined,), SliceTime(0, None, 0))
    assert state.rows == 0 and state.seal().num_rows == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": aggregates.sum("s")}, r"sum\('s'\).*large_string.*cast"),
    ({"n": mean("s")}, r"mean\('s'\)"),
    ({"n": aggregates.min("s")}, r"min\('s'\).*numbers, dates and times"),
    ({"n": count("absent")}, "count needs column 'absent'"),
    ({"s": count()}, "'s' would be two columns"),
    ({"_n": count()}, "reserved"),
]


@pytest.mark.parametrize(("specs", "words"), REFUSED)
def test_what_does_not_fit_is_refused(specs: dict[str, Any], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        KeyedAggregate(("s",), specs).output_schema(SCHEMA)


def test_bad_keys_are_refused() -> None:
    with pytest.raises(TopologyError, match="key column 'absent' is not in the input"):
        KeyedAggregate(("absent",), {"n": count()}).output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="cannot be a key"):
        nested = pa.schema([("k", pa.list_(pa.int64()))])
        KeyedAggregate(("k",), {"n": count()}).output_schema(nested)
