"""The figures of the live view, from slices with known numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from anabranch.demos.words import word_count
from anabranch.driver.progress import Progress
from anabranch.driver.queries import CATCHING_UP, WAITING, CapacityStatus, QueryStatus
from anabranch.model.ids import PartitionId
from anabranch.model.recovery import Adjustment
from anabranch.model.scaling import Decision
from anabranch.terminal import view
from anabranch.terminal.meter import Latency, Meter
from anabranch.terminal.running import summarise

PLAN = word_count(Path("in"), Path("out"), "30s", parallelism=2).plan()
T0 = 1_700_000_000_000
S0 = 5_000  # by the clock that rates are measured by


def progress(number: int, **changes: Any) -> Progress:
    values: dict[str, Any] = {
        "slice": number,
        "batch": number,
        "processing_ms": T0 + number * 1_000,
        "seconds": 0.0,
        "rows_in": 2_000,
        "rows_by_source": {"sentences": 2_000},
        "rows_by_operator": {"sentences": 2_000, "splitter": 16_000, "counter": 5},
        "rows_to_sinks": 5,
        "late_rows": 0,
        "watermark_us": None,
        "packet_bytes": 0,
        "source_log_bytes": 0,
        "state_rows": 700,
        "state_bytes": 2_500_000,
        "state_by_operator": {"counter": (700, 2_500_000)},
        "backup_bytes": 3_000_000,
        "checkpoint_slice": 0,
        "checkpoint_age_s": None,
        "cpu_s": 0.1,
        "nodes": {"0": (4711, 150_000_000, 1), "1": (4712, 160_000_000, 1)},
    }
    values |= changes
    ended_ms = S0 + number * 1_000 + round(values["seconds"] * 1_000)
    return Progress(**values, ended_ms=ended_ms)


def test_a_slice_is_counted_once_however_often_it_is_shown() -> None:
    meter = Meter()
    slices = [progress(1), progress(2)]
    meter.observe(slices)
    meter.observe([*slices, progress(3)])
    assert (meter.slices, meter.rows, meter.rows_to_sinks) == (3, 6_000, 15)
    assert meter.rows_by_operator["splitter"] == 48_000


def test_rate_is_of_the_last_ten_seconds_and_falls_to_zero() -> None:
    meter = Meter()
    assert meter.rate(S0) == 0
    meter.observe(progress(k) for k in range(1, 31))
    now = S0 + 30_500
    assert meter.rate(now) == 2_000
    assert meter.rate(now + 5_000) == 1_000
    assert meter.rate(now + 60_000) == 0


def test_rows_count_when_their_slice_ends() -> None:
    meter = Meter()
    meter.observe([progress(1, seconds=15.0)])
    assert meter.rate(S0 + 16_000) == 200


def test_latency_quantiles() -> None:
    meter = Meter()
    assert meter.latency() is None
    meter.observe(progress(k, seconds=k / 100) for k in range(1, 201))
    assert meter.latency() == Latency(last=2.0, median=1.0, p99=1.98)


def test_lag_needs_a_watermark() -> None:
    meter = Meter()
    meter.observe([progress(1)])
    assert meter.lag_s(T0) is None
    meter.observe([progress(2, watermark_us=T0 * 1_000 - 1_500_000)])
    assert meter.lag_s(T0) == 1.5


def drawn(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_tables_show_every_figure() -> None:
    meter = Meter()
    assert "waiting" in drawn(view.tables(PLAN, meter, S0, T0))
    meter.observe([progress(1, seconds=0.25, watermark_us=T0 * 1_000, late_rows=3)])
    text = drawn(view.tables(PLAN, meter, S0 + 2_000, T0 + 2_000))
    for figure in (
        *("word_count", "slice 1", "2,000 rows/s", "last 250 ms", "p99 250 ms", "lag 2.0 s"),
        *("2023-11-14 22:13:20Z", "3 late rows", "splitter", "16,000", "700", "2.5 MB"),
        *("4711", "150.0 MB"),
    ):
        assert figure in text, figure


def test_without_a_terminal_a_line_is_printed_at_most_once_per_interval() -> None:
    console = Console(file=io.StringIO(), width=120)
    meter = Meter()
    shown = view.View(console, PLAN, meter)
    with shown.shown():
        shown.refresh()
        for k in range(1, 4):
            meter.observe([progress(k)])
            shown.refresh()
    assert console.file.getvalue().count("slice") == 1  # type: ignore[attr-defined]


def test_decisions_and_adjustments_are_shown_as_they_happen() -> None:
    decision = Decision(T0, "up", "counter from 2 to 4 partitions", "of [it]")
    adjustment = Adjustment(decision.what, (PartitionId("counter", 0),), 7, 0.4)
    console = Console(file=io.StringIO(), width=200)
    meter = Meter()
    shown = view.View(console, PLAN, meter)
    for _ in range(2):  # but each only once
        meter.decisions = [decision]
        shown.refresh()
        meter.adjustments = [adjustment]
        shown.refresh()
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "autoscaler: counter from 2 to 4 partitions, because of [it]\n"
        "adjusted after slice 7: counter from 2 to 4 partitions; no slice for 0.40 s\n"
    )
    meter.observe([progress(8)])
    meter.adjusting = True
    text = drawn(view.tables(PLAN, meter, S0 + 9_000, T0 + 9_000))
    assert "because of [it]" in text
    assert "adjusted after slice 7" in text
    assert "adjusting …" in text


def test_summary() -> None:
    meter = Meter()
    assert summarise(meter, 3.0) == "no new rows in 3.0 s"
    meter.observe([progress(2, seconds=0.5, late_rows=1)])
    text = summarise(meter, 90.0)
    assert "2,000 rows in 1 slices and 90.0 s, 5 rows to sinks, 1 late rows" in text
    assert "median 500 ms" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0421, "42 ms"), (1.25, "1.2 s"), (600, "10 min"), (36_000, "10 h"), (900_000, "10 days")],
)
def test_seconds(value: float, text: str) -> None:
    assert view.seconds(value) == text


def test_queries_are_shown_where_there_is_something_to_say() -> None:
    meter = Meter()
    meter.observe([progress(1)])
    meter.capacity = CapacityStatus(1.25, 1.9)

    def shown() -> list[list[str]]:
        return [row.split() for row in drawn(view.tables(PLAN, meter, S0, T0)).splitlines()]

    healthy = QueryStatus("counts", 1, relative_latency=1.0)
    meter.queries = (healthy,)
    assert not any("query" in row or "needed:" in row for row in shown())
    meter.queries = (healthy, QueryStatus("raw", 5))
    table = shown()
    assert ["query", "priority", "state"] in table
    assert ["counts", "1", "live"] in table
    assert ["raw", "5", "live"] in table
    assert ["needed:", "1.25", "nodes;", "there", "are", "1.90"] in table
    assert view.line(meter, S0, T0).endswith("2 nodes")
    meter.queries = (
        healthy,
        QueryStatus("raw", 5, CATCHING_UP, 40, 42.0, 3.5),
        QueryStatus("words", 2, WAITING, 90, 600.0),
    )
    meter.partial_plan = "2 of 3 queries fit on 2 nodes; next is words"
    table = shown()
    assert ["query", "priority", "state", "behind", "live", "in"] in table
    assert ["counts", "1", "live"] in table
    assert ["raw", "5", "catching", "up", "42.0", "s", "~3.5", "s"] in table
    assert ["words", "2", "waiting", "10", "min"] in table
    assert meter.partial_plan.split() in table
    assert view.line(meter, S0, T0).endswith("3 queries (1 catching up, 1 waiting)")
    meter.queries, meter.capacity = (QueryStatus("words", 2, WAITING),), None
    assert ["words", "2", "waiting", "0", "ms"] in shown()
    meter.queries = (*(QueryStatus(f"q{n}", 1) for n in range(30)), *meter.queries)
    table = shown()
    assert ["words", "2", "waiting", "0", "ms"] in table  # before those that are live
    assert ["q18", "1", "live"] in table
    assert ["q19", "1", "live"] not in table
    assert ["and", "11", "others"] in table


def test_every_node_is_shown_also_one_without_work() -> None:
    meter = Meter()
    meter.observe([progress(1)])
    meter.nodes = {"0": "", "1": "draining", "2": "spare", "3": "joining"}
    shown = io.StringIO()
    Console(file=shown, width=120).print(view.tables(PLAN, meter, S0, T0))
    table = [line.split() for line in shown.getvalue().splitlines()]
    assert ["2", "0", "spare"] in table
    assert ["3", "0", "joining"] in table
    assert ["1", "4712", "160.0", "MB", "1", "draining"] in table
    assert view.line(meter, S0, T0).endswith("4 nodes (1 draining, 1 joining, 1 spare)")
