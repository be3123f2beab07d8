from __future__ import annotations

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row

import anabranch as ab
from anabranch.errors import ConfigError, OperatorError, TopologyError
from anabranch.node.arrow.schemas import infer_schemas
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels import aggregates
from anabranch.operators.kernels.aggregates import count, count_distinct
from anabranch.operators.kernels.sessions import Session, SessionAggregate, session
from effort import examples

SCHEMA = pa.schema([("k", pa.string()), ("at", pa.timestamp("us")), ("v", pa.int64())])
GAP = 4
AGGREGATES = {"n": count(), "total": aggregates.sum("v"), "least": aggregates.min("v")}


def kernel(lateness: int = 0, **changes: object) -> SessionAggregate:
    fields = {"keys": ("k",), "time": "at", "session": Session(GAP), "aggregates": AGGREGATES}
    late = timedelta(microseconds=lateness)
    return SessionAggregate(**{**fields, "lateness": late, **changes})  # type: ignore[arg-type]


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


class Model:
    """Sessions as lists of (time, value), joined pair by pair until nothing changes."""

    def __init__(self, lateness: int) -> None:
        self.lateness = lateness
        self.sessions: list[tuple[str | None, list[tuple[int, int]]]] = []
        self.late = 0

    def slice(self, rows: list[Row], watermark: int | None) -> list[Row]:
        closed = [s for s in self.sessions if self._closed(s[1], watermark)]
        going_on = [s for s in self.sessions if not self._closed(s[1], watermark)]
        merged = self._merged(going_on + [(key, [(at, v)]) for key, at, v in rows])
        self.late += sum(len(r) for _, r in merged if self._closed(r, watermark))
        self.sessions = [s for s in merged if not self._closed(s[1], watermark)]
        return [self._row(key, found) for key, found in closed]

    def _closed(self, rows: list[tuple[int, int]], watermark: int | None) -> bool:
        return watermark is not None and max(rows)[0] + GAP + self.lateness <= watermark

    def _merged(
        self, sessions: list[tuple[str | None, list[tuple[int, int]]]]
    ) -> list[tuple[str | None, list[tuple[int, int]]]]:
        for i, (key, rows) in enumerate(sessions):
            for other_key, others in sessions[:i]:
                near = any(abs(a - b) < GAP for a, _ in rows for b, _ in others)
                if key == other_key and near:
                    rest = [s for s in sessions if s[1] is not rows and s[1] is not others]
                    return self._merged([*rest, (key, others + rows)])
        return sessions

    def _row(self, key: str | None, rows: list[tuple[int, int]]) -> Row:
        values = [v for _, v in rows]
        return (key, min(rows)[0], max(rows)[0] + GAP, len(rows), sum(values), min(values))


records = st.tuples(
    st.sampled_from([None, "a", "b", "c"]), st.integers(-15, 45), st.integers(-3, 9)
)
slices = st.tuples(
    st.lists(records, max_size=10),
    st.integers(0, 12),
    st.lists(st.integers(0, 10), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split"]),
)
Script = list[tuple[list[Row], int, list[int], str]]


def us(moment: object) -> int:
    return int(pa.scalar(moment, pa.timestamp("us")).cast(pa.int64()).as_py())


def emitted(outputs: dict[int, list[Row]]) -> list[Row]:
    found = [(k, us(s), us(e), *rest) for rows in outputs.values() for k, s, e, *rest in rows]
    return sorted(found, key=repr)


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from([0, 3]), st.lists(slices, max_size=7))
def test_against_sessions_merged_pair_by_pair(lateness: int, script: Script) -> None:
    run, model = KernelRun(kernel(lateness), SCHEMA), Model(lateness)
    watermark: int | None = None
    for rows, advance, cuts, action in script:
        found = run.run((table_of(rows),), watermark, cuts)
        assert emitted(found) == sorted(model.slice(rows, watermark), key=repr)
        for group in found.values():
            assert [row[2] for row in group] == sorted(row[2] for row in group)
        assert run.late == model.late
        run.act(action)
        assert sum(p.state.rows for p in run.partitions) == len(model.sessions)
        if advance:
            watermark = advance - 15 if watermark is None else watermark + advance
    assert emitted(run.run((table_of([]),), 1_000, [])) == sorted(model.slice([], 1_000), key=repr)
    assert all(p.state._index.nbytes == 0 for p in run.partitions)


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(records, max_size=16), st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_order_of_arrival_does_not_matter(rows: list[Row], random: object, step: int) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    run = KernelRun(kernel(), SCHEMA)
    for start in range(0, len(rows), step):
        assert not run.run((table_of(shuffled[start : start + step]),), None, [])
    whole = KernelRun(kernel(), SCHEMA)
    whole.run((table_of(rows),), None, [])
    last = [emitted(r.run((table_of([]),), 1_000, [])) for r in (run, whole)]
    assert last[0] == last[1]
    assert run.late == 0


def test_a_row_between_two_sessions_joins_them() -> None:
    run = KernelRun(kernel(), SCHEMA)
    run.run((table_of([("a", 0, 1), ("a", 6, 2)]),), None, [])
    assert run.partitions[0].state.rows == 2
    run.act("seal")
    run.run((table_of([("a", 3, 4)]),), None, [])
    assert run.partitions[0].state.rows == 1
    run.act("restore")  # the second session must not come back from the older delta
    assert emitted(run.run((table_of([]),), 9, [])) == []
    assert emitted(run.run((table_of([]),), 10, [])) == [("a", 0, 10, 3, 7, 1)]


def test_a_row_at_the_end_of_a_session_begins_another() -> None:
    run = KernelRun(kernel(), SCHEMA)
    run.run((table_of([("a", 0, 1), ("a", 4, 1)]),), None, [])
    assert emitted(run.run((table_of([]),), 8, [])) == [("a", 0, 4, 1, 1, 1), ("a", 4, 8, 1, 1, 1)]


def test_late_rows_join_what_is_open_and_are_counted_otherwise() -> None:
    run = KernelRun(kernel(), SCHEMA)
    run.run((table_of([("a", 10, 1)]),), None, [])
    run.run((table_of([("a", 8, 2), ("b", 8, 4), ("b", 8, 5)]),), 12, [])
    assert run.late == 2
    assert emitted(run.run((table_of([]),), 14, [])) == [("a", 8, 14, 2, 3, 1)]


def test_a_session_that_grows_is_watched_once() -> None:
    """The index of deadlines does not grow with the rows of a session."""
    sessions = kernel()
    state = sessions.new_state(GROUPS, SCHEMA)
    for at in range(300):
        rows = sessions.combine(0, table_of([("a", at, 1)]))
        result = sessions.compute(state, (rows,), SliceTime(at, at - 2, 0))
        assert result.output.num_rows == 0
        state.install(result.change)
        assert state.rows == 1 and state._index.nbytes == 24


def test_a_topology_with_sessions() -> None:
    topology = ab.Topology("t")
    rows = topology.source("rows", None, time="at")
    visits = rows.key_by("k").window(ab.session("30m"), time="at", lateness="1m")
    visits.aggregate("visits", n=ab.count(), most=ab.max("v")).to("out", ab.Memory())
    plan = topology.plan()
    schemas, _ = infer_schemas(plan.graph, {"rows": SCHEMA}, topology._sinks)
    assert schemas["visits"].names == ["k", "window_start", "window_end", "n", "most"]
    assert schemas["visits"].field("window_end").type == pa.timestamp("us")
    assert plan.graph.by_name["visits"].kernel.session == Session(30 * 60 * 1_000_000)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least a microsecond"):
        session("0s")
    with pytest.raises(TopologyError, match=r"'v' has type int64.*must be a timestamp"):
        kernel(time="v").output_schema(SCHEMA)
    with pytest.raises(TopologyError, match=r"words: sessions merge.*tumbling or hopping"):
        kernel(aggregates={"words": count_distinct("v")}).output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="'window_end' would be two columns"):
        kernel(aggregates={"window_end": count()}).output_schema(SCHEMA)
    with pytest.raises(OperatorError, match="1 of 1 rows have none"):
        kernel().combine(0, table_of([("a", None, 0)]))
