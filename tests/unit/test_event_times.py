"""What a source lets in as an event time, and that it is an instant whatever the session's zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.errors import OperatorError
from anabranch.testing import Idle, LocalJob, Restart, play

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
ZONES = ("UTC", "Asia/Kolkata", "America/Los_Angeles", "+14:00")


def counted(**options: Any) -> ab.Topology:
    topology = ab.Topology("counted", parallelism=1)
    rows = topology.source("in", None, time="ts", **options)
    windows = rows.key_by("k").window(ab.tumbling("10s"), time="ts")
    windows.aggregate("n", n=ab.count()).to("out", ab.Memory())
    if options.get("on_error") == "dead_letter":
        topology.dead_letters("dead", ab.Memory())
    return topology


def row(ts: datetime | None) -> dict[str, Any]:
    return {"in": [{"k": 1, "ts": ts}]}


def rows_of(outputs: list[dict[str, pl.DataFrame]], sink: str) -> list[tuple[Any, ...]]:
    return [r for out in outputs for r in out[sink].rows()]


# -- a clock that is wrong -------------------------------------------------------------------------


def test_one_absurd_time_does_not_move_the_watermark() -> None:
    steps = [row(NOW), row(NOW + timedelta(days=400)), row(NOW), row(NOW + timedelta(seconds=15))]
    outputs = play(counted(on_error="dead_letter"), [*steps, Idle()], start=NOW)
    assert rows_of(outputs, "out") == [(1, NOW, NOW + timedelta(seconds=10), 2)]
    ((slice_number, operator, reason, record),) = rows_of(outputs, "dead")
    assert (slice_number, operator) == (2, "in")
    assert "399 days, 23:59:58 ahead of the clock; the source takes up to 1 day" in reason
    assert '"ts": "2027-06-05T12:00:00+00:00"' in record


def test_by_default_a_time_far_ahead_ends_the_run_and_says_what_to_change() -> None:
    with pytest.raises(OperatorError, match=r"source task 0.*ahead of the clock.*max_ahead=") as e:
        play(counted(), [row(NOW), row(NOW + timedelta(days=2))], start=NOW)
    assert '"ts": "2026-05-03T12:00:00+00:00"' in str(e.value)


@pytest.mark.parametrize(("max_ahead", "lets_in"), [("1h", False), ("3h", True), (None, True)])
def test_how_far_ahead_a_source_lets_rows_be(max_ahead: str | None, lets_in: bool) -> None:
    topology = counted(max_ahead=max_ahead, on_error="dead_letter")
    outputs = play(topology, [row(NOW + timedelta(hours=2))], start=NOW)
    assert len(rows_of(outputs, "dead")) == (not lets_in)


def test_tests_without_a_clock_take_any_time() -> None:
    assert rows_of(play(counted(), [row(NOW), row(NOW + timedelta(days=9)), Idle()]), "out")


def test_rows_without_a_time_may_be_filtered_out_behind_the_source() -> None:
    topology = ab.Topology("t")
    rows = topology.source("in", None, time="ts").filter("timed", pl.col("ts").is_not_null())
    keyed = rows.key_by("k").window(ab.tumbling("10s"), time="ts")
    keyed.aggregate("n", n=ab.count()).to("out", ab.Memory())
    outputs = play(topology, [row(NOW), row(None), row(NOW + timedelta(seconds=10)), Idle()])
    assert rows_of(outputs, "out") == [(1, NOW, NOW + timedelta(seconds=10), 1)]


# -- the ends of the calendar ----------------------------------------------------------------------


class Watching(ab.RowFunction):
    output: ClassVar[dict[str, Any]] = {"watermark": pl.Datetime("us", "UTC")}

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> Any:
        return [{"watermark": state.watermark}]


def watched(max_ahead: str | None) -> ab.Topology:
    topology = ab.Topology("watched", parallelism=1)
    rows = topology.source("in", None, time="ts", max_ahead=max_ahead, on_error="dead_letter")
    watching = rows.select("key", "k", "ts").key_by("k")
    watching.process("watch", Watching(), time="ts").to("out", ab.Memory())
    topology.dead_letters("dead", ab.Memory())
    return topology


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(
    "us", [253_402_300_799_999_999, 253_402_300_800_000_000, 2**63 - 1, -(2**62)]
)
def test_the_end_of_the_calendar_does_not_end_a_job(tmp_path: Path, zone: str, us: int) -> None:
    schema = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", zone))])
    strange = pa.table(
        [[1], pa.array([us], pa.int64()).cast(pa.timestamp("us", zone))], schema=schema
    )
    plain = pa.table([[1], [NOW]], schema=schema)
    job = LocalJob(watched(None), tmp_path, {"in": schema})
    outputs = [
        job.step(s) for s in ({"in": plain}, {"in": strange}, Restart(), {"in": plain}, Idle())
    ]
    taken = 2 + (us == 253_402_300_799_999_999)
    assert len(rows_of(outputs, "out")) == taken
    dead = rows_of(outputs, "dead")
    assert len(dead) == 3 - taken
    for _, _, reason, record in dead:
        assert "outside of the years 1 to 9999" in reason
        assert str(us) in record
    job.close()


# -- zones -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zone", ZONES)
def test_event_time_is_an_instant_whatever_the_zone_of_the_session(zone: str) -> None:
    """What differs is the type of the source's column; streams, state and results do not."""
    schema = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", zone))])
    steps = [row(NOW), row(NOW + timedelta(seconds=30)), Idle()]
    out = [o["out"] for o in play(counted(), steps, schemas={"in": schema})]
    assert rows_of([{"out": o} for o in out], "out") == [(1, NOW, NOW + timedelta(seconds=10), 1)]
    assert {o.schema["window_end"] for o in out} == {pl.Datetime("us", "UTC")}


@pytest.mark.parametrize("crash", [True, False])
def test_a_restart_from_another_zone_goes_on(tmp_path: Path, crash: bool) -> None:
    def schema(zone: str) -> pa.Schema:
        return pa.schema([("k", pa.timestamp("us", zone)), ("ts", pa.timestamp("us", zone))])

    topology = ab.Topology("zones", parallelism=1)
    keyed = topology.source("in", None, time="ts").key_by("k")
    windows = keyed.window(ab.tumbling("10s"), time="ts")
    windows.aggregate("n", last=ab.max("ts"), n=ab.count()).to("out", ab.Memory())
    job = LocalJob(topology, tmp_path, {"in": schema("Asia/Tokyo")})
    job.step({"in": [{"k": NOW, "ts": NOW}]})
    if not crash:
        job.stop()
    job._schemas["in"] = schema("America/New_York")
    job.step(Restart())
    later = NOW + timedelta(seconds=30)
    outputs = [
        job.step(s) for s in ({"in": [{"k": NOW, "ts": NOW}, {"k": NOW, "ts": later}]}, Idle())
    ]
    assert rows_of(outputs, "out") == [(NOW, NOW, NOW + timedelta(seconds=10), NOW, 2)]
    job.close()


def test_times_finer_than_a_microsecond_are_not_cut_without_a_word() -> None:
    def finer(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(at=pl.lit(1_001).cast(pl.Datetime("ns")).first())

    topology = ab.Topology("fine", parallelism=1)
    topology.source("in", None).map("finer", finer).to("out", ab.Memory())
    with pytest.raises(OperatorError, match=r"'finer'.*times have microseconds.*truncate"):
        play(topology, [{"in": [{"k": 1}]}])
