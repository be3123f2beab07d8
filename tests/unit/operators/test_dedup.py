from __future__ import annotations

import itertools
from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row, rows_of

import anabranch as ab
from anabranch.errors import ConfigError, OperatorError, TopologyError
from anabranch.node.arrow.schemas import infer_schemas
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels.dedup import Deduplicate
from anabranch.operators.rows.hashing import key_groups
from effort import examples

SCHEMA = pa.schema([("k", pa.string()), ("at", pa.timestamp("us")), ("v", pa.int64())])
WITHIN = 5
FOREVER = Deduplicate(("k",))
BOUNDED = Deduplicate(("k",), "at", timedelta(microseconds=WITHIN))


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def by_key_group(rows: list[Row]) -> dict[int, list[Row]]:
    groups: dict[int, list[Row]] = {}
    if rows:
        table = table_of(rows)
        for group, row in zip(key_groups(table, ("k",), GROUPS), rows_of(table), strict=True):
            groups.setdefault(int(group), []).append(row)
    return groups


class Model:
    """Every row looks at every row of its key that ever passed."""

    def __init__(self) -> None:
        self.passed: list[tuple[str | None, int]] = []
        self.late = 0

    def slice(self, rows: list[Row], watermark: int | None) -> list[Row]:
        passing = []
        for key, at, value in rows:
            if watermark is not None and (at // WITHIN + 1) * WITHIN <= watermark:
                self.late += 1
            elif all(k != key or abs(at - p) >= WITHIN for k, p in self.passed):
                self.passed.append((key, at))
                passing.append((key, at, value))
        return passing


records = st.tuples(st.sampled_from([None, "a", "b", "c"]), st.integers(-20, 40), st.integers(0, 9))
slices = st.tuples(
    st.lists(records, max_size=14),
    st.integers(0, 10),
    st.lists(st.integers(0, 14), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split"]),
)
Script = list[tuple[list[Row], int, list[int], str]]


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(slices, max_size=7))
def test_within_a_duration_against_a_full_memory(script: Script) -> None:
    run, model = KernelRun(BOUNDED, SCHEMA), Model()
    watermark: int | None = None
    for rows, advance, cuts, action in script:
        found = run.run((table_of(rows),), watermark, cuts)
        assert found == by_key_group(model.slice(rows, watermark))
        assert run.late == model.late
        run.act(action)
        if watermark is not None:
            spans = {span for partition in run.partitions for span in partition.state.spans}
            assert all((span + 2) * WITHIN > watermark for span in spans)
        if advance:
            watermark = advance - 15 if watermark is None else watermark + advance


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(slices, max_size=6))
def test_for_ever_against_a_set(script: Script) -> None:
    run, seen = KernelRun(FOREVER, SCHEMA), set()
    for rows, advance, cuts, action in script:
        first = {}
        for row in rows:
            if row[0] not in seen:
                first.setdefault(row[0], row)
        seen.update(first)
        found = run.run((table_of(rows),), advance * 1_000, cuts)
        assert found == by_key_group(list(first.values()))
        run.act(action)
    assert sum(p.state.rows for p in run.partitions) == len(seen)
    assert run.late == 0


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(records, max_size=20), st.lists(st.integers(0, 20), max_size=4))
def test_slice_boundaries_do_not_matter(rows: list[Row], cuts: list[int]) -> None:
    whole = KernelRun(BOUNDED, SCHEMA).run((table_of(rows),), None, [])
    run = KernelRun(BOUNDED, SCHEMA)
    pieces: dict[int, list[Row]] = {}
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    for low, high in itertools.pairwise(edges):
        for group, found in run.run((table_of(rows[low:high]),), None, []).items():
            pieces.setdefault(group, []).extend(found)
    assert pieces == whole


def test_expired_keys_leave_the_state() -> None:
    state = BOUNDED.new_state(GROUPS, SCHEMA)
    for number, at in enumerate(range(0, 1_000, 10)):
        rows = BOUNDED.combine(0, table_of([(str(number), at, 0)]))
        result = BOUNDED.compute(state, (rows,), SliceTime(number, at, 0))
        assert result.output.num_rows == 1
        state.install(result.change)
        assert state.rows <= 2


def test_combine_drops_only_repetitions_of_the_same_moment() -> None:
    rows = [("a", 1, 1), ("a", 1, 2), ("a", 2, 3), ("b", 1, 4)]
    assert BOUNDED.combine(0, table_of(rows)).column("v").to_pylist() == [1, 3, 4]
    assert FOREVER.combine(0, table_of(rows)).column("v").to_pylist() == [1, 4]


def test_a_topology_that_drops_repetitions() -> None:
    topology = ab.Topology("t")
    rows = topology.source("rows", None, time="at", watermark="5s")
    once = rows.key_by("k").deduplicate("once", within="10m", time="at")
    once.key_by("k").deduplicate("ever").to("out", ab.Memory())
    plan = topology.plan()
    schemas, _ = infer_schemas(plan.graph, {"rows": SCHEMA}, topology._sinks)
    assert schemas["once"] == schemas["ever"] == schemas["rows"]
    assert plan.by_name["once"].operators == ("once", "ever", "out")  # one chain, one shuffle
    kernel = plan.graph.by_name["once"].kernel
    assert kernel == Deduplicate(("k",), "at", timedelta(minutes=10))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TopologyError, match="within= but not time="):
        Deduplicate(("k",), None, timedelta(seconds=1))
    with pytest.raises(TopologyError, match="time= but not within="):
        Deduplicate(("k",), "at", None)
    with pytest.raises(ConfigError, match="at least a microsecond"):
        Deduplicate(("k",), "at", timedelta(0))
    with pytest.raises(TopologyError, match=r"'v' has type int64.*must be a timestamp"):
        Deduplicate(("k",), "v", timedelta(seconds=1)).output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="key column 'absent' is not in the input"):
        Deduplicate(("absent",)).output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="'_rows' has a name this operator needs"):
        FOREVER.output_schema(SCHEMA.append(pa.field("_rows", pa.int64())))
    with pytest.raises(OperatorError, match="1 of 1 rows have none"):
        BOUNDED.combine(0, table_of([("a", None, 0)]))
