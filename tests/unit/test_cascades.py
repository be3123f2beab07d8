"""Operators of event time behind each other: the same rows however the input falls into slices.

Every pair of operators runs on the same rows cut into slices of several sizes, and is compared with
a batch answer: both operators as plain Python over all rows at once. The last row is far in the
future and of a key of its own, so time leaps over everything; what it leads to is left out.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import anabranch as ab
from anabranch.errors import TopologyError
from anabranch.sinks import Memory
from anabranch.testing import Idle, LocalJob, Lose, Restart, play
from effort import LONG

Row = dict[str, Any]
BEGIN = datetime(2024, 5, 1, tzinfo=UTC)
LAST = "~"  # the key of the row that lets time leap
DELAY = "2s"


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def input_rows(seed: int = 7, count: int = 15) -> list[Row]:
    """In order but for the two seconds that rows may be late. Values are powers of two: a sum says
    which rows are in it."""
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, 14) for _ in range(count))
    rows = [
        {"k": rng.choice("abc"), "ts": at(round(t, 1)), "v": 1 << i} for i, t in enumerate(times)
    ]
    jittered = [
        (row["ts"] + timedelta(seconds=rng.uniform(0, 1.9)), i) for i, row in enumerate(rows)
    ]
    return [*(rows[i] for _, i in sorted(jittered)), {"k": LAST, "ts": at(10_000), "v": 0}]


@dataclass(frozen=True)
class Case:
    """An operator: how it is declared, what it gives in one go, and the event times it gives."""

    build: Callable[[ab.Stream, str, str], ab.Stream]  # stream, name, time
    batch: Callable[[list[Row], str], list[Row]]
    times: tuple[str, ...]  # columns; "" is the time it was given


def _windows(size: float, slide: float) -> Case:
    window = ab.hopping(timedelta(seconds=size), timedelta(seconds=slide))

    def build(stream: ab.Stream, name: str, time: str) -> ab.Stream:
        windows = stream.key_by("k").window(window, time=time)
        return windows.aggregate(name, v=ab.sum("v"))

    def batch(rows: list[Row], time: str) -> list[Row]:
        sums: dict[tuple[datetime, str], int] = defaultdict(int)
        for row in rows:
            seconds = (row[time] - BEGIN).total_seconds()
            start = seconds // slide * slide
            while start > seconds - size:
                sums[at(start), row["k"]] += row["v"]
                start -= slide
        ends = timedelta(seconds=size)
        return [
            {"k": k, "window_start": start, "window_end": start + ends, "v": v}
            for (start, k), v in sorted(sums.items())
        ]

    return Case(build, batch, ("window_start", "window_end"))


def _session(gap: float) -> Case:
    def build(stream: ab.Stream, name: str, time: str) -> ab.Stream:
        sessions = stream.key_by("k").window(ab.session(timedelta(seconds=gap)), time=time)
        return sessions.aggregate(name, v=ab.sum("v"))

    def batch(rows: list[Row], time: str) -> list[Row]:
        out: list[Row] = []
        for k, own in _by_key(rows):
            open_: list[Row] = []
            for row in sorted(own, key=lambda r: r[time]):
                if open_ and row[time] - open_[-1][time] >= timedelta(seconds=gap):
                    out.append(_session_row(k, open_, time, gap))
                    open_ = []
                open_.append(row)
            out.append(_session_row(k, open_, time, gap))
        return sorted(out, key=lambda r: (r["window_end"], r["window_start"]))

    return Case(build, batch, ("window_end",))


def _session_row(k: str, rows: list[Row], time: str, gap: float) -> Row:
    end = rows[-1][time] + timedelta(seconds=gap)
    return {
        "k": k,
        "window_start": rows[0][time],
        "window_end": end,
        "v": sum(r["v"] for r in rows),
    }


def _dedup(within: float) -> Case:
    def build(stream: ab.Stream, name: str, time: str) -> ab.Stream:
        return stream.key_by("k").deduplicate(name, within=timedelta(seconds=within), time=time)

    def batch(rows: list[Row], time: str) -> list[Row]:
        passed: dict[str, list[datetime]] = defaultdict(list)
        out = []
        for row in rows:
            close = (abs(row[time] - t) < timedelta(seconds=within) for t in passed[row["k"]])
            if not any(close):
                passed[row["k"]].append(row[time])
                out.append(row)
        return out

    return Case(build, batch, ("",))


class Alarm(ab.RowFunction):
    """Adds rows up until a minute after the first, then gives their sum at that time."""

    state = {"total": pl.Int64, "due": pl.Datetime("us", "UTC")}  # noqa: RUF012
    output = {"due": pl.Datetime("us", "UTC"), "v": pl.Int64}  # noqa: RUF012

    def __init__(self, time: str) -> None:
        self.time = time

    def on_row(self, row: Row, state: ab.KeyState) -> None:
        # The earliest row, whichever comes first.
        due = row[self.time] + timedelta(minutes=1)
        due = min(due, state.get("due", due))
        state.set(total=state.get("total", 0) + row["v"], due=due)
        state.event_timer = due

    def on_timer(self, timer: str, at: datetime, state: ab.KeyState) -> list[Row]:
        total = state.get("total")
        state.clear()
        return [{"due": at, "v": total}]


def _timer() -> Case:
    def build(stream: ab.Stream, name: str, time: str) -> ab.Stream:
        return stream.key_by("k").process(name, Alarm(time), time=time)

    def batch(rows: list[Row], time: str) -> list[Row]:
        return [
            {
                "k": k,
                "due": min(r[time] for r in own) + timedelta(minutes=1),
                "v": sum(r["v"] for r in own),
            }
            for k, own in _by_key(rows)
        ]

    return Case(build, batch, ("due",))


def _join() -> Case:
    windows = _windows(2, 2)

    def build(stream: ab.Stream, name: str, time: str) -> ab.Stream:
        keyed = stream.key_by("k").window(ab.tumbling("2s"), time=time)
        left = keyed.aggregate(f"{name}.sums", v=ab.sum("v"))
        right = keyed.aggregate(f"{name}.rows", n=ab.count())
        return left.key_by("k").join_windows(name, right.key_by("k"), left=["v"], right=["n"])

    def batch(rows: list[Row], time: str) -> list[Row]:
        sums = windows.batch(rows, time)
        counts = windows.batch([{**row, "v": 1} for row in rows], time)
        return [{**row, "n": count["v"]} for row, count in zip(sums, counts, strict=True)]

    return Case(build, batch, ("window_start", "window_end"))


def _ranking(key: str) -> Case:
    windows = _windows(3, 3)

    def build(stream: ab.Stream, name: str, time: str) -> ab.Stream:
        sums = windows.build(stream, f"{name}.sums", time)
        return sums.key_by(key).top_k(name, 2, by="v")

    def batch(rows: list[Row], time: str) -> list[Row]:
        out = []
        sums = windows.batch(rows, time)
        for _, own in itertools.groupby(sums, key=lambda r: r["window_start"]):
            best = sorted(own, key=lambda r: -r["v"])[:2]
            out += [{**row, "rank": i + 1} for i, row in enumerate(best)]
        return out

    return Case(build, batch, (key,))


CASES: dict[str, Case] = {
    "tumbling 1s": _windows(1, 1),
    "tumbling 4s": _windows(4, 4),
    "hopping": _windows(4, 1),
    "session": _session(0.5),
    "dedup": _dedup(1),
    "timer": _timer(),
    "join": _join(),
    "ranking": _ranking("window_end"),
    "ranking by start": _ranking("window_start"),
}


def _by_key(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    keys = dict.fromkeys(row["k"] for row in rows)
    return [(k, [r for r in rows if r["k"] == k]) for k in keys]


def _cut(rows: list[Row], size: int) -> list[dict[str, list[Row]]]:
    return [{"in": rows[i : i + size]} for i in range(0, len(rows), size)]


def _chain(names: tuple[str, ...], times: tuple[str, ...], parallelism: int = 1) -> ab.Topology:
    """Operators behind each other, each by one of the times that the one before gives."""
    topology = ab.Topology("cascade", parallelism=parallelism)
    stream = topology.source("in", None, time="ts", watermark=DELAY)
    for depth, (name, time) in enumerate(zip(names, times, strict=True)):
        stream = CASES[name].build(stream, f"op{depth}", time)
    stream.to("out", Memory())
    return topology


def _batch_answer(names: tuple[str, ...], times: tuple[str, ...], rows: list[Row]) -> list[Row]:
    for name, time in zip(names, times, strict=True):
        rows = CASES[name].batch(rows, time)
    return _plain(rows)


def _plain(rows: Iterable[Row]) -> list[Row]:
    """Without what the last row led to, in one order."""
    return sorted((r for r in rows if r["k"] != LAST), key=lambda r: sorted(map(str, r.items())))


def _streamed(topology: ab.Topology, steps: list[Any], nodes: int = 1) -> list[Row]:
    outputs = play(topology, [*steps, Idle()], nodes=nodes)
    return _plain(row for output in outputs for row in output["out"].to_dicts())


def _times_of(names: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """All the ways in which each operator can go by a time of the one before."""
    ways: list[tuple[str, ...]] = [("ts",)]
    for name in names[:-1]:
        ways = [(*way, time or way[-1]) for way in ways for time in CASES[name].times]
    return ways


PAIRS = [
    (names, times) for names in itertools.product(CASES, repeat=2) for times in _times_of(names)
]


@pytest.mark.parametrize(("names", "times"), PAIRS, ids=lambda x: " > ".join(x))
def test_a_pair_gives_the_batch_answer_whatever_the_slices(
    names: tuple[str, ...], times: tuple[str, ...]
) -> None:
    rows = input_rows()
    expected = _batch_answer(names, times, rows)
    assert expected
    few = (3, 16)[PAIRS.index((names, times)) % 2]
    for size in (1, 2, 3, 5, 16) if LONG else (few,):
        assert _streamed(_chain(names, times), _cut(rows, size)) == expected, size


@pytest.mark.parametrize("size", range(1, 17, 1 if LONG else 3))
def test_slices_of_every_size_give_the_same_rows(size: int) -> None:
    rows = input_rows()
    names = ("tumbling 1s", "hopping", "session", "tumbling 4s")
    times = ("ts", "window_start", "window_end", "window_end")
    expected = _batch_answer(names, times, rows)
    assert _streamed(_chain(names, times), _cut(rows, size)) == expected


@pytest.mark.parametrize("seed", range(60 if LONG else 4))
def test_a_cascade_of_any_depth_survives_losses_and_restarts(seed: int) -> None:
    rng = random.Random(seed)
    rows = input_rows(seed)
    names = tuple(rng.choice(list(CASES)) for _ in range(rng.randint(3, 5)))
    times = rng.choice(list(_times_of(names)))
    steps: list[Any] = []
    while rows[sum(len(s["in"]) for s in steps if isinstance(s, dict)) :]:
        done = sum(len(s["in"]) for s in steps if isinstance(s, dict))
        steps.append({"in": rows[done : done + rng.randint(1, 9)]})
        steps += rng.choice([[], [], [Lose()], [Restart()], [Idle()]])
    topology = _chain(names, times, parallelism=3)
    assert _streamed(topology, steps, nodes=2) == _batch_answer(names, times, rows)


def test_no_row_of_a_cascade_counts_as_late(tmp_path: Path) -> None:
    names, times = ("tumbling 1s", "tumbling 4s", "dedup"), ("ts", "window_end", "window_start")
    rows = input_rows()
    schema = pl.DataFrame(rows).to_arrow().schema
    job = LocalJob(_chain(names, times), tmp_path, {"in": schema})
    for step in _cut(rows, 3):
        job.step(step)
    job.stop()
    assert job.totals.late == {}
    job.close()


def test_the_end_of_a_job_closes_what_time_allows_in_every_operator(tmp_path: Path) -> None:
    names, times = ("tumbling 1s", "tumbling 4s", "tumbling 4s"), ("ts", "window_end", "window_end")
    rows = input_rows()
    schema = pl.DataFrame(rows).to_arrow().schema
    job = LocalJob(_chain(names, times), tmp_path, {"in": schema})
    found = [row for step in _cut(rows, 7) for row in job.step(step)["out"].to_dicts()]
    found += job.stop()["out"].to_dicts()
    assert _plain(found) == _batch_answer(names, times, rows)
    job.close()


class Delayed(Alarm):
    """As an alarm, but what it gives has the time of the first row."""

    def on_timer(self, timer: str, at: datetime, state: ab.KeyState) -> list[Row]:
        (row,) = super().on_timer(timer, at, state)
        return [{**row, "due": at - timedelta(minutes=1)}]


@pytest.mark.parametrize("size", [1, 5, 16])
def test_a_function_says_how_far_before_its_timers_its_rows_lie(size: int) -> None:
    topology = ab.Topology("late", parallelism=1)
    keyed = topology.source("in", None, time="ts", watermark=DELAY).key_by("k")
    sums = keyed.process("alarm", Delayed("ts"), time="ts", watermark="1m")
    CASES["tumbling 4s"].build(sums, "windows", "due").to("out", Memory())
    rows = input_rows()
    given = [{**r, "due": r["due"] - timedelta(minutes=1)} for r in _timer().batch(rows, "ts")]
    assert _streamed(topology, _cut(rows, size)) == _plain(CASES["tumbling 4s"].batch(given, "due"))


def test_the_start_of_a_session_bounds_no_times_so_it_is_refused() -> None:
    topology = ab.Topology("sessions")
    stream = topology.source("in", None, time="ts")
    sessions = CASES["session"].build(stream, "visits", "ts")
    renamed = sessions.select("renamed", "k", "v", pl.col("window_end").alias("left"))
    for above, time in ((sessions, "window_start"), (renamed, "left")):
        CASES["tumbling 4s"].build(above, f"by_{time}", time).to(f"out_{time}", Memory())
        with pytest.raises(TopologyError, match=r"go by 'window_end' of 'visits'"):
            topology.plan()
        topology._operators = topology._operators[:-2]
    CASES["tumbling 4s"].build(sessions, "by_end", "window_end").to("out", Memory())
    topology.plan()


def test_late_rows_of_a_window_go_by_the_time_of_its_input() -> None:
    topology = ab.Topology("late")
    stream = topology.source("in", None, time="ts")
    late = CASES["session"].build(stream, "visits", "ts").late("too_late")
    CASES["tumbling 4s"].build(late, "windows", "ts").to("out", Memory())
    assert topology.plan().clocks == {}


def test_a_window_added_behind_a_window_takes_all_that_comes_from_then_on(tmp_path: Path) -> None:
    """Its time begins with the first slice it is in, not where the sources' watermark is."""
    rows = input_rows()
    schema = pl.DataFrame(rows).to_arrow().schema
    first = _chain(("hopping",), ("ts",))
    job = LocalJob(first, tmp_path, {"in": schema})
    shown = [row for step in _cut(rows[:9], 3) for row in job.step(step)["out"].to_dicts()]
    shown += job.stop()["out"].to_dicts()
    assert shown  # which the new operator never sees
    names, times = ("hopping", "tumbling 4s"), ("ts", "window_start")
    job.step(Restart(topology=_chain(names, times)))
    found = [row for step in _cut(rows[9:], 4) for row in job.step(step)["out"].to_dicts()]
    found += job.stop()["out"].to_dicts()
    later = [r for r in CASES["hopping"].batch(rows, "ts") if r not in shown]
    assert _plain(found) == _plain(CASES["tumbling 4s"].batch(later, "window_start"))
    assert job.totals.late == {}
    job.close()
