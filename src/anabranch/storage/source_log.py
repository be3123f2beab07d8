"""The source log: what each source task fed into each slice, for replays.

A task logs the tables its chain sends on (after its stateless operators and the pre-combine), per
edge and per sink, not the raw rows: that is what a replay needs, it is often far smaller, and it
stays right when the code of a stateless operator changes. The file of (slice, task) is written
before any node sees the rows. Several attempts of a task may run at once and read rows in
different orders: the first complete share is the truth for all of them. A share may be of several
slices, in a file each; all are written under temporary names before the first appears, by a hard
link that only one attempt can make. Paths name the driver's generation and its attempt at the
slice, so that a task left over from a killed driver, or from an attempt that was given up, cannot
touch them.

    ANBRLOG1 | header length (8 bytes) | header's CRC-32 (4 bytes) | header JSON | sections
"""

from __future__ import annotations

import io
import shutil
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.errors import StorageError
from anabranch.storage.checkpoint_files import (
    decode_header,
    decode_table,
    encode_header,
    encode_table,
)
from anabranch.storage.files import (
    explained,
    link_exclusive,
    removed_on_error,
    temporary_name,
    write_temporary,
)

MAGIC = b"ANBRLOG1"


def slice_directory(root: Path, slice_no: int, run: int, attempt: int) -> Path:
    return root / "source-log" / f"{slice_no:012d}-{run}-{attempt}"


def log_path(root: Path, slice_no: int, run: int, attempt: int, task: int) -> Path:
    return slice_directory(root, slice_no, run, attempt) / f"{task:05d}.log"


def logged_tasks(root: Path, slice_no: int, run: int, attempt: int) -> int:
    """How many tasks have logged their share of a slice."""
    directory = slice_directory(root, slice_no, run, attempt)
    return sum(1 for _ in directory.glob("[0-9]*.log")) if directory.is_dir() else 0


def write_share(
    root: Path,
    slice_no: int,
    run: int,
    attempt: int,
    task: int,
    chunks: Sequence[tuple[Mapping[str, pa.Table], Mapping[str, Any]]],
) -> tuple[int, bool]:
    """Log one task's share of a batch: for this slice and the following ones, what each has of it
    and the facts that come back with `read_log`. The size, and whether this share counts: another
    one that is complete already does instead, and is what has to be read."""
    paths = [log_path(root, slice_no + n, run, attempt, task) for n in range(len(chunks))]
    token = uuid.uuid4().hex
    temporaries = [temporary_name(path, token) for path in paths]
    size = 0
    with explained("write", paths[0]):
        with removed_on_error(*temporaries):
            for n, (tables, facts) in enumerate(chunks):
                told = {**facts, "share": token} if n == 0 and len(chunks) > 1 else facts
                size += write_temporary(temporaries[n], _encoded(tables, told), sync=True)
        # From here on an error may come when others count on the whole share already.
        counts = link_exclusive(temporaries[0], paths[0])
        if not counts:
            for temporary in temporaries:
                temporary.unlink(missing_ok=True)
    if counts and len(chunks) > 1:
        finish_share(root, slice_no, run, attempt, task, {"share": token, "chunks": len(chunks)})
    return size, counts


def finish_share(
    root: Path, slice_no: int, run: int, attempt: int, task: int, facts: Mapping[str, Any]
) -> None:
    """Let the later slices of a share appear whose first one has: that it is there decides which
    share counts, and whoever finds it goes on where a killed task stopped."""
    for later in range(slice_no + 1, slice_no + facts["chunks"] if "share" in facts else 0):
        path = log_path(root, later, run, attempt, task)
        with explained("write", path):
            try:
                link_exclusive(temporary_name(path, facts["share"]), path)
            except FileNotFoundError:
                if not path.exists():  # otherwise somebody else has just done it
                    raise


def _encoded(tables: Mapping[str, pa.Table], facts: Mapping[str, Any]) -> list[Any]:
    buffers = [encode_table(t) for t in tables.values()]
    header = {
        "facts": facts,
        "sections": [
            {"name": n, "bytes": b.size, "crc": zlib.crc32(b)}
            for n, b in zip(tables, buffers, strict=True)
        ],
    }
    return [*encode_header(MAGIC, header), *buffers]


def read_log(path: Path) -> tuple[dict[str, pa.Table], dict[str, Any]] | None:
    """Tables and facts of one task's share; None where the task had nothing for the slice."""
    if not path.exists():
        return None
    with explained("read", path):
        file = io.BytesIO(whole := path.read_bytes())  # shares the bytes
    data = memoryview(whole)
    try:
        header, offset = decode_header(MAGIC, file), file.tell()
        tables: dict[str, pa.Table] = {}
        for section in header["sections"]:
            part = data[offset : offset + section["bytes"]]
            if zlib.crc32(part) != section["crc"]:
                raise ValueError(f"section {section['name']!r} is torn")
            tables[section["name"]] = decode_table(part)
            offset += section["bytes"]
    except (ValueError, KeyError, pa.ArrowException) as e:
        raise StorageError(f"the source log {path} is damaged: {e}", path=str(path)) from e
    return tables, header["facts"]


def trim(root: Path, below: int) -> None:
    """Delete the log of slices that no restart replays."""
    base = root / "source-log"
    if not base.exists():
        return
    for entry in base.iterdir():
        number = entry.name.partition("-")[0]
        if number.isdigit() and int(number) < below:
            shutil.rmtree(entry, ignore_errors=True)
