"""The README's example does what the README says."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import anabranch as ab
from anabranch.cli.loading import load_topology
from anabranch.testing import Idle, play

README = Path(__file__).parents[3] / "README.md"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return str(code)


def saved(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ab.Topology:
    """The topology of the example, saved and loaded as the README says."""
    (directory / "sensors.py").write_text(example())
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    return load_topology("sensors:topology")


def test_the_example_is_short() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 15


def test_the_example_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's generator gives a timestamp and a number, counted up."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [{"timestamp": start + timedelta(milliseconds=i), "value": i} for i in range(6_000)]
    printed, closed = play(saved(tmp_path, monkeypatch), [{"rows": rows}, Idle()])
    assert not len(printed["out"])
    assert sorted(closed["out"].select("sensor", "readings", "degrees").rows()) == [
        (sensor, 1_000, 26) for sensor in range(5)
    ]


@pytest.mark.parametrize(
    "page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
