"""What a durable file says, taken apart by docs/formats.md and without the product's code.

So a change of what is written shows, wherever in the code it was made. Bytes are not compared:
Arrow and Parquet may encode the same rows in other ways, and names that are made up (identities,
names of attempts), the clock and the machine are others in every run; they are replaced by what
they are.
"""

from __future__ import annotations

import base64
import io
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Fields whose values are made up, or taken from the clock or the machine.
MADE_UP = frozenset(
    {"job", "place", "share", "key", "socket", "host", "checkpoint", "exposure", "processing_ms"}
    | {"costs"}
)
_ATTEMPT = re.compile(r"-[0-9a-f]{8}\.(staged|parquet)")
Taken = dict[str, Any]


def take_apart(root: Path) -> Taken:
    """Every file below a directory by its name."""
    files = sorted(p for p in root.rglob("*") if p.is_file())
    return {_settled(str(p.relative_to(root))): _reader(p)(p.read_bytes()) for p in files}


def as_text(taken: Any, indent: str = "\n") -> str:
    """JSON to be read and compared by people: what has no parts of parts is one line."""
    parts = list(taken.values()) if isinstance(taken, dict) else taken
    inner = indent + " "
    if not isinstance(parts, list) or not any(isinstance(p, dict | list) and p for p in parts):
        return json.dumps(taken)
    if isinstance(taken, list):
        return f"[{inner}{f',{inner}'.join(as_text(p, inner) for p in parts)}{indent}]"
    named = (f"{json.dumps(k)}: {as_text(v, inner)}" for k, v in taken.items())
    return f"{{{inner}{f',{inner}'.join(named)}{indent}}}"


def _reader(path: Path) -> Callable[[bytes], Any]:
    kinds: dict[str, Callable[[bytes], Any]] = {
        ".jsonl": _journal,
        ".log": _log,
        ".ckpt": _checkpoint,
        ".staged": _parquet,
        ".parquet": _parquet,
    }
    if path.name == "driver":
        return lambda data: re.sub(r"\d+ on .*", "PID on HOST", data.decode())
    return kinds.get(path.suffix, lambda data: _settled(json.loads(data)))


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            k: k.upper() if k in MADE_UP and v else _schemas(v) if k == "inputs" else _settled(v)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_settled(v) for v in value]
    return _ATTEMPT.sub(r"-ATTEMPT.\1", value) if isinstance(value, str) else value


def _schemas(given: list[str]) -> list[list[str]]:
    found = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in given]
    return [[f"{f.name}: {f.type}" for f in schema] for schema in found]


def _journal(data: bytes) -> list[Any]:
    lines = []
    for line in data.splitlines():
        crc, _, body = line.partition(b" ")
        assert crc == b"%08x" % zlib.crc32(body)
        lines.append(_settled(json.loads(body)))
    return lines


def _frame(file: io.BytesIO) -> bytes:
    size, crc = int.from_bytes(file.read(8), "big"), int.from_bytes(file.read(4), "big")
    data = file.read(size)
    assert len(data) == size and zlib.crc32(data) == crc
    return data


def _log(data: bytes) -> Taken:
    file = io.BytesIO(data)
    magic, header = file.read(8).decode(), json.loads(_frame(file))
    sections = {}
    for section in header["sections"]:
        part = file.read(section.pop("bytes"))
        assert zlib.crc32(part) == section.pop("crc")
        sections[section["name"]] = _table(_stream(part))
    assert not file.read()
    return {"magic": magic, "header": _settled(header), "tables": sections}


def _checkpoint(data: bytes) -> Taken:
    file = io.BytesIO(data)
    magic, header = file.read(8).decode(), json.loads(_frame(file))
    pieces = [_table(_stream(_frame(file))) for _ in header["pieces"]]
    assert not file.read()
    return {"magic": magic, "header": _settled(header), "tables": pieces}


def _stream(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


def _parquet(data: bytes) -> Taken:
    return _table(pq.ParquetFile(io.BytesIO(data)).read())


def _table(table: pa.Table) -> Taken:
    """Rows without their order, in which a state keeps them but means nothing by it."""
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    return {
        "columns": [f"{f.name}: {f.type}" for f in table.schema],
        **({"metadata": metadata} if metadata else {}),
        "rows": rows_of(table),
    }


def rows_of(table: pa.Table) -> list[str]:
    """A row is a line of JSON."""
    columns = [c.to_pylist() for c in table.columns]
    return sorted(json.dumps(row, default=str) for row in zip(*columns, strict=True))
