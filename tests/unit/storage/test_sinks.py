"""Sinks: staged rows are invisible, exposed once, by whatever path a crash takes."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import anabranch as ab
from anabranch.errors import (
    ConfigError,
    InvariantError,
    OperatorError,
    StorageError,
    TopologyError,
)
from anabranch.model.slices import SliceRecord
from anabranch.storage.sinks import Home, Sink, refuse_lost_slice

ROWS = pa.table({"k": [1, 2, 3]})


def visible(path: Path) -> list[int]:
    files = sorted(path.glob("slice=*/*.parquet"))
    return [v for f in files for v in pq.ParquetFile(f).read().column("k").to_pylist()]


def stage(sink: Sink, slice_no: int, run: int = 1, writer: str = "w") -> str:
    """Stage the rows on a node's copy; the name that the journal gets."""
    staged = pickle.loads(pickle.dumps(sink)).stage("o", ROWS, slice_no, run, writer)
    assert staged.rows == 3
    assert staged.path is not None
    return str(staged.path)


def record(number: int, **staged: list[str]) -> SliceRecord:
    return SliceRecord(
        number=number,
        feed="live",
        batch=0,
        batch_end=True,
        source_tasks=1,
        chunks_left=0,
        watermark_us=None,
        processing_ms=0,
        mapping=1,
        generation=1,
        max_time_us={},
        rows={},
        staged=staged,
    )


# -- Parquet -----------------------------------------------------------------------------------


def test_rows_are_seen_only_when_exposed_and_then_once(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    files = [stage(sink, 4, writer=f"w{i}") for i in range(2)]
    assert visible(tmp_path) == []
    for _ in range(3):
        sink.expose(4, files, [])
        assert visible(tmp_path) == [1, 2, 3] * 2
    sink.begin(4)
    assert visible(tmp_path) == [1, 2, 3] * 2


def test_a_repeated_stage_is_shown_once(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    stage(sink, 1)
    sink.expose(1, [stage(sink, 1)], [])
    assert [p.name for p in tmp_path.glob("slice=1/*")] == ["w.parquet"]
    assert visible(tmp_path) == [1, 2, 3]


def test_an_attempt_that_does_not_count_changes_nothing_however_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task left over writes other rows under the same name, at every step of the exposure."""
    sink = ab.Parquet(str(tmp_path))
    named, late = stage(sink, 1), pa.table({"k": [7]})
    for module, name in ((os, "link"), (Path, "rename"), (Path, "mkdir")):
        real = getattr(module, name)

        def first(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            monkeypatch.undo()
            sink.stage("o", late, 1, 1, "w")
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, first)
        sink.expose(1, [named], [])
        assert visible(tmp_path) == [1, 2, 3]
        assert [p.name for p in tmp_path.glob("slice=1/*")] == ["w.parquet"]
        shutil.rmtree(tmp_path)
        named = stage(sink, 1)


def test_what_the_journal_does_not_name_is_not_exposed(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    named = stage(sink, 1, run=2)
    stage(sink, 1, run=2, writer="attempt")  # of a task that did not count
    stage(sink, 1, run=1)  # of a driver that was killed
    sink.expose(1, [named], [])
    sink.begin(1)
    assert visible(tmp_path) == [1, 2, 3]
    assert not (tmp_path / "_staging").exists()


def test_a_slice_without_rows_exposes_nothing(tmp_path: Path) -> None:
    ab.Parquet(str(tmp_path)).expose(1, [], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", ["file", "directory", "everything"])
def test_lost_staged_files_are_told(tmp_path: Path, lost: str) -> None:
    sink = ab.Parquet(str(tmp_path))
    path = Path(stage(sink, 1))
    if lost == "file":
        path.unlink()
    else:
        shutil.rmtree(path.parent if lost == "directory" else tmp_path)
    with pytest.raises(StorageError, match=r"lost its staged files w\.\w+\.parquet"):
        sink.expose(1, [str(path)], [])


def test_output_of_another_job_is_refused(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    sink.expose(5, [stage(sink, 5)], [])
    sink.begin(5)
    with pytest.raises(ConfigError, match="holds slice 5 of another job"):
        sink.begin(0)
    assert visible(tmp_path) == [1, 2, 3]
    shutil.rmtree(tmp_path / "slice=5")  # compacted away: it was there all the same
    with pytest.raises(ConfigError, match="holds slice 5 of another job"):
        sink.begin(4)
    named = stage(sink, 4)
    with pytest.raises(ConfigError, match="holds slice 5 of another job"):
        sink.expose(4, [named], [])
    assert Path(named).exists()


def test_an_exposed_slice_may_be_deleted_by_its_readers(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    files = {k: stage(sink, k) for k in (1, 2)}
    sink.expose(1, [files[1]], [])
    sink.expose(2, [files[2]], [])
    shutil.rmtree(tmp_path / "slice=2")
    again = ab.Parquet(str(tmp_path))
    again.expose(2, [files[2]], [])
    again.begin(2)
    again.expose(3, [stage(again, 3)], [])
    assert sorted(p.name for p in tmp_path.glob("slice=*")) == ["slice=1", "slice=3"]


def test_a_damaged_marker_is_told(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    (tmp_path / "_newest").write_text("five")
    with pytest.raises(StorageError, match="should hold the number of the newest exposed slice"):
        sink.begin(5)


def test_a_column_named_slice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="rename the stream's column"):
        ab.Parquet(str(tmp_path)).check(pa.schema([("slice", pa.int64())]))


# -- a function --------------------------------------------------------------------------------


class Calls:
    """A function for a sink; remembers what it got, and raises on some slices."""

    def __init__(self, *bad: int) -> None:
        self.seen: list[tuple[list[int], int]] = []
        self.bad = bad

    def __call__(self, rows: pa.Table, slice_no: int) -> None:
        self.seen.append((rows.column("k").to_pylist(), slice_no))
        if slice_no in self.bad:
            raise ValueError("no such topic")

    def __reduce__(self) -> Any:
        raise TypeError("the function must stay on the driver")


def for_each(calls: Calls, root: Path) -> ab.ForEachSlice:
    sink = ab.ForEachSlice(calls, arrow=True)
    sink.bind(Home("job", "out", root))
    sink.check(ROWS.schema)
    return sink


def test_a_function_gets_every_slice_once_and_files_go(tmp_path: Path) -> None:
    calls = Calls()
    sink = for_each(calls, tmp_path)
    sink.begin(0)
    for number in (1, 3):
        files = [stage(sink, number, writer=w) for w in "ab"]
        assert all((tmp_path / f).exists() for f in files)
        for _ in range(2):
            sink.expose(number, files, [])
        assert not any((tmp_path / f).exists() for f in files)
    sink.expose(4, [], [])
    assert calls.seen == [([1, 2, 3] * 2, 1), ([1, 2, 3] * 2, 3)]


def test_a_restarted_driver_hands_on_what_was_journalled(tmp_path: Path) -> None:
    files = [stage(for_each(Calls(), tmp_path), 7)]
    stage(for_each(Calls(), tmp_path), 8)  # journalled by nobody
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    calls = Calls()
    sink = for_each(calls, moved)
    sink.expose(7, files, [])
    sink.begin(7)
    assert calls.seen == [([1, 2, 3], 7)]
    assert not (moved / "staged" / "out").exists()


def test_a_function_that_raises_keeps_its_slice(tmp_path: Path) -> None:
    calls = Calls(2)
    sink = for_each(calls, tmp_path)
    sink.expose(1, [stage(sink, 1)], [])
    files = [stage(sink, 2)]
    with pytest.raises(OperatorError, match=r"'out' raised on slice 2: ValueError: no such topic"):
        sink.expose(2, files, [])
    mended = Calls()
    again = for_each(mended, tmp_path)
    again.expose(2, files, [])
    again.begin(2)
    assert mended.seen == [([1, 2, 3], 2)]


def test_lost_rows_of_a_function_are_told_not_skipped(tmp_path: Path) -> None:
    sink = for_each(Calls(), tmp_path)
    files = [stage(sink, 1, writer=w) for w in "ab"]
    (tmp_path / files[1]).unlink()
    with pytest.raises(StorageError, match=r"slice 1 of the sink 'out' lost .* b\.\w+\.parquet"):
        sink.expose(1, files, [])


def test_a_torn_staged_file_is_told(tmp_path: Path) -> None:
    sink = for_each(Calls(), tmp_path)
    files = [stage(sink, 1)]
    (tmp_path / files[0]).write_bytes(b"PAR1 torn")
    with pytest.raises(StorageError, match=r"staged file .* is damaged"):
        sink.expose(1, files, [])


def test_types_that_spark_lacks_are_refused_for_frames_only() -> None:
    schema = pa.schema([("t", pa.duration("us"))])
    with pytest.raises(TopologyError, match="Spark has no type for column 't'"):
        ab.ForEachSlice(Calls()).check(schema)
    ab.ForEachSlice(Calls(), arrow=True).check(schema)


def test_the_session_and_the_function_stay_on_the_driver(tmp_path: Path) -> None:
    sink = ab.ForEachSlice(Calls())
    sink.bind(Home("job", "out", tmp_path, spark=Calls()))
    copy = pickle.loads(pickle.dumps(sink))
    assert vars(copy) == {"_home": Home("job", "out", tmp_path)}


def test_one_object_for_two_sinks_is_refused(tmp_path: Path) -> None:
    sink = ab.ForEachSlice(Calls())
    sink.bind(Home("job", "a", tmp_path))
    sink.bind(Home("job", "a", tmp_path))
    sink.bind(Home("job", "a", tmp_path / "another run"))
    with pytest.raises(TopologyError, match="'a' and 'b' are one object"):
        sink.bind(Home("job", "b", tmp_path / "another run"))


def test_a_sink_without_a_home_cannot_stage() -> None:
    with pytest.raises(InvariantError, match="before it was bound"):
        ab.ForEachSlice(Calls()).stage("o", ROWS, 1, 1, "w")


# -- a sink that is gone -----------------------------------------------------------------------


def test_a_slice_whose_sink_is_gone_is_refused_until_it_was_exposed(tmp_path: Path) -> None:
    calls = Calls()
    sink = for_each(calls, tmp_path)
    newest = record(4, out=[stage(sink, 4)], other=[])
    for topology in ({}, {"out": ab.Memory()}, {"renamed": sink}):
        with pytest.raises(ConfigError, match=r"slice 4 has rows for the sink 'out' that were not"):
            refuse_lost_slice(newest, topology, tmp_path)
    refuse_lost_slice(newest, {"out": sink}, tmp_path)
    sink.expose(4, newest.staged["out"], [])
    refuse_lost_slice(newest, {}, tmp_path)
    assert calls.seen == [([1, 2, 3], 4)]


def test_a_parquet_sink_that_is_gone_is_refused_until_its_slice_was_exposed(
    tmp_path: Path,
) -> None:
    sink = ab.Parquet(str(tmp_path / "out"))
    newest = record(4, out=[stage(sink, 4)])
    with pytest.raises(ConfigError, match="start once with the sink as it was"):
        refuse_lost_slice(newest, {}, tmp_path / "checkpoint")
    sink.expose(4, newest.staged["out"], [])
    refuse_lost_slice(newest, {}, tmp_path / "checkpoint")


def test_a_slice_goes_to_whatever_durable_sink_took_the_place(tmp_path: Path) -> None:
    """From a function to Parquet and the other way round: the rows are found by their names."""
    calls = Calls()
    files = [stage(for_each(calls, tmp_path), 4)]
    sink = ab.Parquet(str(tmp_path / "out"))
    sink.bind(Home("job", "out", tmp_path))
    sink.expose(4, files, [])
    assert visible(tmp_path / "out") == [1, 2, 3]
    for_each(calls, tmp_path).expose(5, [stage(sink, 5)], [])
    assert calls.seen == [([1, 2, 3], 5)]


# -- memory and console ------------------------------------------------------------------------


def test_memory_keeps_slices_in_order_and_travels_empty() -> None:
    sink = ab.Memory()
    sink.check(ROWS.schema)
    assert sink.rows().num_rows == 0
    for number in (2, 1, 2):
        copy = pickle.loads(pickle.dumps(sink))
        assert copy.slices == {}
        table = pa.table({"k": [number]})
        sink.expose(number, [], [copy.stage("o", table, number, 1, "w")])
    assert sink.rows().column("k").to_pylist() == [1, 2]


def test_console_prints_the_first_rows() -> None:
    lines: list[str] = []
    sink = ab.Console(limit=2, write=lines.append)
    sink.expose(7, [], [sink.stage("o", ROWS, 7, 1, "w")])
    sink.expose(8, [], [])
    assert lines == ["slice 7: 3 rows", "  k=1", "  k=2", "  … and 1 more"]


# -- the documentation -------------------------------------------------------------------------


def test_the_documented_sinks_can_be_declared() -> None:
    text = (Path(__file__).parents[3] / "docs" / "sinks.md").read_text()
    topology = ab.Topology("documented")
    names: dict[str, Any] = {"counts": topology.source("counts", None)}
    for block in text.split("```python\n")[1:]:
        exec(block.partition("```")[0], names)
    assert list(topology._sinks) == ["files", "lake", "table", "kafka"]
    topology.plan()
