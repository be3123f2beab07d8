from __future__ import annotations

from datetime import timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runs import GROUPS, KernelRun, Row

from anabranch.errors import ConfigError, OperatorError, TopologyError
from anabranch.model.duration import parse_duration
from anabranch.operators.base import SliceTime
from anabranch.operators.kernels import aggregates
from anabranch.operators.kernels.aggregates import count
from anabranch.operators.kernels.windows import Window, WindowedAggregate, hopping, tumbling
from anabranch.operators.rows.hashing import key_groups
from effort import examples

SCHEMA = pa.schema([("k", pa.string()), ("at", pa.timestamp("us")), ("v", pa.int64())])
SECOND = 1_000_000


def table_of(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], SCHEMA)


def group_of(key: str | None) -> int:
    return int(key_groups(table_of([(key, 0, 0)]), ("k",), GROUPS)[0])


class Model:
    """Rows by pane and key; windows judged one by one."""

    def __init__(self, window: Window, lateness: int) -> None:
        self.window = window
        self.lateness = lateness
        self.panes: dict[int, dict[str | None, list[int]]] = {}
        self.emitted: set[int] = set()
        self.late = 0

    def slice(self, rows: list[Row], watermark: int | None) -> dict[int, list[Row]]:
        outputs = self._emit(watermark)
        for key, at, value in rows:
            starts = [s for s in self._starts() if s <= at < s + self.window.size_us]
            lost = [s for s in starts if self._closed(s, watermark)]
            if len(lost) == len(starts):
                self.late += 1
            else:
                pane = at - at % self.window.pane_us
                self.panes.setdefault(pane, {}).setdefault(key, []).append(value)
        return outputs

    def _starts(self) -> range:
        return range(-100 * self.window.slide_us, 100 * self.window.slide_us, self.window.slide_us)

    def _closed(self, start: int, watermark: int | None) -> bool:
        return watermark is not None and start + self.window.size_us + self.lateness <= watermark

    def _emit(self, watermark: int | None) -> dict[int, list[Row]]:
        outputs: dict[int, list[Row]] = {}
        for start in self._starts():
            if start in self.emitted or not self._closed(start, watermark):
                continue
            self.emitted.add(start)
            end = start + self.window.size_us
            merged: dict[str | None, list[int]] = {}
            for pane in sorted(p for p in self.panes if start <= p < end):
                for key, values in self.panes[pane].items():
                    merged.setdefault(key, []).extend(values)
            for key, values in merged.items():
                row = (key, start, end, len(values), sum(values), max(values))
                outputs.setdefault(group_of(key), []).append(row)
        return outputs


records = st.tuples(
    st.sampled_from([None, "a", "b", "c", "d"]), st.integers(-20, 40), st.integers(0, 9)
)
slices = st.tuples(
    st.lists(records, max_size=12),
    st.integers(0, 12),
    st.lists(st.integers(0, 12), max_size=2),
    st.sampled_from(["", "", "seal", "restore", "split"]),
)
WINDOWS = [(4, 4), (6, 2), (5, 3), (10, 5)]


@settings(max_examples=examples(45), deadline=None)
@given(st.sampled_from(WINDOWS), st.sampled_from([0, 3]), st.lists(slices, max_size=8))
def test_against_a_model_that_looks_at_every_window(
    sizes: tuple[int, int], lateness: int, script: list[tuple[list[Row], int, list[int], str]]
) -> None:
    window = Window(sizes[0], sizes[1])
    kernel = WindowedAggregate(
        ("k",),
        "at",
        window,
        {"n": count(), "total": aggregates.sum("v"), "most": aggregates.max("v")},
        timedelta(microseconds=lateness),
    )
    run, model = KernelRun(kernel, SCHEMA), Model(window, lateness)
    watermark: int | None = None
    for rows, advance, cuts, action in script:
        outputs = run.run((table_of(rows),), watermark, cuts)
        assert {g: plain_times(found) for g, found in outputs.items()} == model.slice(
            rows, watermark
        )
        assert run.late == model.late
        run.act(action)
        if advance:
            watermark = advance - 15 if watermark is None else watermark + advance


def plain_times(rows: list[Row]) -> list[Row]:
    def us(value: object) -> object:
        moment = pa.scalar(value, pa.timestamp("us"))
        return moment.cast(pa.int64()).as_py()

    return [(key, us(start), us(end), *rest) for key, start, end, *rest in rows]


def kernel(**changes: object) -> WindowedAggregate:
    settings = {"keys": ("k",), "time": "at", "window": tumbling("30s")}
    return WindowedAggregate(**{**settings, "aggregates": {"n": count()}, **changes})  # type: ignore[arg-type]


def test_a_word_count_of_thirty_seconds() -> None:
    counter = kernel()
    state = counter.new_state(GROUPS, SCHEMA)
    rows = [
        ("a", 1 * SECOND, 0),
        ("b", 29 * SECOND, 0),
        ("a", 2 * SECOND, 0),
        ("a", 30 * SECOND, 0),
    ]
    for number, watermark in enumerate([None, 29 * SECOND]):
        table = table_of(rows if watermark is None else [])
        time = SliceTime(number, watermark, 0)
        result = counter.compute(state, (counter.combine(0, table),), time)
        assert result.output.num_rows == 0
        state.install(result.change)
    empty = counter.combine(0, table_of([]))
    result = counter.compute(state, (empty,), SliceTime(2, 30 * SECOND, 0))
    assert result.output.select(["k", "n"]).to_pylist() == [{"k": "a", "n": 2}, {"k": "b", "n": 1}]
    assert state.rows == 3
    state.install(result.change)
    assert state.rows == 1


def test_a_watermark_that_goes_back_closes_nothing_twice() -> None:
    counter = kernel()
    state = counter.new_state(GROUPS, SCHEMA)
    late = counter.combine(0, table_of([("a", 5 * SECOND, 0)]))
    state.install(counter.compute(state, (late,), SliceTime(0, 60 * SECOND, 0)).change)
    result = counter.compute(state, (late,), SliceTime(1, 10 * SECOND, 0))
    assert (result.output.num_rows, result.late_rows) == (0, 1)


def test_a_sealed_window_that_closed_later_is_not_loaded() -> None:
    counter = kernel()
    state, restored = (counter.new_state(GROUPS, SCHEMA) for _ in range(2))
    rows = counter.combine(0, table_of([("a", 5 * SECOND, 0)]))
    state.install(counter.compute(state, (rows,), SliceTime(0, None, 0)).change)
    deltas = [state.seal()]
    empty = rows.slice(0, 0)
    state.install(counter.compute(state, (empty,), SliceTime(1, 30 * SECOND, 0)).change)
    deltas.append(state.seal())
    for delta in deltas:
        restored.load(delta)
    assert restored.rows == 0
    assert counter.compute(restored, (rows,), SliceTime(2, None, 0)).late_rows == 1


def test_late_rows_are_counted_without_a_count() -> None:
    summed = kernel(aggregates={"total": aggregates.sum("v")}, window=hopping("10s", "5s"))
    state = summed.new_state(GROUPS, SCHEMA)
    rows = summed.combine(0, table_of([("a", 7 * SECOND, 1), ("a", 8 * SECOND, 1)]))
    result = summed.compute(state, (rows,), SliceTime(0, 10 * SECOND, 0))
    assert result.late_rows == 0  # one of the two windows that hold second 7 and 8 is open
    state.install(result.change)
    result = summed.compute(state, (rows,), SliceTime(1, 15 * SECOND, 0))
    assert result.output.column("total").to_pylist() == [2]
    assert (result.late_rows, result.late[0].tolist()) == (2, [True])


def test_windows_keep_the_time_zone() -> None:
    schema = SCHEMA.set(1, pa.field("at", pa.timestamp("ms", "UTC")))
    assert kernel().output_schema(schema).field("window_start").type == pa.timestamp("us", "UTC")


def test_rows_without_a_time_are_refused() -> None:
    with pytest.raises(OperatorError, match=r"'at'.*1 of 2 rows have none"):
        kernel().combine(0, table_of([("a", None, 0), ("a", 1, 0)]))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"'v' has type int64.*timestamp"):
        kernel(time="v").output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="needs column 'when'"):
        kernel(time="when").output_schema(SCHEMA)
    with pytest.raises(TopologyError, match="'window_start' would be two columns"):
        kernel(aggregates={"window_start": count()}).output_schema(SCHEMA)
    for size, slide in (("0s", "0s"), ("10s", "20s"), ("10s", "0s")):
        with pytest.raises(ConfigError, match="slide at most the size"):
            hopping(size, slide)


def test_durations() -> None:
    assert parse_duration("500ms") == timedelta(milliseconds=500)
    assert parse_duration("1.5 h") == timedelta(minutes=90)
    assert parse_duration("1m") == parse_duration(timedelta(minutes=1))
    assert tumbling("30s") == Window(30 * SECOND, 30 * SECOND)
    for text in ("", "30", "s", "-1s", "1 week", "1m30s", 5):
        with pytest.raises(ConfigError, match="is not a duration"):
            parse_duration(text)  # type: ignore[arg-type]
