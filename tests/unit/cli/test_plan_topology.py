"""`plan backups MODULE:ATTRIBUTE`: the tasks of a topology are its partitions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli import app
from anabranch.cli.plan_backups import problem_of
from anabranch.errors import PlanningError

MODULE = """
import anabranch as ab

topology = ab.Topology("shop")
orders = topology.source("orders", None).select("kept", "k", "v")
totals = orders.key_by("k").aggregate("totals", v=ab.sum("v"))
totals.changes().key_by("k").aggregate("best", v=ab.max("v")).to("out", ab.Memory())
"""


def topology() -> ab.Topology:
    made = ab.Topology("shop")
    orders = made.source("orders", None).select("kept", "k", "v")
    totals = orders.key_by("k").aggregate("totals", v=ab.sum("v"), parallelism=2)
    fused = totals.changes().key_by("k").aggregate("best", v=ab.max("v"), parallelism=2)
    fused.changes().union(orders).key_by("v").aggregate("last", n=ab.count(), parallelism=1)
    totals.to("out", ab.Memory())
    return made


def test_tasks_are_partitions_and_streams_are_shuffles() -> None:
    problem = problem_of(topology().plan(), 5.0, ["kept=2", "totals=1.5", "best=0.5"])
    assert problem.graph.tasks == ("orders", "totals/0", "totals/1", "last")
    assert set(problem.graph.edges) == {
        ("orders", "totals/0"),
        ("orders", "totals/1"),
        ("orders", "last"),
        ("totals/0", "last"),
        ("totals/1", "last"),
    }
    times = dict(zip(problem.graph.tasks, problem.reprocess_s, strict=True))
    assert times == {"orders": 2.0, "totals/0": 2.0, "totals/1": 2.0, "last": 1.0}
    assert problem.bound_s == 5.0


@pytest.mark.parametrize(
    ("bound", "seconds", "sentence"),
    [
        (None, [], "give --bound"),
        (5.0, ["nobody=3"], "the operators are: orders, kept, totals, best, out, last"),
        (5.0, ["totals"], "must be OPERATOR=SECONDS"),
        (5.0, ["totals=soon"], "'soon' is not a number of seconds"),
        (5.0, ["totals=-1"], "reprocessing time of task 'totals/0' is -1.0"),
    ],
)
def test_mistakes(bound: float | None, seconds: list[str], sentence: str) -> None:
    with pytest.raises(PlanningError) as refused:
        problem_of(topology().plan(), bound, seconds)
    assert sentence in refused.value.message


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "shop_module.py").write_text(MODULE)
    try:
        arguments = ["plan", "backups", "shop_module:topology", "--bound", "3", "--t", "totals=3"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "1 of 3 tasks keep backups" in result.stdout
        assert (tmp_path / "shop.svg").read_text().startswith("<svg")
    finally:
        sys.modules.pop("shop_module", None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.json"], "nowhere.json cannot be read (No such file or directory)"),
        (["nowhere:topology", "--bound", "3"], "there is no module 'nowhere'"),
        (["tasks.json", "--t", "a=3"], "--t is for a topology"),
    ],
)
def test_what_is_neither_file_nor_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tasks.json").write_text('{"bound_s": 3, "tasks": ["a"], "edges": []}')
    result = CliRunner().invoke(app, ["plan", "backups", *arguments])
    assert result.exit_code == 1
    assert sentence in result.stderr.replace("\n", " ")
