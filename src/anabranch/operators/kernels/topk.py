"""The k rows with the largest (or smallest) value of each key, always up to date.

The best k of a union are among the best k of its parts, so every upstream part sends at most k rows
per key, and the state of a key is its ranking: a list of at most k rows, the best with number 0.
Among equal values the row that came first ranks first; held rows came before those of the slice.
Nulls are not ranked; NaN ranks behind every number.

With a time to live, all rows of a ranking carry when it was last touched, so a slice writes the
rankings of all keys it has rows of; it emits only those that changed.

A final ranking is that of a window: it is touched at the window, and instead of its changes it is
emitted once, when the watermark has passed it, and forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.model.given import whole_number
from anabranch.model.graph import Hold
from anabranch.operators.base import DELETED, GROUP, Computed, SliceTime
from anabranch.operators.kernels.aggregates import check_unreserved, ordered_type, with_columns
from anabranch.operators.rows.canonical import canonical, canonical_table, require_column
from anabranch.operators.rows.grouping import Groups, group_rows
from anabranch.operators.rows.hashing import check_key_types, hash_keys
from anabranch.operators.state.accumulators import (
    Values,
    plain,
    storage_dtype,
    valid,
    with_nulls,
)
from anabranch.operators.state.key_lists import (
    NUMBER,
    KeyLists,
    Replacement,
    Rows,
    members_of,
    positions,
    sealed_schema,
)
from anabranch.operators.state.keyed_table import NEVER, Columns, no_slots
from anabranch.operators.state.row_log import Slots
from anabranch.operators.state.ttl import ALARM, TOUCHED, TOUCHED_PART, Ttl

RANK = "rank"  # int64, from 1
_SAMPLED = 8  # one row in this number is looked at for a bound


class TopKState:
    """The ranking of every key."""

    def __init__(self, kernel: TopK, schema: pa.Schema, key_groups: int) -> None:
        self.schema = schema
        ttl = kernel.ttl
        moments = () if ttl is None else (ALARM,)
        self.lists = KeyLists(kernel.keys, *kernel.split(schema), key_groups, moments)
        self._alarms = None if ttl is None else ttl.alarms(self.lists.table)
        self._by_event = ttl is None or ttl.time is not None

    def install(self, change: TopKChange) -> None:
        heads = self.lists.apply(change.lists)
        if self._alarms is not None:
            self._alarms.settle(change.now_us)
            self._alarms.watch(heads)

    def forgotten(self, now_us: int | None) -> Slots:
        """All rows of the rankings that are due to be forgotten: by the time they were touched
        and key, in an order that does not depend on how keys are spread, then by rank."""
        if self._alarms is None:
            return no_slots()
        heads = self._alarms.due(now_us)
        first, second = self.lists.table.hashes(heads)
        order = np.lexsort((second, first, self.lists.table.value(TOUCHED, heads)))
        return self.lists.find(first[order], second[order])[1]

    def seal(self) -> pa.Table:
        return self.lists.seal()

    def snapshot(self) -> pa.Table:
        return self.lists.snapshot()

    def load(self, table: pa.Table) -> None:
        heads = self.lists.load(table)
        if self._alarms is not None:
            self._alarms.watch(heads)

    @property
    def rows(self) -> int:
        return len(self.lists)

    @property
    def due_us(self) -> int | None:
        return None if self._alarms is None or self._by_event else self._alarms.first

    @property
    def nbytes(self) -> int:
        return self.lists.nbytes + (0 if self._alarms is None else self._alarms.nbytes)


@dataclass(frozen=True, slots=True)
class TopKChange:
    lists: Replacement
    now_us: int | None


@dataclass(frozen=True, slots=True)
class TopK:
    """All columns and the rank. After a slice, the whole new ranking of every key whose ranking
    changed: keys in order of first appearance in the slice, rows by rank. If `once`, every ranking
    a single time, when its time to live ends: by window and key, rows by rank."""

    keys: tuple[str, ...]
    k: int
    by: str
    descending: bool = True
    ttl: Ttl | None = None
    once: bool | None = None  # None, not False: checkpoints from before it was there fit

    @staticmethod
    def final(keys: tuple[str, ...], k: int, by: str, descending: bool, window: str) -> TopK:
        """Rankings of windows, keyed by a column that tells them apart."""
        return TopK(keys, k, by, descending, Ttl(1, window), once=True)

    @property
    def holds(self) -> tuple[tuple[str | None, Hold], ...]:
        return ((self.ttl.time, Hold(1)),) if self.once and self.ttl is not None else ()

    def __post_init__(self) -> None:
        whole_number("k of top_k", self.k)
        if self.by in self.keys:
            raise TopologyError(
                f"top_k ranks by {self.by!r}, which is a key: all rows of a key would be equal; "
                "rank by another column",
                column=self.by,
            )

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        schema = self._checked(schemas[0])
        check_unreserved(schema.names, (GROUP, DELETED, NUMBER, RANK, TOUCHED, ALARM))
        return schema.append(pa.field(RANK, pa.int64()))

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        return sealed_schema(*self.split(self._checked(schemas[0])))

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> TopKState:
        return TopKState(self, self._checked(schemas[0]), key_groups)

    def combine(self, port: int, table: pa.Table) -> pa.Table:
        """At most k rows per key; keys in order of first appearance, their rows in order."""
        table = canonical_table(table)
        if table.column(self.by).null_count:
            table = table.filter(pa.array(valid(table.column(self.by))))
        groups = group_rows(*hash_keys(table, self.keys))
        if self.ttl is not None:
            touches = self.ttl.touches(table, groups)
            table = with_columns(table, {n: t[members_of(groups)] for n, t in touches.items()})
        if groups.members is None:
            return table
        values = plain(table.column(self.by))
        rows = np.flatnonzero(self._may_rank(groups.members, values, groups.count))
        order = rows[self._ranked(groups.members[rows], values[rows])]
        kept = order[positions(groups.members[order]) < self.k]
        kept = kept[np.lexsort((kept, groups.members[kept]))]
        return table.take(pa.array(kept))

    def compute(self, state: TopKState, inputs: tuple[pa.Table, ...], time: SliceTime) -> Computed:
        table = canonical_table(inputs[0])
        now_us = None if self.ttl is None else self.ttl.now_us(time)
        late_rows = 0
        if self.once and now_us is not None:
            late = plain(table.column(TOUCHED)) < now_us
            late_rows = int(late.sum())
            table = table.filter(pa.array(~late)) if late_rows else table
        hashes = hash_keys(table, self.keys)
        groups = group_rows(*hashes)
        keys = hashes[0][groups.firsts], hashes[1][groups.firsts]
        forgotten = state.forgotten(now_us)
        owners, slots = state.lists.find(*keys)
        if len(forgotten):
            held = ~np.isin(slots, forgotten)
            owners, slots = owners[held], slots[held]
        members = np.concatenate([owners, members_of(groups)])
        values = np.concatenate(
            [state.lists.table.value(self.by, slots), plain(table.column(self.by))],
            dtype=self._dtype(state),
        )
        order = self._ranked(members, values)  # stable: what was held comes first among equals
        order = order[positions(members[order]) < self.k]
        changed = np.zeros(groups.count, dtype=np.bool_)
        changed[members[order[order >= len(slots)]]] = True
        written = changed if self.ttl is None else np.ones_like(changed)
        order = order[written[members[order]]]
        rows = self._rows(state, slots, table, order)
        key = members[order]
        numbers = positions(key)
        columns: Columns = {self.by: values[order]}
        if self.ttl is not None:
            touched = self._touched(state, owners, slots, self.ttl.touched(table, time), groups)
            columns |= {name: column[key] for name, column in touched.items()}
        hashes = keys[0][key], keys[1][key]
        lists = Replacement(slots[written[owners]], hashes, numbers, rows, columns, forgotten)
        if self.once:
            output = self._closed(state, forgotten)
        else:
            shown = np.flatnonzero(changed[key])
            output = self._output(state, rows, values[order], numbers, shown)
        return Computed(output, TopKChange(lists, now_us), late_rows)

    def _closed(self, state: TopKState, slots: Slots) -> pa.Table:
        """The rankings of windows that are over."""
        held = state.lists.values(slots)
        every = np.arange(len(slots))
        return self._output(state, state.lists.rows(slots), held[self.by], held[NUMBER], every)

    def _touched(
        self, state: TopKState, owners: Rows, slots: Slots, arriving: Rows, groups: Groups
    ) -> Columns:
        """Per key of the slice when it was last touched, and its alarm as it is set."""
        touched = np.array(TOUCHED_PART.per_group(arriving, groups))
        alarms = np.full(groups.count, NEVER)
        held = state.lists.table.values(slots)
        touched[owners] = np.maximum(touched[owners], held[TOUCHED])
        heads = held[NUMBER] == 0
        alarms[owners[heads]] = held[ALARM][heads]
        return {TOUCHED: touched, ALARM: alarms}

    def _output(
        self, state: TopKState, rows: pa.Table, values: Values, numbers: Rows, shown: Rows
    ) -> pa.Table:
        if len(shown) < len(values):
            rows, values, numbers = rows.take(pa.array(shown)), values[shown], numbers[shown]
        ranked = {self.by: _typed(values, state.schema.field(self.by).type)}
        output = with_columns(rows, ranked).select(state.schema.names)
        return with_columns(output, {RANK: pa.array(numbers + 1)})

    def split(self, schema: pa.Schema) -> tuple[pa.Schema, dict[str, np.dtype[Any]]]:
        """Rows and values of the state: what ranks is read without touching the rest of a row."""
        rows = schema.remove(schema.get_field_index(self.by))
        values = {self.by: storage_dtype(schema.field(self.by).type)}
        if self.ttl is not None:
            values[TOUCHED] = TOUCHED_PART.dtype
        return rows, values

    def _ranked(self, members: npt.NDArray[Any], values: Values) -> Rows:
        """Rows by key, then from the best value to the worst, then in order."""
        if self.descending:  # ~x reverses the order of integers without overflow
            values = -values if values.dtype.kind == "f" else ~values
        return np.lexsort((values, members))

    def _may_rank(
        self, members: npt.NDArray[np.int32], values: Values, keys: int
    ) -> npt.NDArray[np.bool_]:
        """Rows no worse than the k-th best of a sample of their key's rows: of a frequent key, few
        need to be sorted. NaN compares as not worse, so it is never a bound that drops a row."""
        some, owners = values[::_SAMPLED], members[::_SAMPLED]
        order = self._ranked(owners, some)
        bounds = order[positions(owners[order]) == self.k - 1]
        known = np.zeros(keys, dtype=np.bool_)
        known[owners[bounds]] = True
        bound = np.zeros(keys, dtype=values.dtype)
        bound[owners[bounds]] = some[bounds]
        bound_of_row = bound[members]
        worse = values < bound_of_row if self.descending else values > bound_of_row
        return ~(worse & known[members])

    def _rows(self, state: TopKState, slots: Rows, table: pa.Table, order: Rows) -> pa.Table:
        """Rows `order` of the held ones followed by those of the slice."""
        held = order < len(slots)
        names = state.lists.row_schema.names
        both = pa.concat_tables(
            [
                state.lists.rows(slots[order[held]]),
                table.select(names).take(pa.array(order[~held] - len(slots))),
            ]
        )
        back = np.empty(len(order), dtype=np.int64)
        back[np.concatenate([np.flatnonzero(held), np.flatnonzero(~held)])] = np.arange(len(order))
        return both.combine_chunks().take(pa.array(back))

    def _dtype(self, state: TopKState) -> np.dtype[Any]:
        return storage_dtype(state.schema.field(self.by).type)

    def _checked(self, schema: pa.Schema) -> pa.Schema:
        schema = canonical(schema)
        check_key_types(schema, self.keys)
        ordered_type(self.by, "top_k", require_column(schema, self.by, "top_k"))
        if self.ttl is not None:
            self.ttl.check(schema)
        return schema


def _typed(values: Values, kind: pa.DataType) -> pa.Array:
    return with_nulls(values, np.ones(len(values), dtype=np.bool_), kind)
