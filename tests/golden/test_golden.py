"""Directories that earlier versions wrote are read and gone on with; no format changes unseen.

The numbered directories beside this file hold what a version of the formats left, and as JSON what
is in it. `make.py` writes a new one and none anew.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit" / "node"))

from golden_jobs import (
    BATCHES,
    JOBS,
    LATER,
    MEMORY,
    PLAYED,
    Life,
    SinksJob,
    make,
    shown,
    summed,
)
from make import versions, write
from taken_apart import as_text, rows_of, take_apart

from anabranch.cli.recovery_times import describe_recovery
from anabranch.driver.endpoint import ask
from anabranch.errors import AdjustmentError, StorageError
from anabranch.sinks.notes import exposure_of, read_note
from anabranch.storage.checkpoint_files import decode_table, read_checkpoint
from anabranch.storage.identity import find_identity
from anabranch.storage.journal import Journal
from anabranch.storage.local import LocalStore
from anabranch.storage.source_log import read_log
from anabranch.upgrade.state_reader import read_state

CHANGED = """
A durable format has changed: {where} is not what the newest golden files have (- golden, + now).

If that was not meant, undo it. If it was: raise the format's version, keep a reader of the version
before (or refuse it in a clear sentence), say so in docs/formats.md and CHANGELOG.md, and write new
golden files beside the old ones with
    .venv/bin/python tests/golden/make.py
If the files only show that the jobs did something else (other slices, cuts or keys of state), no
version is raised, but new golden files are written in the same way.
See "When a format changes" in CONTRIBUTING.md.

{difference}"""


@pytest.fixture(autouse=True, scope="module")
def quick_fsync() -> Iterator[None]:
    before, os.fsync = os.fsync, lambda fd: None
    yield
    os.fsync = before


@pytest.fixture(params=versions(), ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a version's directories: whatever is done to it."""
    return Path(shutil.copytree(request.param, tmp_path / "golden"))


def content(golden: Path, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((golden / f"{job}.json").read_text())
    return found


def skip_newer(golden: Path, job: str) -> None:
    if not (golden / job).exists():
        pytest.skip(f"there was no job {job!r} yet")


def named(files: dict[str, Any], end: str) -> dict[str, Any]:
    found = {name: what for name, what in files.items() if name.endswith(end)}
    assert found
    return found


def lines_of(golden: Path, job: str) -> list[Any]:
    ((_, lines),) = named(content(golden, job), ".jsonl").items()
    return list(lines)


# -- no format changes unseen ------------------------------------------------------------------


def test_what_is_written_now_is_what_the_newest_golden_files_have(tmp_path: Path) -> None:
    make(tmp_path)
    for job in JOBS:
        now, golden = take_apart(tmp_path / job), content(versions()[-1], job)
        if json.loads(json.dumps(now)) != golden:
            pytest.fail(CHANGED.format(where=job, difference=difference(golden, now)))


def difference(golden: dict[str, Any], now: dict[str, Any]) -> str:
    """The first file that differs, line by line."""
    for name in sorted({*golden, *now}):
        if name not in now or name not in golden:
            return f"{name} is {'new' if name in now else 'gone'}"
        if golden[name] != json.loads(json.dumps(now[name])):
            lines = (as_text(golden[name]).splitlines(), as_text(now[name]).splitlines())
            return "\n".join(difflib.unified_diff(*lines, name, name, lineterm="", n=2))
    return ""


def test_golden_files_are_what_they_were(golden: Path) -> None:
    for job in (j for j in JOBS if (golden / j).exists()):
        assert json.loads(json.dumps(take_apart(golden / job))) == content(golden, job)


def test_golden_files_are_not_written_again() -> None:
    for jobs in (tuple(JOBS), ("sinks",)):
        with pytest.raises(SystemExit, match="never written again"):
            write(versions()[0], jobs)


# -- every file is read ------------------------------------------------------------------------


NOT_COMPARED = ("format", "fingerprint", "processing_ms", "staged", "slices", "costs")


@pytest.mark.parametrize("job", JOBS)
def test_journals_are_read(golden: Path, job: str) -> None:
    skip_newer(golden, job)
    found = Journal(LocalStore(golden / job)).read()
    assert found is not None
    head, slices = found
    lines = lines_of(golden, job)
    for read, written in zip((head, *slices), lines, strict=True):
        again = json.loads(json.dumps(read.to_json()))
        for field, value in written.items():
            if field not in NOT_COMPARED:
                assert again[field] == value, field
    assert [s.number for s in head.slices] == [s["number"] for s in lines[0]["slices"]]
    assert head.fingerprint.keys() == lines[0]["fingerprint"].keys()


@pytest.mark.parametrize("job", JOBS)
def test_checkpoints_are_read(golden: Path, job: str) -> None:
    skip_newer(golden, job)
    for name, written in named(content(golden, job), ".ckpt").items():
        tables = read_checkpoint(LocalStore(golden / job), name)
        found = [rows_of(table) for parts in tables.values() for table in parts]
        assert found == [table["rows"] for table in written["tables"]], name


@pytest.mark.parametrize("job", JOBS)
def test_source_logs_are_read(golden: Path, job: str) -> None:
    skip_newer(golden, job)
    for name, written in named(content(golden, job), ".log").items():
        read = read_log(LocalStore(golden / job), str(name), decode_table)
        assert read is not None
        tables, facts = read
        assert {n: rows_of(t) for n, t in tables.items()} == {
            n: t["rows"] for n, t in written["tables"].items()
        }
        told = written["header"]["facts"]
        assert {**facts, **({"share": "SHARE"} if "share" in facts else {})} == told


def test_what_sinks_recorded_is_read(golden: Path) -> None:
    root = golden / "sinks"
    identity, found = find_identity(LocalStore(root)), Journal(LocalStore(root)).read()
    assert identity is not None and not identity.inherits
    assert found is not None
    slices = {s.number: s for s in (*found[0].slices, *found[1])}
    for sink in ("told", "raw", "sums"):
        note = read_note(LocalStore(root), sink)
        assert note is not None
        assert note.slice == content(golden, "sinks")[f"shown/{sink}/2"]["slice"]
        assert note.tells_of(note.slice, exposure_of(note.slice, slices[note.slice].staged[sink]))


def test_what_a_killed_driver_left_for_others_is_read(golden: Path) -> None:
    with pytest.raises(AdjustmentError, match="the last one ran on nowhere and did not end"):
        ask(golden / "sinks", {"do": "status"})
    assert "0.50 s  count  (1 of 1 partitions back up)" in describe_recovery(golden / "operators")


def test_state_is_read_without_the_code_of_the_job(golden: Path) -> None:
    counts = read_state(golden / "operators", "count").to_pylist()
    assert {r["k"]: r["n.rows"] for r in counts} == {"a": 5, "b": 2, "c": 2, None: 3}


# -- what another version wrote is refused in one sentence, or read ----------------------------

OTHER = r"has format 9, this version reads [\d and]+; .* the version of Anabranch that wrote it"


def journal_of_another_version(root: Path) -> None:
    (path,) = (root / "journal").glob("*.jsonl")
    first, *others = path.read_bytes().split(b"\n")
    body = first.partition(b" ")[2].replace(b'"format":', b'"format":9,"was":', 1)
    path.write_bytes(b"\n".join([b"%08x %s" % (zlib.crc32(body), body), *others]))


@pytest.mark.parametrize(
    "name",
    ["journal", "identity", "shown/raw/2", "shown/told/2", "raw/.anabranch/owner"],
)
def test_a_job_does_not_go_on_from_another_version(golden: Path, name: str) -> None:
    root = golden / "sinks"
    if name == "journal":
        journal_of_another_version(root)
    else:
        with_format(root / name, 9)
    with pytest.raises(StorageError, match=OTHER):
        SinksJob(root)


def with_format(path: Path, number: int | None) -> None:
    data = {k: v for k, v in json.loads(path.read_text()).items() if k != "format"}
    path.write_text(json.dumps(data if number is None else {**data, "format": number}))


def test_a_checkpoint_or_log_of_another_version_is_told_from_a_foreign_file(golden: Path) -> None:
    root = golden / "operators"
    store = LocalStore(root)
    name = next(iter(named(content(golden, "operators"), ".ckpt")))
    log = root / next(iter(named(content(golden, "operators"), ".log")))
    for path in (root / name, log):
        kept = path.read_bytes()
        for begin, why in ((kept[:7] + b"9", OTHER), (b"ANBRXXX1", "does not begin with ANBR")):
            path.write_bytes(begin + kept[8:])
            with pytest.raises(StorageError, match=f"is damaged.*{why}"):
                if path == log:
                    read_log(store, str(log.relative_to(root)), decode_table)
                else:
                    read_checkpoint(store, name)


def test_what_others_are_told_is_read_without_a_format_and_not_in_another(golden: Path) -> None:
    control, prediction = golden / "sinks/control.json", golden / "operators/recovery.json"
    for number, told, predicted in ((None, "ran on nowhere", None), (9, OTHER, OTHER)):
        with_format(control, number)
        with pytest.raises(AdjustmentError, match=told):
            ask(golden / "sinks", {"do": "status"})
        with_format(prediction, number)
        if predicted is None:
            assert "0.50 s  count" in describe_recovery(golden / "operators")
        else:
            with pytest.raises(StorageError, match=predicted):
                describe_recovery(golden / "operators")
    for damaged in ("", "[]", "{}", '{"format": 1, "partitions": [1]}'):
        prediction.write_text(damaged)
        with pytest.raises(StorageError, match=r"recovery.json is damaged .*writes it anew"):
            describe_recovery(golden / "operators")


@pytest.mark.parametrize("number", [None, 9])
def test_an_autoscaler_forgets_what_another_version_noted(
    golden: Path, number: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with_format(golden / "operators/generations/2/autoscaler.json", number)
    life = Life(golden / "operators", PLAYED["operators"])
    life.job.close()
    kept = life.job.run.holding.past.autoscaler
    assert bool(kept) == (number is None)
    assert bool(re.search(OTHER, caplog.text)) == (number is not None)


# -- the jobs go on ----------------------------------------------------------------------------


@pytest.mark.parametrize("job", PLAYED)
@pytest.mark.parametrize("newest", [True, False], ids=["newest cut", "cut before"])
def test_a_job_goes_on_with_every_kind_of_state(golden: Path, job: str, newest: bool) -> None:
    """From its newest cut; or from the one before, where another version wrote the newest."""
    skip_newer(golden, job)
    if not newest:
        cut = lines_of(golden, job)[0]["cut"]["slice"]
        for path in (golden / job).glob(f"checkpoints/*/*/{cut:012d}-*.ckpt"):
            path.write_bytes(path.read_bytes()[:7] + b"9" + path.read_bytes()[8:])
    life = Life(golden / job, PLAYED[job])
    remembered = json.loads(json.dumps(life.job.run.holding.past.autoscaler))
    assert remembered == json.loads(json.dumps(MEMORY))
    found = life.steps(PLAYED[job].then)
    life.job.close()
    for name, expected in PLAYED[job].oracle().items():
        assert expected, name
        assert Counter(found[name]) == expected, name


def test_a_job_with_sinks_goes_on(golden: Path) -> None:
    root = golden / "sinks"
    before = shown(root, "raw")
    life = SinksJob(root)
    life.run.feed(BATCHES[-1], number=len(BATCHES) - 1)  # Spark offers it again
    life.run.feed(LATER)
    life.run.stop()
    raw = shown(root, "raw")
    given = [pair for batch in (*BATCHES, LATER) for task in batch for pair in task["s"]]
    assert Counter(p for rows in raw.values() for p in rows) == Counter(given)
    assert {n: raw[n] for n in before} == before
    assert {n: Counter(rows) for n, rows in shown(root, "sums").items()} == dict(summed(raw))
    assert life.told == {n: rows for n, rows in raw.items() if n not in before}
