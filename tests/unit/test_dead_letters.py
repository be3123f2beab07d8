"""Rows that operators cannot take: put aside exactly once, or shown when they end the run."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.testing import Idle, Lose, Restart, Step, play

Rows = list[dict[str, Any]]
BAD = 7  # what the functions here cannot take


def refuse(values: pl.Series) -> None:
    if (values == BAD).any():
        raise ValueError(f"{BAD} is not allowed")


def picky(frame: pl.DataFrame) -> pl.DataFrame:
    refuse(frame["v"])
    return frame.with_columns(v=pl.col("v") * 10)


def picky_twice(frame: pl.DataFrame) -> pl.DataFrame:
    refuse(frame["v"])
    return pl.concat([frame, frame])


def picky_mask(frame: pl.DataFrame) -> pl.Series:
    refuse(frame["v"])
    return frame["v"] > 2


class Total(ab.RowFunction):
    """A running sum that raises half-way through a row's work."""

    state: ClassVar[dict[str, Any]] = {"total": pl.Int64}
    output: ClassVar[dict[str, Any]] = {"total": pl.Int64}

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> Any:
        state.set(total=state.get("total", 0) + row["v"])
        if row["v"] == BAD:
            raise ValueError(f"{BAD} is not allowed")
        return [{"total": state.get("total")}]


class SliceTotal(ab.SliceFunction):
    """The same for whole slices, without a row per row."""

    state: ClassVar[dict[str, Any]] = {"total": pl.Int64}
    output: ClassVar[dict[str, Any]] = {"total": pl.Int64}

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        refuse(given.rows["v"])
        sums = given.rows.group_by("k", maintain_order=True).agg(pl.col("v").sum())
        old = sums.join(given.state, on="k", nulls_equal=True)
        new = old.select("k", total=pl.col("total").fill_null(0) + pl.col("v"))
        return ab.SliceResult(output=new, state=new)


def rows(*values: int) -> Rows:
    return [{"k": "ab"[n % 2], "v": v} for n, v in enumerate(values)]


def with_letters(build: Callable[[ab.Stream], ab.Stream], **source: Any) -> ab.Topology:
    topology = ab.Topology("letters")
    build(topology.source("rows", None, **source)).to("out", ab.Memory())
    topology.dead_letters("dead", ab.Memory())
    return topology


def dead(output: dict[str, pl.DataFrame]) -> list[tuple[Any, ...]]:
    frame = output["dead"]
    return [(s, o, r, json.loads(x)) for s, o, r, x in frame.rows()]


REASON = "the operator's function raised ValueError: 7 is not allowed"


@pytest.mark.parametrize(
    ("build", "out"),
    [
        (lambda s: s.map("op", picky, on_error="dead_letter"), [("a", 10), ("b", 30), ("b", 50)]),
        (
            lambda s: s.flat_map("op", picky_twice, on_error="dead_letter"),
            [("a", 1), ("b", 3), ("b", 5)] * 2,
        ),
        (lambda s: s.filter("op", picky_mask, on_error="dead_letter"), [("b", 3), ("b", 5)]),
    ],
)
def test_failing_rows_are_put_aside(build: Any, out: list[tuple[str, int]]) -> None:
    (shown,) = play(with_letters(build), [{"rows": rows(1, 3, 7, 5)}])
    assert sorted(shown["out"].rows()) == sorted(out)
    assert dead(shown) == [(1, "op", REASON, {"k": "a", "v": 7})]


def test_a_value_that_does_not_cast() -> None:
    def typed(stream: ab.Stream) -> ab.Stream:
        return stream.select("typed", "k", pl.col("v").cast(pl.Int64), on_error="dead_letter")

    given = [{"k": "a", "v": "1"}, {"k": "b", "v": "one"}, {"k": "c", "v": "3"}]
    (shown,) = play(with_letters(typed), [{"rows": given}])
    assert shown["out"].rows() == [("a", 1), ("c", 3)]
    ((slice_no, operator, reason, record),) = dead(shown)
    assert (slice_no, operator, record) == (1, "typed", {"k": "b", "v": "one"})
    assert "one" in reason


def test_all_rows_may_fail_and_none() -> None:
    topology = with_letters(lambda s: s.map("op", picky, on_error="dead_letter"))
    all_bad, none, good = play(topology, [{"rows": rows(7, 7, 7)}, Idle(), {"rows": rows(1)}])
    assert all_bad["out"].height == 0
    assert [n for n, *_ in dead(all_bad)] == [1, 1, 1]
    assert dead(none) == dead(good) == []
    assert good["out"].rows() == [("a", 10)]


def test_rows_that_fail_only_together_are_no_dead_letters() -> None:
    def at_most_two(frame: pl.DataFrame) -> pl.DataFrame:
        if frame.height > 2:
            raise ValueError("too many")
        return frame

    topology = with_letters(lambda s: s.map("op", at_most_two, on_error="dead_letter"))
    (shown,) = play(topology, [{"rows": rows(1, 2, 3, 4, 5)}])
    assert shown["out"]["v"].to_list() == [1, 2, 3, 4, 5]
    assert dead(shown) == []


@pytest.mark.parametrize("function", [Total(), SliceTotal()])
def test_state_is_that_of_the_good_rows(function: ab.SliceFunction) -> None:
    topology = with_letters(
        lambda s: s.key_by("k").process("total", function, on_error="dead_letter")
    )
    first, second = play(topology, [{"rows": rows(1, 2, 7, 4, 5)}, {"rows": rows(10, 20)}])
    last = dict(first["out"].rows())
    assert last == {"a": 1 + 5, "b": 2 + 4}
    assert [(o, x) for _, o, _, x in dead(first)] == [("total", {"k": "a", "v": 7})]
    assert dict(second["out"].rows()) == {"a": 16, "b": 26}


def test_a_timer_that_raises_is_no_rows_fault() -> None:
    class Alarm(ab.RowFunction):
        state: ClassVar[dict[str, Any]] = {"n": pl.Int64}
        output: ClassVar[dict[str, Any]] = {"n": pl.Int64}

        def on_row(self, row: dict[str, Any], state: ab.KeyState) -> None:
            state.set(n=1)
            state.processing_timer = state.now

        def on_timer(self, timer: str, at: dt.datetime, state: ab.KeyState) -> Any:
            raise ValueError("the timer is broken")

    topology = with_letters(lambda s: s.key_by("k").process("a", Alarm(), on_error="dead_letter"))
    with pytest.raises(ab.AnabranchError, match="the timer is broken"):
        play(topology, [{"rows": rows(1)}, {"rows": rows(2)}])


# -- exactly once ----------------------------------------------------------------------------------


def everything() -> ab.Topology:
    """Dead letters of a source, before the shuffle, behind it, and of state."""
    topology = ab.Topology("everything")
    source = topology.source("rows", None, time="ts", on_error="dead_letter")
    mapped = source.map("before", picky, on_error="dead_letter")
    totals = mapped.key_by("k").process("total", OddTotal(), on_error="dead_letter")
    totals.filter("behind", not_forty, on_error="dead_letter").to("out", ab.Memory())
    topology.dead_letters("dead", ab.Memory())
    return topology


class OddTotal(Total):
    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> Any:
        state.set(total=state.get("total", 0) + row["v"])
        if row["v"] == 30:
            raise ValueError("no threes")
        return [{"total": state.get("total")}]


def not_forty(frame: pl.DataFrame) -> pl.Series:
    if (frame["total"] == 40).any():
        raise ValueError("forty")
    return frame["total"] > 0


def moment(second: int) -> dt.datetime:
    return dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=second)


def oracle(slices: list[Rows]) -> tuple[list[Any], list[Any]]:
    """What `everything` should give, row by row."""
    totals: dict[str, int] = {}
    out, letters = [], []
    for number, given_rows in enumerate(slices, start=1):
        for row in given_rows:
            total = totals.get(row["k"], 0) + 10 * row["v"]
            if row["ts"] is None:
                letters.append((number, "rows", row["k"], row["v"]))
            elif row["v"] == BAD:
                letters.append((number, "before", row["k"], row["v"]))
            elif row["v"] == 3:
                letters.append((number, "total", row["k"], 30))
            else:
                totals[row["k"]] = total
                if total == 40:
                    letters.append((number, "behind", row["k"], 40))
                else:
                    out.append((number, row["k"], total))
    return sorted(out), sorted(letters)


def found(outputs: list[dict[str, pl.DataFrame]], steps: list[Step]) -> tuple[list[Any], list[Any]]:
    out, letters, number = [], [], 0
    for shown, step in zip(outputs, steps, strict=True):
        number += isinstance(step, dict)
        out += [(number, k, total) for k, total in shown["out"].rows()]
        for slice_no, operator, _, record in dead(shown):
            value = record["total"] if operator == "behind" else record["v"]
            letters.append((slice_no, operator, record["k"], value))
    return sorted(out), sorted(letters)


SCHEMA = {
    "rows": pa.schema([("ts", pa.timestamp("us", "UTC")), ("k", pa.string()), ("v", pa.int64())])
}
row = st.fixed_dictionaries(
    {
        "ts": st.one_of(st.none(), st.integers(0, 60).map(moment)),
        "k": st.sampled_from("abcd"),
        "v": st.integers(1, 9),
    }
)
mishap = st.sampled_from([Lose(), Lose(2), Restart(), Restart(nodes=3)])


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=4),
    st.lists(mishap, min_size=4, max_size=4),
)
def test_each_row_once_whatever_happens(slices: list[Rows], mishaps: list[Step]) -> None:
    steps: list[Step] = []
    for given_rows, step in zip(slices, mishaps, strict=False):
        steps += [{"rows": given_rows}, step]
    outputs = play(everything(), steps, schemas=SCHEMA)
    assert found(outputs, steps) == oracle(slices)


# -- the run that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda s: s.map("op", picky),
        lambda s: s.filter("op", picky_mask),
        lambda s: s.key_by("k").process("op", Total()),
        lambda s: s.key_by("k").process("op", SliceTotal()),
    ],
)
def test_a_failing_run_shows_the_record(build: Any) -> None:
    topology = ab.Topology("failing")
    build(topology.source("rows", None)).to("out", ab.Memory())
    with pytest.raises(ab.AnabranchError) as error:
        play(topology, [{"rows": rows(1, 2, 3, 7, 5, 7)}])
    assert "slice 1, operator 'op'" in str(error.value)
    assert 'the first record that fails is {"k": "b", "v": 7}' in str(error.value)


def test_a_missing_event_time_is_shown() -> None:
    topology = ab.Topology("timeless")
    counted = (
        topology.source("rows", None, time="ts").key_by("k").window(ab.tumbling("1s"), time="ts")
    )
    counted.aggregate("n", n=ab.count()).to("out", ab.Memory())
    given_rows = [{"ts": moment(1), "k": "a", "v": 1}, {"ts": None, "k": "b", "v": 2}]
    with pytest.raises(ab.AnabranchError, match=r'first is \{"ts": null, "k": "b", "v": 2\}'):
        play(topology, [{"rows": given_rows}], schemas=SCHEMA)


def test_records_of_every_type_have_a_json() -> None:
    def refuse_all(frame: pl.DataFrame) -> pl.DataFrame:
        if frame.height:
            raise ValueError("no")
        return frame

    value = {
        "t": dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC),
        "d": dt.date(2026, 1, 2),
        "w": dt.timedelta(seconds=90),
        "x": b"\x00\x01",
        "f": float("nan"),
        "l": [1, None],
        "s": {"a": "ö"},
    }
    topology = with_letters(lambda s: s.map("op", refuse_all, on_error="dead_letter"))
    (shown,) = play(topology, [{"rows": [value]}])
    assert dead(shown)[0][3] == {
        "t": "2026-01-01T12:00:00+00:00",
        "d": "2026-01-02",
        "w": 90.0,
        "x": "AAE=",
        "f": "nan",
        "l": [1, None],
        "s": {"a": "ö"},
    }


# -- refusals --------------------------------------------------------------------------------------


def test_a_policy_needs_a_place() -> None:
    topology = ab.Topology("nowhere")
    topology.source("rows", None).map("op", picky, on_error="dead_letter").to("out", ab.Memory())
    with pytest.raises(ab.AnabranchError, match=r"'op' puts rows aside.*topology\.dead_letters"):
        topology.plan()


def test_a_place_needs_a_policy() -> None:
    topology = ab.Topology("unused")
    topology.source("rows", None).to("out", ab.Memory())
    topology.dead_letters("dead", ab.Memory())
    with pytest.raises(ab.AnabranchError, match="nothing can reach the dead letters 'dead'"):
        topology.plan()
    with pytest.raises(ab.AnabranchError, match="dead letters go to 'dead' already"):
        topology.dead_letters("more", ab.Memory())


def test_other_words_are_refused() -> None:
    source = ab.Topology("words").source("rows", None)
    with pytest.raises(ab.AnabranchError, match=r"on_error is 'drop'; give \"fail\" or"):
        source.filter("op", pl.col("v") > 1, on_error="drop")
    with pytest.raises(ab.AnabranchError, match="name its column with time="):
        ab.Topology("words").source("rows", None, on_error="dead_letter")


def test_the_name_of_the_dead_letters_is_its_own() -> None:
    topology = ab.Topology("names")
    topology.source("rows", None).map("op", picky, on_error="dead_letter").to("out", ab.Memory())
    topology.dead_letters("op", ab.Memory())
    with pytest.raises(ab.AnabranchError, match="two operators are named 'op'"):
        topology.plan()
