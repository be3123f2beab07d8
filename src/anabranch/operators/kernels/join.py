"""Inner join of two streams of windowed results, on keys and window.

A pair is emitted in the slice in which its later row arrives. Rows wait, by window and side, until
the watermark passes the window's end plus `retain`; the whole window is dropped then. Rows are a
bag: the n-th row of one key, window and side is told apart by its ordinal n, so that each pair is
made exactly once even if a side repeats a key.

Rows that arrive in the slice whose watermark ends their wait still meet each other and what waited:
a watermark that leaps (a quiet source) closes windows upstream and here in the same slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import OperatorError, TopologyError
from anabranch.model.duration import microseconds
from anabranch.operators.base import DELETED, GROUP, Computed, SliceTime
from anabranch.operators.kernels.aggregates import check_names, with_columns
from anabranch.operators.kernels.punctual import Members
from anabranch.operators.kernels.windows import (
    WINDOW_END,
    WINDOW_START,
    pick,
    rows_by_value,
)
from anabranch.operators.rows.canonical import canonical, canonical_table, require_column
from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import Hashes, check_key_types, hash_keys
from anabranch.operators.state.accumulators import Update, load_rows, plain, sum_part
from anabranch.operators.state.closing import ClosingState
from anabranch.operators.state.keyed_table import KeyedTable
from anabranch.operators.state.row_log import ABSENT, Slots

SIDE = "_side"  # uint8: 0 left, 1 right
ORDINAL = "_ordinal"  # int64: which of the equal keys of a window and side
LEFT, RIGHT = 0, 1
_ORDINAL_MIX = np.uint64(0x9FB21C651E98DF25)
_ORDINAL_PART = sum_part(ORDINAL, np.int64)

Hashed = tuple[Hashes, Hashes]
Rows = npt.NDArray[np.int64]
Waiting = tuple[int, int]  # end of the window in microseconds, side


@dataclass(frozen=True, slots=True)
class JoinChange:
    updates: tuple[tuple[Waiting, Update], ...]
    closed_us: int | None


class JoinState(ClosingState):
    """The waiting rows, one table per window end and side."""

    def __init__(
        self, keys: tuple[str, ...], sides: tuple[pa.Schema, pa.Schema], retain_us: int, groups: int
    ) -> None:
        super().__init__()
        self.sides = sides
        self.waiting: dict[Waiting, KeyedTable] = {}
        self._keys = keys
        self._retain_us = retain_us
        self._key_groups = groups
        self._empty = (self.new_table(LEFT), self.new_table(RIGHT))

    def new_table(self, side: int) -> KeyedTable:
        return KeyedTable(self.sides[side], {ORDINAL: _ORDINAL_PART.dtype}, self._key_groups)

    def at(self, end: int, side: int) -> KeyedTable:
        """To read: an empty table where no row waits."""
        return self.waiting.get((end, side), self._empty[side])

    def expired(self, end: int, watermark_us: int | None) -> bool:
        return watermark_us is not None and end + self._retain_us <= watermark_us

    def install(self, change: JoinChange) -> None:
        for (end, side), update in change.updates:
            update.apply(self._writable(end, side))
        self.close(change.closed_us)

    def seal(self) -> pa.Table:
        return self._sealed([(at, t.export(t.take_dirty())) for at, t in self._ordered()])

    def snapshot(self) -> pa.Table:
        return self._sealed([(at, t.export(t.live_slots())) for at, t in self._ordered()])

    def load(self, table: pa.Table) -> None:
        sides = plain(table.column(SIDE))
        for side in (LEFT, RIGHT):
            mine = table.take(pa.array(np.flatnonzero(sides == side)))
            rows = mine.select(self.sides[side].names).cast(self.sides[side])
            first, second = _identities(rows, self._keys)
            second = _numbered(second, plain(mine.column(ORDINAL)))
            deleted = np.asarray(mine.column(DELETED))
            for end, at in rows_by_value(plain(rows.column(WINDOW_END))):
                load_rows(
                    self._writable(end, side),
                    (_ORDINAL_PART,),
                    (first[at], second[at]),
                    pick(rows, at),
                    pick(mine, at),
                    deleted[at],
                )
        self.close(self.sealed_at(table))

    @property
    def rows(self) -> int:
        return sum(len(table) for table in self.waiting.values())

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.waiting.values())

    def _writable(self, end: int, side: int) -> KeyedTable:
        if (end, side) not in self.waiting:
            self.waiting[end, side] = self.new_table(side)
        return self.waiting[end, side]

    def _drop(self, closed_us: int) -> None:
        for end, side in list(self.waiting):
            if self.expired(end, closed_us):
                del self.waiting[end, side]

    def _ordered(self) -> list[tuple[Waiting, KeyedTable]]:
        return sorted(self.waiting.items(), key=lambda item: item[0])

    def _sealed(self, exports: list[tuple[Waiting, pa.Table]]) -> pa.Table:
        schema = _state_schema(self.sides)
        tables = [schema.empty_table()]
        for (_, side), table in exports:
            other = self.sides[1 - side]
            absent = {
                name: pa.nulls(table.num_rows, other.field(name).type)
                for name in other.names
                if name not in table.schema.names
            }
            mark = pa.repeat(pa.scalar(side, pa.uint8()), table.num_rows)
            tables.append(with_columns(table, {**absent, SIDE: mark}).select(schema.names))
        return self._marked(pa.concat_tables(tables))


@dataclass(frozen=True, slots=True)
class WindowJoin:
    """Keys, window_start, window_end, then columns `left` of input 0 and `right` of input 1."""

    keys: tuple[str, ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    retain: timedelta = timedelta(minutes=1)

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        left, right = self._sides(*schemas)
        return pa.schema([*left, *(right.field(name) for name in self.right)])

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        return _state_schema(self._sides(*schemas))

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> JoinState:
        return JoinState(self.keys, self._sides(*schemas), microseconds(self.retain), key_groups)

    def late_schema(self, *schemas: pa.Schema) -> pa.Schema:
        """As of pairs: the columns of the side that the row is not of are null."""
        return self.output_schema(*schemas)

    def late_table(self, port: int, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        own = self.combine(port, rows)
        columns = [
            own.column(f.name) if f.name in own.schema.names else pa.nulls(own.num_rows, f.type)
            for f in schema
        ]
        return pa.table(columns, schema=schema)

    def combine(self, port: int, table: pa.Table) -> pa.Table:
        """Only the columns the join needs."""
        return canonical_table(table.select([*self._on(), *(self.left, self.right)[port]]))

    def grouped(self, port: int, table: pa.Table) -> tuple[pa.Table, Members]:
        return self.combine(port, table), None

    def compute(self, state: JoinState, inputs: tuple[pa.Table, ...], time: SliceTime) -> Computed:
        watermark = state.watermark(time)
        arrivals = [self._arrivals(state, side, inputs[side]) for side in (LEFT, RIGHT)]
        late = tuple(lost for _, lost in arrivals)
        left, right = (by_end for by_end, _ in arrivals)
        outputs = [self._output(*(schema.empty_table() for schema in state.sides))]
        updates: list[tuple[Waiting, Update]] = []
        for end in sorted({*left, *right}):
            new_left = left.get(end) or _Arrival.none(state, LEFT)
            new_right = right.get(end) or _Arrival.none(state, RIGHT)
            outputs += self._pairs(state, end, new_left, new_right)
            if state.expired(end, watermark):
                continue
            for side, new in ((LEFT, new_left), (RIGHT, new_right)):
                if len(new.first):
                    updates.append(((end, side), new.update(state.at(end, side))))
        late_rows = sum(int(lost.sum()) for lost in late)
        change = JoinChange(tuple(updates), watermark)
        return Computed(pa.concat_tables(outputs), change, late_rows, late)

    def _arrivals(
        self, state: JoinState, side: int, table: pa.Table
    ) -> tuple[dict[int, _Arrival], npt.NDArray[np.bool_]]:
        """Rows by the end of their window, without those that come after their wait; which rows
        those are."""
        rows = table.select(state.sides[side].names).cast(state.sides[side])
        for name in (WINDOW_START, WINDOW_END):
            if rows.column(name).null_count:
                raise OperatorError(
                    f"a window join got rows whose {name} is null; filter them out before it",
                    column=name,
                )
        first, second = _identities(rows, self.keys)
        arrivals: dict[int, _Arrival] = {}
        late = np.zeros(rows.num_rows, dtype=np.bool_)
        for end, at in rows_by_value(plain(rows.column(WINDOW_END))):
            if state.expired(end, state.closed_us):
                late[at] = True
            else:
                arrivals[end] = _Arrival(pick(rows, at), first[at], second[at])
        return arrivals, late

    def _pairs(self, state: JoinState, end: int, left: _Arrival, right: _Arrival) -> list[pa.Table]:
        """New left with waiting right, waiting left with new right, new with new; each in the
        order of the arriving rows, then of the rows they meet."""
        waiting_left, waiting_right = state.at(end, LEFT), state.at(end, RIGHT)
        outputs = []
        rows, slots = _probe(waiting_right, left.first, left.second)
        if len(rows):
            outputs.append(self._output(pick(left.rows, rows), waiting_right.rows(slots)))
        rows, slots = _probe(waiting_left, right.first, right.second)
        if len(rows):
            outputs.append(self._output(waiting_left.rows(slots), pick(right.rows, rows)))
        if len(left.first) and len(right.first):
            fresh = state.new_table(LEFT)
            left.update(fresh).apply(fresh)
            rows, slots = _probe(fresh, right.first, right.second)
            outputs.append(self._output(pick(left.rows, slots), pick(right.rows, rows)))
        return outputs

    def _output(self, left: pa.Table, right: pa.Table) -> pa.Table:
        return with_columns(left, {name: right.column(name) for name in self.right})

    def _on(self) -> tuple[str, ...]:
        return (*self.keys, WINDOW_START, WINDOW_END)

    def _sides(self, *schemas: pa.Schema) -> tuple[pa.Schema, pa.Schema]:
        """The columns kept of each side, or why the two cannot be joined."""
        left, right = (canonical(schema) for schema in schemas)
        check_names([*self._on(), *self.left, *self.right])
        for what, schema, own in (("left", left, self.left), ("right", right, self.right)):
            check_key_types(schema, self.keys)
            for name in (*self._on(), *own):
                require_column(schema, name, f"the {what} input of a window join")
        for name in self._on():
            if left.field(name).type != right.field(name).type:
                raise TopologyError(
                    f"a window join needs the same type of {name!r} on both inputs; left has "
                    f"{left.field(name).type}, right has {right.field(name).type}",
                    column=name,
                )
        on = self._on()
        return (
            pa.schema([left.field(name) for name in (*on, *self.left)]),
            pa.schema([right.field(name) for name in (*on, *self.right)]),
        )


@dataclass(frozen=True, slots=True)
class _Arrival:
    """The rows of one slice, side and window end."""

    rows: pa.Table
    first: Hashes
    second: Hashes

    @staticmethod
    def none(state: JoinState, side: int) -> _Arrival:
        nothing = np.empty(0, dtype=np.uint64)
        return _Arrival(state.sides[side].empty_table(), nothing, nothing)

    def update(self, table: KeyedTable) -> Update:
        """The rows numbered after their equals that wait and that came before them."""
        ordinal = _rank(self.first, self.second)
        waiting, _ = _probe(table, self.first, self.second)
        ordinal += np.bincount(waiting, minlength=len(ordinal))
        return Update(
            np.empty(0, dtype=np.int64),
            {},
            self.first,
            _numbered(self.second, ordinal),
            self.rows,
            {ORDINAL: ordinal},
        )


def _identities(rows: pa.Table, keys: tuple[str, ...]) -> Hashed:
    """The first hash is of the key alone, since it decides the key group; the second of key and
    window."""
    first, _ = hash_keys(rows, keys)
    _, second = hash_keys(rows, (*keys, WINDOW_START, WINDOW_END))
    return first, second


def _numbered(second: Hashes, ordinal: Rows) -> Hashes:
    return second + ordinal.astype(np.uint64) * _ORDINAL_MIX


def _rank(first: Hashes, second: Hashes) -> Rows:
    """For every row, how many equal ones come before it."""
    members = group_rows(first, second).members
    if members is None:
        return np.zeros(len(first), dtype=np.int64)
    order = np.argsort(members, kind="stable")
    sizes = np.bincount(members)
    starts = np.cumsum(sizes) - sizes
    rank = np.empty(len(first), dtype=np.int64)
    rank[order] = np.arange(len(first)) - np.repeat(starts, sizes)
    return rank


def _probe(table: KeyedTable, first: Hashes, second: Hashes) -> tuple[Rows, Slots]:
    """All (row, slot) with equal identity, by row and then by ordinal."""
    rows, slots = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    asking = np.arange(len(first))
    ordinal = 0
    while len(asking) and len(table):
        number = np.full(len(asking), ordinal)
        found = table.find(first[asking], _numbered(second[asking], number))
        hit = found != ABSENT
        asking = asking[hit]
        rows.append(asking)
        slots.append(found[hit])
        ordinal += 1
    all_rows, all_slots = np.concatenate(rows), np.concatenate(slots)
    order = np.argsort(all_rows, kind="stable")
    return all_rows[order], all_slots[order]


def _state_schema(sides: tuple[pa.Schema, pa.Schema]) -> pa.Schema:
    left, right = sides
    marks = [pa.field(GROUP, pa.uint16()), pa.field(DELETED, pa.bool_())]
    others = [field for field in right if field.name not in left.names]
    own = [pa.field(ORDINAL, pa.int64()), pa.field(SIDE, pa.uint8())]
    return pa.schema([*marks, *left, *others, *own])
