"""A driver that has lost its lock without knowing it, cut short by its successor anywhere.

The lock file is deleted, as an expired lease would let it go. Before any single storage operation
of the old driver a new one starts on the same directory and runs; then the old one goes on from
where it was. It must end at its next step, and the rows in the sinks must be those of one driver.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from local_run import LocalRun
from test_crashes import BATCHES, output, rows_of, topology

from anabranch.errors import AnabranchError
from anabranch.storage.generations import Generation, claimed
from anabranch.storage.local import LocalStore
from effort import LONG
from interruptions import interrupted

PLACES = 6  # of several hundred, unless asked for all


def start(root: Path) -> LocalRun:
    """Whoever holds the lock, it is not in the way."""
    (root / "ck" / "lock").unlink(missing_ok=True)
    return LocalRun(topology(root), root / "ck", nodes=1)


def feed(run: LocalRun, upto: int) -> None:
    """As Spark does: the batch of which it was not told that it ended comes again."""
    for number in range(max(0, run.next_batch - 1), upto):
        run.feed(BATCHES[number], number)


def work(root: Path) -> None:
    run = start(root)
    feed(run, len(BATCHES))
    run.stop()


def run_first(root: Path, started: list[LocalRun]) -> None:
    started.append(start(root))
    feed(started[0], 3)
    started[0].await_cut()
    feed(started[0], len(BATCHES))


def overlapping(root: Path, monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
    """A driver, another one before its n-th operation, the first one again, the second one again,
    and one more after them. Of the first two the older one ends."""
    first: list[LocalRun] = []
    second: list[LocalRun] = []

    def successor() -> None:
        second.append(start(root))
        feed(second[0], min(second[0].next_batch + 1, len(BATCHES) - 1))
        second[0].await_cut()

    ended: dict[str, str] = {}
    try:
        with interrupted(monkeypatch, operation, successor):
            run_first(root, first)
            if second:
                first[0].feed(BATCHES[0], 0)  # at the latest with the next step
        if not second:  # how many operations there are depends on when files are written
            successor()
            first[0].feed(BATCHES[0], 0)
    except AnabranchError as e:
        ended["first"] = type(e).__name__
    try:
        feed(second[0], len(BATCHES))
        second[0].feed(BATCHES[0], 0)
    except AnabranchError as e:
        ended["second"] = type(e).__name__
    claims = [run.run.caller.generation for run in (*first, *second)]
    older = "second" if first and claims[0] == max(claims) else "first"
    assert ended == {older: "CheckpointLockedError"}, (operation, claims)
    for run in (*first, *second):
        run.kill()
    work(root)


def assert_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk through the operations of a run."""
    work(tmp_path / "calm")
    wanted = {s: rows_of(output(tmp_path / "calm", s)) for s in ("raw", "out")}
    with interrupted(monkeypatch, -1, lambda: None) as done:
        run_first(tmp_path / "alone", [])
    for operation in range(0, len(done), 1 if LONG else len(done) // PLACES):
        root = tmp_path / f"{operation}"
        overlapping(root, monkeypatch, operation)
        assert {s: rows_of(output(root, s)) for s in wanted} == wanted, operation


def test_a_driver_that_lost_its_lock_changes_nothing_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_fenced(tmp_path, monkeypatch)


def test_a_missing_fence_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generation, "check", lambda self: None)
    with pytest.raises(AssertionError):
        assert_fenced(tmp_path, monkeypatch)


def test_what_a_replaced_driver_remembers_late_is_not_read(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.run.holding.remember({"known": 1})
    feed(first, 1)
    second = start(tmp_path)
    first.run.holding.remember({"late": 1})
    second.kill()
    third = start(tmp_path)
    assert third.run.holding.past.autoscaler == {"known": 1}
    for run in (first, third):
        run.kill()


def test_a_directory_from_before_journals_named_their_generation_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path)
    feed(run, 2)
    run.kill()
    journal = tmp_path / "ck" / "journal"
    for segment in journal.glob("1-*.jsonl"):
        segment.rename(journal / f"{int(segment.stem.partition('-')[2]):06d}.jsonl")
    shutil.rmtree(tmp_path / "ck" / "generations")
    work(tmp_path)
    work(tmp_path / "calm")
    for sink in ("raw", "out"):
        assert rows_of(output(tmp_path, sink)) == rows_of(output(tmp_path / "calm", sink))
    assert claimed(LocalStore(tmp_path / "ck")) == [2]
