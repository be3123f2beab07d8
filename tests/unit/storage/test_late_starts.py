"""The directory of a job some of whose chains wait, as a start and `anabranch state` find it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "node"))
from local_run import LocalRun

import anabranch as ab
from anabranch.cli import app
from anabranch.driver.opening import Opening
from anabranch.driver.options import RunOptions
from anabranch.errors import CheckpointMismatchError, ConfigError, StorageError
from anabranch.model.commands import ExposeLate, WriteLate
from anabranch.model.slices import Cut, Late
from anabranch.storage.journal import Head, Journal
from anabranch.storage.local import LocalStore
from anabranch.upgrade.going_on import continue_from, refuse_lost_state
from anabranch.upgrade.state_reader import inspect, read_state


def topology(root: Path, *more: str, parallelism: int = 2) -> ab.Topology:
    made = ab.Topology("job")
    keyed = made.source("s", None).key_by("k")
    keyed.aggregate("on", v=ab.sum("v"), parallelism=parallelism).to(
        "a", ab.Parquet(str(root / "a"))
    )
    off = keyed.aggregate("off", v=ab.max("v"), parallelism=1)
    off.to("b", ab.Parquet(str(root / "b")))
    for name in more:
        off.to(name, ab.Parquet(str(root / name)))
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three batches, each with a checkpoint."""
    run = LocalRun(topology(tmp_path), tmp_path / "ck")
    for n in range(3):
        run.feed([{"s": [(k, n) for k in range(4)]}])
    run.stop()
    return tmp_path


def rewritten(root: Path, change: Callable[[Head], Head]) -> Head:
    """What the journal ends with, as if it had come to something else."""
    book = Journal(LocalStore(root / "ck"))
    found = book.read()
    assert found is not None
    head = replace(found[0], generation=found[0].generation + 1)
    told = change(replace(head, slices=(*found[0].slices, *found[1])))
    book.begin(told)
    book.close()
    return told


def without(cut: Cut | None, chain: str) -> Cut:
    assert cut is not None
    files = {p: f for p, f in cut.files.items() if not p.startswith(f"{chain}/")}
    return Cut(cut.slice, files, {c: g for c, g in cut.groups.items() if c != chain})


def off_waits(head: Head) -> Head:
    """At the two newest cuts: the first slice that "off" lacks is the one after the older cut."""
    assert head.cut is not None and head.previous is not None
    return replace(
        head,
        cut=without(head.cut, "off"),
        previous=without(head.previous, "off"),
        older=(head.previous,),
        behind={"off": head.previous.slice + 1},
    )


def open_it(root: Path, made: ab.Topology) -> Opening:
    return Opening(made.parts(), root / "ck", RunOptions.of({}))


def test_the_state_of_a_chain_that_waits_is_that_of_the_newest_cut_which_has_it(
    root: Path,
) -> None:
    before = {name: read_state(root / "ck", name) for name in ("on", "off")}
    told = rewritten(root, off_waits)
    listed = {o.name: o for o in inspect(root / "ck").operators}
    assert told.cut is not None
    assert (listed["on"].cut, listed["off"].cut) == (told.cut.slice, told.older[0].slice)
    assert listed["off"].keys == 4
    assert inspect(root / "ck").behind == {"off": told.behind["off"]}
    assert read_state(root / "ck", "on") == before["on"]
    assert read_state(root / "ck", "off").num_rows == before["off"].num_rows
    printed = CliRunner().invoke(app, ["state", str(root / "ck")]).output
    first, old = told.behind["off"], told.older[0].slice
    line = f"off waits for nodes, and lacks the slices from {first} on (state of slice {old})"
    assert line in printed


def test_a_chain_that_no_cut_has_is_told(root: Path) -> None:
    told = rewritten(root, lambda head: replace(off_waits(head), older=()))
    assert [o.name for o in inspect(root / "ck").operators] == ["on"]
    with pytest.raises(ConfigError, match=r"no checkpoint in .* has the state of 'off', which wa"):
        read_state(root / "ck", "off")
    printed = CliRunner().invoke(app, ["state", str(root / "ck")]).output
    assert f"off waits for nodes, and lacks the slices from {told.behind['off']} on\n" in printed


def test_a_chain_that_came_back_after_the_newest_cut_is_read_from_the_one_before(
    root: Path,
) -> None:
    rewritten(root, lambda head: replace(off_waits(head), behind={}))
    assert read_state(root / "ck", "off").num_rows == 4
    assert inspect(root / "ck").behind == {}


def test_a_target_is_compared_with_what_its_own_sink_is_to_have_shown(root: Path) -> None:
    """It had all slices. Had its chain waited, it would be ahead: a copy has run."""
    open_it(root, topology(root)).close()
    told = rewritten(root, off_waits)
    ends = told.behind["off"] - 1
    with pytest.raises(ConfigError, match=f"b has slice .* ends with slice {ends}: that is an old"):
        open_it(root, topology(root))


def test_a_start_says_why_another_topology_must_wait(root: Path) -> None:
    rewritten(root, off_waits)
    for made, reason in (
        (topology(root, "c"), "sink 'c' is new"),
        (topology(root, parallelism=3), "operator 'on' had parallelism 2, now it has 3"),
    ):
        told = f"'off' could not go on: slices are still .*: {reason}; .* gracefully"
        with pytest.raises(CheckpointMismatchError, match=told):
            open_it(root, made)


def paused(head: Head, upto: int) -> Head:
    """ "off" waited in slices up to this one."""
    told = (replace(r, paused=("off",)) if r.number <= upto else r for r in head.slices)
    return replace(head, slices=tuple(told))


def test_a_chain_that_came_back_after_the_newest_cut_is_still_needed(root: Path) -> None:
    """The cut has all slices, but not of this chain."""

    def came_back(head: Head) -> Head:
        return replace(paused(off_waits(head), head.slices[-1].number), behind={})

    rewritten(root, came_back)
    with pytest.raises(CheckpointMismatchError, match=r"'off' could not .* sink 'c' is new; .*"):
        open_it(root, topology(root, "c"))
    open_it(root, topology(root)).close()


def test_after_a_graceful_stop_any_topology_goes_on_with_the_newest_cut(root: Path) -> None:
    """The one before lacks a chain: of it and others no new chains are made."""

    def stopped(head: Head) -> Head:
        waits = off_waits(head)
        assert head.previous is not None
        return paused(replace(waits, cut=head.cut, behind={}), head.previous.slice)

    told = rewritten(root, stopped)
    open_it(root, topology(root, "c", parallelism=3)).close()
    renamed = {"both": ["on", "off"]}
    fingerprint = {**told.fingerprint, "chains": renamed, "parallelism": {"both": 2}}
    for head, kept in ((told, False), (replace(told, previous=told.older[0]), True)):
        went_on, _ = continue_from(LocalStore(root / "ck"), head, (), fingerprint)
        assert went_on.cut is not None and went_on.older == ()
        assert went_on.cut.groups.keys() == {"both"}
        assert (went_on.previous is not None) == kept


def test_a_cut_that_a_waiting_chain_needs_must_be_whole(root: Path) -> None:
    told = rewritten(root, off_waits)
    refuse_lost_state(LocalStore(root / "ck"), told)
    (lost,) = told.older[0].files["off/0"][:1]
    (root / "ck" / lost).unlink()
    with pytest.raises(StorageError, match=f"state of the job in .* is gone: {lost} is missing"):
        refuse_lost_state(LocalStore(root / "ck"), told)


def test_a_run_writes_what_came_late_and_shows_it_once(tmp_path: Path) -> None:
    run = LocalRun(topology(tmp_path), tmp_path / "ck")
    run.feed([{"s": [(1, 1)]}])
    newest = run.controller.newest
    assert newest is not None
    before = sorted((tmp_path / "b").rglob("*.parquet"))
    run.run.effects.execute(WriteLate(Late(newest.number, ("off",))))
    for _ in range(2):
        run.run.effects.execute(ExposeLate(newest, frozenset({"b"}), ()))
    run.kill()
    assert sorted((tmp_path / "b").rglob("*.parquet")) == before
    (path,) = sorted((tmp_path / "ck" / "journal").glob("*.jsonl"))[-1:]
    assert b'{"late":1,"chains":["off"],"staged":{}}' in path.read_bytes()
