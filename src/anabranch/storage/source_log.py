"""The source log: what each source task fed into each slice, for replays.

A task logs the tables its chain sends on (after its stateless operators and the pre-combine),
per edge and per sink, not the raw rows: that is what a replay needs, it is often far smaller, and
it stays right when the code of a stateless operator changes. The file of (slice, task) is written
before any node sees the rows: the first complete one is the truth, also for a retried task. Paths
name the driver's generation and its attempt at the slice, so that a task left over from a killed
driver, or from an attempt that was given up, cannot touch them.

    ANBRLOG1 | header length (8 bytes) | header's CRC-32 (4 bytes) | header JSON | sections
"""

from __future__ import annotations

import io
import shutil
import zlib
from collections.abc import Mapping
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
from anabranch.storage.files import explained, write_atomic

MAGIC = b"ANBRLOG1"


def slice_directory(root: Path, slice_no: int, run: int, attempt: int) -> Path:
    return root / "source-log" / f"{slice_no:012d}-{run}-{attempt}"


def log_path(root: Path, slice_no: int, run: int, attempt: int, task: int) -> Path:
    return slice_directory(root, slice_no, run, attempt) / f"{task:05d}.log"


def logged_tasks(root: Path, slice_no: int, run: int, attempt: int) -> int:
    """How many tasks have logged their share of a slice."""
    directory = slice_directory(root, slice_no, run, attempt)
    return sum(1 for _ in directory.glob("[0-9]*.log")) if directory.is_dir() else 0


def drop_leftovers(root: Path, above: int, run: int, attempt: int, task: int) -> None:
    """Delete one task's logs of slices after `above`: an earlier try had cut more slices."""
    for path in (root / "source-log").glob(f"*-{run}-{attempt}/{task:05d}.log"):
        if int(path.parent.name.partition("-")[0]) > above:
            path.unlink(missing_ok=True)


def write_log(path: Path, tables: Mapping[str, pa.Table], facts: Mapping[str, Any]) -> int:
    """Write one task's share of one slice; `facts` come back with `read_log`."""
    buffers = [encode_table(t) for t in tables.values()]
    header = {
        "facts": facts,
        "sections": [
            {"name": n, "bytes": b.size, "crc": zlib.crc32(b)}
            for n, b in zip(tables, buffers, strict=True)
        ],
    }
    return write_atomic(path, [*encode_header(MAGIC, header), *buffers], sync=True)


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
