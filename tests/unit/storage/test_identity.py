"""A checkpoint directory's identity: made once, by whoever comes first, and kept."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from anabranch.errors import StorageError
from anabranch.storage import identity
from anabranch.storage.identity import find_identity, identify
from anabranch.storage.local import LocalStore
from anabranch.storage.store import Store


def test_it_is_made_once_and_stays(tmp_path: Path) -> None:
    root = tmp_path / "new" / "directory"
    store = LocalStore(root)
    assert find_identity(store) is None
    made = identify(store)
    assert identify(store) == find_identity(store) == made
    assert 0 <= made.number < 2**63  # what a Delta table can hold
    assert [p.name for p in root.iterdir()] == ["identity"]
    assert identify(LocalStore(tmp_path / "another")).job != made.job


def test_two_drivers_at_once_get_the_same(tmp_path: Path) -> None:
    """All have seen that there is none before one makes it."""
    drivers, found = 4, []
    barrier = threading.Barrier(drivers)
    looked = threading.local()
    real = identity.find_identity

    def look(store: Store) -> identity.Identity | None:
        result = real(store)
        if not getattr(looked, "once", False):
            looked.once = True
            barrier.wait(60)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "find_identity", look)
        threads = [
            threading.Thread(target=lambda: found.append(identify(LocalStore(tmp_path))))
            for _ in range(drivers)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert len(found) == drivers
    assert len(set(found)) == 1


def test_a_directory_from_before_gets_one_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    assert not identify(LocalStore(tmp_path)).inherits
    (tmp_path / "identity").unlink()
    (tmp_path / "journal" / "000001.jsonl").touch()
    assert identify(LocalStore(tmp_path)).inherits
    assert identify(LocalStore(tmp_path)).inherits


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("7", "cannot be read"),
        ('{"format": 1}', "cannot be read"),
        ('{"format": 1, "job": "xyz", "inherits": false}', "cannot be read"),
        ('{"format": 2, "job": "12", "inherits": false}', "has format 2, this version reads 1"),
    ],
)
def test_one_that_is_damaged_is_told_and_not_replaced(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "identity").write_text(text)
    with pytest.raises(StorageError, match=why):
        identify(LocalStore(tmp_path))
    assert (tmp_path / "identity").read_text() == text


def test_an_exclusive_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert LocalStore(tmp_path).create("file", [b"first"]) == 5
    assert LocalStore(tmp_path).create("file", [b"second"]) is None
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
