"""Arrow rows by slot, in chunks: rows are written once, and their room is given back in pieces.

A state whose rows are replaced leaves dead ones behind. To copy all the others together at once
would hold one slice up; `tidy` does it chunk by chunk, a bit per slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Slots = npt.NDArray[np.int64]

ABSENT = -1

_CHUNK_ROWS = 1 << 17  # rows of a finished chunk
_CHUNK_BYTES = 1 << 24
_MIN_RUN = 32  # rows of a slice, on average, from which on slices cost less than a copy
# Rows from which on they stay where they are when a checkpoint is loaded or others leave: in pieces
# of this many bytes, each row so wide that what else stays with it does not matter.
_KEPT_BYTES = 1 << 20
_KEPT_ROW_BYTES = 128
_SMALL_BYTES = 1 << 24  # of neighbours that become one chunk when they are tidied


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A table, and which of its rows belong to which slots, in the same order."""

    table: pa.Table
    start: int
    end: int  # no slot of this chunk is beyond
    slots: Slots | None = None  # of the rows; None: all from `start` to `end`
    at: Slots | None = None  # where they are in the table; None: they are all there is

    def __len__(self) -> int:
        return self.end - self.start if self.slots is None else len(self.slots)

    @property
    def is_plain(self) -> bool:
        return self.slots is None and self.at is None

    @property
    def spare(self) -> int:
        """Rows of the table that belong to no slot."""
        return int(self.table.num_rows) - len(self)

    @property
    def is_wide(self) -> bool:
        return int(self.table.nbytes) >= _KEPT_ROW_BYTES * int(self.table.num_rows)

    def all_slots(self) -> Slots:
        return np.arange(self.start, self.end) if self.slots is None else self.slots

    def by_row(self) -> Slots:
        """The slot of every row of the table, ABSENT where it has none."""
        if self.at is None:
            return self.all_slots()
        slots = np.full(self.table.num_rows, ABSENT, dtype=np.int64)
        slots[self.at] = self.all_slots()
        return slots

    def places(self, slots: Slots) -> Slots:
        """Where in the table the rows of these slots are."""
        found = slots - self.start if self.slots is None else np.searchsorted(self.slots, slots)
        return found if self.at is None else self.at[found]

    def only(self, wanted: npt.NDArray[np.bool_], copy: bool) -> _Chunk:
        """With some of its rows, under the same slots."""
        slots = self.all_slots()[wanted]
        at = np.flatnonzero(wanted) if self.at is None else self.at[wanted]
        if copy:
            return replace(self, table=self.table.take(pa.array(at)), slots=slots, at=None)
        return replace(self, slots=slots, at=at)

    def renumbered(self, start: int) -> _Chunk:
        """The same rows under slots without gaps."""
        at = self.at if self.spare else None
        return _Chunk(self.table, start, start + len(self), None, at)


class RowLog:
    """Neighbouring small chunks are merged, so that there are few; a full one is copied again only
    when most of it is gone."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._chunks: list[_Chunk] = []
        self._slots = 0  # given out so far
        self._next = 0  # the chunk to be tidied next

    def load(self, rows: pa.Table) -> None:
        """Rows that nobody else holds. A copy of a large state would cost most of a restore."""
        wide = rows.nbytes >= _KEPT_ROW_BYTES * rows.num_rows
        for batch in rows.to_batches():
            table = pa.Table.from_batches([batch])
            if wide and table.nbytes >= _KEPT_BYTES:
                self._keep(_Chunk(table, self._slots, self._slots + table.num_rows))
            else:
                self.append(table)

    def append(self, rows: pa.Table) -> None:
        most = max(1, min(_CHUNK_ROWS, rows.num_rows * _CHUNK_BYTES // max(1, rows.nbytes)))
        for start in range(0, rows.num_rows, most):
            # A second chunk makes combine_chunks copy: a state must not keep a whole packet alive.
            piece = [self.schema.empty_table(), rows.slice(start, most)]
            self._push(pa.concat_tables(piece))

    def kept(self, slots: Slots) -> RowLog:
        """A log of these rows alone, which come in ascending order and get slots without gaps. Wide
        ones stay where they are until they are tidied."""
        log = RowLog(self.schema)
        for chunk, mine in self._by_chunk(slots):
            if chunk.is_wide and chunk.table.nbytes >= _KEPT_BYTES:
                wanted = np.zeros(len(chunk), dtype=np.bool_)
                wanted[np.searchsorted(chunk.all_slots(), mine)] = True
                log._keep(chunk.only(wanted, copy=False).renumbered(log._slots))
            else:
                log._push(chunk.table.take(pa.array(chunk.places(mine))))
        return log

    def tidy(self, needed: Callable[[Any], npt.NDArray[np.bool_]], rows: int) -> None:
        """Look at chunks of at least this number of rows, the next ones in a circle, and give back
        the room of slots that nobody needs where they are most of a chunk. Narrow rows wait for
        `kept`, which copies them fast."""
        while rows > 0 and self._chunks:
            self._next %= len(self._chunks)
            chunk = self._chunks[self._next]
            rows -= max(1, chunk.table.num_rows)
            if not chunk.is_wide:
                self._next += 1
                continue
            wanted = needed(slice(chunk.start, chunk.end) if chunk.slots is None else chunk.slots)
            if 2 * np.count_nonzero(wanted) > chunk.table.num_rows:
                self._next += 1
                continue
            before = self._chunks[: self._next]
            left = _joined(before[-1:], chunk.only(wanted, copy=True))
            self._chunks = [*before[:-1], *left, *self._chunks[self._next + 1 :]]
            self._next = len(before[:-1]) + len(left)

    def _keep(self, chunk: _Chunk) -> None:
        self._chunks.append(chunk)
        self._slots = chunk.end

    def _push(self, rows: pa.Table) -> None:
        start, end = self._slots, self._slots + rows.num_rows
        while self._chunks and _worth_merging(self._chunks[-1], rows):
            last = self._chunks.pop()
            rows, start = pa.concat_tables([last.table, rows]), last.start
        self._keep(_Chunk(rows.combine_chunks(), start, end))

    def _by_chunk(self, slots: Slots) -> Iterator[tuple[_Chunk, Slots]]:
        """Chunks, and which of ascending slots are in each."""
        ends = np.searchsorted(slots, np.array([c.end for c in self._chunks], dtype=np.int64))
        low = 0
        for chunk, high in zip(self._chunks, ends, strict=True):
            if low < high:
                yield chunk, slots[low:high]
            low = high

    def take(self, slots: Slots) -> pa.Table:
        order = None
        if len(slots) > 1 and np.any(slots[1:] < slots[:-1]):
            order = np.argsort(slots, kind="stable")
            slots = slots[order]
        parts = [self.schema.empty_table()]
        for chunk, mine in self._by_chunk(slots):
            parts += _picked(chunk.table, chunk.places(mine))
        taken = pa.concat_tables(parts)
        if order is None:
            return taken
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return taken.combine_chunks().take(pa.array(back))

    def whole(self) -> tuple[Slots, pa.Table]:
        """All rows that are there, uncopied, and their slots, ABSENT where one has none."""
        slots = [np.empty(0, np.int64), *(chunk.by_row() for chunk in self._chunks)]
        tables = [self.schema.empty_table(), *(chunk.table for chunk in self._chunks)]
        return np.concatenate(slots), pa.concat_tables(tables)

    @property
    def spare(self) -> int:
        """Rows that belong to no slot and were not tidied away yet."""
        return sum(chunk.spare for chunk in self._chunks)

    @property
    def nbytes(self) -> int:
        return _nbytes(*self._chunks)


def _joined(before: list[_Chunk], chunk: _Chunk) -> list[_Chunk]:
    """A chunk with the one before it, if there is one and both are small."""
    if not len(chunk):
        return before
    if not before or before[0].spare or _nbytes(*before, chunk) > _SMALL_BYTES:
        return [*before, chunk]
    table = pa.concat_tables([before[0].table, chunk.table]).combine_chunks()
    slots = np.concatenate([before[0].all_slots(), chunk.all_slots()])
    return [_Chunk(table, before[0].start, chunk.end, slots)]


def _nbytes(*chunks: _Chunk) -> int:
    return int(sum(chunk.table.nbytes for chunk in chunks))


def _picked(table: pa.Table, rows: Slots) -> list[pa.Table]:
    """Rows in ascending order. Of nearly all of a chunk, as slices: a checkpoint of the whole state
    must not copy it while the stream waits."""
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    if len(starts) * _MIN_RUN > len(rows):
        return [table.take(pa.array(rows))]
    ends = np.append(starts[1:], len(rows))
    return [table.slice(rows[a], b - a) for a, b in zip(starts, ends, strict=True)]


def _worth_merging(last: _Chunk, new: pa.Table) -> bool:
    rows, more = last.table.num_rows, new.num_rows
    if not last.is_plain or rows > 2 * more or rows + more > _CHUNK_ROWS:
        return False
    return bool(last.table.nbytes + new.nbytes <= _CHUNK_BYTES)
