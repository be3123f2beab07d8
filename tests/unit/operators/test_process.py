"""Functions with state and timers of their own, whole slices and single rows, against loops."""

from __future__ import annotations

import datetime as dt
import json
import pickle
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row

import anabranch as ab
from anabranch.errors import OperatorError, TopologyError
from anabranch.node.arrow.schemas import fingerprint, infer_schemas
from anabranch.operators.base import SliceTime
from anabranch.operators.functions import state_fields
from anabranch.operators.kernels.process import KeyedProcess
from anabranch.operators.state.ttl import Ttl
from anabranch.upgrade.kernel_settings import decode, encode
from effort import examples

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
        ("do", pa.string()),
        ("v", pa.int64()),
    ]
)
GAP, AFTER = 5_000, 7_000


def moment(us: int) -> dt.datetime:
    return EPOCH + dt.timedelta(microseconds=us)


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def kernel_of(function: Any, time: str | None = "at", ttl: Ttl | None = None) -> KeyedProcess:
    return KeyedProcess(("k",), function, state_fields(function), time, ttl)


class Obedient(ab.RowFunction):
    """Rows are commands; timers add one and say so."""

    state = {"total": pl.Int64, "words": pl.List(pl.String)}  # noqa: RUF012
    output = {"what": pl.String, "total": pl.Int64}  # noqa: RUF012

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> Iterator[dict[str, Any]]:
        do, v = row["do"], row["v"]
        if do == "add":
            state.set(total=state.get("total", 0) + v, words=[*state.get("words", []), str(v)])
        elif do == "event":
            state.event_timer = row["at"] + dt.timedelta(milliseconds=v)
        elif do == "processing":
            state.processing_timer = state.now + dt.timedelta(milliseconds=v)
        elif do == "cancel":
            state.event_timer = None
        elif do == "clear":
            state.clear()
        yield {"what": "-".join(state.get("words", [])), "total": state.get("total")}

    def on_timer(
        self, timer: str, at: dt.datetime, state: ab.KeyState
    ) -> list[dict[str, Any]] | None:
        if state.get("total", 0) % 3 == 2:
            state.clear()
            return None
        if timer == "processing":
            state.set(total=state.get("total", 0) + 1)
        us = (at - EPOCH) // dt.timedelta(microseconds=1)
        return [{"what": f"{timer} {us}", "total": state.get("total")}]


class Held:
    """What the model knows of one key."""

    def __init__(self) -> None:
        self.total: int | None = None
        self.words: list[str] | None = None
        self.event: int | None = None
        self.processing: int | None = None


class Model:
    """The commands of `Obedient`, carried out one by one; every key is looked at in every slice."""

    def __init__(self, ttl: Ttl | None) -> None:
        self.ttl = ttl
        self.held: dict[Any, Held] = {}
        self.touched: dict[Any, int] = {}

    def slice(self, rows: list[Row], watermark: int | None, now_ms: int) -> dict[Any, list[Row]]:
        now = now_ms * 1_000
        out: dict[Any, list[Row]] = {}
        touched = dict(self.touched)
        for key, at, _, _ in rows:
            when = now if self.ttl is None or self.ttl.time is None else at
            touched[key] = max(when, touched.get(key, when))
        for key, held in list(self.held.items()):
            fired = []
            if held.event is not None and watermark is not None and held.event <= watermark:
                fired.append(("event", held.event))
                held.event = None
            if held.processing is not None and held.processing <= now:
                fired.append(("processing", held.processing))
                held.processing = None
            if not fired and self._over(key, watermark, now):
                del self.held[key]
                touched[key] = max(
                    (now if self.ttl.time is None else at for k, at, _, _ in rows if k == key),
                    default=0,
                )
            for timer, at in fired:
                if (held.total or 0) % 3 == 2:
                    held = self.held[key] = Held()
                    self._forget(key)
                    continue
                self.held[key] = held
                if timer == "processing":
                    held.total = (held.total or 0) + 1
                out.setdefault(key, []).append((f"{timer} {at}", held.total))
        for key, at, do, v in rows:
            held = self.held.get(key, Held())
            if do == "add":
                held.total = (held.total or 0) + v
                held.words = [*(held.words or []), str(v)]
            elif do == "event":
                held.event = at + v * 1_000
            elif do == "processing":
                held.processing = now + v * 1_000
            elif do == "cancel":
                held.event = None
            elif do == "clear":
                held = Held()
            if do == "clear":
                self._forget(key)
            elif do != "look":
                self.held[key] = held
            out.setdefault(key, []).append(("-".join(held.words or []), held.total))
        self.touched = {key: touched[key] for key in self.held}
        return out

    def _over(self, key: Any, watermark: int | None, now: int) -> bool:
        if self.ttl is None:
            return False
        clock = now if self.ttl.time is None else watermark
        return clock is not None and self.touched[key] + self.ttl.after_us <= clock

    def _forget(self, key: Any) -> None:
        self.held.pop(key, None)


def by_key(outputs: dict[int, list[Row]]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for rows in outputs.values():
        for key, *rest in rows:
            found.setdefault(key, []).append(tuple(rest))
    return found


records = st.tuples(
    st.sampled_from([None, "a", "b", "c", "d"]),
    st.integers(-8, 30).map(lambda n: n * 1_000),
    st.sampled_from(["add", "add", "event", "processing", "cancel", "clear", "look"]),
    st.integers(-2, 6),
)
slices = st.tuples(
    st.lists(records, max_size=6),
    st.integers(0, 4).map(lambda n: n * 1_000),  # how far the watermark advances
    st.integers(-1, 4),  # and the clock, which may go back
    st.lists(st.integers(0, 6), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split", "merge"]),
)
Script = list[tuple[list[Row], int, int, list[int], str]]


@pytest.mark.parametrize(
    "ttl", [None, Ttl(AFTER, "at"), Ttl(AFTER)], ids=["for ever", "by events", "by the clock"]
)
@settings(max_examples=examples(15), deadline=None)
@given(st.lists(slices, max_size=8))
def test_rows_one_by_one(ttl: Ttl | None, script: Script) -> None:
    run, model = KernelRun(kernel_of(Obedient(), ttl=ttl), SCHEMA), Model(ttl)
    watermark, now_ms = None, 1_000
    for rows, advance, passes, cuts, action in script:
        expected = model.slice(rows, watermark, now_ms)
        assert by_key(run.run((table_of(rows),), watermark, cuts, now_ms)) == expected
        run.act(action)
        assert sum(p.state.rows for p in run.partitions) == len(model.held)
        watermark, now_ms = (watermark or -8_000) + advance, now_ms + passes


class Sittings(ab.SliceFunction):
    """Sums that begin anew after a quiet time, in whole columns."""

    state = {"total": pl.Int64, "last": pl.Datetime("us", "UTC")}  # noqa: RUF012
    output = {"total": pl.Int64, "over": pl.Boolean}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        fired = pl.col("event_fired").is_not_null()
        over = given.state.filter(fired).select("k", "total", over=pl.lit(True))
        sums = given.rows.group_by(given.state_row).agg(
            pl.col("v").sum(), pl.col("at").max()
        )  # in any order, which must not matter
        held = given.state[sums["state_row"]].with_columns(
            total=pl.when(fired).then(0).otherwise(pl.col("total").fill_null(0)) + sums["v"],
            last=pl.max_horizontal(pl.when(~fired).then("last"), sums["at"]),
        )
        state = held.with_columns(event_timer=pl.col("last") + pl.duration(microseconds=GAP))
        now = held.select("k", "total", over=pl.lit(False))
        quiet = over.join(now, on="k", how="anti", nulls_equal=True)
        return ab.SliceResult(pl.concat([over, now]).to_arrow(), state, quiet)


def sittings(
    held: dict[Any, tuple[int, int]], rows: list[Row], watermark: int | None
) -> dict[Any, list[Row]]:
    out: dict[Any, list[Row]] = {}
    for key, (total, last) in list(held.items()):
        if watermark is not None and last + GAP <= watermark:
            out[key] = [(total, True)]
            del held[key]
    for key in dict.fromkeys(row[0] for row in rows):
        mine = [(at, v) for k, at, _, v in rows if k == key]
        total, last = held.get(key, (0, -(10**9)))
        held[key] = total + sum(v for _, v in mine), max(last, *(at for at, _ in mine))
        out.setdefault(key, []).append((held[key][0], False))
    return out


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(slices, max_size=8))
def test_whole_slices(script: Script) -> None:
    run = KernelRun(kernel_of(Sittings()), SCHEMA)
    held: dict[Any, tuple[int, int]] = {}
    watermark = None
    for rows, advance, _, cuts, action in script:
        expected = sittings(held, rows, watermark)
        assert by_key(run.run((table_of(rows),), watermark, cuts)) == expected
        run.act(action)
        assert sum(p.state.rows for p in run.partitions) == len(held)
        watermark = (watermark or -8_000) + advance


def apply(
    kernel: KeyedProcess, state: Any, rows: list[Row], watermark: int | None = None, now_ms: int = 0
) -> list[tuple[Any, ...]]:
    result = kernel.compute(state, (table_of(rows),), SliceTime(0, watermark, now_ms))
    state.install(result.change)
    return list(zip(*result.output.to_pydict().values(), strict=True))


def test_keys_without_rows_come_by_their_timers() -> None:
    kernel = kernel_of(Obedient())
    state = kernel.new_state(GROUPS, SCHEMA)
    keys = [f"key {n}" for n in range(20)]
    apply(kernel, state, [(key, 100 - n, "event", 0) for n, key in enumerate(keys)])
    assert apply(kernel, state, [], watermark=80) == []
    fired = apply(kernel, state, [("new", 0, "add", 1)], watermark=95)
    assert [row[0] for row in fired] == ["new", *(f"key {n}" for n in range(19, 4, -1))]
    assert len(apply(kernel, state, [], watermark=100)) == 5


def test_a_timer_in_the_past_comes_in_the_next_slice() -> None:
    kernel = kernel_of(Obedient())
    state = kernel.new_state(GROUPS, SCHEMA)
    assert apply(kernel, state, [("a", 0, "event", 0)], watermark=50) == [("a", "", None)]
    assert apply(kernel, state, [], watermark=50) == [("a", "event 0", None)]
    assert apply(kernel, state, [], watermark=50) == []


def test_a_timer_moved_again_and_again_costs_one_entry() -> None:
    kernel = kernel_of(Obedient())
    state = kernel.new_state(GROUPS, SCHEMA)
    for at in range(0, 4_000, 100):
        apply(kernel, state, [("a", at, "event", 1)], watermark=at - 10)
        assert state.event._index.nbytes == 24
    for at in range(4_000, 10_000, 100):  # entries left over by cancelled timers go in time
        apply(kernel, state, [("a", at, "clear", 0)], watermark=at - 10)
        apply(kernel, state, [("a", at, "event", 1)], watermark=at - 10)
        assert state.event._index.nbytes <= 24 * 12
    assert apply(kernel, state, [], watermark=10**7) == [("a", "event 10900", None)]
    assert state.event._index.nbytes == 0


def test_timers_have_the_type_of_the_time_column() -> None:
    seen: list[Any] = []

    class Look(ab.SliceFunction):
        output = {}  # noqa: RUF012

        def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
            seen.append((given.state.schema["event_timer"], given.watermark, given.now))
            return ab.SliceResult()

    naive = SCHEMA.set(1, pa.field("at", pa.timestamp("ms")))
    cases = [(SCHEMA, "at", "UTC"), (naive, "at", None), (naive, None, "UTC")]
    for schema, time, zone in cases:
        kernel = kernel_of(Look(), time)
        kernel.output_schema(schema)
        rows = pa.table([["a"], [1], ["add"], [1]], schema=schema)
        kernel.compute(kernel.new_state(1, schema), (rows,), SliceTime(1, 7, 3))
        kind, watermark, now = seen[-1]
        assert kind == pl.Datetime("us", zone)
        assert watermark == (moment(7).replace(tzinfo=None) if zone is None else moment(7))
        assert now == moment(3_000)


def test_nothing_changes_before_install() -> None:
    kernel = kernel_of(Obedient())
    state = kernel.new_state(GROUPS, SCHEMA)
    kernel.compute(state, (table_of([("a", 0, "add", 1)]),), SliceTime(0, None, 0))
    assert state.rows == 0 and state.seal().num_rows == 0


def test_state_is_read_without_the_function() -> None:
    kernel = kernel_of(Obedient(), ttl=Ttl(AFTER))
    state = kernel.new_state(GROUPS, SCHEMA)
    apply(kernel, state, [("a", 0, "add", 1)])
    stranger = decode(json.loads(json.dumps(encode(kernel))))
    assert stranger.function is None
    copy = stranger.new_state(GROUPS, SCHEMA)
    copy.load(state.snapshot())
    assert copy.snapshot().equals(state.snapshot())
    assert copy.snapshot().column("words").to_pylist() == [["1"]]


def test_a_topology_with_functions() -> None:
    topology = ab.Topology("t")
    keyed = topology.source("rows", None, time="at").key_by("k")
    sums = keyed.process("sums", Sittings(), time="at", ttl="1h")
    sums.key_by("k").process("rows_too", Again(), deterministic=False).to("out", ab.Memory())
    plan = topology.plan()
    schemas, inputs = infer_schemas(plan.graph, {"rows": SCHEMA}, topology._sinks)
    assert schemas["sums"].names == ["k", "total", "over"]
    assert plan.by_name["sums"].operators == ("sums", "rows_too", "out")
    operators = plan.graph.by_name
    assert [operators[n].deterministic for n in ("sums", "rows_too")] == [True, False]
    assert operators["sums"].kernel.ttl == Ttl(3_600_000_000, "at")
    pickle.loads(pickle.dumps(operators["sums"].kernel))
    assert "total: int64" in str(fingerprint(plan, inputs))


class Again(ab.RowFunction):
    output = {"n": int}  # noqa: RUF012

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> Any:
        return [{"n": row["total"]}]


# -- what is refused ----------------------------------------------------------------------------


class Returns(ab.SliceFunction):
    """Gives what it is told once there are rows."""

    state = {"n": pl.Int64}  # noqa: RUF012
    output = {"m": pl.Int64}  # noqa: RUF012

    def __init__(self, result: Any) -> None:
        self.result = result

    def process(self, given: ab.KeyedSlice) -> Any:
        return self.result if given.rows.height else ab.SliceResult()


def frame(**columns: Any) -> pl.DataFrame:
    return pl.DataFrame(columns)


REFUSED: list[tuple[Any, str]] = [
    (None, "process returned NoneType; return an anabranch.SliceResult"),
    (ab.SliceResult([1]), "returned a list; return a polars.DataFrame"),
    (ab.SliceResult(frame(k=["a"])), "output that process returned lacks column 'm'"),
    (ab.SliceResult(frame(k=["a"], m=[1.5])), "output .* 'm' must be int64, but came as double"),
    (
        ab.SliceResult(frame(k=["z"], m=[1])),
        "output .* key {'k': 'z'}, which has neither",
    ),
    (ab.SliceResult(state=frame(k=["z"], n=[1])), "state .* names the key {'k': 'z'}"),
    (ab.SliceResult(deleted=frame(k=["z"])), "deleted names the key {'k': 'z'}"),
    (ab.SliceResult(deleted=frame(n=[1])), "deleted lacks column 'k'"),
    (ab.SliceResult(state=frame(k=["a"])), "state .* lacks column 'n'"),
    (ab.SliceResult(state=frame(k=["a"], n=[1], x=[1])), "column 'x' that was not expected"),
    (ab.SliceResult(state=frame(k=["a", "a"], n=[1, 2])), "{'k': 'a'} more than once"),
    (
        ab.SliceResult(state=frame(k=["a"], n=[1]), deleted=frame(k=["a"])),
        "new state for the key {'k': 'a'} and deleted it",
    ),
    (
        ab.SliceResult(state=frame(k=["a"], n=[1], event_timer=[5])),
        "'event_timer' must be a timestamp, but came as int64",
    ),
]


@pytest.mark.parametrize(("result", "words"), REFUSED)
def test_what_process_may_not_return(result: Any, words: str) -> None:
    kernel = kernel_of(Returns(result))
    state = kernel.new_state(GROUPS, SCHEMA)
    with pytest.raises(OperatorError, match=words):
        apply(kernel, state, [("a", 0, "add", 1)])
    assert state.rows == 0


class Careless(ab.RowFunction):
    state = {"n": pl.Int64}  # noqa: RUF012
    output = {"m": pl.Int64}  # noqa: RUF012

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> Any:
        do = row["do"]
        if do == "type":
            state.set(n="one")
        elif do == "field":
            state.set(x=1)
        elif do == "column":
            return [{"x": 1}]
        elif do == "tuple":
            return [(1,)]
        elif do == "value":
            return [{"m": 2**80}]
        elif do == "timer":
            state.event_timer = row["at"]
        elif do == "raise":
            raise KeyError("here")
        return None


@pytest.mark.parametrize(
    ("do", "words"),
    [
        ("type", r"field 'n' of the state must be Int64, but was given 'one' \(str\)"),
        ("field", r"the state has no field 'x'; it declares \['n'\]"),
        ("column", r"a row of the output is {'x': 1}; give a dict .* \['m'\]"),
        ("tuple", r"a row of the output is \(1,\); give a dict"),
        ("value", r"column 'm' of the output must be Int64, but was given 1208925819614629174706"),
        ("raise", "the operator's function raised KeyError: 'here'"),
    ],
)
def test_what_a_row_may_not_do(do: str, words: str) -> None:
    kernel = kernel_of(Careless())
    with pytest.raises(OperatorError, match=words):
        apply(kernel, kernel.new_state(GROUPS, SCHEMA), [("a", 0, "look", 1), ("a", 0, do, 1)])


def test_a_timer_needs_somebody_to_hear_it() -> None:
    kernel = kernel_of(Careless())
    state = kernel.new_state(GROUPS, SCHEMA)
    apply(kernel, state, [("a", 0, "timer", 1)])
    with pytest.raises(OperatorError, match="Careless sets a timer but has no method on_timer"):
        apply(kernel, state, [], watermark=1)


def declared(**attributes: Any) -> Any:
    return type("Declared", (ab.RowFunction,), {"output": {"m": pl.Int64}, **attributes})()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (declared(state={"k": pl.Int64}), "field 'k', which is the name of a key column"),
        (declared(state={"event_timer": pl.Int64}), "'event_timer', which is the name of a timer"),
        (declared(state={"_n": pl.Int64}), "start with an underscore are reserved"),
        (declared(output={"k": pl.Int64}), "'k' would be two columns of the output"),
        (type("Silent", (ab.RowFunction,), {})(), "Silent does not declare its output"),
        (declared(output={"m": "no type"}), "output is declared as .*give Polars types by name"),
        (type("Idle", (ab.SliceFunction,), {"output": {}})(), "Idle has no method process"),
    ],
)
def test_declarations_that_do_not_fit(function: Any, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        kernel_of(function).output_schema(SCHEMA)


def test_what_does_not_fit_is_refused_when_the_topology_is_built() -> None:
    keyed = ab.Topology("t").source("rows", None).key_by("k")
    with pytest.raises(TopologyError, match=r"instance of .*got the class Sittings"):
        keyed.process("sums", Sittings)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match=r"pl.Object cannot be stored"):
        keyed.process("sums", declared(state={"x": pl.Object}))
    with pytest.raises(TopologyError, match="'v' has type int64"):
        kernel_of(Sittings(), "v").output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="key column 'event_timer' has the name of a timer"):
        timed = KeyedProcess(("event_timer",), declared(), state_fields(declared()))
        timed.output_schema(pa.schema([("event_timer", pa.int64())]))
    other = SCHEMA.set(3, pa.field("w", pa.int64()))
    with pytest.raises(TopologyError, match=r"(?s)ColumnNotFoundError.*called once with an empty"):
        kernel_of(Sittings()).output_schema(other)
