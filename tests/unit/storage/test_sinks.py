"""Sinks: staged rows are invisible, exposed once, by whatever path a crash takes."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
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
from anabranch.sinks import Home, Sink, refuse_lost_slice
from anabranch.storage.local import LocalStore
from sink_starts import start

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
        placement=1,
        generation=1,
        max_time_us={},
        rows={},
        staged=staged,
    )


# -- Parquet -----------------------------------------------------------------------------------


def parquet(path: Path, newest: int = 0, files: Sequence[str] = (), run: int = 1) -> ab.Parquet:
    """A started sink in `path`, whose job has the checkpoint directory `path`.ck."""
    sink = ab.Parquet(str(path))
    sink.bind(Home("job", "out", path.with_name(f"{path.name}.ck")))
    start(sink, newest, files, run)
    return sink


def test_rows_are_seen_only_when_exposed_and_then_once(tmp_path: Path) -> None:
    sink = parquet(tmp_path / "out")
    files = [stage(sink, 4, writer=f"w{i}") for i in range(2)]
    assert visible(tmp_path / "out") == []
    for _ in range(3):
        sink.expose(4, files, [])
        assert visible(tmp_path / "out") == [1, 2, 3] * 2
    parquet(tmp_path / "out", 4, files, run=2)
    assert visible(tmp_path / "out") == [1, 2, 3] * 2


def test_a_repeated_stage_is_shown_once(tmp_path: Path) -> None:
    sink = parquet(tmp_path)
    stage(sink, 1)
    counts = stage(sink, 1)
    sink.expose(1, [counts], [])
    names = [p.name for p in tmp_path.glob("slice=1/*")]
    assert names == [Path(counts).with_suffix(".parquet").name]
    assert visible(tmp_path) == [1, 2, 3]


def test_an_attempt_that_does_not_count_changes_nothing_however_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task left over writes other rows under the same name, at every step of the exposure."""
    late = pa.table({"k": [7]})
    for number, (module, name) in enumerate(((os, "link"), (Path, "rename"), (Path, "mkdir"))):
        path = tmp_path / str(number)
        sink = parquet(path)
        named = stage(sink, 1)
        real = getattr(module, name)

        def first(*args: Any, real: Any = real, sink: Sink = sink, **kwargs: Any) -> Any:
            monkeypatch.undo()
            sink.stage("o", late, 1, 1, "w")
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, first)
        sink.expose(1, [named], [])
        assert visible(path) == [1, 2, 3]
        assert len(list(path.glob("slice=1/*"))) == 1


def test_what_the_journal_does_not_name_is_not_exposed(tmp_path: Path) -> None:
    sink = parquet(tmp_path)
    named = stage(sink, 1, run=2)
    stage(sink, 1, run=2, writer="attempt")  # of a task that did not count
    stage(sink, 1, run=1)  # of a driver that was killed
    late = stage(sink, 2, run=4)  # of a driver that has replaced this one
    parquet(tmp_path, 1, [named], run=3)
    assert visible(tmp_path) == [1, 2, 3]
    assert [str(p) for p in tmp_path.rglob("*.staged")] == [late]


def test_a_slice_without_rows_exposes_nothing(tmp_path: Path) -> None:
    parquet(tmp_path).expose(1, [], [])
    assert [p.name for p in tmp_path.iterdir()] == [".anabranch"]


@pytest.mark.parametrize("lost", ["file", "directory", "everything"])
def test_lost_staged_files_are_told(tmp_path: Path, lost: str) -> None:
    sink = parquet(tmp_path / "out")
    path = Path(stage(sink, 1))
    if lost == "file":
        path.unlink()
    else:
        shutil.rmtree(path.parent if lost == "directory" else tmp_path / "out")
    with pytest.raises(StorageError, match=r"lost its staged files w\.1-\w+\.staged"):
        sink.expose(1, [str(path)], [])


def test_a_checkpoint_that_is_behind_the_directory_is_refused(tmp_path: Path) -> None:
    sink = parquet(tmp_path)
    file = stage(sink, 5)
    sink.expose(5, [file], [])
    parquet(tmp_path, 5, [file], run=2)
    for newest in (0, 4):
        with pytest.raises(ConfigError, match=r"has slice 5 of this job, whose .* ends with slice"):
            parquet(tmp_path, newest, run=3)
    assert visible(tmp_path) == [1, 2, 3]


def test_an_exposed_slice_may_be_deleted_or_compacted_by_its_readers(tmp_path: Path) -> None:
    sink = parquet(tmp_path)
    for change in ("delete", "compact"):
        files = {k: stage(sink, k) for k in (1, 2)}
        sink.expose(1, [files[1]], [])
        sink.expose(2, [files[2]], [])
        if change == "delete":
            shutil.rmtree(tmp_path / "slice=2")
        else:
            (file,) = (tmp_path / "slice=2").iterdir()
            file.rename(file.with_name("compacted.parquet"))
        again = parquet(tmp_path, 2, [files[2]], run=2)
        again.expose(3, [stage(again, 3, run=2)], [])
        left = sorted(p.name for p in tmp_path.glob("slice=*"))
        assert left == ["slice=1", *(["slice=2"] if change == "compact" else []), "slice=3"]
        if change == "compact":
            assert [p.name for p in (tmp_path / "slice=2").iterdir()] == ["compacted.parquet"]
        for path in (tmp_path, tmp_path.with_name(f"{tmp_path.name}.ck")):
            shutil.rmtree(path)
        sink = parquet(tmp_path)


@pytest.mark.parametrize("text", ["", "7", "{", '{"format": 1}'])
def test_damaged_notes_and_owners_are_told(tmp_path: Path, text: str) -> None:
    parquet(tmp_path / "out")
    note, owner = tmp_path / "out.ck/shown/out/1", tmp_path / "out/.anabranch/owner"
    for path, why in ((note, "which slice the sink 'out' has shown"), (owner, "whose slices")):
        kept = path.read_text()
        path.write_text(text)
        with pytest.raises(StorageError, match=why):
            parquet(tmp_path / "out", run=2)
        path.write_text('{"format": 9}')
        with pytest.raises(StorageError, match="has format 9, this version reads 1; run the job"):
            parquet(tmp_path / "out", run=2)
        path.write_text(kept)


def test_a_column_named_slice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="rename the stream's column"):
        ab.Parquet(str(tmp_path)).check(pa.schema([("slice", pa.int64())]))


def test_directories_that_only_look_like_slices_are_no_slices(tmp_path: Path) -> None:
    for name in ("slice=²", "slice=x", "slice=", "slice=٣", "slice=-1"):
        (tmp_path / name).mkdir()
    parquet(tmp_path)


READERS: dict[str, Callable[[Path], int]] = {
    "pathlib": lambda path: sum(pq.read_metadata(p).num_rows for p in path.glob("**/*.parquet")),
    "polars": lambda path: pl.scan_parquet(f"{path}/**/*.parquet").collect().height,
    "pyarrow": lambda path: ds.dataset(path, partitioning="hive").count_rows(),
    "pandas": lambda path: len(pd.read_parquet(path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_sees_what_is_not_shown(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while rows are staged, nor between any two steps of showing them."""
    sink = parquet(tmp_path / "out")
    sink.expose(1, [stage(sink, 1)], [])
    files, seen = [stage(sink, 2, writer=w) for w in "ab"], [READERS[reader](tmp_path / "out")]
    for module, name in ((os, "link"), (Path, "rename"), (Path, "mkdir")):
        real = getattr(module, name)

        def step(*args: Any, real: Any = real, **kwargs: Any) -> None:
            seen.append(READERS[reader](tmp_path / "out"))
            real(*args, **kwargs)

        monkeypatch.setattr(module, name, step)
    sink.expose(2, files, [])
    assert seen[:5] == [3] * 5
    assert seen == sorted(seen)
    assert set(seen) <= {3, 9}  # all of the slice or nothing
    assert READERS[reader](tmp_path / "out") == 9


def test_a_checkpoint_directory_on_another_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: Path, target: Path) -> None:
        if "out.ck" in str(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, target)

    sink = parquet(tmp_path / "out")
    monkeypatch.setattr(os, "link", link)
    sink.expose(1, [stage(sink, 1)], [])
    assert visible(tmp_path / "out") == [1, 2, 3]
    assert not any(tmp_path.rglob("*.ready"))


def test_leftovers_of_a_crash_go(tmp_path: Path) -> None:
    parquet(tmp_path / "out")
    leftovers = [
        tmp_path / "out/._newest.123.tmp",
        tmp_path / "out/.anabranch/.owner.abc.tmp",
        tmp_path / "out.ck/shown/out/.1.123.tmp",
    ]
    for path in leftovers:
        path.touch()
    parquet(tmp_path / "out", run=2)
    assert not any(path.exists() for path in leftovers)
    assert [p.name for p in (tmp_path / "out.ck/shown/out").iterdir()] == ["2"]


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


def for_each(
    calls: Calls, root: Path, newest: int = 0, files: Sequence[str] = (), run: int = 1
) -> ab.ForEachSlice:
    sink = ab.ForEachSlice(calls, arrow=True)
    sink.bind(Home("job", "out", root))
    sink.check(ROWS.schema)
    start(sink, newest, files, run)
    return sink


def test_a_function_gets_every_slice_once_and_files_go(tmp_path: Path) -> None:
    calls = Calls()
    sink = for_each(calls, tmp_path)
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
    for_each(calls, moved, 7, files, run=2)
    assert calls.seen == [([1, 2, 3], 7)]
    assert list((moved / "staged" / "out").iterdir()) == []


def test_a_function_that_raises_keeps_its_slice(tmp_path: Path) -> None:
    calls = Calls(2)
    sink = for_each(calls, tmp_path)
    sink.expose(1, [stage(sink, 1)], [])
    files = [stage(sink, 2)]
    with pytest.raises(OperatorError, match=r"'out' raised on slice 2: ValueError: no such topic"):
        sink.expose(2, files, [])
    mended = Calls()
    for_each(mended, tmp_path, 2, files, run=2)
    assert mended.seen == [([1, 2, 3], 2)]


def test_lost_rows_of_a_function_are_told_not_skipped(tmp_path: Path) -> None:
    sink = for_each(Calls(), tmp_path)
    files = [stage(sink, 1, writer=w) for w in "ab"]
    (tmp_path / files[1]).unlink()
    with pytest.raises(StorageError, match=r"slice 1 of .* sink 'out' lost .* b\.1-\w+\.staged"):
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
            refuse_lost_slice(newest, topology, LocalStore(tmp_path))
    refuse_lost_slice(newest, {"out": sink}, LocalStore(tmp_path))
    sink.expose(4, newest.staged["out"], [])
    refuse_lost_slice(newest, {}, LocalStore(tmp_path))
    assert calls.seen == [([1, 2, 3], 4)]


def test_a_parquet_sink_that_is_gone_is_refused_until_its_slice_was_exposed(
    tmp_path: Path,
) -> None:
    sink = parquet(tmp_path / "out")
    newest = record(4, out=[stage(sink, 4)])
    with pytest.raises(ConfigError, match="start once with the sink as it was"):
        refuse_lost_slice(newest, {}, LocalStore(tmp_path / "out.ck"))
    sink.expose(4, newest.staged["out"], [])
    refuse_lost_slice(newest, {}, LocalStore(tmp_path / "out.ck"))


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
