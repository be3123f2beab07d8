"""The code of docs/operators.md does what the page says, and the page names every operator."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.control.ledgers.slices import SliceLedger
from anabranch.model.plan import Chain
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.arrow.schemas import build_programs, infer_schemas
from anabranch.operators.base import SliceTime

PAGE = Path(__file__).parents[3] / "docs" / "operators.md"
SCHEMA = pa.schema(
    [
        ("ts", pa.timestamp("us", "UTC")),
        ("user", pa.string()),
        ("item", pa.string()),
        ("amount", pa.int64()),
    ]
)
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
ORDERS = [
    (0, "ann", "tea", 4),
    (5, "bob", "cup", 20),
    (9, "ann", "tea", 30),
    (70, "ann", "pot", 1),
]
FIRST, SECOND = ORDERS[:3], ORDERS[3:]


def at(seconds: int) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def us(moment: dt.datetime) -> int:
    return (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


class Flow:
    """All chains of a topology, one partition each, slice after slice."""

    def __init__(self, topology: ab.Topology) -> None:
        self.plan = topology.plan()
        schemas, inputs = infer_schemas(self.plan.graph, {"orders": SCHEMA}, topology._sinks)
        self.programs = build_programs(self.plan, schemas, inputs)
        self.states = {name: p.new_states() for name, p in self.programs.items()}
        self.ledger = SliceLedger({}, (), clocks=self.plan.clocks)

    def slice(self, rows: Sequence[tuple[Any, ...]], time: SliceTime) -> dict[str, pa.Table]:
        self.ledger._watermark.resume(time.watermark_us)
        time = replace(time, watermarks=self.ledger.watermarks)
        plan = SlicePlan(
            number=time.slice,
            feed=Feed.NONE,
            batch=None,
            source_tasks=0,
            watermark_us=time.watermark_us,
            processing_ms=time.processing_ms,
            placement=0,
            seal=False,
            watermarks=time.watermarks,
        )
        self.ledger.commit(plan, 0, (), time.processing_ms)
        columns = [[at(t) for t, *_ in rows], *([row[i] for row in rows] for i in (1, 2, 3))]
        table = pa.table(columns, schema=SCHEMA)
        packets: dict[int, list[pa.Table]] = {}
        shown: dict[str, pa.Table] = {}
        for chain in self.plan.chains:
            result = self._run(chain, table, packets, time)
            packets |= {edge: [rows] for edge, rows in result.edges.items()}
            shown |= result.sinks
        return shown

    def _run(self, chain: Chain, table: pa.Table, packets: Any, time: SliceTime) -> Any:
        states = self.states[chain.name]
        sources = {"orders": table} if chain.is_source else {}
        result = self.programs[chain.name].run(sources, packets, states, time)
        for operator, change in result.changes.items():
            states[operator].install(change)
        return result


NOW_MS = us(START) // 1_000


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
def shown(page: dict[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
    """What every stream of the page gives for three slices, without times of rows."""
    for name, value in page.items():
        if isinstance(value, ab.Stream):
            value.to(f"sink.{name}", ab.Memory())
    flow = Flow(page["topology"])
    outputs = [
        flow.slice(FIRST, SliceTime(1, None, NOW_MS)),
        flow.slice(SECOND, SliceTime(2, us(at(10)), NOW_MS + 1_000)),
        flow.slice([], SliceTime(3, us(at(7_200)), NOW_MS + 2_000)),
        flow.slice([], SliceTime(4, us(at(7_200)), NOW_MS + 2_000)),
    ]
    found: dict[str, list[tuple[Any, ...]]] = {}
    for tables in outputs:
        for name, table in tables.items():
            kept = [n for n in table.schema.names if n not in ("ts", "window_start", "window_end")]
            columns = table.select(kept).to_pydict().values()
            found.setdefault(name.removeprefix("sink."), []).extend(zip(*columns, strict=True))
    return found


PLAIN = [(user, item, amount) for _, user, item, amount in ORDERS]
EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "orders": PLAIN,
    "large": [("bob", "cup", 20), ("ann", "tea", 30)],
    "upper": [(user, item.upper(), amount) for user, item, amount in PLAIN],
    "twice": [*PLAIN[:3], *PLAIN[:3], *PLAIN[3:], *PLAIN[3:]],
    "priced": [
        (*PLAIN[0], 3),
        (*PLAIN[1], 7),
        (*PLAIN[2], 3),
        (*PLAIN[3], None),
    ],
    "some": [PLAIN[1], PLAIN[2], PLAIN[0], PLAIN[2]],
    "spent": [("ann", 2, 34), ("bob", 1, 20), ("ann", 3, 35)],
    "seen": [(2, 1), (1, 1), (3, 1)],
    "sold": [("tea", 2), ("cup", 1), ("pot", 1)],
    "busiest": [("tea", 2), ("cup", 1), ("pot", 1)],
    "best_sold": [("tea", 2, 1), ("cup", 1, 2), ("pot", 1, 1)],
    "too_late": [],
    "visits": [("ann", 3), ("bob", 1)],
    "paid": [("tea", 34), ("cup", 20), ("pot", 1)],
    "both": [("tea", 2, 34), ("cup", 1, 20), ("pot", 1, 1)],
    "firsts": [PLAIN[0], PLAIN[1], PLAIN[3]],
    "largest": [
        ("ann", "tea", 30, 1),
        ("ann", "tea", 4, 2),
        ("bob", "cup", 20, 1),
        ("ann", "tea", 30, 1),
        ("ann", "tea", 4, 2),
        ("ann", "pot", 1, 3),
    ],
    "record": [("ann", "tea", 30, 1)],
    "balances": [("ann", 34), ("bob", 20), ("ann", 35)],
    "quiet": [("bob", 1), ("ann", 3)],
    "recent": [("ann", 2), ("bob", 1), ("ann", 3)],
    "looked_up": PLAIN,
    "cents": [("ann", 100)],
    "dead": [
        (1, "cents", '{"ts": "2026-01-01T00:00:00+00:00", "user": "ann", "item": "tea"'),
        (1, "cents", '{"ts": "2026-01-01T00:00:05+00:00", "user": "bob", "item": "cup"'),
        (1, "cents", '{"ts": "2026-01-01T00:00:09+00:00", "user": "ann", "item": "tea"'),
    ],
}


@pytest.mark.parametrize("stream", EXPECTED)
def test_the_page(stream: str, shown: dict[str, list[tuple[Any, ...]]]) -> None:
    got = shown[stream]
    if stream == "dead":
        got = [(n, operator, record.partition(', "amount"')[0]) for n, operator, _, record in got]
    if stream in (
        "some",
        "sold",
        "busiest",
        "visits",
        "paid",
        "both",
    ):  # in no order
        assert sorted(got) == sorted(EXPECTED[stream])
    else:
        assert got == EXPECTED[stream]


def test_all_of_the_page_is_checked(shown: dict[str, list[tuple[Any, ...]]]) -> None:
    assert [round(gross, 3) for _, gross in shown["taxed"]] == [4.8, 24.0, 36.0, 1.2]
    assert shown.keys() - {"out"} == EXPECTED.keys() | {"taxed"}


def test_the_page_names_every_operator() -> None:
    text = PAGE.read_text()
    classes = (ab.Stream, ab.KeyedStream, ab.WindowedStream)
    operators = {n for c in classes for n, m in vars(c).items() if callable(m) and n[0] != "_"}
    assert {"enrich", "process", "top_k"} <= operators
    for name in operators - {"key_by"}:
        assert f"**{name}**" in text, f"{name} is not on the page"
