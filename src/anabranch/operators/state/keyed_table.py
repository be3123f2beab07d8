"""Keyed state: 128-bit identity of a key → slot, and the columns of every slot.

An open-addressing index with linear probing, held in NumPy and probed for whole batches. Slots are
numbered in order of insertion and keep that order through compaction, `export` and `load`, so what
is emitted in slot order is the same before and after a recovery. Everything a slice does costs
O(rows of the slice); only growth (amortised) and compaction look at all slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.operators.base import DELETED, GROUP
from anabranch.operators.rows.hashing import Hashes, groups_of
from anabranch.operators.state.row_log import ABSENT, RowLog, Slots

Columns = dict[str, npt.NDArray[Any]]

NEVER = np.iinfo(np.int64).max  # a moment that does not come
_MIN_SLOTS = 64
_INT64: np.dtype[Any] = np.dtype(np.int64)
_TIDIED_ROWS = 4  # per row that is added, of those that were there before


def no_slots() -> Slots:
    return np.empty(0, dtype=np.int64)


class KeyedTable:
    """One row (Arrow, written once) and mutable value columns (NumPy) per key.

    `moments` are int64 values that are not exported, NEVER unless given: the one who loads a table
    finds them out again.
    """

    def __init__(
        self,
        row_schema: pa.Schema,
        values: Mapping[str, np.dtype[Any]],
        key_groups: int,
        moments: Iterable[str] = (),
    ) -> None:
        self._key_groups = key_groups
        self._moments = tuple(moments)
        self._log = RowLog(row_schema)
        self._slots = 0  # used, dead ones included
        self._dead = 0
        self._spent = 0  # dead and not dirty: the next seal has no use for them
        self._index = np.full(4 * _MIN_SLOTS, ABSENT, dtype=np.int32)
        self._first: Hashes = np.empty(_MIN_SLOTS, dtype=np.uint64)
        self._second: Hashes = np.empty(_MIN_SLOTS, dtype=np.uint64)
        self._alive = np.zeros(_MIN_SLOTS, dtype=np.bool_)
        self._dirty = np.zeros(_MIN_SLOTS, dtype=np.bool_)
        self._values: Columns = {
            name: np.empty(_MIN_SLOTS, dtype=dtype)
            for name, dtype in {**values, **dict.fromkeys(self._moments, _INT64)}.items()
        }

    def __len__(self) -> int:
        return self._slots - self._dead

    def find(self, first: Hashes, second: Hashes) -> Slots:
        """The slot of every key, ABSENT where there is none. Duplicates are allowed."""
        found = np.full(len(first), ABSENT, dtype=np.int64)
        if not len(self):
            return found
        mask = np.uint64(len(self._index) - 1)
        place = ((first ^ second) & mask).astype(np.int64)
        rows = np.arange(len(first))
        while len(rows):
            slot = self._index[place]
            used = slot != ABSENT
            if not used.all():
                rows, place, slot = rows[used], place[used], slot[used]
            same = self._first[slot] == first[rows]
            same &= self._second[slot] == second[rows]
            if self._dead:
                same &= self._alive[slot]
            found[rows[same]] = slot[same]
            other = ~same
            rows, place = rows[other], place[other] + 1
            place &= np.int64(mask)
        return found

    def add(
        self, first: Hashes, second: Hashes, rows: pa.Table, values: Columns, dirty: bool = True
    ) -> Slots:
        """Append keys that are distinct and absent; slots known before may move (compaction). What
        is not dirty was loaded from a file."""
        if self._spent > len(self):
            self.keep(np.flatnonzero(self._alive[: self._slots] | self._dirty[: self._slots]))
        start, end = self._slots, self._slots + len(first)
        self._reserve(end)
        if dirty:
            self._log.append(rows)
        else:
            self._log.load(rows)
        self._first[start:end] = first
        self._second[start:end] = second
        self._alive[start:end] = True
        self._dirty[start:end] = dirty
        for name, column in {**dict.fromkeys(self._moments, NEVER), **values}.items():
            self._values[name][start:end] = column
        self._slots = end
        slots = np.arange(start, end)
        self._link(slots)
        if self._spent or self._log.spare:
            needed = lambda s: self._alive[s] | self._dirty[s]  # noqa: E731
            self._log.tidy(needed, _TIDIED_ROWS * len(first))
        return slots

    def write(self, slots: Slots, values: Columns, dirty: bool = True) -> None:
        for name, column in values.items():
            self._values[name][slots] = column
        if dirty:
            self._dirty[slots] = True

    def delete(self, slots: Slots, dirty: bool = True) -> None:
        """Free slots; a key that comes back gets a new slot at the end."""
        self._alive[slots] = False
        self._dirty[slots] = dirty
        self._dead += len(slots)
        self._spent += 0 if dirty else len(slots)

    def values(self, slots: Slots) -> Columns:
        return {name: column[slots] for name, column in self._values.items()}

    def value(self, name: str, slots: Slots) -> npt.NDArray[Any]:
        return self._values[name][slots]

    def rows(self, slots: Slots) -> pa.Table:
        return self._log.take(slots)

    def hashes(self, slots: Slots) -> tuple[Hashes, Hashes]:
        return self._first[slots], self._second[slots]

    def live_slots(self) -> Slots:
        return np.flatnonzero(self._alive[: self._slots])

    def take_dirty(self) -> Slots:
        """Slots written or deleted since the last call."""
        slots = np.flatnonzero(self._dirty[: self._slots])
        self._dirty[slots] = False
        self._spent = self._dead
        return slots

    def export(self, slots: Slots) -> pa.Table:
        """`GROUP`, `DELETED`, the rows, the values; no moments."""
        return self._exported(slots, self.rows(slots))

    def snapshot(self) -> pa.Table:
        """All live rows. Dead ones may be among them, marked as such: to leave them out would copy
        a large state while the stream waits."""
        return self._exported(*self._log.whole())

    def _exported(self, slots: Slots, rows: pa.Table) -> pa.Table:
        """What stands where a slot is ABSENT is marked as deleted, so it does not matter."""
        deleted = ~self._alive[slots] | (slots == ABSENT)
        marks = {
            GROUP: pa.array(groups_of(self._first[slots], self._key_groups)),
            DELETED: pa.array(deleted),
        }
        own = (name for name in self._values if name not in self._moments)
        values = {name: pa.array(self._values[name][slots]) for name in own}
        kept = {name: rows.column(name) for name in rows.schema.names}
        return pa.table({**marks, **kept, **values})

    @property
    def nbytes(self) -> int:
        arrays: list[npt.NDArray[Any]] = [
            self._index,
            self._first,
            self._second,
            self._alive,
            self._dirty,
        ]
        return sum(array.nbytes for array in [*arrays, *self._values.values()]) + self._log.nbytes

    def keep(self, slots: Slots) -> None:
        """Compact to these slots, in their order; the others leave no trace."""
        self._log = self._log.kept(slots)
        size = max(_MIN_SLOTS, len(slots))
        self._resize(size, slots)
        self._slots = len(slots)
        dead = ~self._alive[: len(slots)]
        self._dead = int(np.count_nonzero(dead))
        self._spent = int(np.count_nonzero(dead & ~self._dirty[: len(slots)]))
        self._reindex()

    def _reserve(self, slots: int) -> None:
        if slots > len(self._first):
            self._resize(max(slots, 2 * len(self._first)), slice(0, self._slots))
        if 2 * slots > len(self._index):
            self._index = np.full(_index_size(slots), ABSENT, dtype=np.int32)
            self._link(np.arange(self._slots))

    def _resize(self, size: int, kept: Slots | slice) -> None:
        self._first = _resized(self._first, size, kept)
        self._second = _resized(self._second, size, kept)
        self._alive = _resized(self._alive, size, kept)
        self._dirty = _resized(self._dirty, size, kept)
        self._values = {n: _resized(column, size, kept) for n, column in self._values.items()}

    def _reindex(self) -> None:
        self._index = np.full(_index_size(self._slots), ABSENT, dtype=np.int32)
        self._link(np.arange(self._slots))

    def _link(self, slots: Slots) -> None:
        """Enter slots into the index: all claim a free place at once, who is overwritten goes on
        to the next place. The place of a dead slot is free: a key that is deleted and added again
        and again must not leave a longer and longer chain behind."""
        mask = np.int64(len(self._index) - 1)
        slot = slots.astype(np.int32)
        # Both words: rows of one key in a join differ in the second only, and would pile up.
        place = ((self._first[slots] ^ self._second[slots]) & np.uint64(mask)).astype(np.int64)
        while len(slot):
            held = self._index[place]
            free = held == ABSENT
            if self._dead:
                free |= ~self._alive[held]
            self._index[place[free]] = slot[free]
            lost = self._index[place] != slot
            slot, place = slot[lost], place[lost] + 1
            place &= mask


def _index_size(slots: int) -> int:
    """A power of two that leaves the index at most half full after the table has doubled."""
    return 1 << max(4 * _MIN_SLOTS, 4 * slots - 1).bit_length()


def _resized(column: npt.NDArray[Any], size: int, kept: Slots | slice) -> npt.NDArray[Any]:
    grown = np.empty(size, dtype=column.dtype)
    part = column[kept]
    grown[: len(part)] = part
    return grown
