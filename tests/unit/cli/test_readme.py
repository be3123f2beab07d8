"""The README's example does what the README says."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.node.schemas import build_programs, infer_schemas
from anabranch.operators.base import SliceTime

README = Path(__file__).parents[3] / "README.md"
SENTENCES = pa.schema([("ts", pa.timestamp("us", "UTC")), ("sentence", pa.large_string())])


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return str(code)


def test_the_example_is_short() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_example_counts_words() -> None:
    names: dict[str, object] = {}
    exec(compile(example(), "README.md", "exec"), names)
    topology = names["topology"]
    assert isinstance(topology, ab.Topology)
    plan = topology.plan()
    sinks = {"counts": ab.Memory()}
    programs = build_programs(plan, *infer_schemas(plan.topology, {"sentences": SENTENCES}, sinks))
    rows = pa.table(
        {"ts": [datetime(2026, 1, 1, tzinfo=UTC)] * 2, "sentence": ["to be", "or not to be"]},
        schema=SENTENCES,
    )
    source, counter = programs["sentences"], programs["count"]
    now_ms = 1_767_225_600_000  # 2026-01-01
    sent = source.run({"sentences": rows}, {}, {}, SliceTime(1, None, now_ms)).edges
    packets = {edge: [table] for edge, table in sent.items()}
    states = counter.new_states()
    first = counter.run({}, packets, states, SliceTime(1, None, 0))
    states["count"].install(first.changes["count"])
    after = int(datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC).timestamp() * 1e6)
    result = counter.run({}, {}, states, SliceTime(2, after, 0))
    counts = pl.from_arrow(result.sinks["counts"])
    assert isinstance(counts, pl.DataFrame)
    assert dict(counts.select("word", "n").iter_rows()) == {"to": 2, "be": 2, "or": 1, "not": 1}


@pytest.mark.parametrize(
    "page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
