"""Keyed state with several rows per key: a list that is found, and replaced, as a whole.

The rows of a key are numbered from 0 without a hole, and the number is part of a row's identity. A
list that changes is written anew, so a sealed delta holds every row of the lists it names, and
loading it replaces those lists; a tombstone stands only for a list that is forgotten whole. Rows
may also be removed from a list's end. Row 0 has the identity of its key.

The number is mixed into the lower half of the first hash, which places a row in the index; the
upper half, which decides the key group, stays that of the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.operators.base import DELETED, GROUP
from anabranch.operators.rows.canonical import canonical_table
from anabranch.operators.rows.grouping import Groups, group_rows
from anabranch.operators.rows.hashing import Hashes, hash_keys
from anabranch.operators.state.accumulators import plain
from anabranch.operators.state.keyed_table import Columns, KeyedTable, no_slots
from anabranch.operators.state.row_log import ABSENT, Slots

NUMBER = "_number"  # int64, position of a row in its key's list

Hashed = tuple[Hashes, Hashes]
Rows = npt.NDArray[np.int64]

_MIX_LOW, _MIX_SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x9FB21C651E98DF25)
_HALF = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Replacement:
    """Slots to free, then whole lists to write: hashes of their keys, numbers, rows, values; and
    slots of whole lists to forget."""

    removed: Slots
    hashes: Hashed
    numbers: Rows
    rows: pa.Table
    values: Columns
    forgotten: Slots = field(default_factory=no_slots)


class KeyLists:
    """Lists of rows (Arrow) and values (NumPy) by key; keys are columns of the rows."""

    def __init__(
        self,
        keys: tuple[str, ...],
        rows: pa.Schema,
        values: Mapping[str, np.dtype[Any]],
        key_groups: int,
        moments: Iterable[str] = (),
    ) -> None:
        self.row_schema = rows
        self._keys = keys
        self._value_names = tuple(values)
        whole = {**values, NUMBER: np.dtype(np.int64)}
        self.table = KeyedTable(rows, whole, key_groups, moments)

    def find(self, first: Hashes, second: Hashes) -> tuple[Rows, Slots]:
        """All rows of distinct keys: (which key, slot), by key and then by number."""
        owners, slots = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        asking = np.arange(len(first))
        number = 0
        while len(asking) and len(self.table):
            numbers = np.full(len(asking), number)
            found = self.table.find(*_numbered((first[asking], second[asking]), numbers))
            hit = found != ABSENT
            asking = asking[hit]
            owners.append(asking)
            slots.append(found[hit])
            number += 1
        all_owners, all_slots = np.concatenate(owners), np.concatenate(slots)
        order = np.argsort(all_owners, kind="stable")
        return all_owners[order], all_slots[order]

    def rows(self, slots: Slots) -> pa.Table:
        return self.table.rows(slots)

    def values(self, slots: Slots) -> Columns:
        return self.table.values(slots)

    def apply(self, change: Replacement, dirty: bool = True) -> Slots:
        """The slots of the first rows of the lists written."""
        self.remove(change.removed)
        self.table.delete(change.forgotten)
        if not len(change.numbers):
            return no_slots()
        values = {**change.values, NUMBER: change.numbers}
        identities = _numbered(change.hashes, change.numbers)
        slots = self.table.add(*identities, change.rows, values, dirty)
        return slots[np.flatnonzero(change.numbers == 0)]

    def remove(self, slots: Slots) -> None:
        """Free rows, leaving no mark: their list is written anew, or what ended them is known to
        the one who loads the state (a watermark)."""
        self.table.delete(slots, dirty=False)

    def seal(self) -> pa.Table:
        return self.table.export(self.table.take_dirty())

    def snapshot(self) -> pa.Table:
        return self.table.snapshot()

    def load(self, table: pa.Table) -> Slots:
        """Replace the lists of all keys in the table; gives the slots of their first rows."""
        rows = canonical_table(table.select(self.row_schema.names))
        first, second = hash_keys(rows, self._keys)
        once = group_rows(first, second).firsts
        _, removed = self.find(first[once], second[once])
        values = {name: plain(table.column(name)) for name in (*self._value_names, NUMBER)}
        deleted = np.asarray(table.column(DELETED))
        if deleted.any():
            live = np.flatnonzero(~deleted)
            rows, first, second = rows.take(pa.array(live)), first[live], second[live]
            values = {name: column[live] for name, column in values.items()}
        numbers = values.pop(NUMBER)
        change = Replacement(removed, (first, second), numbers, rows, values)
        return self.apply(change, dirty=False)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes


def sealed_schema(rows: pa.Schema, values: Mapping[str, np.dtype[Any]]) -> pa.Schema:
    """What `KeyLists.seal` gives."""
    marks = [pa.field(GROUP, pa.uint16()), pa.field(DELETED, pa.bool_())]
    own = [pa.field(name, pa.from_numpy_dtype(dtype)) for name, dtype in values.items()]
    return pa.schema([*marks, *rows, *own, pa.field(NUMBER, pa.int64())])


def members_of(groups: Groups) -> npt.NDArray[Any]:
    """The group of every row."""
    return np.arange(groups.count) if groups.members is None else groups.members


def positions(sorted_groups: npt.NDArray[Any]) -> Rows:
    """Given group numbers in runs, the position of every row in its run."""
    size = len(sorted_groups)
    starts = np.ones(size, dtype=np.bool_)
    starts[1:] = sorted_groups[1:] != sorted_groups[:-1]
    rows = np.arange(size)
    return rows - np.maximum.accumulate(np.where(starts, rows, 0))


def _numbered(hashes: Hashed, numbers: Rows) -> Hashed:
    number = numbers.astype(np.uint64)
    low = (hashes[0] + number * _MIX_LOW) << _HALF >> _HALF
    return (hashes[0] >> _HALF << _HALF) | low, hashes[1] + number * _MIX_SECOND
