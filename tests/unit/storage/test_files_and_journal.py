"""Durable files: torn anywhere, damaged anywhere, on a full disk, owned twice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from anabranch.errors import CheckpointLockedError, StorageError
from anabranch.model.ids import PartitionId
from anabranch.model.slices import Cut, SliceRecord
from anabranch.storage import checkpoint_files, files
from anabranch.storage.checkpoint_files import (
    checkpoint_name,
    decode_table,
    encode_table,
    piece_bytes,
    read_checkpoint,
    write_checkpoint,
)
from anabranch.storage.files import write_atomic
from anabranch.storage.identity import identify
from anabranch.storage.journal import DirectoryLock, Head, Journal, _line
from anabranch.storage.local import LocalStore, _Appended
from anabranch.storage.source_log import log_name, read_log, trim, write_share

JOB = "5eed"
TABLE = pa.table({"k": [1, None, 3], "s": ["a", "bb", None]})


def record(number: int) -> SliceRecord:
    times = {"s": number}
    return SliceRecord(number, "live", number, True, 2, 0, None, 5, 1, 1, times, {"s": 3}, {})


def head(*slices: SliceRecord) -> Head:
    cut = Cut(3, {"c/0": ["x"]}, {"c": [0, 0]})
    return Head(
        generation=4,
        fingerprint={"topology": "t"},
        cut=cut,
        slices=slices,
        epochs={PartitionId("c", 0): 7},
        groups={"c": (0, 0)},
        placement_version=2,
        layouts={1: {"c": (0, 1)}},
    )


def journal(root: Path, *numbers: int) -> Path:
    book = Journal(LocalStore(root))
    book.begin(head())
    for number in numbers:
        book.append(record(number))
    book.close()
    return max((root / "journal").glob("*.jsonl"))


def segment(root: Path, data: bytes) -> None:
    (root / "journal").mkdir(parents=True)
    (root / "journal" / "000001.jsonl").write_bytes(data)


def test_a_journal_comes_back_as_it_was(tmp_path: Path) -> None:
    assert Journal(LocalStore(tmp_path)).read() is None
    journal(tmp_path, 4, 5)
    assert Journal(LocalStore(tmp_path)).read() == (head(), [record(4), record(5)])


def test_a_tail_torn_at_any_byte_loses_only_the_last_slice(tmp_path: Path) -> None:
    whole = journal(tmp_path, 4, 5, 6).read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for end in range(start, len(whole)):
        segment(tmp_path / str(end), whole[:end])
        found = Journal(LocalStore(tmp_path / str(end))).read()
        assert found is not None
        kept = [r.number for r in found[1]]
        assert kept == ([4, 5, 6] if end == len(whole) - 1 else [4, 5])


def test_damage_before_the_tail_is_refused(tmp_path: Path) -> None:
    path = journal(tmp_path, 4, 5, 6)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, len(whole) - 1)
    for position in range(0, last, 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x55
        for tail in (b"", b"deadbeef {torn"):
            path.write_bytes(bytes(damaged) + tail)
            with pytest.raises(StorageError, match=r"damaged at line \d|after slice \d"):
                Journal(LocalStore(tmp_path)).read()


def test_a_missing_line_is_refused(tmp_path: Path) -> None:
    path = journal(tmp_path, 4, 5, 6)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[3]]))
    with pytest.raises(StorageError, match="slice 6 after slice 4"):
        Journal(LocalStore(tmp_path)).read()


def test_another_format_is_refused(tmp_path: Path) -> None:
    segment(tmp_path, _line({**head().to_json(), "format": 99}))
    with pytest.raises(StorageError, match="has format 99, this version reads 1"):
        Journal(LocalStore(tmp_path)).read()


def test_an_empty_segment_is_refused(tmp_path: Path) -> None:
    segment(tmp_path, b"")
    with pytest.raises(StorageError, match="is empty"):
        Journal(LocalStore(tmp_path)).read()


def test_the_newest_segment_counts_and_old_ones_go(tmp_path: Path) -> None:
    book = Journal(LocalStore(tmp_path))
    for number in range(4, 10):
        book.begin(head(record(number)))
    book.close()
    assert sorted(p.name for p in (tmp_path / "journal").iterdir()) == ["4-5.jsonl", "4-6.jsonl"]
    found = Journal(LocalStore(tmp_path)).read()
    assert found is not None
    assert [r.number for r in found[0].slices] == [9]


@pytest.mark.parametrize("written", [0, 1, 50])
def test_an_append_on_a_full_disk_leaves_the_journal_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    book = Journal(LocalStore(tmp_path))
    book.begin(head())
    book.append(record(4))
    appended = book._segment
    assert isinstance(appended, _Appended)
    full = appended._file

    class Full:
        def fileno(self) -> int:
            return full.fileno()

        def write(self, data: bytes) -> int:
            return full.write(data[:written])

    appended._file = Full()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        book.append(record(5))
    appended._file = full
    book.append(record(5))
    found = Journal(LocalStore(tmp_path)).read()
    assert found is not None
    assert [r.number for r in found[1]] == [4, 5]


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match="free some space and start again"):
        write_atomic(tmp_path / "a", [b"x"])
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    assert write_atomic(tmp_path / "a", [b"0123456789", b"ab"]) == 12
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"0123456789ab"


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_a_checkpoint_torn_or_damaged_anywhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", piece)
    partition = PartitionId("c", 1)
    name = checkpoint_name(partition, 7, 2)
    states = {"a": [TABLE, TABLE], "b": [TABLE.slice(0, 0)]}
    write_checkpoint(LocalStore(tmp_path), name, JOB, partition, 7, 2, False, states)
    found = read_checkpoint(LocalStore(tmp_path), name)
    assert [t.equals(TABLE) for t in found["a"]] == [True, True]
    assert [t.equals(TABLE.slice(0, 0)) for t in found["b"]] == [True]
    sizes = piece_bytes(LocalStore(tmp_path), name)
    assert list(sizes) == ["a", "b"]
    assert sum(sizes.values()) < (tmp_path / name).stat().st_size
    some = read_checkpoint(LocalStore(tmp_path), name, lambda t: t.filter(t["k"].is_valid()))
    assert [t["k"].to_pylist() for t in some["a"]] == [[1, 3], [1, 3]]
    _assert_all_damage_seen(tmp_path / name, lambda _: read_checkpoint(LocalStore(tmp_path), name))


@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_a_full_checkpoint_leaves_out_what_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", piece)
    partition = PartitionId("c", 1)
    table = pa.table({"_deleted": [False, True, True, False], "k": [1, 2, 3, 4]})
    for full, kept in ((True, [1, 4]), (False, [1, 2, 3, 4])):
        name = checkpoint_name(partition, 7, int(full))
        write_checkpoint(
            LocalStore(tmp_path), name, JOB, partition, 7, int(full), full, {"a": [table]}
        )
        (found,) = read_checkpoint(LocalStore(tmp_path), name)["a"]
        assert found["k"].to_pylist() == kept


@pytest.mark.parametrize(
    ("job", "chain", "index", "slice_no", "epoch", "why"),
    [
        (JOB, "d", 1, 7, 2, "it is slice 7 of d/1, epoch 2"),
        (JOB, "c", 2, 7, 2, "it is slice 7 of c/2, epoch 2"),
        (JOB, "c", 1, 8, 2, "it is slice 8 of c/1, epoch 2"),
        (JOB, "c", 1, 7, 3, "it is slice 7 of c/1, epoch 3"),
        ("f0e", "c", 1, 7, 2, "it is another job's, f0e, and this one is 5eed"),
    ],
)
def test_a_checkpoint_of_another_job_partition_or_slice_is_refused(
    tmp_path: Path, job: str, chain: str, index: int, slice_no: int, epoch: int, why: str
) -> None:
    (tmp_path / "identity").write_text(f'{{"format": 1, "job": "{JOB}", "inherits": false}}')
    name = checkpoint_name(PartitionId("c", 1), 7, 2)
    partition = PartitionId(chain, index)
    write_checkpoint(
        LocalStore(tmp_path), name, job, partition, slice_no, epoch, False, {"a": [TABLE]}
    )
    for read in (read_checkpoint, piece_bytes):
        with pytest.raises(StorageError, match=f"is not the one asked for: {why}"):
            read(LocalStore(tmp_path), name)


def test_a_checkpoint_from_before_there_were_identities_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = checkpoint_files.encode_header

    def without_job(magic: bytes, header: dict[str, Any]) -> list[Any]:
        return encode(magic, {k: v for k, v in header.items() if k != "job"})

    monkeypatch.setattr(checkpoint_files, "encode_header", without_job)
    name = checkpoint_name(PartitionId("c", 1), 7, 2)
    write_checkpoint(
        LocalStore(tmp_path), name, JOB, PartitionId("c", 1), 7, 2, False, {"a": [TABLE]}
    )
    identify(LocalStore(tmp_path))
    assert read_checkpoint(LocalStore(tmp_path), name)["a"][0].equals(TABLE)


def test_an_error_of_who_reads_a_checkpoint_is_not_the_files(tmp_path: Path) -> None:
    name = checkpoint_name(PartitionId("c", 1), 7, 2)
    write_checkpoint(
        LocalStore(tmp_path), name, JOB, PartitionId("c", 1), 7, 2, False, {"a": [TABLE]}
    )

    def wanted(_: pa.Table) -> pa.Table:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        read_checkpoint(LocalStore(tmp_path), name, wanted)


@pytest.mark.parametrize(("unhurried", "times"), [(False, 0), (True, 2)])
def test_only_who_has_time_syncs_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unhurried: bool, times: int
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(files, "SYNC_BYTES", 4)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    assert write_atomic(tmp_path / "a", [b"012345", b"6789"], sync=True, unhurried=unhurried) == 10
    assert len(synced) == times


def test_a_source_log_torn_or_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    store, name = LocalStore(tmp_path), log_name(3, 1, 0, 0)
    assert read_log(store, name, decode_table) is None
    rows = encode_table(TABLE)
    write_share(store, 3, 1, 0, 0, [({"edge:0": rows, "sink:x": rows}, {"chunks": 2})])
    found = read_log(store, name, decode_table)
    assert found is not None
    assert found[0]["sink:x"].equals(TABLE)
    assert found[1] == {"chunks": 2}
    _assert_all_damage_seen(tmp_path / name, lambda _: read_log(store, name, decode_table))


def _assert_all_damage_seen(path: Path, read: Any) -> None:
    whole = path.read_bytes()
    for end in [*range(40), *range(40, len(whole), 7)]:
        path.write_bytes(whole[:end])
        with pytest.raises(StorageError, match="is damaged"):
            read(path)
    for position in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match="is damaged"):
            read(path)
    path.write_bytes(whole)


def test_the_source_log_is_trimmed_below(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for number in (1, 2, 3):
        write_share(store, number, 1, 0, 0, [({"edge:0": encode_table(TABLE)}, {})])
    trim(store, 3)
    kept = [store.has(log_name(n, 1, 0, 0)) for n in (1, 2, 3)]
    assert kept == [False, False, True]
    trim(LocalStore(tmp_path / "none"), 3)


def test_one_driver_per_directory(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    with pytest.raises(CheckpointLockedError, match=f"in use by process {os.getpid()}"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_killed_owner_leaves_the_directory_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from anabranch.storage.journal import DirectoryLock\n"
        f"lock = DirectoryLock(Path({str(tmp_path)!r})); print('locked', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(CheckpointLockedError, match=f"process {owner.pid}"):
            DirectoryLock(tmp_path)
        owner.kill()
    DirectoryLock(tmp_path).release()
