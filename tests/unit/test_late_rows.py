"""Rows that come too late: kept in a stream of their own, each once, and none beside it."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.testing import Idle, Lose, Restart, Step, play

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
DELAY, SIZE, SLIDE, GAP, WITHIN = 2, 10, 5, 4, 6
SCHEMA = {
    "rows": pa.schema([("ts", pa.timestamp("us", "UTC")), ("k", pa.string()), ("v", pa.int64())])
}
Rows = list[tuple[int, str, int]]  # second, key, value


def at(second: int) -> dt.datetime:
    return START + dt.timedelta(seconds=second)


def second(moment: dt.datetime) -> int:
    return (moment - START) // dt.timedelta(seconds=1)


def step(rows: Rows) -> Step:
    return {"rows": [{"ts": at(t), "k": k, "v": v} for t, k, v in rows]}


def watermarks(slices: list[Rows]) -> list[int | None]:
    """What each slice is given: of the batches before it."""
    found: list[int | None] = []
    latest: int | None = None
    for rows in slices:
        found.append(None if latest is None else latest - DELAY)
        latest = max([t for t, _, _ in rows] + ([] if latest is None else [latest]))
    return found


def windowed(window: Any, precombine: bool = True) -> ab.Topology:
    topology = ab.Topology("late")
    rows = topology.source("rows", None, time="ts", watermark=f"{DELAY}s")
    keyed = rows.key_by("k").window(window, time="ts")
    counts = keyed.aggregate("counts", n=ab.count(), precombine=precombine)
    counts.to("out", ab.Memory())
    counts.late("late").to("too_late", ab.Memory())
    return topology


def gathered(outputs: list[dict[str, pl.DataFrame]]) -> tuple[list[Any], list[tuple[Any, ...]]]:
    out = [row for shown in outputs for row in shown["out"].rows()]
    late = [(second(ts), k, v) for shown in outputs for ts, k, v in shown["too_late"].rows()]
    return out, late


row = st.tuples(st.integers(0, 60), st.sampled_from("ab"), st.integers(0, 9))
slices_of_rows = st.lists(st.lists(row, min_size=1, max_size=8), min_size=2, max_size=5)
mishaps = st.lists(
    st.sampled_from([Lose(), Lose(2), Restart(), Restart(nodes=3), None]), min_size=6, max_size=6
)
LAST: Rows = [(10_000, "z", 0)]  # closes everything before it


def storm(slices: list[Rows], happens: list[Step | None]) -> list[Step]:
    steps: list[Step] = []
    for rows, mishap in zip(slices, happens, strict=False):
        steps += [step(rows), *([mishap] if mishap is not None else [])]
    return [*steps, step(LAST), Idle()]


@pytest.mark.parametrize("slide", [SIZE, SLIDE])
@settings(max_examples=5, deadline=None)
@given(slices_of_rows, mishaps)
def test_windows(slide: int, slices: list[Rows], happens: list[Step | None]) -> None:
    window = ab.hopping(f"{SIZE}s", f"{slide}s")
    out, late = gathered(play(windowed(window), storm(slices, happens), schemas=SCHEMA))
    expected, counts = [], Counter[tuple[str, int]]()
    for rows, watermark in zip(slices, watermarks(slices), strict=True):
        for t, k, v in rows:
            starts = range(t // slide * slide - SIZE + slide, t + 1, slide)
            open_ = [s for s in starts if watermark is None or s + SIZE > watermark]
            counts.update((k, s) for s in open_)
            expected += [] if open_ else [(t, k, v)]
    assert sorted(late) == sorted(expected)
    assert {(k, second(s)): n for k, s, _, n in out} == counts


@settings(max_examples=6, deadline=None)
@given(slices_of_rows, mishaps)
def test_sessions(slices: list[Rows], happens: list[Step | None]) -> None:
    window = ab.session(f"{GAP}s")
    out, late = gathered(play(windowed(window), storm(slices, happens), schemas=SCHEMA))
    expected = []
    open_: dict[str, list[list[int]]] = {}
    closed: list[tuple[str, int, int]] = []
    for rows, watermark in zip(slices, watermarks(slices), strict=True):
        limit = -(10**9) if watermark is None else watermark
        for k, sessions in open_.items():
            closed += [(k, min(s), len(s)) for s in sessions if max(s) + GAP <= limit]
            open_[k] = [s for s in sessions if max(s) + GAP > limit]
        held = {id(s) for sessions in open_.values() for s in sessions}
        for k in sorted({k for _, k, _ in rows}):
            mine = sorted(t for t, key, _ in rows if key == k)
            old = open_.get(k, [])
            assert all(id(s) in held for s in old)
            merged: list[list[int]] = []
            for span in sorted([*old, *([t] for t in mine)], key=min):
                if merged and min(span) < max(merged[-1]) + GAP:
                    merged[-1] = [*merged[-1], *span]
                else:
                    merged.append(list(span))
            open_[k] = [s for s in merged if max(s) + GAP > limit]
            gone = [t for s in merged if max(s) + GAP <= limit for t in s]
            expected += [(t, key, v) for t, key, v in rows if key == k and t in gone]
    closed += [(k, min(s), len(s)) for k, sessions in open_.items() for s in sessions]
    assert sorted(late) == sorted(expected)
    assert sorted((k, second(s), n) for k, s, _, n in out) == sorted(closed)


@settings(max_examples=5, deadline=None)
@given(slices_of_rows, mishaps)
def test_deduplication(slices: list[Rows], happens: list[Step | None]) -> None:
    topology = ab.Topology("firsts")
    rows = topology.source("rows", None, time="ts", watermark=f"{DELAY}s")
    firsts = rows.key_by("k").deduplicate("firsts", within=f"{WITHIN}s", time="ts")
    firsts.to("out", ab.Memory())
    firsts.late("late").to("too_late", ab.Memory())
    out, late = gathered(play(topology, storm(slices, happens), schemas=SCHEMA))
    expected, passed = [], []
    for given_rows, watermark in zip(slices, watermarks(slices), strict=True):
        for t, k, v in given_rows:
            if watermark is not None and (t // WITHIN + 1) * WITHIN <= watermark:
                expected.append((t, k, v))
            elif all(k != other or abs(t - when) >= WITHIN for when, other, _ in passed):
                passed.append((t, k, v))
    assert sorted(late) == sorted(expected)
    assert sorted((second(t), k, v) for t, k, v in out if k != "z") == sorted(passed)


def test_rows_too_late_for_a_join() -> None:
    def at_hand(name: str, stream: ab.Stream) -> ab.KeyedStream:
        return stream.filter(name, pl.col("v") >= 0).key_by("k")

    topology = ab.Topology("joined")
    left = topology.source("left", None, time="window_end")
    right = topology.source("right", None, time="window_end")
    both = at_hand("l", left).join_windows(
        "both", at_hand("r", right), left=["v"], right=["w"], retain="5s"
    )
    both.to("out", ab.Memory())
    both.late("late").to("too_late", ab.Memory())

    def rows(value: str, *ends: int) -> list[dict[str, Any]]:
        # A right row has a `v` too, which the join does not keep.
        return [
            {"k": "a", "window_start": at(e - 1), "window_end": at(e), "v": e, value: e}
            for e in ends
        ]

    steps: list[Step] = [
        {"left": rows("v", 10, 60), "right": rows("w", 10, 60)},
        {"left": rows("v", 60, 12)},
        Restart(),
        {"right": rows("w", 12, 61)},
        Lose(),
        {"left": rows("v", 11, 61), "right": rows("w", 11)},
    ]
    outputs = play(topology, steps)
    late = [(second(e), v, w) for o in outputs for _, _, e, v, w in o["too_late"].rows()]
    # The first 12 came in the slice whose watermark passed it: alone, but not late.
    assert late == [(12, None, 12), (11, 11, None), (11, None, 11)]
    pairs = [(second(e), v, w) for o in outputs for _, _, e, v, w in o["out"].rows()]
    assert sorted(pairs) == [(10, 10, 10), (60, 60, 60), (60, 60, 60), (61, 61, 61)]


def test_late_rows_are_a_stream_like_any_other() -> None:
    topology = ab.Topology("counted")
    rows = topology.source("rows", None, time="ts")
    counts = rows.key_by("k").window(ab.tumbling("10s"), time="ts").aggregate("n", n=ab.count())
    counts.to("out", ab.Memory())
    late = counts.late("late").key_by("k").aggregate("late_by_key", n=ab.count())
    late.to("too_late", ab.Memory())
    steps: list[Step] = [step([(100, "a", 1)]), step([(1, "a", 1), (2, "a", 2), (101, "b", 3)])]
    outputs = play(topology, [*steps, Restart(), step([(3, "a", 3)])], schemas=SCHEMA)
    assert [o["too_late"].rows() for o in outputs] == [[], [("a", 2)], [], [("a", 3)]]


def test_refusals() -> None:
    topology = ab.Topology("never")
    rows = topology.source("rows", None, time="ts")
    running = rows.key_by("k").aggregate("n", n=ab.count())
    with pytest.raises(ab.AnabranchError, match=r"no row is late for n; take \.late"):
        running.late("late")
    firsts = rows.key_by("k").deduplicate("firsts")
    firsts.late("late").to("out", ab.Memory())
    with pytest.raises(ab.AnabranchError, match="'late': without within=, no row is late"):
        play(topology, [step([(1, "a", 1)])], schemas=SCHEMA)
