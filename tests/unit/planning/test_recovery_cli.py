"""`anabranch plan recovery`: the file, the table, the picture, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import typer
from typer.testing import CliRunner

from anabranch.cli.plan_recovery import plan_recovery
from anabranch.errors import PlanningError

app = typer.Typer()
app.command()(plan_recovery)

#: 001, figure 2: twelve partitions, the two sources survive; five nodes of two partitions each.
UPSTREAM = {
    "p1": [], "p2": [], "p3": ["p1"], "p4": ["p2"], "p5": ["p3", "p4"], "p6": ["p3", "p4"],
    "p7": ["p5"], "p8": ["p6"], "p9": ["p7"], "p10": ["p7"], "p11": ["p8"], "p12": ["p8"],
}  # fmt: skip


def write(tmp_path, **changes):
    data = {
        "partitions": {p: {"cpu": 1, "upstream": ups} for p, ups in UPSTREAM.items()},
        "outputs": ["p9", "p10", "p11", "p12"],
        "failed": [f"p{i}" for i in range(3, 13)],
        "nodes": [{"name": f"N{i}", "cpu": 2.5} for i in range(1, 6)],
    }
    file = tmp_path / "failure.json"
    file.write_text(json.dumps(data | changes))
    return file


@pytest.mark.parametrize("planner", ["exact", "best-density", "progressive", "dp"])
def test_table_and_picture_of_a_recovery(tmp_path, planner):
    file = write(tmp_path)
    done = CliRunner().invoke(app, [str(file), "--planner", planner], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "4 of 4 failed queries are back with 5 nodes; nothing is left" in done.output
    picture = ET.fromstring((tmp_path / "failure.svg").read_text())
    assert picture.tag.endswith("svg")


def test_what_waits_is_said(tmp_path):
    file = write(tmp_path, nodes=[{"cpu": 5}], outputs={"p9": 1, "p12": 7})
    target = tmp_path / "other.svg"
    done = CliRunner().invoke(app, [str(file), "--picture", str(target)], env={"COLUMNS": "200"})
    assert "0 of 2 failed queries are back with 1 nodes; 6 partitions wait, 6 CPU" in done.output
    assert target.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "unknown key 'extra'"),
        ({"partitions": {}}, "needs an object of partitions"),
        ({"partitions": {"p1": {"cpu": "much"}}}, "cpu of partition 'p1' must be a number"),
        ({"partitions": {"p1": {"cpus": 1}}}, "unknown key 'cpus'"),
        ({"partitions": {"p1": 3}}, "must be an object"),
        ({"outputs": 3}, "needs outputs"),
        ({"outputs": {"p9": 0}}, "integer >= 1"),
        ({"outputs": ["p99"]}, "'p99' is not a partition"),
        ({"failed": ["p99"]}, "'p99' is not in the topology"),
        ({"failed": "p9"}, "must be a list of partition names"),
        ({"nodes": 3}, "needs a list of nodes"),
        ({"nodes": [{"cpu": -1}]}, "cpu > 0"),
        ({"cap": 2}, "CPU cap"),
    ],
)
def test_bad_files_say_where(tmp_path, changes, message):
    with pytest.raises(PlanningError, match=message):
        plan_recovery(write(tmp_path, **changes))


def test_not_json_and_unknown_planner(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("{")
    with pytest.raises(PlanningError, match="not JSON"):
        plan_recovery(file)
    file.write_text("[]")
    with pytest.raises(PlanningError, match="one JSON object"):
        plan_recovery(file)
    with pytest.raises(PlanningError, match="Unknown planner 'best'"):
        plan_recovery(write(tmp_path), planner="best")
