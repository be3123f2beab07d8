"""Attempts of one source task that overlap, and read the rows of their batch in another order.

Spark may start a task again while the first attempt still runs. Whatever the second one does
between any two storage operations of the first, also if it is killed there, both must send the same
rows, and these must be the ones in the log.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from local_run import SCHEMA, LocalRun, table
from test_local_runs import Comparison

from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.arrow.packets import RowRanges
from anabranch.node.protocol.messages import SourceRequest
from anabranch.node.protocol.source_task import run_source_task
from anabranch.storage.checkpoint_files import decode_table
from anabranch.storage.local import LocalStore
from anabranch.storage.source_log import log_name, read_log
from anabranch.testing.local import arrow_frames
from interruptions import interrupted
from oracle import Dataflow, Step

STEPS = (
    Step("s", "source"),
    Step("sum", "sum", ("s",), 2),
    Step("sums", "sink", ("sum",)),
    Step("raw", "sink", ("s",)),
)
ROWS = [(n % 4, n) for n in range(10)]


class Killed(BaseException):
    """Not an Exception: nothing in the product may catch it."""


class Task:
    """Source task 0 of slice 1; a limit of four rows makes its batch three slices."""

    def __init__(self, root: Path, limit: int | None) -> None:
        run = LocalRun(
            Comparison(Dataflow(STEPS)).topology(), root, nodes=1, max_rows_per_slice=limit
        )
        self.root, self._job = root, run.prepared.spec
        placement = run.controller.placement
        assert placement is not None
        plan = SlicePlan(1, Feed.LIVE, 0, 0, None, 0, placement.version, seal=False, generation=1)
        self._request = SourceRequest(1, placement.nodes, placement, plan, 1, ("s",), SCHEMA)
        run.kill()

    def attempt(self, rows: list[tuple[int, int]]) -> list[Any]:
        """What it sends: the rows of the slice in their order."""
        frames = arrow_frames({"s": table(rows)}, ("s",), SCHEMA)
        (parcel,) = run_source_task(self._job, self._request, 0, frames)
        assert parcel.facts is not None
        assert not parcel.facts.failures
        packets = [b.packets for b in parcel.bundles]
        return [p.table.to_pylist() for p in packets if isinstance(p, RowRanges)]

    def logged(self) -> list[list[Any]]:
        """The source's rows in the log, of one slice after the other."""
        found = []
        while (log := self._log(len(found) + 1)) is not None:
            found.append(log[0]["sink:raw"].to_pylist())
        return found

    def _log(self, slice_no: int) -> Any:
        name = log_name(slice_no, 1, 0, 0)
        return read_log(LocalStore(self.root), name, decode_table)

    @property
    def leftovers(self) -> list[Path]:
        return list((self.root / "source-log").rglob(".*.tmp"))


def values(logged: list[list[Any]]) -> Counter[tuple[int, int]]:
    return Counter((row["k"], row["v"]) for rows in logged for row in rows)


@pytest.fixture(params=[None, 4], ids=["one slice", "three slices"])
def limit(request: pytest.FixtureRequest) -> int | None:
    found: int | None = request.param
    return found


def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> int:
    task = Task(tmp_path / "alone", limit)
    with interrupted(monkeypatch, -1, lambda: None) as done:
        task.attempt(ROWS)
    assert len(task.logged()) == (1 if limit is None else 3)
    return len(done)


def overlapping(
    task: Task, monkeypatch: pytest.MonkeyPatch, operation: int
) -> tuple[list[Any], list[Any]]:
    """What an attempt sends, and what another one sends before its n-th operation."""
    other: list[Any] = []
    with interrupted(monkeypatch, operation, lambda: other.extend(task.attempt(ROWS[::-1]))):
        mine = task.attempt(ROWS)
    return mine, other


def test_the_first_complete_log_of_overlapping_attempts_counts_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    for operation in range(operations(tmp_path, monkeypatch, limit)):
        task = Task(tmp_path / str(operation), limit)
        mine, other = overlapping(task, monkeypatch, operation)
        assert other == mine, operation
        again = task.attempt(ROWS[3:] + ROWS[:3])
        assert again == mine, operation
        assert values(task.logged()) == Counter(ROWS), operation
        assert task.leftovers == []


def test_a_share_is_whole_when_an_attempt_is_killed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    def kill() -> None:
        raise Killed

    for operation in range(operations(tmp_path, monkeypatch, limit)):
        task = Task(tmp_path / str(operation), limit)
        with pytest.raises(Killed), interrupted(monkeypatch, operation, kill):
            task.attempt(ROWS)
        task.attempt(ROWS[::-1])
        assert values(task.logged()) == Counter(ROWS), operation


def test_a_share_is_whole_when_the_disk_refuses_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, links = os.link, 0

    def link(*args: Any) -> None:
        nonlocal links
        links += 1
        if links == refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    for refused in (1, 2, 3):
        task, links = Task(tmp_path / str(refused), 4), 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", link)
            with pytest.raises(AssertionError, match="No space left"):
                task.attempt(ROWS)
            task.attempt(ROWS[::-1])
        assert values(task.logged()) == Counter(ROWS)
