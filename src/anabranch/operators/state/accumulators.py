"""The parts an aggregate is made of: NumPy columns that reduce by an associative operation.

Each part has an identity that stands for "nothing yet", so arrays hold no nulls; whether anything
was there is a part of its own (`seen`, or a count). The same parts are what `combine` sends, what
the state keeps and what a checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import OperatorError
from anabranch.operators.rows.grouping import Groups, group_rows
from anabranch.operators.rows.hashing import Hashes
from anabranch.operators.state.keyed_table import Columns, KeyedTable, no_slots
from anabranch.operators.state.row_log import ABSENT, Slots

Values = npt.NDArray[Any]

_HALF, _LOW = np.int64(32), np.int64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Part:
    """One column of an aggregate's state."""

    name: str
    dtype: np.dtype[Any]
    reduce: np.ufunc
    identity: Any

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, pa.from_numpy_dtype(self.dtype))

    def per_group(self, values: Values, groups: Groups) -> Values:
        """Reduce the values of each group's rows, in row order."""
        if groups.members is None:
            return values
        out = np.full(groups.count, self.identity, dtype=self.dtype)
        if self.dtype == np.bool_:
            out[groups.members[values]] = True
        else:
            self.reduce.at(out, groups.members, values)
        return out

    def merged(self, one: Values, other: Values) -> Values:
        """Reduce two values of each key."""
        return np.asarray(self.reduce(one, other))

    def of_table(self, table: pa.Table) -> Values:
        return plain(table.column(self.name)).astype(self.dtype, copy=False)


@dataclass(frozen=True, slots=True)
class IntegerSum(Part):
    """A sum in int64 that refuses to leave it. `of` says whose sum: "sum('amount')"."""

    of: str

    def per_group(self, values: Values, groups: Groups) -> Values:
        if groups.members is None or not len(values):
            return values
        out = np.zeros(groups.count, dtype=np.int64)
        largest = max(abs(int(values.min())), abs(int(values.max())))
        if largest * len(values) < 1 << 63:  # as good as always: no group can leave int64
            np.add.at(out, groups.members, values)
            return out
        # Both halves are summed apart, which is exact: int64 + int64 of up to 2^31 rows.
        high, low = np.zeros_like(out), np.zeros_like(out)
        np.add.at(high, groups.members, values >> _HALF)
        np.add.at(low, groups.members, values & _LOW)
        high += low >> _HALF
        if np.any(high != high.astype(np.int32)):
            raise _overflow(self.of)
        return (high << _HALF) | (low & _LOW)

    def merged(self, one: Values, other: Values) -> Values:
        total: Values = one + other
        # Only terms of one sign can overflow, and then the total has the other.
        if np.any((one ^ total) & (other ^ total) < 0):
            raise _overflow(self.of)
        return total


def _overflow(of: str) -> OperatorError:
    return OperatorError(
        f"{of} of a key has left the range of 64-bit integers; cast the column to a float before "
        'it is summed, such as pl.col("…").cast(pl.Float64), or sum a coarser unit',
        aggregate=of,
    )


def rows_part(name: str) -> Part:
    """Counts rows; `row_counts` gives its values without an array of ones."""
    return Part(name, np.dtype(np.int64), np.add, 0)


def integer_sum_part(name: str, of: str) -> Part:
    return IntegerSum(name, np.dtype(np.int64), np.add, 0, of)


def sum_part(name: str, dtype: Any) -> Part:
    return Part(name, np.dtype(dtype), np.add, 0)


def seen_part(name: str) -> Part:
    return Part(name, np.dtype(np.bool_), np.logical_or, False)


def least_part(name: str, dtype: np.dtype[Any]) -> Part:
    # fmin and fmax ignore NaN beside a number, so NaN can be the identity and all-NaN stays NaN.
    identity = np.nan if dtype.kind == "f" else np.iinfo(dtype).max
    return Part(name, dtype, np.fmin, identity)


def greatest_part(name: str, dtype: np.dtype[Any]) -> Part:
    identity = np.nan if dtype.kind == "f" else np.iinfo(dtype).min
    return Part(name, dtype, np.fmax, identity)


def row_counts(groups: Groups) -> Values:
    if groups.members is None:
        return np.ones(groups.count, dtype=np.int64)
    return np.bincount(groups.members, minlength=groups.count)


def storage_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """How a number or a time is held in NumPy."""
    if pa.types.is_temporal(kind):
        return np.dtype(np.int32 if kind.bit_width == 32 else np.int64)
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def plain(column: pa.ChunkedArray, fill: Any = None) -> Values:
    """A column as NumPy; times by their integer; nulls replaced by `fill`."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if pa.types.is_temporal(array.type):
        array = array.view(pa.from_numpy_dtype(storage_dtype(array.type)))
    if array.null_count:
        array = array.fill_null(pa.scalar(fill, type=array.type))
    return np.asarray(array.to_numpy(zero_copy_only=False))


def valid(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if not column.null_count:
        return np.ones(len(column), dtype=np.bool_)
    return np.asarray(column.is_valid().to_numpy())


def with_nulls(values: Values, present: npt.NDArray[np.bool_], kind: pa.DataType) -> pa.Array:
    array = pa.array(values, mask=None if present.all() else ~present)
    return array.view(kind) if pa.types.is_temporal(kind) else array.cast(kind)


@dataclass(frozen=True, slots=True)
class Update:
    """A computed change of one table: values for slots it has, keys it does not have (or not any
    more, once the removed slots are freed)."""

    slots: Slots
    values: Columns
    first: Hashes
    second: Hashes
    rows: pa.Table
    new_values: Columns
    removed: Slots = field(default_factory=no_slots)

    def apply(self, table: KeyedTable, dirty: bool = True) -> Slots:
        """The slots of the new keys."""
        table.write(self.slots, self.values, dirty)  # before add, which may move slots
        table.delete(self.removed, dirty)
        if not len(self.first):
            return no_slots()
        return table.add(self.first, self.second, self.rows, self.new_values, dirty)


@dataclass(frozen=True, slots=True)
class Merged:
    """Distinct keys of a slice in order of first appearance, with their new values."""

    keys: pa.Table
    values: Columns
    update: Update


def merge(
    table: KeyedTable,
    parts: Sequence[Part],
    hashes: tuple[Hashes, Hashes],
    keys: pa.Table,
    arriving: Columns,
    removed: Slots | None = None,
) -> Merged:
    """Reduce arriving parts by key and onto what the table holds but for the removed slots; the
    table is only read."""
    groups = group_rows(*hashes)
    if groups.members is not None:
        hashes = (hashes[0][groups.firsts], hashes[1][groups.firsts])
        keys = keys.take(pa.array(groups.firsts))
        arriving = {part.name: part.per_group(arriving[part.name], groups) for part in parts}
    slots = table.find(*hashes)
    known = slots != ABSENT
    removed = no_slots() if removed is None else removed
    if len(removed):
        known &= ~np.isin(slots, removed)
    held = slots[known]
    if not len(held):
        none = {part.name: arriving[part.name][:0] for part in parts}
        return Merged(keys, arriving, Update(held, none, *hashes, keys, arriving, removed))
    old = table.values(held)
    values, written, added = {}, {}, {}
    new = ~known
    for part in parts:
        column = arriving[part.name]
        written[part.name] = part.merged(old[part.name], column[known])
        added[part.name] = column[new]
        whole = column.copy()
        whole[known] = written[part.name]
        values[part.name] = whole
    rows = keys.take(pa.array(np.flatnonzero(new)))
    update = Update(held, written, hashes[0][new], hashes[1][new], rows, added, removed)
    return Merged(keys, values, update)


def load_rows(
    table: KeyedTable,
    parts: Sequence[Part],
    hashes: tuple[Hashes, Hashes],
    rows: pa.Table,
    values: pa.Table,
    deleted: npt.NDArray[np.bool_],
) -> None:
    """Upsert sealed rows: tombstones first, since a key may be deleted and come back later in
    the same table."""
    if deleted.any():
        gone = table.find(hashes[0][deleted], hashes[1][deleted])
        table.delete(np.unique(gone[gone != ABSENT]), dirty=False)
        kept = np.flatnonzero(~deleted)
        hashes = (hashes[0][kept], hashes[1][kept])
        rows, values = rows.take(pa.array(kept)), values.take(pa.array(kept))
    arriving = {part.name: part.of_table(values) for part in parts}
    slots = table.find(*hashes)
    known, new = slots != ABSENT, slots == ABSENT
    update = Update(
        slots[known],
        {name: column[known] for name, column in arriving.items()},
        hashes[0][new],
        hashes[1][new],
        rows if new.all() else rows.take(pa.array(np.flatnonzero(new))),
        {name: column[new] for name, column in arriving.items()},
    )
    update.apply(table, dirty=False)
