"""The demo's judge must see what is wrong."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.demos.words import Recount, SentenceWriter, recount

WINDOW_US = 1_000_000
TIMESTAMP = pa.timestamp("us", "UTC")


def write_input(directory: Path, rows: list[tuple[int, str]]) -> None:
    directory.mkdir(exist_ok=True)
    times = pa.array([t for t, _ in rows], pa.int64()).cast(TIMESTAMP)
    table = pa.table({"ts": times, "sentence": [s for _, s in rows]})
    pq.write_table(table, directory / "000001.parquet")


def write_output(directory: Path, number: int, rows: list[tuple[int, str, int]]) -> None:
    target = directory / f"slice={number}"
    target.mkdir(parents=True, exist_ok=True)
    table = pa.table(
        {
            "word": [w for _, w, _ in rows],
            "window_start": pa.array([t for t, _, _ in rows], pa.int64()).cast(TIMESTAMP),
            "n": [n for _, _, n in rows],
        }
    )
    pq.write_table(table, target / "counter-0.parquet")


# Windows [0, 1) and [1, 2) close at the last row; [2, 3) stays open.
INPUT = [(0, "a b a"), (1_500_000, "b"), (2_000_000, "c")]
RIGHT = [(0, "a", 2), (0, "b", 1), (1_000_000, "b", 1)]


@pytest.mark.parametrize(
    ("output", "lost", "duplicated"),
    [
        (RIGHT, 0, 0),
        (RIGHT[:2], 1, 0),
        ([*RIGHT, RIGHT[0]], 0, 2),
        ([(0, "a", 1), *RIGHT[1:]], 1, 0),
        ([*RIGHT, (2_000_000, "c", 1)], 0, 1),  # a window that is not closed
        ([(1_000_000, "a", 2), *RIGHT[1:]], 2, 2),  # in the wrong window
        ([], 4, 0),
    ],
)
def test_recount(
    tmp_path: Path, output: list[tuple[int, str, int]], lost: int, duplicated: int
) -> None:
    write_input(tmp_path / "in", INPUT)
    write_output(tmp_path / "out", 7, output)
    found = recount(tmp_path / "in", tmp_path / "out", WINDOW_US)
    assert found == Recount(windows=2, words=4, lost=lost, duplicated=duplicated)


def test_rows_staged_but_not_exposed_are_not_output(tmp_path: Path) -> None:
    write_input(tmp_path / "in", INPUT)
    write_output(tmp_path / "out" / ".anabranch", 7, RIGHT)
    assert recount(tmp_path / "in", tmp_path / "out", WINDOW_US).lost == 4


def test_the_last_file_closes_every_window_before_it(tmp_path: Path) -> None:
    writer = SentenceWriter(tmp_path, duration_s=0.6, window_us=WINDOW_US)
    writer.start()
    assert writer.done.wait(30)
    files = [pq.read_table(f) for f in sorted(tmp_path.glob("*.parquet"))]
    assert not list(tmp_path.glob(".*"))
    assert sum(f.num_rows for f in files) == writer.rows
    times = pa.concat_tables(files).column("ts").cast(pa.int64()).to_pylist()
    assert times == sorted(times)
    assert times[-1] % WINDOW_US == 0
    assert times[-1] >= times[-2] + 1
    assert files[-1].num_rows == 1


def test_finish_cuts_the_writer_short(tmp_path: Path) -> None:
    writer = SentenceWriter(tmp_path, duration_s=3_600, window_us=WINDOW_US)
    writer.start()
    writer.finish()
    assert writer.done.is_set()
    assert writer.error is None


def test_a_writer_without_a_directory_reports_it(tmp_path: Path) -> None:
    writer = SentenceWriter(tmp_path / "gone", duration_s=0.1, window_us=WINDOW_US)
    writer.start()
    assert writer.done.wait(30)
    assert isinstance(writer.error, OSError)
