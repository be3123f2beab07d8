"""Random runs hold; a seed decides everything; what is to be met is met."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from jobs import CRASHES, DIRECTED, MOST, SHORT, copied, digest, line, run
from plants import PLANTS
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.control.outcomes import Outcomes
from anabranch.control.schedule import Schedule
from anabranch.sim import simulate
from anabranch.sim.coverage import ANSWERS, FAULTS
from anabranch.sim.faults import Faults
from anabranch.sim.oracle import Oracle
from anabranch.sim.workload import Workload, random_workload
from effort import LONG

SEEDS = range(5_000 if LONG else 80)
MET = (*FAULTS, *ANSWERS)


def test_random_runs_hold_and_meet_everything() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        outcome = simulate(seed)
        told = "\n".join((f"seed {seed}: {outcome.violation}", *outcome.story))
        assert outcome.violation is None, told
        counts += outcome.counts
    assert not [what for what in MET if not counts[what]], counts


@pytest.mark.parametrize("job", [line("a", "b"), line("a", "b", "c", backups=[])])
def test_copies_take_over_and_nothing_is_lost(job: Workload) -> None:
    counts: Counter[str] = Counter()
    for seed in range(15):
        outcome = run(seed, copied(job), replace(CRASHES, torn=0.1))
        told = "\n".join((f"seed {seed}: {outcome.violation}", *outcome.story))
        assert outcome.violation is None, told
        counts += outcome.counts
    assert counts["promoted"] > 5


@pytest.mark.parametrize("name", SHORT)
def test_most_nodes_die_and_chains_wait(name: str) -> None:
    for seed in range(300 if LONG else 12):
        outcome = run(seed, SHORT[name], MOST)
        told = "\n".join((f"seed {seed}: {outcome.violation}", *outcome.story))
        assert outcome.violation is None, told


@pytest.mark.parametrize(
    ("name", "seed"),
    [("none backs up", 89), ("from the second loss on", 79), ("twice the work", 86)],
)
def test_chains_that_failed_to_come_back_once(name: str, seed: int) -> None:
    assert run(seed, SHORT[name], MOST).violation is None


def test_a_node_lost_between_two_stages_of_a_rebuild() -> None:
    """What is healthy then is where the first stage ends, and stays there while it is repeated."""
    outcome = run(17, *DIRECTED["older_cut_replayed_under_the_newer_layout"])
    assert outcome.violation is None, outcome.story


@pytest.mark.parametrize(
    "seed",
    [
        *(171, 206, 905, 941, 1177, 1423, 690, 1707, 1736, 1878, 1949, 2132, 2168, 2438),
        *(406_378, 406_853, 411_000, 712_323, 713_974, 907_766, 912_594, 1_034_462),
    ],
)
def test_seeds_that_failed_once(seed: int) -> None:
    assert simulate(seed).violation is None


def test_a_seed_decides_everything_in_every_process() -> None:
    """Also the order of sets and dicts, which differs between processes, must not matter."""
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    path = os.pathsep.join(p for p in sys.path if p)
    ran = subprocess.run(
        [sys.executable, "-c", "from jobs import MOST, SHORT, digest; print(digest(range(4)))"],
        env=os.environ | {"PYTHONHASHSEED": salt, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == digest(range(4))


def test_without_faults_nothing_is_recovered_but_the_start() -> None:
    outcome = simulate(1, line("a", "b"), Faults)
    assert outcome.violation is None
    assert outcome.counts["recoveries"] == 1


def test_a_run_that_does_not_end_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "_stop", lambda self, now_ms: [])
    outcome = simulate(1, line("a"), Faults)
    assert outcome.violation == "no end after 8000 steps"


def test_whatever_ends_a_run_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outcomes, "slice_ran", lambda self, event: [][0])
    outcome = simulate(1, line("a"), Faults)
    assert outcome.violation is not None
    assert "IndexError" in outcome.violation


def test_a_broken_invariant_is_a_violation_with_the_story_of_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        PLANTS["loss_not_forgotten_after_the_rebuild"](patch)
        outcome = simulate(1, line("a"), Faults)
    assert outcome.violation is not None
    assert "what is lost agrees with the rebuild: everything is whole" in outcome.violation
    assert "\n" not in outcome.violation
    assert any("rebuild REPLAYING → WHOLE" in told for told in outcome.story)


def test_the_order_of_rows_counts() -> None:
    """The oracle, and so the checks, tell two orders of the same rows apart."""
    job = line("a")
    rows = tuple((1, value, 0) for value in range(30))  # more than there are keys behind the edge
    shown = []
    for order in (rows, rows[::-1]):
        oracle = Oracle(job)
        oracle.run([{"s": order}], None, 5, {"a": (0, 0, 1, 1)})
        shown.append(oracle.state())
    assert shown[0] != shown[1]


def test_a_batch_read_again_has_the_same_rows_in_other_tasks() -> None:
    job = random_workload(3, random.Random(3))
    for batch, raw in enumerate(job.batches):
        readings = [job.read(batch, again) for again in range(6)]
        for tasks in readings:
            for source, rows in raw.items():
                assert sorted(r for t in tasks for r in t[source]) == sorted(rows)
        if sum(map(len, raw.values())) > 3:
            assert len({repr(tasks) for tasks in readings}) > 1


def test_the_command_tells_one_seed_and_runs_many() -> None:
    one = CliRunner().invoke(app, ["sim", "--seed", "3"])
    assert one.exit_code == 0
    assert one.output.splitlines()[-1].startswith("seed 3 holds:")
    assert "the run ends" in one.output
    many = CliRunner().invoke(app, ["sim", "--seeds", "3..5"])
    assert many.exit_code == 0
    assert "3 seeds, 0 failed" in many.output


@pytest.mark.parametrize(
    "options",
    [[], ["--seed", "1", "--seeds", "1..2"], ["--seeds", "5..1"], ["--seed", "1", "--only", "x"]],
)
def test_the_command_says_what_to_give(options: list[str]) -> None:
    ran = CliRunner().invoke(app, ["sim", *options])
    assert ran.exit_code == 1
    assert "give" in ran.output
