"""One generation per driver, and a journal that an older one cannot take from a newer one."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from test_files_and_journal import head, record

from anabranch.errors import CheckpointLockedError
from anabranch.storage.generations import Generation, claimed
from anabranch.storage.journal import Journal, _line
from anabranch.storage.local import LocalStore
from interruptions import interrupted


def test_no_two_drivers_have_the_same_generation(tmp_path: Path) -> None:
    def claim(_: int) -> int:
        try:
            return Generation.claim(LocalStore(tmp_path), 0).number
        except CheckpointLockedError as e:  # somebody was faster, and has a greater one
            number: int = e.fields["generation"]
            return number

    with ThreadPoolExecutor(8) as drivers:
        found = list(drivers.map(claim, range(40)))
    assert len(set(found)) == 40
    assert claimed(LocalStore(tmp_path)) == sorted(found)


def test_the_newest_claim_ends_all_older_drivers(tmp_path: Path) -> None:
    first, second = (
        Generation.claim(LocalStore(tmp_path), 0),
        Generation.claim(LocalStore(tmp_path), 0),
    )
    second.check()
    with pytest.raises(CheckpointLockedError, match=r"process \d+ on .* taken over .*eration 2\)"):
        first.check()
    second.clean_up()
    assert claimed(LocalStore(tmp_path)) == [2]
    with pytest.raises(CheckpointLockedError):
        first.check()
    assert (
        Generation.claim(LocalStore(tmp_path), above=7).number == 8
    )  # what a journal says counts as well


def test_claims_are_numbers_not_text(tmp_path: Path) -> None:
    older = Generation.claim(LocalStore(tmp_path), above=8)
    newer = Generation.claim(LocalStore(tmp_path), 0)
    assert (older.number, newer.number) == (9, 10)
    newer.check()
    with pytest.raises(CheckpointLockedError):
        older.check()


def old_driver(root: Path, acted: list[int]) -> None:
    mine = Generation.claim(LocalStore(root), 0)
    book = Journal(LocalStore(root), mine.check)
    book.begin(replace(head(record(4)), generation=mine.number))
    acted.append(4)
    for number in (5, 6):
        book.append(record(number))
        acted.append(number)
    slices = tuple(record(n) for n in (4, 5, 6))
    book.begin(replace(head(*slices), generation=mine.number))
    book.append(record(7))
    acted.append(7)


def newer_driver(root: Path) -> list[int]:
    """Takes over; the slices that have happened for it."""
    mine = Generation.claim(LocalStore(root), 0)
    book = Journal(LocalStore(root), mine.check)
    found = book.read()
    known = [*found[0].slices, *found[1]] if found else []
    book.begin(replace(head(*known), generation=mine.number))
    return [r.number for r in known]


def overlapping(
    root: Path, monkeypatch: pytest.MonkeyPatch, operation: int
) -> tuple[list[int], list[int]]:
    """The slices that the older driver acted upon, and those that the newer one knows."""
    acted: list[int] = []
    known: list[int] = []
    with (
        interrupted(monkeypatch, operation, lambda: known.extend(newer_driver(root))),
        contextlib.suppress(CheckpointLockedError),
    ):
        old_driver(root, acted)
    return acted, known


def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A newer driver takes over before each storage operation of an older one: whatever the older
    one acted upon, the newer knows, and nobody reads anything else afterwards."""
    with interrupted(monkeypatch, -1, lambda: None) as done:
        old_driver(tmp_path / "alone", [])
    after_claim = done.index("iterdir", done.index("write")) + 1
    for operation in range(after_claim, len(done)):
        acted, known = overlapping(tmp_path / str(operation), monkeypatch, operation)
        assert acted == known[: len(acted)], operation
        found = Journal(LocalStore(tmp_path / str(operation))).read()
        assert found is not None
        assert [r.number for r in (*found[0].slices, *found[1])] == known, operation
    return len(done) - after_claim


def test_a_journal_write_of_an_older_driver_counts_for_both_or_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert walk(tmp_path, monkeypatch) > 20


@pytest.mark.parametrize("plant", ["no look after a write", "numbers without the generation"])
def test_a_journal_without_its_fence_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    if plant == "no look after a write":
        real = Journal.__init__
        monkeypatch.setattr(Journal, "__init__", lambda self, path, _=None: real(self, path))
    else:
        real_segments = Journal._segments
        by_number = lambda self: {(0, n): p for (_, n), p in real_segments(self).items()}  # noqa: E731
        monkeypatch.setattr(Journal, "_segments", by_number)
    with pytest.raises(AssertionError):
        walk(tmp_path, monkeypatch)


def test_segments_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """As text, 1000000 comes before 999999, and 10 before 9."""
    (tmp_path / "journal").mkdir()
    for name, number in (("999999", 4), ("1000000", 5)):
        (tmp_path / "journal" / f"{name}.jsonl").write_bytes(_line(head(record(number)).to_json()))
    assert newest(tmp_path) == 5
    for name, number in (("4-9", 6), ("4-10", 7), ("9-1", 8), ("10-1", 9)):
        (tmp_path / "journal" / f"{name}.jsonl").write_bytes(_line(head(record(number)).to_json()))
        assert newest(tmp_path) == number
    (tmp_path / "journal" / "11-1.copy.jsonl").write_bytes(b"a stranger's")
    assert newest(tmp_path) == 9


def newest(directory: Path) -> int:
    found = Journal(LocalStore(directory)).read()
    assert found is not None
    return found[0].slices[-1].number


def test_what_a_killed_writer_left_goes_at_a_start_and_a_live_writers_stays(tmp_path: Path) -> None:
    names = [".recovery.json.a.tmp", "journal/.1-1.jsonl.b.tmp", "checkpoints/c/0/.17-1.ckpt.c.tmp"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    others = [
        "identity",
        ".identity.d.tmp",
        "journal/1-1.jsonl",
        "checkpoints/c/0/17-1.ckpt",
        ".tmp/.x.tmp",
    ]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    mine = Generation.claim(LocalStore(tmp_path), 0)
    late = (
        (tmp_path / mine.directory / "driver").stat().st_mtime_ns
    )  # what is written since may be needed
    for name in names:
        (tmp_path / f"{name}.tmp").touch()
        os.utime(tmp_path / f"{name}.tmp", ns=(late, late))
    mine.clean_up()
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left - {"generations/1/driver"} == {*others, *(f"{n}.tmp" for n in names)}


def test_a_claim_that_is_overtaken_while_it_is_made_is_refused_for_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtake(root: Path) -> None:
        Generation.claim(LocalStore(root), 0).clean_up()

    with interrupted(monkeypatch, -1, lambda: None) as done:
        Generation.claim(LocalStore(tmp_path / "alone"), 0)
    made = len(done) - done[::-1].index("mkdir")  # the first operation after the claim is there
    assert len(done) - made > 3
    for operation in range(made, len(done)):
        root = tmp_path / str(operation)
        with (
            pytest.raises(CheckpointLockedError),
            interrupted(monkeypatch, operation, partial(overtake, root)),
        ):
            Generation.claim(LocalStore(root), 0)
        assert claimed(LocalStore(root))[-1] == 2
