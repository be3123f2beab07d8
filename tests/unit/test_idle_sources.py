"""A source that stalls holds time back only for its idle time-out; timers come without rows."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.testing import Idle, LocalJob, Lose, Restart, Step, play

START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
ROWS = pa.schema([("ts", pa.timestamp("us", "UTC")), ("k", pa.string())])
SCHEMAS = {"a": ROWS, "b": ROWS}


def at(second: int) -> list[dict[str, Any]]:
    return [{"ts": START + dt.timedelta(seconds=second), "k": "x"}]


def two(timeout: str | None = "5s") -> ab.Topology:
    topology = ab.Topology("two")
    a = topology.source("a", None, time="ts", idle_timeout=timeout)
    b = topology.source("b", None, time="ts", idle_timeout=timeout)
    windows = a.union(b).key_by("k").window(ab.tumbling("10s"), time="ts")
    counts = windows.aggregate("n", n=ab.count())
    counts.to("out", ab.Memory())
    counts.late("late").to("too_late", ab.Memory())
    return topology


def closed(outputs: list[dict[str, pl.DataFrame]]) -> list[tuple[int, int]]:
    """(step, rows of the window) of every window that closed."""
    return [(i, n) for i, o in enumerate(outputs) for *_, n in o["out"].rows()]


BEGIN: list[Step] = [{"a": at(1), "b": at(1)}]  # a slice is a second


def test_without_a_timeout_time_stands_still() -> None:
    steps = [*BEGIN, *({"a": at(20 + i)} for i in range(10)), Idle(60), Idle()]
    assert closed(play(two(None), steps, schemas=SCHEMAS)) == []


def test_a_stalled_source_is_not_waited_for() -> None:
    steps = [*BEGIN, *({"a": at(20 + i)} for i in range(7))]
    # Five slices without b, and the watermark they lead to is the next one's.
    assert closed(play(two(), steps, schemas=SCHEMAS)) == [(6, 2)]


@pytest.mark.parametrize("mishap", [Lose(2), Restart(), Restart(nodes=3)])
def test_a_restart_goes_on_counting(mishap: Step) -> None:
    slices: list[Step] = [{"a": at(20 + i)} for i in range(7)]
    calm = play(two(), [*BEGIN, *slices], schemas=SCHEMAS)
    stormy = play(two(), [*BEGIN, *slices[:3], mishap, *slices[3:]], schemas=SCHEMAS)
    late = 1 if isinstance(mishap, Restart) else 0  # time between two runs does not count
    assert closed(calm) == [(6, 2)]
    assert closed(stormy) == [(7 + late, 2)]
    again = [*BEGIN, *slices, Restart(), {"a": at(35)}, {"a": at(36)}]
    assert closed(play(two(), again, schemas=SCHEMAS))[-1] == (10, 7)  # b is idle still


def test_what_comes_back_is_late_but_not_lost() -> None:
    steps = [*BEGIN, *({"a": at(20 + i)} for i in range(8)), {"b": at(2)}, {"b": at(28)}]
    outputs = play(two(), steps, schemas=SCHEMAS)
    assert [o["too_late"].height for o in outputs] == [0] * 9 + [1, 0]


def test_time_goes_on_without_any_rows() -> None:
    steps: list[Step] = [*BEGIN, {"a": at(20)}, Idle(4.5), Idle(0.5), Idle(0.1), Idle(0.1)]
    outputs = play(two(), steps, schemas=SCHEMAS)
    # After 5 s b is idle and a is not yet; the window closes in the slice after the look, which
    # does not wait for rows.
    assert [i for i, _ in closed(outputs)] == [2]


def test_when_all_are_idle_the_latest_counts() -> None:
    steps: list[Step] = [*BEGIN, {"a": at(20)}, Idle(60), Idle(1), Idle(1)]
    assert [n for _, n in closed(play(two(), steps, schemas=SCHEMAS))] == [2]


def test_a_slice_that_takes_long_is_no_silence(tmp_path: Path) -> None:
    job = LocalJob(two(), tmp_path, SCHEMAS)
    for second in range(0, 60, 20):
        job.now_ms += 19_000
        assert job.step({"a": at(second), "b": at(second)})["too_late"].height == 0
    assert job.controller.newest is not None
    assert job.controller.newest.quiet_ms == {"a": 0, "b": 0}


def test_refusals() -> None:
    topology = ab.Topology("timeless")
    with pytest.raises(ab.AnabranchError, match="name its event-time column with time="):
        topology.source("a", None, idle_timeout="5s")
    with pytest.raises(ab.AnabranchError, match="idle_timeout is 0s; give at least"):
        topology.source("b", None, time="ts", idle_timeout="0s")


# -- processing time without rows ------------------------------------------------------------------


class Reminder(ab.RowFunction):
    state: ClassVar[dict[str, Any]] = {"n": pl.Int64}
    output: ClassVar[dict[str, Any]] = {"n": pl.Int64}

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> None:
        state.set(n=state.get("n", 0) + 1)
        state.processing_timer = state.now + dt.timedelta(seconds=10)

    def on_timer(self, timer: str, when: dt.datetime, state: ab.KeyState) -> Any:
        yield {"n": state.get("n")}
        state.clear()


@pytest.mark.parametrize("mishap", [Idle(0.001), Lose(2), Restart()])
def test_a_processing_timer_comes_without_rows(mishap: Step, tmp_path: Path) -> None:
    topology = ab.Topology("reminded")
    rows = topology.source("a", None)
    rows.key_by("k").process("reminder", Reminder()).to("out", ab.Memory())
    job = LocalJob(topology, tmp_path, {"a": ROWS})
    job.step({"a": at(1)})
    job.step({"a": at(1)})
    job.step(mishap)
    assert job.step(Idle(9))["out"].height == 0
    assert job.step(Idle(2))["out"].rows() == [("x", 2)]
    number = job.controller.newest.number  # type: ignore[union-attr]
    for _ in range(5):
        job.step(Idle(5))
    newest = job.controller.newest
    assert newest is not None
    # The moved timer of the first row may cost one slice; then nothing is left to wait for but
    # checkpoints.
    assert newest.number <= number + 2


@pytest.mark.parametrize("kind", ["aggregate", "top_k"])
def test_a_time_to_live_ends_without_rows(kind: str, tmp_path: Path) -> None:
    topology = ab.Topology("forgetful")
    keyed = topology.source("a", None).key_by("k")
    if kind == "aggregate":
        kept = keyed.aggregate("kept", n=ab.count(), ttl="10s")
    else:
        kept = keyed.top_k("kept", 2, by="ts", ttl="10s")
    kept.to("out", ab.Memory())
    job = LocalJob(topology, tmp_path, {"a": ROWS})
    job.step({"a": at(1)})
    job.step(Idle(5))
    assert job.history.progress[-1].state_rows == 1
    job.step(Idle(6))
    assert job.history.progress[-1].state_rows == 0
