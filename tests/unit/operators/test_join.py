from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row

from anabranch.errors import OperatorError, TopologyError
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels.join import WindowJoin
from effort import examples

STAMP = pa.timestamp("us")
ON = [("k", pa.string()), ("window_start", STAMP), ("window_end", STAMP)]
LEFT = pa.schema([*ON, ("n", pa.int64())])
RIGHT = pa.schema([*ON, ("name", pa.string())])
RETAIN = 10
KERNEL = WindowJoin(("k",), ("n",), ("name",), timedelta(microseconds=RETAIN))


def table_of(schema: pa.Schema, rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(schema)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)


class Model:
    """Two lists of waiting rows and nested loops."""

    def __init__(self) -> None:
        self.left: list[Row] = []
        self.right: list[Row] = []
        self.closed: int | None = None
        self.late = 0

    def slice(self, left: list[Row], right: list[Row], watermark: int | None) -> Counter[Row]:
        kept_left, kept_right = self._in_time(left), self._in_time(right)
        pairs = self._pairs(kept_left, self.right) + self._pairs(self.left, kept_right)
        pairs += self._pairs(kept_left, kept_right)
        self.closed = watermark
        self.left = [row for row in self.left + kept_left if not self._expired(row)]
        self.right = [row for row in self.right + kept_right if not self._expired(row)]
        return Counter(pairs)

    def _expired(self, row: Row) -> bool:
        return self.closed is not None and row[2] + RETAIN <= self.closed

    def _in_time(self, rows: list[Row]) -> list[Row]:
        kept = [row for row in rows if not self._expired(row)]
        self.late += len(rows) - len(kept)
        return kept

    def _pairs(self, left: list[Row], right: list[Row]) -> list[Row]:
        return [(*a, b[3]) for a in left for b in right if a[:3] == b[:3]]


def sided(values: st.SearchStrategy[object]) -> st.SearchStrategy[list[Row]]:
    window = st.sampled_from([(0, 5), (5, 10), (0, 10), (20, 25)])
    row = st.tuples(st.sampled_from([None, "a", "b", "c"]), window, values)
    return st.lists(row.map(lambda r: (r[0], *r[1], r[2])), max_size=8)


slices = st.tuples(
    sided(st.one_of(st.none(), st.integers(0, 3))),
    sided(st.sampled_from([None, "x", "y"])),
    st.integers(0, 9),
    st.lists(st.integers(0, 8), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split"]),
)


@settings(max_examples=examples(35), deadline=None)
@given(st.lists(slices, max_size=8))
def test_against_nested_loops(
    script: list[tuple[list[Row], list[Row], int, list[int], str]],
) -> None:
    run, model = KernelRun(KERNEL, LEFT, RIGHT), Model()
    watermark: int | None = None
    for left, right, advance, cuts, action in script:
        inputs = (table_of(LEFT, left), table_of(RIGHT, right))
        outputs = run.run(inputs, watermark, cuts)
        found = Counter(plain_times(row) for rows in outputs.values() for row in rows)
        assert found == model.slice(left, right, watermark)
        assert run.late == model.late
        run.act(action)
        if advance:
            watermark = (watermark or 0) + advance
    waiting = sum(partition.state.rows for partition in run.partitions)
    assert waiting == len(model.left) + len(model.right)


def plain_times(row: Row) -> Row:
    start, end = (pa.scalar(t, STAMP).cast(pa.int64()).as_py() for t in row[1:3])
    return (row[0], start, end, *row[3:])


def test_order_of_the_pairs_survives_a_restore() -> None:
    lefts = [("a", 0, 5, 1), ("b", 0, 5, 2), ("a", 0, 5, 3)]
    rights = [("b", 0, 5, "x"), ("a", 0, 5, "y")]
    outputs = []
    for restore in (False, True):
        run = KernelRun(KERNEL, LEFT, RIGHT)
        run.run((table_of(LEFT, lefts), table_of(RIGHT, [])), None, [])
        run.act("restore" if restore else "")
        outputs.append(run.run((table_of(LEFT, []), table_of(RIGHT, rights)), None, []))
    assert outputs[0] == outputs[1]


def test_a_leap_of_the_watermark_loses_no_pair_of_the_slice() -> None:
    state = KERNEL.new_state(GROUPS, LEFT, RIGHT)
    inputs = (table_of(LEFT, [("a", 0, 5, 1)]), table_of(RIGHT, [("a", 0, 5, "x")]))
    combined = tuple(KERNEL.combine(port, table) for port, table in enumerate(inputs))
    result = KERNEL.compute(state, combined, SliceTime(0, 1_000, 0))
    assert (result.output.num_rows, result.late_rows) == (1, 0)
    state.install(result.change)
    assert state.rows == 0
    result = KERNEL.compute(state, combined, SliceTime(1, 1_000, 0))
    assert (result.output.num_rows, result.late_rows) == (0, 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TopologyError, match="'n' would be two columns"):
        WindowJoin(("k",), ("n",), ("n",)).output_schema(LEFT, LEFT)
    with pytest.raises(TopologyError, match="right input of a window join needs column 'absent'"):
        WindowJoin(("k",), ("n",), ("absent",)).output_schema(LEFT, RIGHT)
    with pytest.raises(TopologyError, match="left input of a window join needs column 'window_s"):
        plain = pa.schema([("k", pa.string()), ("n", pa.int64())])
        KERNEL.output_schema(plain, RIGHT)
    with pytest.raises(TopologyError, match="same type of 'k' on both inputs"):
        KERNEL.output_schema(LEFT.set(0, pa.field("k", pa.int64())), RIGHT)
    with pytest.raises(OperatorError, match="window_end is null"):
        state = KERNEL.new_state(GROUPS, LEFT, RIGHT)
        inputs = (table_of(LEFT, [("a", 0, None, 1)]), table_of(RIGHT, []))
        KERNEL.compute(state, inputs, SliceTime(0, None, 0))
