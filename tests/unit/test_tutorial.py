"""The tutorial's code does what the page says: here what needs no cluster, all in tests/spark."""

from __future__ import annotations

import codeop
import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_examples import outputs

import anabranch as ab
from anabranch.cli.loading import load_topology

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]*) -->\n)?```python\n(?P<code>.*?)```"
    r"(?:\n\n```text\n(?P<shown>.*?)```)?",
    re.DOTALL,
)


END = "-- the block is done --"


@dataclass(frozen=True)
class Block:
    """Code, the mark before it, and the output shown after it."""

    mark: str
    code: str
    shown: str | None


def blocks() -> list[Block]:
    found = BLOCK.finditer(PAGE.read_text())
    return [Block(m["mark"] or "", m["code"], m["shown"]) for m in found]


def run_page(wanted: Callable[[Block], bool]) -> tuple[dict[str, Any], int]:
    """Run the wanted blocks as one program, each with the output the page shows; the names they
    leave, and how many ran."""
    names: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for block in blocks():
        if wanted(block):
            written = io.StringIO()
            with contextlib.redirect_stdout(written):
                exec(compile(block.code, PAGE.name, "exec"), names)
            assert block.shown is None or written.getvalue() == block.shown
            ran += 1
    return names, ran


@pytest.fixture
def page() -> dict[str, Any]:
    names, ran = run_page(lambda block: block.mark in ("", "file: shop.py"))
    assert ran == 5
    return names


def test_every_block_is_run_somewhere() -> None:
    marks = [block.mark for block in blocks()]
    assert set(marks) == {"", "cluster", "file: orders.py", "file: shop.py"}
    assert len(marks) == PAGE.read_text().count("```python")
    assert sum(block.shown is not None for block in blocks()) == PAGE.read_text().count("```text")


def test_counts_and_windows(page: dict[str, Any]) -> None:
    """The topologies give what the page shows for a cluster."""
    tweets = {"tweets": page["tweets"].rows(0, 6_000)}
    counts = outputs(page["tag_counts"](None, ab.Memory()), tweets, 6)["out"]
    latest = {row["tag"]: row["n"] for row in counts}
    assert f"{sorted(latest.items(), key=lambda item: -item[1])[:3]}\n" in shown()
    ranking = outputs(page["hot_tags"](None, ab.Memory()), tweets, 6)["hot"]
    second = [row for row in ranking if row["rank"] == 2]
    lines = [f"{row['window_start'].time()} {row['tag']} {row['n']}\n" for row in second]
    assert "".join(lines) in shown()


def shown() -> list[str | None]:
    return [block.shown for block in blocks()]


def test_the_file_is_a_job(
    page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (block for block in blocks() if block.mark == "file: orders.py")
    (tmp_path / block.mark.removeprefix("file: ")).write_text(block.code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    topology = load_topology("orders:topology")
    orders = page["Orders"](seed=1, rate=10).rows(0, 2_000)
    sales = outputs(topology, {"orders": orders}, 5)["sales"]
    first = next(row for row in sales if row["window_start"].second == 0)
    inside = [
        row["amount"]
        for row in orders.to_pylist()
        if first["window_start"] <= row["ts"] < first["window_end"]
        and row["shop"] == first["shop"]
        and row["amount"] > 100
    ]
    assert first["n"] == len(inside) > 5
    assert first["total"] == pytest.approx(sum(inside))


def at_a_prompt() -> list[Block]:
    return [block for block in blocks() if not block.mark.startswith("file: ")]


@pytest.mark.parametrize("block", at_a_prompt(), ids=lambda block: block.code.partition("\n")[0])
def test_a_block_can_be_pasted(block: Block) -> None:
    """A prompt takes a blank line for the end of a function, and wants one before what follows."""
    waiting: list[str] = []
    for line in [*block.code.splitlines(), ""]:
        waiting.append(line)
        if codeop.compile_command("\n".join(waiting), PAGE.name) is not None:
            waiting.clear()
    assert not waiting


def test_the_page_at_a_python_prompt(tmp_path: Path) -> None:
    """As someone would paste it who has no cluster: each block, then Enter."""
    mine = [block for block in blocks() if not block.mark]
    typed = "".join(f"{block.code}\nprint({END!r})\n" for block in mine)
    ran = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=typed,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert ran.returncode == 0
    assert "Error" not in ran.stderr
    printed = ran.stdout.split(END + "\n")[:-1]
    assert printed == [block.shown or "" for block in mine]
