"""Checkpoint files: the state of one partition at one slice, whole or as a delta.

    ANBRCKP1 | header length (8 bytes) | header's CRC-32 (4 bytes) | header JSON | sections

Numbers are big endian. The header names the partition, slice and epoch and lists one section per
stateful operator: its name, Arrow IPC bytes' length and CRC-32. A file that is short or whose CRCs
do not match is refused with a StorageError, so that the caller can fall back on the cut before.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.errors import StorageError
from anabranch.model.ids import PartitionId
from anabranch.storage import checkpoint_store

MAGIC = b"ANBRCKP1"


def encode_table(table: pa.Table) -> pa.Buffer:
    """Arrow IPC stream bytes of a table."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def decode_table(data: Any) -> pa.Table:
    """The table in Arrow IPC stream bytes, without copying them."""
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all()


def encode_header(magic: bytes, header: Mapping[str, Any]) -> list[bytes]:
    """The beginning of a file of sections: a damaged name must not lose its section unseen."""
    data = json.dumps(header).encode()
    return [magic, len(data).to_bytes(8, "big"), zlib.crc32(data).to_bytes(4, "big"), data]


def decode_header(magic: bytes, file: memoryview) -> tuple[dict[str, Any], int]:
    """The header and where the sections begin; ValueError for a damaged one."""
    if bytes(file[:8]) != magic:
        raise ValueError(f"it does not begin with {magic.decode()}")
    end = 20 + int.from_bytes(file[8:16], "big")
    data = bytes(file[20:end])
    if zlib.crc32(data) != int.from_bytes(file[16:20], "big"):
        raise ValueError("its header is torn")
    header: dict[str, Any] = json.loads(data)
    return header, end


def checkpoint_name(
    partition: PartitionId, slice_no: int, epoch: int, place: str = checkpoint_store.LOCAL
) -> str:
    """How a cut names the file. Relative to the checkpoint directory, unless the place is a URL, so
    that the directory can be moved or copied."""
    return f"{place}/{partition.chain}/{partition.index}/{slice_no:012d}-{epoch}.ckpt"


def write_checkpoint(
    root: Path,
    name: str,
    partition: PartitionId,
    slice_no: int,
    epoch: int,
    states: Mapping[str, list[pa.Table]],
) -> int:
    """Write every operator's tables (several deltas may have piled up); returns the size."""
    sections: list[dict[str, Any]] = []
    buffers: list[pa.Buffer] = []
    for operator, tables in states.items():
        for table in tables:
            data = encode_table(table)
            buffers.append(data)
            sections.append({"operator": operator, "bytes": data.size, "crc": zlib.crc32(data)})
    header = {
        "chain": partition.chain,
        "index": partition.index,
        "slice": slice_no,
        "epoch": epoch,
        "sections": sections,
    }
    return checkpoint_store.write(root, name, [*encode_header(MAGIC, header), *buffers])


def read_checkpoint(root: Path, name: str) -> dict[str, list[pa.Table]]:
    """Per operator its tables, oldest first; a damaged file is refused."""
    view = memoryview(checkpoint_store.read(root, name))
    try:
        header, offset = decode_header(MAGIC, view)
        states: dict[str, list[pa.Table]] = {}
        for section in header["sections"]:
            part = view[offset : offset + section["bytes"]]
            if zlib.crc32(part) != section["crc"]:
                raise ValueError(f"the state of {section['operator']!r} is torn")
            states.setdefault(section["operator"], []).append(decode_table(part))
            offset += section["bytes"]
    except (ValueError, KeyError, pa.ArrowException) as e:
        where = name if checkpoint_store.is_url(name) else str(root / name)
        raise StorageError(f"the checkpoint {where} is damaged: {e}", path=where) from e
    return states
