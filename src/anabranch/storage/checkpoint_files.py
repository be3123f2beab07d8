"""Checkpoint files: the state of one partition at one slice, whole or as a delta.

    ANBRCKP1 | header length (8 bytes, big endian) | header JSON | sections

The header names the partition, slice and epoch and lists one section per stateful operator:
its name, Arrow IPC bytes' length and CRC-32. A file that is short or whose CRC does not match is
refused with a StorageError, so that the caller can fall back on the cut before.
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
from anabranch.storage.files import explained, write_atomic

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


def checkpoint_path(partition: PartitionId, slice_no: int, epoch: int) -> Path:
    """Relative to the checkpoint directory, so that the directory can be moved or copied."""
    name = f"{slice_no:012d}-{epoch}.ckpt"
    return Path("checkpoints") / partition.chain / str(partition.index) / name


def write_checkpoint(
    path: Path,
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
    header = json.dumps(
        {
            "chain": partition.chain,
            "index": partition.index,
            "slice": slice_no,
            "epoch": epoch,
            "sections": sections,
        }
    ).encode()
    parts = [MAGIC, len(header).to_bytes(8, "big"), header, *buffers]
    return write_atomic(path, parts, sync=True)


def read_checkpoint(path: Path) -> dict[str, list[pa.Table]]:
    """Per operator its tables, oldest first; a damaged file is refused."""
    with explained("read", path):
        data = path.read_bytes()
    try:
        if data[:8] != MAGIC:
            raise ValueError("not a checkpoint of this format")
        length = int.from_bytes(data[8:16], "big")
        header = json.loads(data[16 : 16 + length])
        states: dict[str, list[pa.Table]] = {}
        offset = 16 + length
        view = memoryview(data)
        for section in header["sections"]:
            part = view[offset : offset + section["bytes"]]
            if zlib.crc32(part) != section["crc"]:
                raise ValueError(f"the state of {section['operator']!r} is torn")
            states.setdefault(section["operator"], []).append(decode_table(part))
            offset += section["bytes"]
    except (ValueError, KeyError, pa.ArrowException) as e:
        raise StorageError(f"the checkpoint {path} is damaged: {e}", path=str(path)) from e
    return states
