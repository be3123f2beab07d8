"""The source log: what each source task fed into each slice, for replays.

A task logs the tables its chain sends on (after its stateless operators and the pre-combine), per
edge and per sink, not the raw rows: that is what a replay needs, it is often far smaller, and it
stays right when the code of a stateless operator changes. The file of (slice, task) is written
before any node sees the rows. Several attempts of a task may run at once and read rows in
different orders: the first complete share is the truth for all of them. A share may be of several
slices, in a file each; the later ones are written under hidden names before the first appears,
which only one attempt can create. Names have the driver's generation and its attempt at the slice,
so that a task left over from a killed driver, or from an attempt that was given up, cannot touch
them.

    ANBRLOG1 | header length (8 bytes) | header's CRC-32 (4 bytes) | header JSON | sections
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from anabranch.errors import StorageError
from anabranch.storage.checkpoint_files import decode_header, encode_header
from anabranch.storage.checkpoint_store import DAMAGE
from anabranch.storage.store import Store

MAGIC = b"ANBRLOG1"
DIRECTORY = "source-log"
R = TypeVar("R")
Chunk = tuple[Mapping[str, Any], Mapping[str, Any]]  # sections by name, as bytes; facts


def slice_directory(slice_no: int, run: int, attempt: int) -> str:
    return f"{DIRECTORY}/{slice_no:012d}-{run}-{attempt}"


def log_name(slice_no: int, run: int, attempt: int, task: int) -> str:
    return f"{slice_directory(slice_no, run, attempt)}/{task:05d}.log"


def _hidden_name(slice_no: int, run: int, attempt: int, task: int, token: str) -> str:
    return f"{slice_directory(slice_no, run, attempt)}/.{task:05d}.log.{token}.tmp"


def logged_tasks(store: Store, slice_no: int, run: int, attempt: int) -> int:
    """How many tasks have logged their share of a slice."""
    names = store.names(slice_directory(slice_no, run, attempt))
    return sum(n.removesuffix(".log").isdecimal() for n in names if n.endswith(".log"))


def write_share(
    store: Store, slice_no: int, run: int, attempt: int, task: int, chunks: Sequence[Chunk]
) -> tuple[int, bool]:
    """Log one task's share of a batch: for this slice and the following ones, what each has of it
    and the facts that come back with `read_log`. The size, and whether this share counts: another
    one that is complete already does instead, and is what has to be read."""
    token = store.token() if len(chunks) > 1 else ""
    hidden = [_hidden_name(slice_no + n, run, attempt, task, token) for n in range(1, len(chunks))]
    size = 0
    try:
        for name, (sections, facts) in zip(hidden, chunks[1:], strict=True):
            size += store.create(name, _encoded(sections, facts)) or 0
    except StorageError:
        _remove(store, hidden)
        raise
    sections, facts = chunks[0]
    told = {**facts, "share": token} if hidden else facts
    # From here on an error may come when others count on the whole share already.
    made = store.create(log_name(slice_no, run, attempt, task), _encoded(sections, told))
    if made is None:
        _remove(store, hidden)
        return size, False
    if hidden:
        finish_share(store, slice_no, run, attempt, task, {"share": token, "chunks": len(chunks)})
    return size + made, True


def finish_share(
    store: Store, slice_no: int, run: int, attempt: int, task: int, facts: Mapping[str, Any]
) -> None:
    """Let the later slices of a share appear whose first one has: that it is there decides which
    share counts, and the task that finds it goes on where a killed task stopped."""
    for later in range(slice_no + 1, slice_no + facts["chunks"] if "share" in facts else 0):
        name = log_name(later, run, attempt, task)
        store.reveal(_hidden_name(later, run, attempt, task, facts["share"]), name)


def _remove(store: Store, hidden: Sequence[str]) -> None:
    for name in hidden:
        store.delete(name)


def _encoded(sections: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Any]:
    views = {name: memoryview(data) for name, data in sections.items()}
    header = {
        "facts": facts,
        "sections": [
            {"name": n, "bytes": v.nbytes, "crc": zlib.crc32(v)} for n, v in views.items()
        ],
    }
    return [*encode_header(MAGIC, header), *views.values()]


def read_log(
    store: Store, name: str, decode: Callable[[memoryview], R]
) -> tuple[dict[str, R], dict[str, Any]] | None:
    """Sections and facts of one task's share; None where the task had nothing for the slice."""
    whole = store.read(name)
    if whole is None:
        return None
    file, data = io.BytesIO(whole), memoryview(whole)  # they share the bytes
    try:
        header, offset = decode_header(MAGIC, file), file.tell()
        sections: dict[str, R] = {}
        for section in header["sections"]:
            part = data[offset : offset + section["bytes"]]
            if zlib.crc32(part) != section["crc"]:
                raise ValueError(f"section {section['name']!r} is torn")
            sections[section["name"]] = decode(part)
            offset += section["bytes"]
    except DAMAGE as e:
        where = store.where(name)
        raise StorageError(f"the source log {where} is damaged: {e}", path=where) from e
    return sections, header["facts"]


def trim(store: Store, below: int) -> None:
    """Delete the log of slices that no restart replays."""
    for entry in store.names(DIRECTORY):
        number = entry.partition("-")[0]
        if number.isdigit() and int(number) < below:
            store.delete(f"{DIRECTORY}/{entry}")
