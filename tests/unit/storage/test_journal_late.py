"""A journal of chains that waited: what its lines say together, torn anywhere; and the format
before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import StorageError
from anabranch.model.costs import Costs
from anabranch.model.ids import PartitionId
from anabranch.model.slices import Cut, Late, SliceRecord
from anabranch.storage.journal import Head, Journal, _line
from anabranch.storage.local import LocalStore


def record(number: int, *paused: str, **staged: list[str]) -> SliceRecord:
    return SliceRecord(
        number, "none", None, True, 0, 0, None, 0, 1, staged=staged, paused=tuple(paused)
    )


HEAD = Head(
    4,
    {"topology": "t"},
    cut=Cut(4, {"a/0": ["new"]}, {"a": [0]}),
    previous=Cut(3, {"a/0": ["old"]}, {"a": [0]}),
    slices=(record(4, "b", out=["a4"]), record(5, "b", out=["a5"])),
    groups={"a": (0,), "b": (0,)},
    placement_version=2,
    older=(Cut(2, {"a/0": ["x"], "b/0": ["y"]}, {"a": [0], "b": [0]}),),
    behind={"b": 3},
    costs=Costs({PartitionId("a", 0): 0.25}, 12.5),
)


def journal(root: Path, *lines: SliceRecord | Late, head: Head = HEAD) -> Path:
    book = Journal(LocalStore(root))
    book.begin(head)
    for line in lines:
        book.append(line)
    book.close()
    return max((root / "journal").glob("*.jsonl"))


def found(root: Path) -> tuple[Head, list[SliceRecord]]:
    read = Journal(LocalStore(root)).read()
    assert read is not None
    return read


def test_a_head_with_chains_that_wait_comes_back_as_it_was(tmp_path: Path) -> None:
    journal(tmp_path)
    assert found(tmp_path) == (HEAD, [])
    assert HEAD.cut_of("a") == HEAD.cut
    assert HEAD.cut_of("b") == HEAD.older[0]


def test_late_lines_are_told_with_their_slices(tmp_path: Path) -> None:
    lines = (
        record(6, "b", out=["a6"]),
        Late(4, ("b",), {"out": ["b4"]}),
        record(7, "b", "c"),
        Late(6, ("b",), {"out": ["b6"], "new": ["n6"]}),
    )
    journal(tmp_path, *lines)
    head, slices = found(tmp_path)
    assert head.slices == (record(4, "b", out=["a4", "b4"]), record(5, "b", out=["a5"]))
    assert slices == [record(6, "b", out=["a6", "b6"], new=["n6"]), record(7, "b", "c")]
    assert head.behind == {"b": 7, "c": 7}
    # What the next driver writes at first says the same, and its lines go on from there.
    again = replace(head, generation=5, slices=(*head.slices, *slices))
    journal(tmp_path, Late(7, ("b",)), record(8, "c"), head=again)
    head, slices = found(tmp_path)
    assert (head.slices, slices, head.behind) == (again.slices, [record(8, "c")], {"c": 7})


def test_a_tail_torn_at_any_byte_loses_only_the_late_line(tmp_path: Path) -> None:
    whole = journal(tmp_path, record(6, "b"), Late(4, ("b",), {"out": ["b4"]})).read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for end in range(start, len(whole)):
        torn = tmp_path / str(end) / "journal"
        torn.mkdir(parents=True)
        (torn / "4-1.jsonl").write_bytes(whole[:end])
        head, slices = found(tmp_path / str(end))
        made_up = end == len(whole) - 1
        assert head.behind == {"b": 5 if made_up else 3}
        assert head.slices[0].staged == {"out": ["a4", "b4"] if made_up else ["a4"]}
        assert slices == [record(6, "b")]


@pytest.mark.parametrize("slice_no", [3, 7, 8])
def test_a_late_line_of_a_slice_that_is_not_there_is_refused(tmp_path: Path, slice_no: int) -> None:
    journal(tmp_path, record(6, "b"), Late(slice_no, ("b",)), record(7, "b"))
    with pytest.raises(StorageError, match=f"b made up for slice {slice_no}, which it does not"):
        found(tmp_path)


def test_a_journal_of_the_format_before_is_read(tmp_path: Path) -> None:
    """It knew nothing of chains that wait."""
    old = replace(HEAD, older=(), behind={}, costs=Costs(), slices=(record(4), record(5)))

    def as_it_was(data: dict[str, Any]) -> dict[str, Any]:
        new = ("older", "behind", "costs", "paused")
        return {k: v for k, v in data.items() if k not in new}

    written = as_it_was({**old.to_json(), "format": 1})
    written["slices"] = [as_it_was(s) for s in written["slices"]]
    (tmp_path / "journal").mkdir()
    line = _line(as_it_was(record(6).to_json()))
    (tmp_path / "journal" / "4-1.jsonl").write_bytes(_line(json.loads(json.dumps(written))) + line)
    assert found(tmp_path) == (old, [record(6)])


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    path = tmp_path / "journal" / "4-1.jsonl"
    for number in (3, True, None):
        path.write_bytes(_line({**HEAD.to_json(), "format": number}))
        with pytest.raises(StorageError, match=r"has (no )?format.*, this version reads 1 and 2; "):
            found(tmp_path)
