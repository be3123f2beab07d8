from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row, plain_value

import anabranch as ab
from anabranch.errors import TopologyError
from anabranch.node.arrow.schemas import infer_schemas
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels.aggregates import KeyedAggregate, count, count_distinct
from anabranch.operators.kernels.distinct import PairSet
from anabranch.operators.kernels.windows import Window, WindowedAggregate
from anabranch.operators.rows.hashing import hash_keys, key_groups
from effort import examples

SCHEMA = pa.schema(
    [("k", pa.string()), ("at", pa.timestamp("us")), ("s", pa.string()), ("x", pa.float64())]
)
AGGREGATES = {"rows": count(), "words": count_distinct("s"), "numbers": count_distinct("x")}
nan = float("nan")

records = st.tuples(
    st.sampled_from([None, "a", "b", "c"]),
    st.integers(0, 30),
    st.sampled_from([None, "", "u", "v", "w"]),
    st.sampled_from([None, nan, 0.0, -0.0, 1.5]),
)
slices = st.tuples(
    st.lists(records, max_size=10),
    st.integers(0, 12),
    st.lists(st.integers(0, 10), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split"]),
)
Script = list[tuple[list[Row], int, list[int], str]]


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def group_of(key: str | None) -> int:
    return int(key_groups(table_of([(key, 0, None, None)]), ("k",), GROUPS)[0])


def counted(history: list[Row]) -> Row:
    words = {s for _, _, s, _ in history if s is not None}
    numbers = {plain_value(x) for _, _, _, x in history if x is not None}
    return (len(history), len(words), len(numbers))


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(slices, max_size=6))
def test_running_counts_against_sets(script: Script) -> None:
    run = KernelRun(KeyedAggregate(("k",), AGGREGATES), SCHEMA)
    histories: dict[str | None, list[Row]] = {}
    for rows, _, cuts, action in script:
        for row in rows:
            histories.setdefault(row[0], []).append(row)
        expected: dict[int, list[Row]] = {}
        for key in dict.fromkeys(row[0] for row in rows):
            expected.setdefault(group_of(key), []).append((key, *counted(histories[key])))
        assert run.run((table_of(rows),), None, cuts) == expected
        run.act(action)
    pairs = sum(sum(counted(history)[1:]) for history in histories.values())
    assert sum(p.state.rows for p in run.partitions) == len(histories) + pairs


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from([(6, 6), (6, 2), (5, 3)]), st.lists(slices, max_size=6))
def test_windows_count_the_union_of_their_panes(sizes: tuple[int, int], script: Script) -> None:
    window = Window(*sizes)
    run = KernelRun(WindowedAggregate(("k",), "at", window, AGGREGATES), SCHEMA)
    kept: list[tuple[int, Row]] = []  # window start, row
    watermark = 0
    for rows, advance, cuts, action in script:
        found = run.run((table_of(rows),), watermark, cuts)
        due = sorted({start for start, _ in kept if start + window.size_us <= watermark})
        expected = {}
        for start in due:
            for key in {row[0] for s, row in kept if s == start}:
                history = [row for s, row in kept if s == start and row[0] == key]
                expected[key, start] = counted(history)
        assert {(r[0], us(r[1])): r[3:] for rs in found.values() for r in rs} == expected
        kept = [(start, row) for start, row in kept if start not in due]
        for row in rows:
            starts = window.starts_of(row[1] // window.pane_us * window.pane_us)
            kept += [(s, row) for s in starts if s + window.size_us > watermark]
        run.act(action)
        watermark += advance


def us(moment: object) -> int:
    return int(pa.scalar(moment, pa.timestamp("us")).cast(pa.int64()).as_py())


def test_combine_sends_a_value_once() -> None:
    kernel = KeyedAggregate(("k",), {"words": count_distinct("s")})
    rows = [("a", 0, "u", 0.0), ("a", 1, "u", 1.0), ("b", 2, "u", 2.0), ("a", 3, None, 3.0)]
    assert kernel.combine(0, table_of(rows)).num_rows == 3


def test_what_a_slice_brings_costs_the_slice_alone() -> None:
    """Sealed after a small slice, a large state gives the small slice."""
    kernel = KeyedAggregate(("k",), {"n": count_distinct("i")})
    schema = pa.schema([("k", pa.int64()), ("i", pa.int64())])
    state = kernel.new_state(GROUPS, schema)
    for numbers in (range(5_000), range(4_998, 5_003)):
        table = pa.table({"k": [0] * len(numbers), "i": numbers}, schema)
        result = kernel.compute(state, (kernel.combine(0, table),), SliceTime(0, None, 0))
        state.install(result.change)
        sealed = state.seal()
    assert result.output.to_pylist() == [{"k": 0, "n": 5_003}]
    assert sealed.num_rows == 1 + 3


def test_pairs_live_in_the_group_of_their_key() -> None:
    keys = pa.table({"k": [f"key {i}" for i in range(200)]})
    hashes = hash_keys(keys, ("k",))
    pairs = PairSet(GROUPS)
    pairs.add(pairs.unseen(hashes, hashes, hashes[0] == hashes[0]))
    sealed = pairs.seal()
    assert sealed.column("_group").to_pylist() == list(key_groups(keys, ("k",), GROUPS))
    assert len(set(sealed.column("_pair_first").to_pylist())) == 200


def test_a_topology_with_distinct_counts() -> None:
    topology = ab.Topology("t")
    rows = topology.source("rows", None, time="at")
    rows.key_by("k").aggregate("users", n=ab.count_distinct("s")).to("a", ab.Memory())
    windows = rows.key_by("k").window(ab.hopping("10s", "5s"), time="at")
    windows.aggregate("recent", n=ab.count_distinct("s")).to("b", ab.Memory())
    plan = topology.plan()
    schemas, _ = infer_schemas(plan.graph, {"rows": SCHEMA}, topology._sinks)
    assert schemas["users"].names == ["k", "n"]
    assert schemas["recent"].names == ["k", "window_start", "window_end", "n"]
    assert schemas["recent"].field("n").type == pa.int64()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TopologyError, match="count_distinct needs column 'absent'"):
        KeyedAggregate(("k",), {"n": count_distinct("absent")}).output_schema(SCHEMA)
    nested = pa.schema([("k", pa.string()), ("l", pa.list_(pa.int64()))])
    with pytest.raises(TopologyError, match=r"count_distinct\('l'\).*list.*takes numbers, strings"):
        KeyedAggregate(("k",), {"n": count_distinct("l")}).output_schema(nested)
