"""What a job knows about its sinks by itself: the newest slice each one has shown, and where.

    <checkpoint>/shown/SINK/3    {"format": 1, "place": "…", "slice": 17, "exposure": "…"}

A driver writes a file named by its generation and no other, and the newest counts: one that has
lost its lock without knowing it does not touch what its successor knows. The note follows the
target: after a crash between the two, the target is asked whether it has the slice.

An exposure is which rows a slice showed: a hash of the names of its staged files, as the journal
has them. No two attempts at a slice share a name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from anabranch.errors import StorageError
from anabranch.storage.files import explained, write_atomic
from anabranch.storage.identity import DIGITS

FORMAT = 1
DIRECTORY = "shown"


@dataclass(frozen=True, slots=True)
class Note:
    """`place` is the target, by a name that it keeps itself, not by its address."""

    place: str
    slice: int = 0
    exposure: str = ""

    def tells_of(self, slice_no: int, exposure: str) -> bool:
        return (self.slice, self.exposure) == (slice_no, exposure)


def exposure_of(slice_no: int, files: Iterable[str]) -> str:
    """The staged files of a slice in a few digits; as a number it fits into an int64."""
    text = "\n".join([str(slice_no), *sorted(files)])
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def read_note(root: Path, sink: str) -> Note | None:
    """The newest generation's; None if the sink has shown nothing since there are notes."""
    found = _generations(root, sink)
    if not found:
        return None
    path = found[max(found)]
    with explained("read", path):
        data = path.read_bytes()
    try:
        note = json.loads(data)
        if note["format"] != FORMAT:
            raise ValueError(f"its format is {note['format']}, this version reads {FORMAT}")
        return Note(note["place"], note["slice"], note["exposure"])
    except (ValueError, KeyError, TypeError) as e:
        raise StorageError(
            f"{path} should say which slice the sink {sink!r} has shown last, but cannot be read "
            f"({e}); restore it from a copy",
            path=str(path),
        ) from e


def write_note(root: Path, sink: str, run: int, note: Note) -> None:
    text = json.dumps(
        {
            "format": FORMAT,
            "place": note.place,
            "slice": note.slice,
            "exposure": note.exposure,
        }
    )
    write_atomic(root / DIRECTORY / sink / str(run), [text.encode()])


def forget_older(root: Path, sink: str, run: int) -> None:
    """Remove what earlier generations noted, and what a crash left of their writing."""
    with explained("remove", root / DIRECTORY / sink):
        for generation, path in _generations(root, sink).items():
            if generation < run:
                path.unlink(missing_ok=True)
        for leftover in (root / DIRECTORY / sink).glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        old = root / "exposed"  # before there were notes, a file for each function
        (old / sink).unlink(missing_ok=True)
        if old.is_dir() and not any(old.iterdir()):
            shutil.rmtree(old, ignore_errors=True)


def _generations(root: Path, sink: str) -> dict[int, Path]:
    directory = root / DIRECTORY / sink
    with explained("list", directory):
        entries = list(directory.iterdir()) if directory.is_dir() else []
    return {int(p.name): p for p in entries if p.name.isascii() and p.name.isdigit()}


def read_marker(path: Path) -> int:
    """The newest slice, where it was kept before there were notes; 0 without it."""
    with explained("read", path):
        try:
            text = path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return 0
    if not (text.isascii() and text.isdigit()):
        raise StorageError(
            f"{path} should hold the number of the newest exposed slice, but holds {text[:40]!r}; "
            "restore it from a copy",
            path=str(path),
        )
    return int(text)
