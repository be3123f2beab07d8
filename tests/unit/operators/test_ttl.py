from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row

import anabranch as ab
from anabranch.errors import ConfigError, OperatorError, TopologyError
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels import aggregates, distinct
from anabranch.operators.kernels.aggregates import KeyedAggregate
from anabranch.operators.kernels.distinct import CountDistinct
from anabranch.operators.kernels.topk import TopK
from anabranch.operators.rows.hashing import key_groups
from anabranch.operators.state.ttl import Ttl
from effort import examples

SCHEMA = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC")), ("v", pa.int64())])
AFTER = 5_000
BY_EVENTS, BY_CLOCK = Ttl(AFTER, "at"), Ttl(AFTER)


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def group_of(key: str | None) -> int:
    return int(key_groups(table_of([(key, 0, 0)]), ("k",), GROUPS)[0])


class Model:
    """Rows of every key since it was last forgotten, with the number of their arrival; keys are
    looked at one by one."""

    def __init__(self, ttl: Ttl) -> None:
        self.ttl = ttl
        self.arrived = 0
        self.rows: dict[Any, list[tuple[int, Row]]] = {}
        self.touched: dict[Any, int] = {}

    def slice(self, rows: list[Row], watermark: int | None, now_ms: int) -> list[Any]:
        """The keys of the slice, after what is due was forgotten."""
        clock = now_ms * 1_000 if self.ttl.time is None else watermark
        for key, touched in list(self.touched.items()):
            if clock is not None and touched + AFTER <= clock:
                del self.rows[key], self.touched[key]
        for key, at, value in rows:
            moment = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=at)
            self.rows.setdefault(key, []).append((self.arrived, (key, moment, value)))
            self.arrived += 1
            when = now_ms * 1_000 if self.ttl.time is None else at
            self.touched[key] = max(when, self.touched.get(key, when))
        return list(dict.fromkeys(row[0] for row in rows))


records = st.tuples(
    st.sampled_from([None, "a", "b", "c", "d"]),
    st.integers(-8, 30).map(lambda n: n * 1_000),
    st.integers(0, 9),
)
slices = st.tuples(
    st.lists(records, max_size=6),
    st.integers(0, 4).map(lambda n: n * 1_000),  # how far the watermark advances
    st.integers(-1, 4),  # and the clock, which may go back
    st.lists(st.integers(0, 6), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split", "merge"]),
)
Script = list[tuple[list[Row], int, int, list[int], str]]


@pytest.mark.parametrize("ttl", [BY_EVENTS, BY_CLOCK], ids=["events", "clock"])
@settings(max_examples=examples(25), deadline=None)
@given(st.lists(slices, max_size=8))
def test_aggregates_against_keys_looked_at_one_by_one(ttl: Ttl, script: Script) -> None:
    kernel = KeyedAggregate(("k",), {"n": aggregates.count(), "sum": aggregates.sum("v")}, ttl)
    run, model = KernelRun(kernel, SCHEMA), Model(ttl)
    watermark, now_ms = None, 1_000
    for rows, advance, passes, cuts, action in script:
        expected: dict[int, list[Row]] = {}
        for key in model.slice(rows, watermark, now_ms):
            values = [value for _, (_, _, value) in model.rows[key]]
            expected.setdefault(group_of(key), []).append((key, len(values), sum(values)))
        assert run.run((table_of(rows),), watermark, cuts, now_ms) == expected
        run.act(action)
        assert sum(p.state.rows for p in run.partitions) == len(model.rows)
        watermark, now_ms = (watermark or -8_000) + advance, now_ms + passes


@pytest.mark.parametrize("ttl", [BY_EVENTS, BY_CLOCK], ids=["events", "clock"])
@pytest.mark.parametrize("sweep_from", [1, 10_000], ids=["swept at once", "hardly ever swept"])
@settings(max_examples=examples(15), deadline=None)
@given(st.lists(slices, max_size=8))
def test_distinct_values_are_forgotten_with_their_key(
    sweep_from: int, ttl: Ttl, script: Script
) -> None:
    """A key that comes back has seen nothing, whether or not its old pairs are swept out."""
    kernel = KeyedAggregate(("k",), {"n": aggregates.count(), "d": CountDistinct("v")}, ttl)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct, "_SWEEP_FROM", sweep_from)
        run, model = KernelRun(kernel, SCHEMA), Model(ttl)
        run.leaves_garbage = True
        watermark, now_ms = None, 1_000
        for rows, advance, passes, cuts, action in script:
            expected: dict[int, list[Row]] = {}
            for key in model.slice(rows, watermark, now_ms):
                values = [value for _, (_, _, value) in model.rows[key]]
                found = (key, len(values), len(set(values)))
                expected.setdefault(group_of(key), []).append(found)
            assert run.run((table_of(rows),), watermark, cuts, now_ms) == expected
            run.act(action)
            watermark, now_ms = (watermark or -8_000) + advance, now_ms + passes


def test_pairs_of_forgotten_keys_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distinct, "_SWEEP_FROM", 100)
    kernel = KeyedAggregate(("k",), {"d": CountDistinct("v")}, BY_CLOCK)
    run = KernelRun(kernel, SCHEMA)
    for number in range(100):  # ten new keys a slice, five values each, forgotten after two slices
        rows = [(f"{number}-{key}", 0, value) for key in range(10) for value in range(5)]
        run.run((table_of(rows),), None, [], 1_000 + 3 * number)
    assert sum(p.state.rows for p in run.partitions) < 1_000


@pytest.mark.parametrize("ttl", [BY_EVENTS, BY_CLOCK], ids=["events", "clock"])
@settings(max_examples=examples(25), deadline=None)
@given(st.lists(slices, max_size=8))
def test_rankings_against_keys_looked_at_one_by_one(ttl: Ttl, script: Script) -> None:
    kernel = TopK(("k",), 2, "v", ttl=ttl)
    run, model = KernelRun(kernel, SCHEMA), Model(ttl)
    watermark, now_ms = None, 1_000
    for rows, advance, passes, cuts, action in script:
        before = model.arrived
        expected: dict[int, list[Row]] = {}
        for key in model.slice(rows, watermark, now_ms):
            best = sorted(model.rows[key], key=lambda one: -one[1][2])[:2]
            if any(number >= before for number, _ in best):
                expected.setdefault(group_of(key), []).extend(
                    (*row, rank) for rank, (_, row) in enumerate(best, 1)
                )
        assert run.run((table_of(rows),), watermark, cuts, now_ms) == expected
        run.act(action)
        held = sum(min(2, len(rows)) for rows in model.rows.values())
        assert sum(p.state.rows for p in run.partitions) == held
        watermark, now_ms = (watermark or -8_000) + advance, now_ms + passes


def apply(kernel: Any, state: Any, rows: list[Row], time: SliceTime) -> list[dict[str, Any]]:
    result = kernel.compute(state, (kernel.combine(0, table_of(rows)),), time)
    state.install(result.change)
    output: list[dict[str, Any]] = result.output.to_pylist()
    return output


@pytest.mark.parametrize(
    "kernel",
    [
        KeyedAggregate(("k",), {"n": aggregates.count()}, BY_CLOCK),
        TopK(("k",), 1, "v", ttl=BY_CLOCK),
    ],
    ids=["aggregate", "top_k"],
)
def test_a_delta_says_what_was_forgotten(kernel: Any) -> None:
    state, copy = kernel.new_state(GROUPS, SCHEMA), kernel.new_state(GROUPS, SCHEMA)
    apply(kernel, state, [("a", 0, 1), ("b", 0, 1)], SliceTime(1, None, 0))
    copy.load(state.seal())
    apply(kernel, state, [("b", 0, 1)], SliceTime(2, None, 4))
    apply(kernel, state, [], SliceTime(3, None, 5))
    delta = state.seal()
    marks = dict(zip(delta["k"].to_pylist(), delta["_deleted"].to_pylist(), strict=True))
    assert marks == {"a": True, "b": False}
    copy.load(delta)
    assert copy.rows == state.rows == 1


def test_a_key_touched_for_ever_costs_one_entry() -> None:
    kernel = KeyedAggregate(("k",), {"n": aggregates.count()}, BY_CLOCK)
    state = kernel.new_state(GROUPS, SCHEMA)
    for slice_no in range(200):
        (row,) = apply(kernel, state, [("a", 0, 1)], SliceTime(slice_no, None, slice_no))
        assert row["n"] == slice_no + 1
        assert state._alarms._index.nbytes == 24


def test_a_topology_with_a_ttl() -> None:
    topology = ab.Topology("t")
    keyed = topology.source("rows", None, time="at").key_by("k")
    keyed.aggregate("count", ttl="1h", n=ab.count()).to("a", ab.Memory())
    keyed.top_k("best", 3, by="v", ttl="2m", time="at").to("b", ab.Memory())
    kernels = {o.name: o.kernel for o in topology.plan().graph.operators}
    assert kernels["count"].ttl == Ttl(3_600_000_000)
    assert kernels["best"].ttl == Ttl(120_000_000, "at")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="ttl is 0s; give a duration of at least a microsecond"):
        Ttl.of("0s", None)
    with pytest.raises(TopologyError, match="time='at' is what ttl= goes by, but there is no ttl="):
        Ttl.of(None, "at")
    with pytest.raises(TopologyError, match="give an aggregate of that name another one"):
        keyed = ab.Topology("t").source("rows", None, time="at").key_by("k")
        keyed.aggregate("latest", time=ab.max("at"))  # type: ignore[arg-type]
    for make in (
        lambda ttl: KeyedAggregate(("k",), {"n": aggregates.count()}, ttl),
        lambda ttl: TopK(("k",), 1, "v", ttl=ttl),
    ):
        with pytest.raises(TopologyError, match=r"'v' has type int64.*must be a timestamp"):
            make(Ttl(AFTER, "v")).output_schema(SCHEMA)
        with pytest.raises(TopologyError, match="ttl needs column 'absent'"):
            make(Ttl(AFTER, "absent")).output_schema(SCHEMA)
        with pytest.raises(OperatorError, match="1 of 1 rows have none"):
            make(BY_EVENTS).combine(0, table_of([("a", None, 0)]))
