"""Checkpoint files: the state of one partition at one slice, whole or as a delta.

    ANBRCKP2 | header | piece | piece | …

Header and pieces are each a length (8 bytes), a CRC-32 (4 bytes), both big endian, and as many
bytes. The header (JSON) names job, partition, slice and epoch and, for every piece, whose it is;
pieces are Arrow IPC streams of some 16 MB. They are written as they are made and read one by one:
neither side has a whole table twice, and who reads a part of the key groups has the rest of one
piece at most. A file that is short, whose CRCs do not match or that is another one than its name
says is refused with a StorageError, so that the caller can fall back on the cut before.
"""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa

from anabranch.errors import StorageError
from anabranch.model.ids import PartitionId
from anabranch.operators.base import DELETED
from anabranch.storage import checkpoint_store
from anabranch.storage.credentials import masked
from anabranch.storage.identity import find_identity
from anabranch.storage.store import Store
from anabranch.storage.versions import other_format

MAGIC = b"ANBRCKP2"
PIECE_BYTES = 16 << 20
FRAME_BYTES = 12  # of length and CRC
R = TypeVar("R")


class AnotherFileError(ValueError):
    """A file is whole, but of another job, partition or slice than its name says."""


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


class _Parts:
    """A file to write to that keeps what it is given, without a copy."""

    closed = False

    def __init__(self) -> None:
        self.found: list[Any] = []

    def write(self, data: Any) -> int:
        if isinstance(data, bytes) and self.found and isinstance(self.found[-1], bytes):
            self.found[-1] += data  # a few bytes each
        else:
            self.found.append(data)
        return len(data)

    def flush(self) -> None:
        pass


def encode_parts(table: pa.Table) -> list[Any]:
    """Arrow IPC stream bytes of a table, in parts that are mostly the table's own memory."""
    parts = _Parts()
    with pa.ipc.new_stream(pa.PythonFile(parts, mode="w"), table.schema) as writer:
        writer.write_table(table)
    return parts.found


def encode_header(magic: bytes, header: Mapping[str, Any]) -> list[Any]:
    """The beginning of a file: a damaged name must not lose its section unseen."""
    return [magic, *_frame([json.dumps(header).encode()])]


def decode_header(magic: bytes, file: BinaryIO) -> dict[str, Any]:
    """The header, read up to its end; ValueError for a damaged one."""
    begins = file.read(len(magic))
    if begins != magic:
        told = f"it does not begin with {magic.decode()}"
        # One bit makes another version of a damaged file: both are said.
        if begins[:-1] == magic[:-1] and begins[-1:].isdigit():
            told = f"or it {other_format(int(begins[-1:]), int(magic[-1:]))}"
        raise ValueError(told)
    header: dict[str, Any] = json.loads(_read_frame(file, "its header"))
    return header


def _frame(parts: list[Any]) -> list[Any]:
    size = crc = 0
    for part in parts:
        size, crc = size + len(part), zlib.crc32(part, crc)
    return [size.to_bytes(8, "big") + crc.to_bytes(4, "big"), *parts]


def _read_frame(file: BinaryIO, what: str) -> bytes:
    size, crc = _read_frame_start(file, what)
    data = file.read(size)
    if zlib.crc32(data) != crc:
        raise ValueError(f"{what} is torn")
    return data


def _read_frame_start(file: BinaryIO, what: str) -> tuple[int, int]:
    """Length and CRC of what follows; a length that cannot be is none."""
    start = file.read(FRAME_BYTES)
    size = int.from_bytes(start[:8], "big")
    here = file.tell()
    left = file.seek(0, io.SEEK_END) - here
    file.seek(here)
    if len(start) < FRAME_BYTES or size > left:
        raise ValueError(f"{what} is torn")
    return size, int.from_bytes(start[8:], "big")


def checkpoint_name(
    partition: PartitionId, slice_no: int, epoch: int, place: str = checkpoint_store.LOCAL
) -> str:
    """How a cut names the file. Relative to the checkpoint directory, unless the place is a URL, so
    that the directory can be moved or copied."""
    return f"{place}/{partition.chain}/{partition.index}/{slice_no:012d}-{epoch}.ckpt"


def write_checkpoint(
    store: Store,
    name: str,
    job: str,
    partition: PartitionId,
    slice_no: int,
    epoch: int,
    full: bool,
    states: Mapping[str, list[pa.Table]],
) -> int:
    """Write every operator's tables (several deltas may have piled up); returns the size. What is
    deleted is left out of a full one, piece by piece."""
    pieces = [
        (operator, number, piece)
        for operator, tables in states.items()
        for number, table in enumerate(tables)
        for piece in _pieces(table)
    ]
    encode = (lambda piece: encode_parts(_live(piece))) if full else encode_parts
    return write_pieces(store, name, job, partition, slice_no, epoch, pieces, encode)


def write_pieces(
    store: Store,
    name: str,
    job: str,
    partition: PartitionId,
    slice_no: int,
    epoch: int,
    pieces: Sequence[tuple[str, int, R]],
    encode: Callable[[R], list[Any]],
) -> int:
    """Write pieces, each of one of an operator's tables, whatever they are; they are encoded as
    they are written."""
    header = {
        "job": job,
        "chain": partition.chain,
        "index": partition.index,
        "slice": slice_no,
        "epoch": epoch,
        "pieces": [[operator, number] for operator, number, _ in pieces],
    }
    frames = (part for _, _, piece in pieces for part in _frame(encode(piece)))
    return checkpoint_store.write(store, name, chain(encode_header(MAGIC, header), frames))


def _pieces(table: pa.Table) -> list[pa.Table]:
    """At least one: an empty table has a schema, too."""
    rows = max(1, table.num_rows * PIECE_BYTES // max(1, table.nbytes))
    return [table.slice(start, rows) for start in range(0, max(1, table.num_rows), rows)]


def _live(table: pa.Table) -> pa.Table:
    deleted = np.asarray(table.column(DELETED))
    return table.filter(pa.array(~deleted)) if deleted.any() else table


def read_checkpoint(
    store: Store, name: str, wanted: Callable[[pa.Table], pa.Table] = lambda table: table
) -> dict[str, list[pa.Table]]:
    """Per operator what is wanted of its tables, oldest first; a damaged file is refused."""
    found: dict[str, dict[int, list[pa.Table]]] = {}
    for operator, number, piece in read_pieces(store, name, decode_table):
        found.setdefault(operator, {}).setdefault(number, []).append(wanted(piece))
    return {o: [pa.concat_tables(ps) for ps in tables.values()] for o, tables in found.items()}


def read_pieces(
    store: Store, name: str, decode: Callable[[bytes], R]
) -> Iterator[tuple[str, int, R]]:
    """An error of the code that takes them is not the file's fault."""
    with _refused(store, name), checkpoint_store.opened(store, name) as file:
        for operator, number in _pieces_of(store, name, file):
            data = _read_frame(file, f"the state of {operator!r}")
            yield operator, number, decode(data)


def piece_bytes(store: Store, name: str) -> dict[str, int]:
    """Per operator the bytes of its pieces, which are skipped."""
    sizes: dict[str, int] = {}
    with _refused(store, name), checkpoint_store.opened(store, name) as file:
        for operator, _ in _pieces_of(store, name, file):
            size, _ = _read_frame_start(file, f"the state of {operator!r}")
            file.seek(size, io.SEEK_CUR)
            sizes[operator] = sizes.get(operator, 0) + size
    return sizes


def _pieces_of(store: Store, name: str, file: BinaryIO) -> list[tuple[str, int]]:
    """From the header, which must be that of the file asked for: somebody may have put another
    one in its place. Before jobs had identities, none was in it."""
    header = decode_header(MAGIC, file)
    chain, index, of = name.rsplit("/", 2)[-3:]
    slice_no, epoch = of.removesuffix(".ckpt").split("-")
    asked = (chain.rpartition("/")[2], int(index), int(slice_no), int(epoch))
    found = tuple(header[key] for key in ("chain", "index", "slice", "epoch"))
    if found != asked:
        raise AnotherFileError("it is slice {2} of {0}/{1}, epoch {3}".format(*found))
    mine = find_identity(store)
    if mine is not None and header.get("job", mine.job) != mine.job:
        raise AnotherFileError(f"it is another job's, {header['job']}, and this one is {mine.job}")
    return [(operator, number) for operator, number in header["pieces"]]


@contextlib.contextmanager
def _refused(store: Store, name: str) -> Iterator[None]:
    try:
        yield
    except checkpoint_store.DAMAGE as e:
        where = masked(name) if checkpoint_store.is_url(name) else store.where(name)
        what = "is not the one asked for" if isinstance(e, AnotherFileError) else "is damaged"
        raise StorageError(f"the checkpoint {where} {what}: {e}", path=where) from e
