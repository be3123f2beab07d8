"""Delta tables: one commit per slice, read back by other code than the sink's."""

from __future__ import annotations

import datetime as dt
import pickle
import random
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.errors import ConfigError, StorageError, TopologyError
from anabranch.sinks import Home
from sink_starts import start

ROWS = pa.table({"k": [1, 2], "v": pa.array(["a", None], pa.large_string())})


def delta(root: Path, schema: pa.Schema = ROWS.schema, job: str = "job") -> ab.Delta:
    """A sink of a job whose checkpoint directory is `root`/ck; the table is `root`/table."""
    sink = ab.Delta(str(root / "table"))
    sink.bind(Home(job, "out", root / "ck"))
    sink.check(schema)
    return sink


def stage(sink: ab.Delta, slice_no: int, table: pa.Table = ROWS, writer: str = "w") -> str:
    path = pickle.loads(pickle.dumps(sink)).stage("out", table, slice_no, 1, writer).path
    assert path is not None
    return str(path)


def rows(root: Path) -> list[dict[str, object]]:
    """What a reader sees, by the files the table's log names."""
    return list(DeltaTable(root / "table").to_pyarrow_table().to_pylist())


def test_slices_appear_in_one_commit_each_and_once(tmp_path: Path) -> None:
    sink = delta(tmp_path)
    start(sink, 0)
    files = [stage(sink, 1, writer=w) for w in "ab"]
    assert rows(tmp_path) == []
    for _ in range(3):
        sink.expose(1, files, [])
    sink.expose(2, [], [])
    sink.expose(3, [stage(sink, 3)], [])
    start(delta(tmp_path), 3)
    assert sorted(map(str, rows(tmp_path))) == sorted(map(str, ROWS.to_pylist() * 3))
    writes = [c for c in DeltaTable(tmp_path / "table").history() if "operationMetrics" in c]
    assert len(writes) == 2
    assert list((tmp_path / "ck" / "staged" / "out").iterdir()) == []


def test_a_slice_is_recognised_behind_the_tables_own_checkpoints(tmp_path: Path) -> None:
    configuration = {"delta.checkpointInterval": "3"}
    DeltaTable.create(tmp_path / "table", ROWS.schema, configuration=configuration)
    sink = delta(tmp_path)
    start(sink, 0)
    files = {n: [stage(sink, n)] for n in range(1, 8)}
    for number, named in files.items():
        sink.expose(number, named, [])
    assert list((tmp_path / "table" / "_delta_log").glob("*.checkpoint.parquet"))
    start(delta(tmp_path), 7, files[7], run=2)
    assert len(rows(tmp_path)) == 14


def test_compacted_and_vacuumed_tables_go_on(tmp_path: Path) -> None:
    sink = delta(tmp_path)
    start(sink, 0)
    files = {n: [stage(sink, n)] for n in range(1, 5)}
    for number in (1, 2, 3):
        sink.expose(number, files[number], [])
    table = DeltaTable(tmp_path / "table")
    table.optimize.compact()
    table.vacuum(0, enforce_retention_duration=False, dry_run=False)
    again = delta(tmp_path)
    start(again, 3, files[3], run=2)
    assert len(rows(tmp_path)) == 6
    again.expose(4, [stage(again, 4)], [])
    assert len(rows(tmp_path)) == 8


def test_rows_of_others_do_not_count_as_slices(tmp_path: Path) -> None:
    first, second = delta(tmp_path), delta(tmp_path, job="another")
    start(first, 0)
    first.expose(5, [stage(first, 5)], [])
    write_deltalake(tmp_path / "table", ROWS, mode="append")
    start(second, 0)
    second.expose(1, [stage(second, 1)], [])
    assert len(rows(tmp_path)) == 6


def test_what_another_version_recorded_is_refused_and_what_had_no_format_is_read(
    tmp_path: Path,
) -> None:
    start(delta(tmp_path), 0)
    table = DeltaTable(tmp_path / "table")
    assert table.transaction_version("anabranch/job/out/format") == 1
    of_another = CommitProperties(app_transactions=[Transaction("anabranch/job/out/format", 9)])
    write_deltalake(tmp_path / "table", ROWS, mode="append", commit_properties=of_another)
    with pytest.raises(StorageError, match="has format 9, this version reads 1; run the job with"):
        start(delta(tmp_path), 0, run=2)
    before = tmp_path / "before"
    shutil.copytree(tmp_path / "table", before / "table")
    for commit in (before / "table/_delta_log").glob("*.json"):
        lines = [line for line in commit.read_text().splitlines() if "out/format" not in line]
        commit.write_text("\n".join(lines))
    assert DeltaTable(before / "table").transaction_version("anabranch/job/out/format") is None
    start(delta(before), 0, run=2)


def test_a_checkpoint_that_is_behind_the_table_is_refused(tmp_path: Path) -> None:
    sink = delta(tmp_path)
    start(sink, 0)
    sink.expose(5, [stage(sink, 5)], [])
    for newest in (0, 4):
        with pytest.raises(ConfigError, match=r"has slice 5 of this job, whose .* ends with slice"):
            start(delta(tmp_path), newest)
    file = stage(sink, 4)
    with pytest.raises(ConfigError, match="has slice 5 of this job"):
        sink.expose(4, [file], [])
    assert (tmp_path / "ck" / file).exists()


@pytest.mark.parametrize(
    "columns",
    [
        [("k", pa.int64())],
        [("k", pa.int64()), ("v", pa.string()), ("more", pa.int64())],
        [("k", pa.string()), ("v", pa.string())],
    ],
)
def test_a_table_with_other_columns_is_refused(
    tmp_path: Path, columns: list[tuple[str, pa.DataType]]
) -> None:
    DeltaTable.create(tmp_path / "table", pa.schema(columns))
    with pytest.raises(ConfigError, match=r"has the columns k: .*, but the stream .* k: long, v"):
        start(delta(tmp_path), 0)


def test_a_table_that_changes_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    sink = delta(tmp_path)
    start(sink, 0)
    DeltaTable(tmp_path / "table").alter.add_constraint({"small": "k < 2"})
    file = stage(sink, 1)
    with pytest.raises(StorageError, match=r"could not add slice 1 to .*; nothing is lost"):
        sink.expose(1, [file], [])
    assert rows(tmp_path) == []
    DeltaTable(tmp_path / "table").alter.drop_constraint("small")
    start(delta(tmp_path), 1, [file])
    assert len(rows(tmp_path)) == 2


def test_partitioned_tables_with_columns_in_another_order(tmp_path: Path) -> None:
    reordered = pa.schema([("v", pa.string()), ("k", pa.int64())])
    DeltaTable.create(tmp_path / "table", reordered, partition_by=["k"])
    sink = delta(tmp_path)
    start(sink, 0)
    sink.expose(1, [stage(sink, 1)], [])
    assert sorted(map(str, rows(tmp_path))) == ["{'v': 'a', 'k': 1}", "{'v': None, 'k': 2}"]


def test_types_that_delta_lacks_are_refused(tmp_path: Path) -> None:
    for kind in (pa.duration("us"), pa.time64("ns")):
        with pytest.raises(TopologyError, match="Delta Lake has no type for column 'c'"):
            delta(tmp_path, pa.schema([("c", kind)]))


def test_types_without_a_twin_take_the_next_wider(tmp_path: Path) -> None:
    when = dt.datetime(2026, 7, 1, 12, 30, 0, 5, tzinfo=dt.UTC)
    table = pa.table(
        {
            "a": pa.array([2**8 - 1], pa.uint8()),
            "b": pa.array([2**16 - 1], pa.uint16()),
            "c": pa.array([2**32 - 1], pa.uint32()),
            "d": pa.array([2**64 - 1], pa.uint64()),
            "t": pa.array([when], pa.timestamp("us", "Europe/Berlin")),
            "l": pa.array([[2**32 - 1, None]], pa.large_list(pa.uint32())),
            "s": pa.array([{"x": 2**8 - 1}], pa.struct([("x", pa.uint8())])),
        }
    )
    sink = delta(tmp_path, table.schema)
    start(sink, 0)
    sink.expose(1, [stage(sink, 1, table)], [])
    (row,) = rows(tmp_path)
    assert row["d"] == Decimal(2**64 - 1)
    expected = table.to_pylist()[0]
    assert {**row, "d": 2**64 - 1} == expected


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("a file")
    with pytest.raises(StorageError, match=r"could not open the Delta table .*table: [^\n]*$"):
        start(delta(tmp_path), 0)


def test_without_the_package_the_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"pip install 'anabranch\[delta\]'"):
        delta(tmp_path)


values = st.lists(
    st.tuples(st.none() | st.integers(-5, 5), st.none() | st.text(max_size=3)), max_size=4
)


@settings(max_examples=20)  # each writes tables
@given(st.lists(st.lists(values, max_size=3), max_size=5), st.randoms(use_true_random=False))
def test_any_slices_with_repeats_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, slices: list[list[list[Any]]], chance: random.Random
) -> None:
    """The model is a list: whatever is repeated, the table holds the slices one after another."""
    root = tmp_path_factory.mktemp("delta")
    sink, wanted, note = delta(root), [], root / "ck/shown/out/1"
    start(sink, 0)
    for number, writers in enumerate(slices, 1):
        tables = [
            pa.table({"k": [r[0] for r in w], "v": [r[1] for r in w]}, ROWS.schema) for w in writers
        ]
        files = [stage(sink, number, t, f"w{i}") for i, t in enumerate(tables)]
        noted = note.read_text()
        for _ in range(chance.randint(1, 2)):
            sink.expose(number, files, [])
        if chance.random() < 0.3:
            if chance.random() < 0.5:
                note.write_text(noted)  # killed between the table and the note
            sink = delta(root)
            start(sink, number, files)
        wanted += [r for t in tables for r in t.to_pylist()]
    assert sorted(map(str, rows(root))) == sorted(map(str, wanted))
