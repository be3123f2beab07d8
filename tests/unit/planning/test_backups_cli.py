"""`plan backups FILE`: the file's format, the table, the picture, and what a bad file is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from anabranch.cli.plan_backups import plan_backups, read_problem
from anabranch.errors import PlanningError

APP = typer.Typer()
APP.command()(plan_backups)

LINE: dict[str, Any] = {
    "bound_s": 7,
    "tasks": [
        {"name": "a", "reprocess_s": 2},
        "b",
        {"name": "c", "reprocess_s": 4, "cost": 1.5},
        {"name": "d <x>", "reprocess_s": 3},
        {"name": "e", "reprocess_s": 3},
    ],
    "edges": [["a", "b"], ["b", "c"], ["c", "d <x>"], ["d <x>", "e"]],
}


def written(tmp_path: Path, content: object) -> Path:
    file = tmp_path / "topology.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_it_prints_the_plan_and_draws_it(tmp_path: Path) -> None:
    file = written(tmp_path, LINE)
    result = CliRunner().invoke(APP, [str(file), "--curve"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "1 of 5 tasks keep backups, cost 1.5: no plan costs less." in result.output
    assert "Least cost by recovery bound" in result.output
    picture = ElementTree.parse(tmp_path / "topology.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert len(picture.findall(f"{space}circle")) == 4
    assert len(picture.findall(f"{space}path[@class='stream']")) == 4


def test_the_bound_and_the_algorithm_can_be_given(tmp_path: Path) -> None:
    file = written(tmp_path, LINE)
    out = tmp_path / "plan.svg"
    args = [str(file), "--bound", "13", "--algorithm", "line", "--picture", str(out)]
    result = CliRunner().invoke(APP, args, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "0 of 5 tasks" in result.output
    assert out.exists()


def test_existing_backups_are_kept_at_equal_cost(tmp_path: Path) -> None:
    content = {"bound_s": 3, "tasks": list("abcd"), "existing": ["b", "zz"]}
    content["edges"] = [["a", "b"], ["b", "c"], ["c", "d"]]
    result = CliRunner().invoke(APP, [str(written(tmp_path, content))], env={"COLUMNS": "120"})
    rows = [
        line.split()
        for line in result.output.splitlines()
        if line.startswith("│") and "kept" in line
    ]
    assert [row[1] for row in rows] == ["b"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "one JSON object"),
        ({"tasks": ["a"]}, "list of edges"),
        ({"tasks": ["a"], "edges": []}, "no bound_s"),
        ({"tasks": ["a"], "edges": [], "bound_s": "7"}, "bound_s must be a number"),
        ({"tasks": ["a"], "edges": [], "bound": 7}, "unknown key 'bound'"),
        ({"tasks": [{"cost": 1}], "edges": [], "bound_s": 7}, "Task 0"),
        ({"tasks": [{"name": "a", "t": 1}], "edges": [], "bound_s": 7}, "unknown key 't'"),
        ({"tasks": ["a"], "edges": [["a"]], "bound_s": 7}, "Edge 0"),
        ({"tasks": ["a", "b"], "edges": [["a", "b"], ["b", "a"]], "bound_s": 7}, "cycle"),
        ({"tasks": [{"name": "a", "cost": -1}], "edges": [], "bound_s": 7}, "cost of task 'a'"),
        ({"tasks": [{"name": "a", "host": "n"}, "b"], "edges": [], "bound_s": 7}, "has no host"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: object, said: str) -> None:
    with pytest.raises(PlanningError) as refusal:
        read_problem(written(tmp_path, content))
    assert said in str(refusal.value)


def test_an_unknown_algorithm_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, [str(written(tmp_path, LINE)), "--algorithm", "magic"])
    assert isinstance(result.exception, PlanningError)
    assert "share" in str(result.exception)
