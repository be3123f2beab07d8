"""Many seeds: on several cores, resumed, and the fewest faults that fail a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_plants import PLANTS
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.errors import ConfigError
from anabranch.sim import Outcome, simulate
from anabranch.sim import sweep as sweeping
from anabranch.sim.shrink import shrink
from anabranch.sim.sweep import BLOCK, Tally, sweep


def last(seeds: range, file: Path | None = None, jobs: int = 1) -> Tally:
    return list(sweep(seeds, jobs, file))[-1]


def test_two_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "BLOCK", 2)
    assert last(range(6), jobs=2) == last(range(6))


def test_a_sweep_goes_on_where_another_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def run(seed: int, lines: int) -> Outcome:
        ran.append(seed)
        return Outcome(seed, "broken" if seed == 7 else None, (), 1, 1)

    monkeypatch.setattr(sweeping, "simulate", run)
    file, seeds = tmp_path / "sweep.jsonl", range(3 * BLOCK)
    begun = sweep(seeds, 1, file)
    next(begun)
    next(begun)
    begun.close()
    assert ran == list(range(BLOCK))
    whole = last(seeds, file)
    assert ran == list(seeds)
    assert (whole.seeds, whole.slices, whole.failed) == (3 * BLOCK, 3 * BLOCK, {7: "broken"})
    assert last(seeds, file) == whole
    assert len(ran) == len(seeds)

    file.write_text(file.read_text()[:-20])  # cut short in the middle of a line
    assert last(seeds, file) == whole
    assert ran[len(seeds) :] == list(range(2 * BLOCK, 3 * BLOCK))
    assert last(seeds, file) == whole

    monkeypatch.setattr(sweeping, "_code", lambda: "another")
    with pytest.raises(ConfigError, match="another version of the code"):
        last(seeds, file)


def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("buy milk\n")
    with pytest.raises(ConfigError, match="has no results of seeds"):
        last(range(3), file)
    assert file.read_text() == "buy milk\n"


def test_the_faults_that_are_needed_are_found() -> None:
    needed = frozenset({3, 40, 41})

    def run(only: frozenset[int]) -> Outcome:
        why = "slice 9 is lost" if needed <= only else "other" if 5 in only else None
        return Outcome(1, why, (), 1, 1, faults=60)

    failed = Outcome(1, "slice 12 is lost", (), 1, 1, faults=60)
    assert shrink(failed, run)[0] == needed


def test_a_seed_that_fails_tells_its_shortest_story(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS["epochs_used_again_after_a_restart"](monkeypatch)
    failed = next(o for o in map(simulate, range(200)) if o.violation and 2 < o.faults < 9)
    only, least = shrink(failed, lambda only: simulate(failed.seed, only=only))
    assert least.violation
    assert len(only) < failed.faults
    assert simulate(failed.seed, only=only) == least
    ran = CliRunner().invoke(app, ["sim", "--seed", str(failed.seed)])
    assert ran.exit_code == 1
    numbers = ",".join(map(str, sorted(only)))
    assert f"{len(only)} of its {failed.faults} faults are enough" in ran.output
    assert f"--seed {failed.seed} --only {numbers}" in ran.output
    again = CliRunner().invoke(app, ["sim", "--seed", str(failed.seed), "--only", numbers])
    assert again.exit_code == 1
    assert f"seed {failed.seed} fails: {least.violation}" in again.output
    many = CliRunner().invoke(app, ["sim", "--seeds", f"{failed.seed}..{failed.seed}"])
    assert many.exit_code == 1
    assert f"seed {failed.seed} fails: {failed.violation}" in many.output
    assert "1 seeds, 1 failed" in many.output
    assert "of its" in many.output
