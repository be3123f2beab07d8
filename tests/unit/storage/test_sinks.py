"""Sinks: staged rows are invisible, exposed once, by whatever path a crash takes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import anabranch as ab
from anabranch.errors import ConfigError, StorageError, TopologyError

ROWS = pa.table({"k": [1, 2, 3]})


def visible(path: Path) -> list[int]:
    files = sorted(path.glob("slice=*/*.parquet"))
    return [v for f in files for v in pq.ParquetFile(f).read().column("k").to_pylist()]


def test_rows_are_seen_only_when_exposed_and_then_once(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    staged = [sink.stage("o", ROWS, 4, 1, f"w{i}") for i in range(2)]
    files = [s.path for s in staged if s.path]
    assert visible(tmp_path) == []
    for _ in range(3):
        sink.expose(4, files, staged)
        assert visible(tmp_path) == [1, 2, 3] * 2
    sink.begin(4)
    assert visible(tmp_path) == [1, 2, 3] * 2


def test_a_repeated_stage_writes_the_rows_once(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    for _ in range(2):
        staged = sink.stage("o", ROWS, 1, 1, "w")
    assert staged.path is not None
    sink.expose(1, [staged.path], [])
    assert visible(tmp_path) == [1, 2, 3]


def test_what_the_journal_does_not_name_is_not_exposed(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    named = sink.stage("o", ROWS, 1, 2, "w")
    sink.stage("o", ROWS, 1, 2, "attempt")  # of a task that did not count
    sink.stage("o", ROWS, 1, 1, "w")  # of a driver that was killed
    assert named.path is not None
    sink.expose(1, [named.path], [named])
    sink.begin(1)
    assert visible(tmp_path) == [1, 2, 3]
    assert not (tmp_path / "_staging").exists()


def test_a_slice_without_rows_exposes_nothing(tmp_path: Path) -> None:
    ab.Parquet(str(tmp_path)).expose(1, [], [])
    assert list(tmp_path.iterdir()) == []


def test_lost_staged_files_are_told(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    staged = sink.stage("o", ROWS, 1, 1, "w")
    assert staged.path is not None
    Path(staged.path).unlink()
    with pytest.raises(StorageError, match=r"lost its staged files w\.parquet"):
        sink.expose(1, [staged.path], [])


def test_output_of_another_job_is_refused(tmp_path: Path) -> None:
    sink = ab.Parquet(str(tmp_path))
    staged = sink.stage("o", ROWS, 5, 1, "w")
    assert staged.path is not None
    sink.expose(5, [staged.path], [])
    sink.begin(5)
    with pytest.raises(ConfigError, match="holds slice 5 of another job"):
        sink.begin(0)
    assert visible(tmp_path) == [1, 2, 3]


def test_a_column_named_slice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="rename the stream's column"):
        ab.Parquet(str(tmp_path)).check(pa.schema([("slice", pa.int64())]))


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
