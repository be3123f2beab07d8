"""Operators as a table: what each makes of one stream of events, and a slow model of it.

`operator_gives_what_its_model_says` is one test for every place a topology can run: in the unit
tests the fixture `outputs` plays a case in the test driver, in tests/spark it runs all of them on
real executors. The input has late and out-of-order events, events on the bounds of windows and of
slices, lost nodes and a restart; the models know of none of these but the events.

A model is given slices, each with the watermark it sees, and yields rows. It keeps everything it
has ever seen, and looks at all of it for every row.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl
import pytest

import anabranch as ab
from anabranch.testing import Idle, Lose, Restart, Step

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
LATE_S = 5  # how late events may be
COLUMNS = "ts timestamp, k string, v long, item long"
SCHEMA = {"ts": pl.Datetime("us", "UTC"), "k": pl.String, "v": pl.Int64, "item": pl.Int64}
NEVER = dt.datetime(1, 1, 1, tzinfo=dt.UTC)  # a watermark before all events

Row = tuple[Any, ...]


class Event(NamedTuple):
    ts: dt.datetime
    k: str | None
    v: int
    item: int


Slices = list[tuple[list[Event], dt.datetime]]  # events, and the watermark the slice sees
Model = Callable[[Slices], Iterable[Row]]


def seconds(count: float) -> dt.timedelta:
    return dt.timedelta(seconds=count)


# -- the input ---------------------------------------------------------------------------------


def _events(number: int) -> list[Event]:
    """Slice `number`: five seconds, out of order; every eighth is late, some of them too late."""
    rng = random.Random(number)
    begin = START + seconds(5 * number)
    times = [begin + seconds(rng.randrange(50) / 10) for _ in range(18)]
    times += [begin - seconds(rng.choice([0.5, 4, 5, 6, 10, 20])) for _ in range(3)]
    times += [begin, begin + seconds(5)]  # on the bounds of windows and of this slice
    rng.shuffle(times)
    keys = ["a", "b", "c", None, f"only_{number}", f"sometimes_{number % 3}"]
    draw = rng.choices
    return [
        Event(ts, draw(keys, [9, 5, 3, 2, 1, 2])[0], rng.randrange(-3, 40), rng.randrange(5))
        for ts in times
    ]


EVENTS = [_events(number) for number in range(8)]
STEPS: list[Step] = [
    *({"events": pl.DataFrame(rows, SCHEMA, orient="row")} for rows in EVENTS),
    Idle(),
]
# From the back, so that a number says after how many slices. After ten seconds without rows there
# is a checkpoint, so each of these restores one and replays a slice.
STEPS[7:7] = [Lose()]
STEPS[6:6] = [Idle(10)]
STEPS[5:5] = [Restart()]
STEPS[4:4] = [Idle(10)]
STEPS[3:3] = [Lose()]
STEPS[2:2] = [Idle(10)]


def slices() -> Slices:
    """The slices of the input, the empty one at the end among them."""
    watermark = NEVER
    found: Slices = []
    for events in [*EVENTS, []]:
        found.append((events, watermark))
        watermark = max([watermark, *(e.ts - seconds(LATE_S) for e in events)])
    return found


# -- models ------------------------------------------------------------------------------------

Fold = Callable[[list[Event]], Row]


def counted(events: list[Event]) -> Row:
    return (len(events),)


def totalled(events: list[Event]) -> Row:
    return (sum(e.v for e in events),)


def distinct(events: list[Event]) -> Row:
    return (len({e.item for e in events}),)


def extremes(events: list[Event]) -> Row:
    values = [e.v for e in events]
    return min(values), max(values), sum(values) / len(values)


def running(fold: Fold, ttl_s: float | None = None) -> Model:
    """After every slice, the keys it touched; keys that nothing has touched are forgotten."""

    def model(given: Slices) -> Iterator[Row]:
        held: dict[Any, list[Event]] = {}
        for events, watermark in given:
            for key, old in list(held.items()):
                if ttl_s is not None and max(e.ts for e in old) + seconds(ttl_s) <= watermark:
                    del held[key]
            for event in events:
                held.setdefault(event.k, []).append(event)
            for key in {e.k for e in events}:
                yield (key, *fold(held[key]))

    return model


def windowed(size_s: int, slide_s: int, fold: Fold, keep: Callable[[Event], bool] = bool) -> Model:
    """Every window by itself, from the rows that came before the watermark had passed its end."""

    def model(given: Slices) -> Iterator[Row]:
        for n in range(-50, 60):
            start = START + seconds(n * slide_s)
            end = start + seconds(size_s)
            held: dict[Any, list[Event]] = {}
            for events, watermark in given:
                for event in events:
                    if watermark < end and start <= event.ts < end and keep(event):
                        held.setdefault(event.k, []).append(event)
            if given[-1][1] >= end:
                for key, mine in held.items():
                    yield (key, start, end, *fold(mine))

    return model


def sessions(gap_s: float, fold: Fold) -> Model:
    """Sessions as lists of events; an event joins all that it is near to."""
    gap = seconds(gap_s)

    def model(given: Slices) -> Iterator[Row]:
        held: list[list[Event]] = []
        for events, watermark in given:

            def closed(one: list[Event], watermark: dt.datetime = watermark) -> bool:
                return max(e.ts for e in one) + gap <= watermark

            for one in filter(closed, held):
                times = [e.ts for e in one]
                yield (one[0].k, min(times), max(times) + gap, *fold(one))
            held = [one for one in held if not closed(one)]
            for event in events:
                near = [s for s in held if s[0].k == event.k and _near(s, event, gap)]
                apart = [s for s in held if not any(s is n for n in near)]
                held = [*apart, [event, *(e for s in near for e in s)]]
            held = [one for one in held if not closed(one)]  # of late events alone

    return model


def _near(session: list[Event], event: Event, gap: dt.timedelta) -> bool:
    return any(abs(e.ts - event.ts) < gap for e in session)


def ranked(k: int, by_key: bool = True, ascending: bool = False) -> Model:
    """After every slice the rankings it changed; among equals, who came first."""

    def model(given: Slices) -> Iterator[Row]:
        held: dict[Any, list[Event]] = {}
        for events, _ in given:
            before = {key: list(mine) for key, mine in held.items()}
            for event in events:
                held.setdefault(event.k if by_key else 0, []).append(event)
            for key, mine in held.items():
                best = sorted(mine, key=lambda e: e.v if ascending else -e.v)[:k]
                old = before.get(key, [])
                if any(not any(e is o for o in old) for e in best):
                    yield from ((*e, rank) for rank, e in enumerate(best, 1))

    return model


def firsts(given: Slices) -> Iterator[Row]:
    """The first event of every key and item."""
    seen = set()
    for events, _ in given:
        for event in events:
            if (event.k, event.item) not in seen:
                seen.add((event.k, event.item))
                yield tuple(event)


def firsts_within(within_s: int) -> Model:
    """Events that are not near one of their key that passed, but for late ones."""

    def model(given: Slices) -> Iterator[Row]:
        passed: list[Event] = []
        for events, watermark in given:
            for event in events:
                span = (event.ts - START) // seconds(within_s)
                late = START + seconds((span + 1) * within_s) <= watermark
                mine = [e for e in passed if e.k == event.k]
                if not late and not _near(mine, event, seconds(within_s)):
                    passed.append(event)
                    yield tuple(event)

    return model


def joined(left: Model, right: Model) -> Model:
    def model(given: Slices) -> Iterator[Row]:
        rights = list(right(given))
        for row in left(given):
            yield from ((*row, *other[3:]) for other in rights if other[:3] == row[:3])

    return model


def added_by(size_s: int, windows: Model) -> Model:
    """The first values of windows of a second, added up by larger windows that are over."""

    def model(given: Slices) -> Iterator[Row]:
        for n in range(-5, 5):
            start = START + seconds(n * size_s)
            end = start + seconds(size_s)
            totals: dict[Any, int] = {}
            for key, inner_start, _, value in windows(given):
                if start <= inner_start < end and given[-1][1] >= end:
                    totals[key] = totals.get(key, 0) + value
            yield from ((key, start, end, total) for key, total in totals.items())

    return model


def quiet(after_s: int) -> Model:
    """How many events a key had when none came for so long."""

    def model(given: Slices) -> Iterator[Row]:
        held: dict[Any, list[Event]] = {}
        for events, watermark in given:
            for key, mine in list(held.items()):
                if mine[-1].ts + seconds(after_s) <= watermark:
                    yield key, len(mine)
                    del held[key]
            for event in events:
                held.setdefault(event.k, []).append(event)

    return model


def row_by_row(given: Slices) -> Iterator[Row]:
    for events, _ in given:
        for e in events:
            if e.v >= 0 and e.item in TITLES:
                for sign in (1, -1):
                    yield e.k, sign * e.v * 10, e.item, TITLES[e.item]


# -- the table ---------------------------------------------------------------------------------


class Quiet(ab.RowFunction):
    state = {"n": pl.Int64}  # noqa: RUF012
    output = {"n": pl.Int64}  # noqa: RUF012

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> None:
        state.set(n=state.get("n", 0) + 1)
        state.event_timer = row["ts"] + dt.timedelta(seconds=3)

    def on_timer(self, timer: str, at: dt.datetime, state: ab.KeyState) -> list[dict[str, Any]]:
        n = state.get("n")
        state.clear()
        return [{"n": n}]


class Totals(ab.SliceFunction):
    state = {"total": pl.Int64}  # noqa: RUF012
    output = {"total": pl.Int64}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        sums = given.rows.group_by("k", maintain_order=True).agg(pl.col("v").sum())
        known = sums.join(given.state, on="k", nulls_equal=True)
        new = known.select("k", total=pl.col("total").fill_null(0) + pl.col("v"))
        return ab.SliceResult(output=new, state=new)


TITLES = {1: "one", 2: "two", 4: "four"}
_TITLED = pl.DataFrame({"item": list(TITLES), "title": list(TITLES.values())})


def _both_signs(frame: pl.DataFrame) -> pl.DataFrame:
    return pl.concat([frame, frame.with_columns(-pl.col("v"))])


def _stateless(events: ab.Stream) -> ab.Stream:
    kept = events.filter("positive", pl.col("v") >= 0).select("bare", "k", "v", "item")
    tens = kept.map("tens", lambda f: f.with_columns(pl.col("v") * 10))
    signed = tens.flat_map("signed", _both_signs)
    return signed.enrich("titled", _TITLED, on="item", how="inner")


def _join(events: ab.Stream) -> ab.Stream:
    def side(name: str, stream: ab.Stream, **aggregates: Any) -> ab.KeyedStream:
        windows = stream.key_by("k").window(ab.tumbling("5s"), time="ts")
        return windows.aggregate(name, **aggregates).key_by("k")

    large = events.filter("large", pl.col("v") > 25)
    left, right = side("all", events, n=ab.count()), side("some", large, total=ab.sum("v"))
    return left.join_windows("both", right, left=["n"], right=["total"])


def _window_on_window(events: ab.Stream) -> ab.Stream:
    by_second = events.key_by("k").window(ab.tumbling("1s"), time="ts")
    counts = by_second.aggregate("by_second", n=ab.count())
    longer = counts.key_by("k").window(ab.tumbling("10s"), time="window_start")
    return longer.aggregate("window_on_window", n=ab.sum("n"))


@dataclass(frozen=True)
class Case:
    """An operator on the events, and what must come out of it."""

    name: str
    build: Callable[[ab.Stream], ab.Stream]
    model: Model


def _by_key(name: str, **options: Any) -> Callable[[ab.Stream], ab.Stream]:
    return lambda events: events.key_by("k").aggregate(name, **options)


def _window(name: str, window: Any, **aggregates: Any) -> Callable[[ab.Stream], ab.Stream]:
    return lambda s: s.key_by("k").window(window, time="ts").aggregate(name, **aggregates)


_STATISTICS = {"least": ab.min("v"), "most": ab.max("v"), "mean": ab.mean("v")}
CASES = [
    Case("stateless", _stateless, row_by_row),
    Case("count", _by_key("count", n=ab.count()), running(counted)),
    Case("sum", _by_key("sum", total=ab.sum("v"), precombine=False), running(totalled)),
    Case("statistics", _by_key("statistics", **_STATISTICS), running(extremes)),
    Case("distinct", _by_key("distinct", n=ab.count_distinct("item")), running(distinct)),
    Case(
        "ttl",
        _by_key("ttl", ttl="4s", time="ts", n=ab.count(), items=ab.count_distinct("item")),
        running(lambda events: (*counted(events), *distinct(events)), 4),
    ),
    Case(
        "tumbling",
        _window("tumbling", ab.tumbling("5s"), n=ab.count(), total=ab.sum("v")),
        windowed(5, 5, lambda events: (*counted(events), *totalled(events))),
    ),
    Case("window_on_window", _window_on_window, added_by(10, windowed(1, 1, counted))),
    Case(
        "hopping", _window("hopping", ab.hopping("6s", "4s"), n=ab.count()), windowed(6, 4, counted)
    ),
    Case(
        "hopping_distinct",
        _window("hopping_distinct", ab.hopping("10s", "5s"), n=ab.count_distinct("item")),
        windowed(10, 5, distinct),
    ),
    Case("session", _window("session", ab.session("1s"), **_STATISTICS), sessions(1, extremes)),
    Case("top_k", lambda s: s.key_by("k").top_k("top_k", 3, by="v"), ranked(3)),
    Case(
        "top_k_of_all",
        lambda s: s.top_k("top_k_of_all", 4, by="v", descending=False),
        ranked(4, by_key=False, ascending=True),
    ),
    Case("deduplicate", lambda s: s.key_by("k", "item").deduplicate("deduplicate"), firsts),
    Case(
        "deduplicate_within",
        lambda s: s.key_by("k").deduplicate("deduplicate_within", within="3s", time="ts"),
        firsts_within(3),
    ),
    Case(
        "join", _join, joined(windowed(5, 5, counted), windowed(5, 5, totalled, lambda e: e.v > 25))
    ),
    Case(
        "row_function",
        lambda s: s.key_by("k").process("row_function", Quiet(), time="ts"),
        quiet(3),
    ),
    Case(
        "slice_function",
        lambda s: s.key_by("k").process("slice_function", Totals()),
        running(totalled),
    ),
]


def topology(cases: Iterable[Case], data: Any, sink: Callable[[str], Any]) -> ab.Topology:
    """The operators of these cases, side by side on one source; a sink for each."""
    built = ab.Topology("operators")
    events = built.source("events", data, time="ts", watermark=f"{LATE_S}s")
    for case in cases:
        case.build(events).to(f"{case.name}_out", sink(case.name))
    return built


Outputs = Callable[[Case], list[Row]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def operator_gives_what_its_model_says(case: Case, outputs: Outputs) -> None:
    expected = list(case.model(slices()))
    assert len(expected) > 10
    assert sorted(outputs(case), key=repr) == sorted(expected, key=repr)
