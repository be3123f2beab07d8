"""Key → two 64-bit hashes and a key group, by a hash this module specifies.

Key groups are written into checkpoints and decide where a key lives, so the hash must never change
with a library's version: it is defined here, on values, and pinned by golden values in the tests.

Specification (all arithmetic modulo 2^64). A key is a sequence of words; each word w is absorbed by
    a ← (a xor w)·A, a ← a xor (a >> 32)        b ← (b + w)·B, b ← b xor (b >> 29)
from a = SEED_A, b = SEED_B; at the end both are finished by
    h ← h·FINAL_1, h ← h xor (h >> 29), h ← h·FINAL_2, h ← h xor (h >> 32).
Columns are absorbed in key order. A column gives: integers, booleans, dates, times, durations,
timestamps (microseconds) their value in two's complement, times of the day plus 2^40 times the
nanoseconds that are left over; floats the bits of the double (one zero,
one NaN); decimals the low, then the high half of the unscaled value; strings and binaries their
length in bytes, then their bytes as little-endian words, zero-padded (above `LONG_BYTES` the 16
bytes of their BLAKE2b instead); a null the words of zero or of the empty string, and then
a xor NULL_A, b xor NULL_B.

The pair (a, b) serves as the identity of a key: two of n keys of ordinary data share it with
probability about n²/2^129. It does not resist somebody who constructs colliding keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import TopologyError

Hashes = npt.NDArray[np.uint64]

LONG_BYTES = 1024  # bounds the rounds of 8 bytes; BLAKE2b costs about the same here (1.8 µs to 1.5)
MAX_KEY_GROUPS = 65_536  # a key group is stored as uint16

_A, _B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_FINAL_1, _FINAL_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SEED_A, _SEED_B = np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344)
_NULL_A, _NULL_B = np.uint64(0xA4093822299F31D1), np.uint64(0x082EFA98EC4E6C89)
_SHIFT_A, _SHIFT_B = np.uint64(32), np.uint64(29)
_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)
_BLOCK = 1 << 14  # rows at a time: the arrays of a block stay in the L2 cache


def hash_keys(table: pa.Table, keys: Sequence[str]) -> tuple[Hashes, Hashes]:
    """Both hashes of every row's key; the first alone decides the key group."""
    a, b = _hash(table, keys, second=True)
    assert b is not None
    return a, b


def key_groups(table: pa.Table, keys: Sequence[str], key_groups: int) -> npt.NDArray[np.uint16]:
    """The key group of every row, from the first hash only."""
    return groups_of(_hash(table, keys, second=False)[0], key_groups)


def groups_of(first: Hashes, key_groups: int) -> npt.NDArray[np.uint16]:
    """The upper half of the first hash scaled to [0, key_groups); tables index by the lower half,
    so that the keys of one group spread over the whole of an index."""
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise TopologyError(
            f"key_groups is {key_groups}; choose a number from 1 to {MAX_KEY_GROUPS}",
            key_groups=key_groups,
        )
    scaled = (first >> np.uint64(32)) * np.uint64(key_groups)
    scaled >>= np.uint64(32)
    return scaled.astype(np.uint16)


def check_key_types(schema: pa.Schema, keys: Sequence[str]) -> None:
    """Refuse key columns that are missing or have no specified hash."""
    if not keys:
        raise TopologyError("no key columns were given; name at least one column to key by")
    for name in keys:
        if schema.get_field_index(name) < 0:
            raise TopologyError(
                f"key column {name!r} is not in the input; it has {schema.names}",
                column=name,
            )
        _check_type(name, schema.field(name).type)


def _check_type(name: str, kind: pa.DataType) -> None:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (_is_bytes(value) or _is_fixed(value) or pa.types.is_null(value)):
        raise TopologyError(
            f"column {name!r} of type {kind} cannot be a key; key by a number, string, binary, "
            "boolean, decimal, date or time column",
            column=name,
        )


def _is_bytes(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind)
        or t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind)
        or t.is_fixed_size_binary(kind)
    )  # fmt: skip


def _is_fixed(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_date(kind)
        or t.is_time(kind) or t.is_timestamp(kind) or t.is_duration(kind)
        or (t.is_decimal(kind) and kind.bit_width <= 128)
    )  # fmt: skip


def _hash(table: pa.Table, keys: Sequence[str], second: bool) -> tuple[Hashes, Hashes | None]:
    check_key_types(table.schema, keys)
    a = np.full(table.num_rows, _SEED_A)
    b = np.full(table.num_rows, _SEED_B) if second else None
    for name in keys:
        start = 0
        for chunk in table.column(name).chunks:
            rows = slice(start, start + len(chunk))
            _absorb_array(chunk, a[rows], None if b is None else b[rows])
            start += len(chunk)
    for rows in _blocks(table.num_rows):
        for h in (a, b):
            if h is not None:
                part = h[rows]
                part *= _FINAL_1
                part ^= part >> _SHIFT_B
                part *= _FINAL_2
                part ^= part >> _SHIFT_A
    return a, b


def _blocks(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _BLOCK):
        yield slice(start, min(start + _BLOCK, rows))


def _absorb(a: Hashes, b: Hashes | None, words: Hashes) -> None:
    a ^= words
    a *= _A
    a ^= a >> _SHIFT_A
    if b is not None:
        b += words
        b *= _B
        b ^= b >> _SHIFT_B


def _absorb_array(array: pa.Array, a: Hashes, b: Hashes | None) -> None:
    if len(array) == 0:
        return
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    nulls = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if pa.types.is_null(array.type):
        _absorb(a, b, np.zeros(len(array), dtype=np.uint64))
    elif _is_bytes(array.type):
        _absorb_bytes(array, nulls, a, b)
    elif pa.types.is_decimal(array.type):
        for words in _decimal_words(array, nulls):
            _absorb(a, b, words)
    else:
        words = _fixed_words(array)
        for rows in _blocks(len(array)):
            _absorb(a[rows], None if b is None else b[rows], words[rows])
    if nulls is not None:
        a[nulls] ^= _NULL_A
        if b is not None:
            b[nulls] ^= _NULL_B


def _fixed_words(array: pa.Array) -> Hashes:
    kind = array.type
    t = pa.types
    if t.is_floating(kind):
        values = array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        values = values + 0.0  # -0.0 becomes 0.0
        values[np.isnan(values)] = np.nan
        words: Hashes = values.view(np.uint64)
        return words
    if t.is_boolean(kind):
        array = array.cast(pa.uint8())
    elif t.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", kind.tz), safe=False).view(pa.int64())
    elif t.is_duration(kind):
        array = array.cast(pa.duration("us"), safe=False).view(pa.int64())
    elif t.is_time(kind):
        nanoseconds = array.cast(pa.time64("ns")).view(pa.int64()).fill_null(0)
        us, left = np.divmod(nanoseconds.to_numpy(zero_copy_only=False), 1_000)
        return np.asarray((us + (left << 40)).view(np.uint64))
    elif t.is_date(kind):
        array = array.cast(pa.date32()).view(pa.int32())
    if array.null_count:
        array = array.fill_null(0)
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype != np.uint64:
        values = values.astype(np.int64, copy=False).view(np.uint64)
    return np.asarray(values)


def _decimal_words(array: pa.Array, nulls: npt.NDArray[np.bool_] | None) -> tuple[Hashes, Hashes]:
    if array.type.bit_width < 128:
        array = array.cast(pa.decimal128(array.type.precision, array.type.scale))
    halves = np.frombuffer(array.buffers()[1], dtype="<u8").reshape(-1, 2)
    halves = halves[array.offset : array.offset + len(array)].copy()
    if nulls is not None:
        halves[nulls] = 0
    return halves[:, 0], halves[:, 1]


def _absorb_bytes(
    array: pa.Array, nulls: npt.NDArray[np.bool_] | None, a: Hashes, b: Hashes | None
) -> None:
    if not _has_offsets(array.type):  # views and fixed sizes
        text = pa.types.is_string_view(array.type)
        array = array.cast(pa.large_string() if text else pa.large_binary())
    if nulls is not None:
        array = array.fill_null("" if "string" in str(array.type) else b"")
    large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int64 if large else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    for rows in _blocks(len(array)):
        bounds = offsets[rows.start : rows.stop + 1].astype(np.int64, copy=False)
        _absorb_spans(data, bounds, a[rows], None if b is None else b[rows])


def _has_offsets(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(
        t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)
    )


def _absorb_spans(
    data: npt.NDArray[np.uint8], bounds: npt.NDArray[np.int64], a: Hashes, b: Hashes | None
) -> None:
    """Absorb data[bounds[i]:bounds[i+1]] into row i."""
    if bounds[-1] + 8 > len(data):  # an 8-byte load would leave the buffer
        data = np.append(data[bounds[0] : bounds[-1]], np.zeros(8, dtype=np.uint8))
        bounds = bounds - bounds[0]
    # Words at every byte offset, overlapping: an unaligned little-endian load per row.
    words = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    starts, lengths = bounds[:-1], np.diff(bounds)
    _absorb(a, b, lengths.view(np.uint64))
    if lengths.max() > LONG_BYTES:
        _absorb_long(data, starts, lengths, a, b)
        lengths = np.where(lengths > LONG_BYTES, 0, lengths)
    _absorb_words(words, starts, lengths, 0, a, b)


def _absorb_words(
    words: Hashes,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    done: int,
    a: Hashes,
    b: Hashes | None,
) -> None:
    """Absorb what lies beyond `done` bytes; as strings end, go on with the others alone, or one
    long string would cost a pass over all."""
    while (more := lengths > done).all():
        left = np.minimum(lengths - done, 8)
        _absorb(a, b, words[starts + done] & _LOW_BYTES.take(left))
        done += 8
    rows = np.flatnonzero(more)
    if len(rows):
        some_a, some_b = a[rows], None if b is None else b[rows]
        _absorb_words(words, starts[rows], lengths[rows], done, some_a, some_b)
        _put(a, b, rows, some_a, some_b)


def _absorb_long(
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    a: Hashes,
    b: Hashes | None,
) -> None:
    rows = np.flatnonzero(lengths > LONG_BYTES)
    digests = b"".join(
        hashlib.blake2b(data[start:end].data, digest_size=16).digest()
        for start, end in zip(starts[rows], (starts + lengths)[rows], strict=True)
    )
    words = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    some_a, some_b = a[rows], None if b is None else b[rows]
    for half in (0, 1):
        _absorb(some_a, some_b, words[:, half])
    _put(a, b, rows, some_a, some_b)


def _put(
    a: Hashes, b: Hashes | None, rows: npt.NDArray[np.int64], some_a: Hashes, some_b: Hashes | None
) -> None:
    a[rows] = some_a
    if b is not None and some_b is not None:
        b[rows] = some_b
