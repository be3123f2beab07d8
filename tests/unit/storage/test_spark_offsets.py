"""A journal and Spark's offsets that a crash can leave are taken, all others refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.storage.spark_offsets import misfit, newest_number

# The newest batch in the journal, whether it ended, Spark's newest offsets, its newest commit.
FIT = [
    (None, True, None, None),  # a new directory
    (None, True, 0, None),  # offered, not finished
    (0, False, 0, None),  # the first slice of a large batch
    (0, True, 0, None),  # journalled, Spark not told
    (0, True, 0, 0),
    (7, True, 7, 7),  # idle
    (7, True, 8, 7),  # the next one was offered
    (7, True, 7, 6),  # journalled, Spark not told
    (7, False, 7, 6),
    (7, True, 7, 3),  # commits that lag: Spark offers batch 7 again, which is finished unread
    (7, True, 8, None),
]
MISFIT = [
    ((None, True, 0, 0), "the journal has no batch, but Spark has committed batch 0"),
    ((None, True, 1, None), "the journal has no batch, but Spark's offsets go on to batch 1"),
    ((6, True, 7, 7), "the journal ends with batch 6, but Spark has committed batch 7"),
    ((6, True, 8, 7), "but Spark has committed batch 7"),
    ((3, True, 7, 7), "but Spark has committed batch 7"),
    ((7, False, 7, 7), "in the middle of batch 7, but Spark has committed batch 7"),
    ((7, False, 8, 6), "in the middle of batch 7, but Spark's offsets go on to batch 8"),
    ((6, True, 8, 6), "ends with batch 6, but Spark's offsets go on to batch 8"),
    ((8, True, 7, 7), "ends with batch 8, but Spark's offsets end with batch 7"),
    ((8, True, 7, 6), "but Spark's offsets end with batch 7"),
    ((8, False, 7, 7), "but Spark's offsets end with batch 7"),
    ((0, True, None, None), "ends with batch 0, but Spark's offsets are gone"),
    ((7, True, None, 7), "but Spark's offsets are gone"),
]


@pytest.mark.parametrize("state", FIT)
def test_what_a_crash_leaves_fits(state: tuple[int | None, bool, int | None, int | None]) -> None:
    assert misfit(*state) is None


@pytest.mark.parametrize(("state", "words"), MISFIT)
def test_what_no_crash_leaves_is_refused(
    state: tuple[int | None, bool, int | None, int | None], words: str
) -> None:
    found = misfit(*state)
    assert found is not None
    assert words in found


def test_every_crash_of_a_run_fits() -> None:
    """Spark and the journal step by step, large batches in three slices."""
    batch, ended, offset, commit = None, True, None, None
    for number in range(4):
        offset = number
        assert misfit(batch, ended, offset, commit) is None
        for part in range(3):
            batch, ended = number, part == 2
            assert misfit(batch, ended, offset, commit) is None
        commit = number
        assert misfit(batch, ended, offset, commit) is None


def test_the_newest_of_sparks_files_by_number(tmp_path: Path) -> None:
    assert newest_number(tmp_path / "offsets") is None
    for name in ("9", "10", ".11.crc", ".12.f00.tmp", "13.tmp", "metadata"):
        (tmp_path / name).touch()
    assert newest_number(tmp_path) == 10
