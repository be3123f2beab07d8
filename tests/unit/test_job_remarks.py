"""A job logs what its user should know, keeps it for whoever asks, and adds it up at the end."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.control.remarks import Seen
from anabranch.driver.preparing import remarks_for
from anabranch.operators.described import keeps_for_ever
from anabranch.terminal.meter import Meter
from anabranch.terminal.running import summarise
from anabranch.testing import LocalJob, Lose

SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("k", pa.string()), ("v", pa.int64())])
START = datetime(2026, 1, 1, tzinfo=UTC)


def row(second: int, value: int = 1) -> dict[str, Any]:
    return {"ts": START + timedelta(seconds=second), "k": "a", "v": value}


def small(frame: pl.DataFrame) -> pl.DataFrame:
    if (frame["v"] > 100).any():
        raise ValueError("too large")
    return frame


def topology(keeps_late: bool = False) -> ab.Topology:
    made = ab.Topology("noted")
    rows = made.source("in", None, time="ts").map("small", small, on_error="dead_letter")
    counts = rows.key_by("k").window(ab.tumbling("10s"), time="ts").aggregate("count", n=ab.count())
    counts.to("out", ab.Memory())
    if keeps_late:
        counts.late("late").to("late.out", ab.Memory())
    made.dead_letters("dead", ab.Memory())
    return made


def ran(made: ab.Topology, root: Path) -> LocalJob:
    job = LocalJob(made, root, {"in": SCHEMA})
    for rows in ([row(0)], [row(100)], [row(1), row(2), row(101, 999)], [row(3)]):
        job.step({"in": rows})
    job.step(Lose())
    job.stop()
    job.close()
    return job


def test_late_rows_and_dead_letters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="anabranch"):
        job = ran(topology(), tmp_path)
    late, dead = job.history.remarks
    assert late.startswith("'count' dropped 2 rows as too late")
    assert dead.startswith("'small' put 1 row aside that it cannot take; the reasons are in the s")
    logged = [r.getMessage() for r in caplog.records if "lost node" not in r.getMessage()]
    assert logged == [
        late,
        dead,
        "in all, 3 rows came too late for 'count'",
        "in all, 'small' put 1 row aside",
    ]


def test_late_rows_that_are_kept_are_no_news(tmp_path: Path) -> None:
    (said,) = ran(topology(keeps_late=True), tmp_path).history.remarks
    assert said.startswith("'small' put")


def test_the_summary_of_a_run_shows_them(tmp_path: Path) -> None:
    job, meter = ran(topology(), tmp_path), Meter()
    meter.observe(job.history.progress)
    meter.totals, meter.remarks = job.totals, job.history.remarks
    lines = summarise(meter, 1.0).splitlines()
    assert "late: count 3" in lines
    assert [line for line in lines if line.startswith("note: ")] == [
        f"note: {remark}" for remark in job.history.remarks
    ]


def test_which_state_is_kept_for_ever() -> None:
    made = ab.Topology("t")
    by_key = made.source("in", None, time="ts").key_by("k")
    by_key.aggregate("running", n=ab.count())
    by_key.aggregate("recent", ttl="1h", n=ab.count())
    by_key.window(ab.tumbling("1h"), time="ts").aggregate("hourly", n=ab.count())
    by_key.window(ab.session("1h"), time="ts").aggregate("visits", n=ab.count())
    by_key.deduplicate("firsts")
    by_key.deduplicate("often", within="1h", time="ts")
    by_key.top_k("largest", 3, by="v")
    endless = [o.name for o in made._operators if keeps_for_ever(o.kernel)]
    assert endless == ["running", "firsts", "largest"]


@pytest.mark.parametrize("beside_a_window", [False, True])
def test_a_window_that_shares_a_chain_is_not_taken_for_endless(
    beside_a_window: bool, tmp_path: Path
) -> None:
    made = ab.Topology("t")
    firsts = made.source("in", None, time="ts").key_by("k").deduplicate("firsts")
    firsts.to("out", ab.Memory())
    if beside_a_window:
        days = firsts.key_by("k").window(ab.tumbling("1d"), time="ts")
        days.aggregate("daily", n=ab.count()).to("days", ab.Memory())
    job = LocalJob(made, tmp_path, {"in": SCHEMA})
    job.close()
    (chain,) = (c.name for c in made.plan().node_chains)
    watch = remarks_for(job.prepared.spec, None, None)
    said = [
        remark
        for i in range(1, 100)
        for remark in watch.observe(Seen(i, i, 0.1, i, state_rows={chain: 100 * i}))
    ]
    assert len(said) == (0 if beside_a_window else 1)
