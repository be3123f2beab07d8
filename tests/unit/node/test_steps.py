"""What interrupts a driver's step, or comes in the middle of one: the run ends in order or goes on,
and in either case every row is shown once, also by the next run."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from local_run import LocalQuery, LocalRun

import anabranch as ab
from anabranch.driver.progress import Progress
from anabranch.driver.steps import Turns
from anabranch.errors import (
    AdjustmentError,
    AnabranchError,
    ClusterError,
    OperatorError,
    StorageError,
)
from anabranch.model.events import DrainRequested, ScaleRequested
from anabranch.model.ids import NodeId
from anabranch.storage.journal import DirectoryLock

BATCHES = [[{"s": [(k, 10 * b + k) for k in range(5)]}] for b in range(6)]
ROWS = Counter(r for [task] in BATCHES for r in task["s"])
SECONDS = 60.0  # until a test gives up


def topology(root: Path, *sinks: tuple[str, ab.Sink]) -> ab.Topology:
    """Sinks are shown in the order they are declared in: those given, then "rows"."""
    made = ab.Topology("t", key_groups=4, parallelism=2)
    stream = made.source("s", None)
    for name, sink in sinks:
        stream.to(name, sink)
    stream.to("rows", ab.Parquet(str(root / "rows")))
    stream.key_by("k").aggregate("sum", total=ab.sum("v")).to("sums", ab.Memory())
    return made


def shown(root: Path) -> Counter[Any]:
    """Every row in the Parquet sink."""
    files = (root / "rows").glob("slice=*/*.parquet")
    rows = (r for f in files for r in pq.ParquetFile(f).read().to_pylist())
    return Counter((r["k"], r["v"]) for r in rows)


def slices(root: Path) -> set[str]:
    return {d.name for d in (root / "rows").glob("slice=*")}


def followed(run: LocalRun, batches: Any = BATCHES) -> AnabranchError | None:
    """Let a query offer the batches; what ended the run. Nothing of it may be left."""
    LocalQuery(run, batches).start()
    assert run.reading.await_termination(SECONDS), "the run does not end"
    DirectoryLock(Path(run.run.caller.job)).release()
    return run.run.error


def finish(root: Path) -> None:
    """Another run on the same directory, to the end; then every row is there once."""
    assert followed(LocalRun(topology(root), root / "ck")) is None
    assert shown(root) == ROWS


# -- observers -------------------------------------------------------------------------------------


def test_an_observer_that_raises_is_logged_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = LocalRun(topology(tmp_path), tmp_path / "ck")
    seen: list[int] = []

    def raises(progress: Progress) -> None:
        seen.append(progress.slice)
        raise BrokenPipeError("nobody listens")

    run.run.steps.on_progress.append(raises)
    with caplog.at_level(logging.WARNING, "anabranch"):
        assert followed(run) is None
    assert shown(tmp_path) == ROWS
    assert seen == sorted(seen)
    assert len(seen) >= len(BATCHES)
    assert len([r for r in caplog.records if "on_progress" in r.message]) == 1


def test_an_observer_sees_its_slice_in_the_sinks(tmp_path: Path) -> None:
    run = LocalRun(topology(tmp_path), tmp_path / "ck")
    missing: list[int] = []

    def look(progress: Progress) -> None:
        if progress.rows_in and not (tmp_path / "rows" / f"slice={progress.slice}").exists():
            missing.append(progress.slice)

    run.run.steps.on_progress.append(look)
    assert followed(run) is None
    assert missing == []


def test_a_stop_by_an_observer_comes_after_the_step(tmp_path: Path) -> None:
    run = LocalRun(topology(tmp_path), tmp_path / "ck")
    run.run.steps.on_progress.append(lambda p: run.reading.stop() if p.slice == 2 else None)
    assert followed(run) is None
    assert slices(tmp_path) == {"slice=1", "slice=2"}
    finish(tmp_path)


def test_requests_by_an_observer_are_answered(tmp_path: Path) -> None:
    run = LocalRun(topology(tmp_path), tmp_path / "ck")
    answers: list[str] = []

    def ask(progress: Progress) -> None:
        for request in (lambda: run.run.scale("nobody", 3), lambda: run.run.drain("x")):
            try:
                request()
            except AdjustmentError as e:
                answers.append(e.message)

    run.run.steps.on_progress.append(ask)
    assert followed(run) is None
    assert "nobody" in answers[0]
    assert "x" in answers[1]
    assert shown(tmp_path) == ROWS


@pytest.mark.parametrize("way_out", [SystemExit, KeyboardInterrupt])
def test_an_observer_that_exits_ends_the_run(tmp_path: Path, way_out: type[BaseException]) -> None:
    run = LocalRun(topology(tmp_path), tmp_path / "ck")

    def leave(progress: Progress) -> None:
        raise way_out

    run.run.steps.on_progress.append(leave)
    error = followed(run)
    assert isinstance(error, ClusterError)
    assert f"interrupted (a function given to on_progress): {way_out.__name__}" in error.message
    finish(tmp_path)


# -- sinks and other strangers in the middle of a step ---------------------------------------------


@pytest.mark.parametrize(
    ("problem", "kind", "told"),
    [
        (BrokenPipeError(32, "Broken pipe"), StorageError, "the sink 'a' could not show slice 3: "),
        (ValueError("what?"), StorageError, "could not show slice 3: ValueError: what?"),
        (KeyboardInterrupt(), ClusterError, "was interrupted (ExposeSlice): KeyboardInterrupt"),
        (SystemExit(1), ClusterError, "was interrupted (ExposeSlice): SystemExit: 1"),
    ],
)
@pytest.mark.parametrize("batches", [BATCHES, BATCHES[:3]], ids=["more", "last"])
def test_a_sink_that_raises_ends_the_run_and_no_row_is_lost(
    tmp_path: Path, problem: BaseException, kind: type[AnabranchError], told: str, batches: Any
) -> None:
    """Between the journal and the sinks behind it, also on the last slice with rows."""

    def write(line: str) -> None:
        if line.startswith("slice 3"):
            raise problem

    run = LocalRun(topology(tmp_path, ("a", ab.Console(write=write))), tmp_path / "ck")
    error = followed(run, batches)
    assert isinstance(error, kind)
    assert told in error.message
    assert "start the job again with the same checkpoint directory" in error.message
    assert slices(tmp_path) == {"slice=1", "slice=2"}
    assert run.controller.newest is not None
    assert run.controller.newest.number == 3  # nothing is journalled after it
    run = LocalRun(topology(tmp_path, ("a", ab.Console(write=[].append))), tmp_path / "ck")
    assert slices(tmp_path) == {
        "slice=1",
        "slice=2",
        "slice=3",
    }
    assert followed(run) is None
    assert shown(tmp_path) == ROWS


def test_a_function_that_raises_ends_the_run(tmp_path: Path) -> None:
    def fails(frame: pl.DataFrame) -> pl.DataFrame:
        if (frame["v"] == 20).any():
            raise ValueError("twenty is too much")
        return frame

    made = ab.Topology("t", key_groups=4, parallelism=2)
    made.source("s", None).map("mapped", fails).to("out", ab.Memory())
    error = followed(LocalRun(made, tmp_path / "ck"))
    assert isinstance(error, OperatorError)
    assert "twenty is too much" in error.message


def test_an_error_at_the_very_end_lets_go_of_the_directory(tmp_path: Path) -> None:
    """The stop at the end of the data runs on a thread that nobody looks at."""
    run = LocalRun(topology(tmp_path), tmp_path / "ck", checkpoint_interval="300h")

    def breaks(step: str, depth: int) -> None:
        newest = run.controller.newest
        if newest is not None and newest.number == len(BATCHES):
            raise RuntimeError("out of the blue")

    run.cluster.before = breaks
    error = followed(run)
    assert error is not None
    assert "the driver failed (RunSlice): RuntimeError: out of the blue" in error.message
    finish(tmp_path)


def test_what_cannot_be_let_go_of_does_not_keep_the_rest(tmp_path: Path) -> None:
    class Stubborn(ab.Memory):
        def close(self) -> None:
            raise OSError("no")

    assert followed(LocalRun(topology(tmp_path, ("a", Stubborn())), tmp_path / "ck")) is None


def test_a_stop_by_a_sinks_function_comes_after_the_step(tmp_path: Path) -> None:
    """In the middle of a step, with the journal ahead of the sinks behind this one."""
    run: LocalRun
    calls: list[int] = []

    def stops(rows: Any, number: int) -> None:
        calls.append(number)
        if number == 3:
            run.run.scale("nobody", 7)  # refused, when nobody is there to hear it
            run.reading.stop()

    sink = ab.ForEachSlice(stops, arrow=True)
    run = LocalRun(topology(tmp_path, ("a", sink)), tmp_path / "ck")
    assert followed(run) is None
    assert calls == [1, 2, 3]
    assert slices(tmp_path) == {"slice=1", "slice=2", "slice=3"}
    run = LocalRun(topology(tmp_path, ("a", ab.ForEachSlice(stops, arrow=True))), tmp_path / "ck")
    assert followed(run) is None
    assert shown(tmp_path) == ROWS


# -- a batch of many slices ------------------------------------------------------------------------

MANY = [[{"s": [(k % 3, k) for k in range(40)]}]]


def cut_up(root: Path) -> LocalRun:
    return LocalRun(topology(root), root / "ck", max_rows_per_slice=1)


@pytest.mark.parametrize("by", ["observer", "another thread"])
def test_a_stop_does_not_wait_for_the_rest_of_a_batch(tmp_path: Path, by: str) -> None:
    run = cut_up(tmp_path)
    stopping = threading.Thread(target=run.reading.stop)

    def at_three(progress: Progress) -> None:
        if progress.slice == 3 and by == "observer":
            run.reading.stop()

    def asked(step: str, depth: int) -> None:
        newest = run.controller.newest
        if by != "observer" and newest and newest.number == 2 and not stopping.ident:
            stopping.start()
            until(lambda: waiting(run) == 1)

    run.run.steps.on_progress.append(at_three)
    run.cluster.before = asked
    assert followed(run, MANY) is None
    newest = run.controller.newest
    assert newest is not None
    assert newest.number == 4  # the slice in hand, and the one that seals
    assert newest.chunks_left == 36
    again = cut_up(tmp_path)
    assert again.controller.cut is not None
    assert again.controller.cut.slice == 4  # nothing to replay
    assert followed(again, MANY) is None
    assert shown(tmp_path) == Counter(MANY[0][0]["s"])


@pytest.mark.parametrize(
    "request_",
    [ScaleRequested("nobody", 3, 0), DrainRequested(NodeId("nobody"), 0)],
    ids=["scale", "drain"],
)
def test_a_request_has_its_turn_between_two_slices_of_a_batch(
    tmp_path: Path, request_: Any
) -> None:
    run = cut_up(tmp_path)
    answered_at: list[int] = []

    def ask() -> None:
        with pytest.raises(AdjustmentError):
            run.handle(request_)
        newest = run.controller.newest
        answered_at.append(newest.number if newest else 0)

    asking = threading.Thread(target=ask)

    def asked(step: str, depth: int) -> None:
        newest = run.controller.newest
        if newest and newest.number == 2 and not asking.ident:
            asking.start()
            until(lambda: waiting(run) == 1)

    run.cluster.before = asked
    assert followed(run, MANY) is None
    asking.join(SECONDS)
    assert answered_at[0] < 40


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        pass


def waiting(run: LocalRun) -> int:
    return run.run.steps.turns.waiting


# -- turns -----------------------------------------------------------------------------------------


def test_turns_are_taken_in_the_order_they_were_asked_for() -> None:
    turns, order = Turns(), []
    assert turns.take()

    def wait_for_it(name: int) -> None:
        turns.take()
        order.append(name)
        turns.give_back()

    threads = [threading.Thread(target=wait_for_it, args=(n,)) for n in range(5)]
    for n, thread in enumerate(threads):
        thread.start()
        until(lambda n=n: turns.waiting == n + 1)  # type: ignore[misc]
    assert turns.mine
    turns.give_back()
    assert turns.take()  # behind all of them
    assert order == [0, 1, 2, 3, 4]
    turns.give_back()
    assert not turns.mine
