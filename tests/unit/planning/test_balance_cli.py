"""`anabranch plan balance`: the file, the table, the picture, the routes, and refusals."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from anabranch.cli.plan_balance import plan_balance
from anabranch.errors import PlanningError

app = typer.Typer()
app.command()(plan_balance)


def write(tmp_path, text):
    file = tmp_path / "keys.csv"
    file.write_text(text)
    return file


def skewed(copies):
    lines = [f"k{i},{1 + i % 9},{i},{0 if i < 60 else 1},{copies}" for i in range(100)]
    return "\n".join(["key,count,state,task,copies", *lines, ""])


@pytest.mark.parametrize("planner", ["ftlb", "mixed", "min-table", "readj"])
def test_table_picture_and_routes(tmp_path, planner):
    file = write(tmp_path, skewed(1))
    arguments = [str(file), "--tasks", "2", "--theta-max", "0.05", "--planner", planner]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "keys change their active task" in done.output
    assert "not met" not in done.output
    assert ET.fromstring((tmp_path / "keys.svg").read_text()).tag.endswith("svg")
    with (tmp_path / "keys.routes.csv").open() as lines:
        routes = list(csv.DictReader(lines))
    assert routes or planner == "min-table"  # the hash alone may already do
    assert {row["active"] for row in routes} <= {"0", "1"}
    assert all(row["replicas"] == "" for row in routes)


def test_with_replicas_no_state_moves(tmp_path):
    file = write(tmp_path, skewed(2))
    done = CliRunner().invoke(app, [str(file), "--tasks", "2"], env={"COLUMNS": "200"})
    assert "0 copies of state move, 0 in size" in done.output


def test_a_hot_key_is_named(tmp_path):
    file = write(tmp_path, "key,count,state\nhot,100,1\na,1,1\nb,1,1\n")
    done = CliRunner().invoke(app, [str(file), "--tasks", "3"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "key 'hot' alone exceeds" in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key,count\na,1\n", "no column 'state'"),
        ("key,count,state,colour\na,1,1,red\n", "unknown column 'colour'"),
        ("key,count,state\n", "has no keys"),
        ("key,count,state\na,1,1\na,2,1\n", "key 'a' twice"),
        ("key,count,state\na,many,1\n", "count in line 2 must be a number: 'many'"),
        ("key,count,state\na,-1,1\n", "count -1.0"),
        ("key,count,state\na,nan,1\n", "count nan"),
        ("key,count,state,task\na,1,1,x\n", "task in line 2"),
        ("key,count,state,task\na,1,1,7\n", "task 7, but there are tasks 0 to 1"),
        ("key,count,state,copies\na,1,1,3\n", "3 copies, but there are 2 tasks"),
        ("key,count,state,copies\na,1,1,0\n", "0 copies"),
    ],
)
def test_bad_files_say_where(tmp_path, text, message):
    with pytest.raises(PlanningError, match=message):
        plan_balance(write(tmp_path, text), tasks=2)


def test_unknown_planner(tmp_path):
    with pytest.raises(PlanningError, match="Unknown planner 'best'"):
        plan_balance(write(tmp_path, skewed(1)), tasks=2, planner="best")
