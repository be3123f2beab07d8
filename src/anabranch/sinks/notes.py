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
from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.errors import StorageError
from anabranch.storage.identity import DIGITS
from anabranch.storage.store import Store
from anabranch.storage.versions import check_format

FORMAT = 1
DIRECTORY = "shown"
OLD = "exposed"  # before there were notes, a file for each function


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


def read_note(store: Store, sink: str) -> Note | None:
    """The newest generation's; None if the sink has shown nothing since there are notes."""
    found = _generations(store, sink)
    if not found:
        return None
    name = f"{DIRECTORY}/{sink}/{max(found)}"
    path, data = store.where(name), store.read(name)
    try:
        if data is None:
            raise ValueError("it is gone")
        note = json.loads(data)
        check_format(path, note["format"], FORMAT)
        return Note(note["place"], note["slice"], note["exposure"])
    except (ValueError, KeyError, TypeError) as e:
        raise StorageError(
            f"{path} should say which slice the sink {sink!r} has shown last, but cannot be read "
            f"({e}); restore it from a copy",
            path=path,
        ) from e


def write_note(store: Store, sink: str, generation: int, note: Note) -> None:
    text = json.dumps(
        {
            "format": FORMAT,
            "place": note.place,
            "slice": note.slice,
            "exposure": note.exposure,
        }
    )
    store.put(f"{DIRECTORY}/{sink}/{generation}", [text.encode()], sync=False)


def forget_older(store: Store, sink: str, generation: int) -> None:
    """Remove what earlier generations noted, and what a crash left of their writing."""
    for name in store.names(f"{DIRECTORY}/{sink}"):
        earlier = name.isascii() and name.isdigit() and int(name) < generation
        if earlier or (name.startswith(".") and name.endswith(".tmp")):
            store.delete(f"{DIRECTORY}/{sink}/{name}")
    store.delete(f"{OLD}/{sink}")
    if not store.names(OLD):
        store.delete(OLD)


def _generations(store: Store, sink: str) -> list[int]:
    found = store.names(f"{DIRECTORY}/{sink}")
    return [int(n) for n in found if n.isascii() and n.isdigit()]


def read_marker(store: Store, name: str) -> int:
    """The newest slice, where it was kept before there were notes; 0 without it."""
    data = store.read(name)
    if data is None:
        return 0
    text = data.decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        path = store.where(name)
        raise StorageError(
            f"{path} should hold the number of the newest exposed slice, but holds {text[:40]!r}; "
            "restore it from a copy",
            path=path,
        )
    return int(text)
