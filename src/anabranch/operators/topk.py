"""The k rows with the largest (or smallest) value of each key, always up to date.

The best k of a union are among the best k of its parts, so every upstream part sends at most k rows
per key, and the state of a key is its ranking: a list of at most k rows, the best with number 0.
Among equal values the row that came first ranks first; held rows came before those of the slice.
Nulls are not ranked; NaN ranks behind every number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.operators.accumulators import Values, plain, storage_dtype, valid, with_nulls
from anabranch.operators.aggregates import check_unreserved, ordered_type, with_columns
from anabranch.operators.base import DELETED, GROUP, Computed, SliceTime
from anabranch.operators.canonical import canonical, canonical_table, require_column
from anabranch.operators.grouping import group_rows
from anabranch.operators.hashing import check_key_types, hash_keys
from anabranch.operators.key_lists import (
    NUMBER,
    KeyLists,
    Replacement,
    Rows,
    members_of,
    positions,
    sealed_schema,
)

RANK = "rank"  # int64, from 1


class TopKState:
    """The ranking of every key."""

    def __init__(self, keys: tuple[str, ...], schema: pa.Schema, by: str, key_groups: int) -> None:
        self.schema = schema
        rows, values = _split(schema, by)
        self.lists = KeyLists(keys, rows, values, key_groups)

    def install(self, change: Replacement) -> None:
        self.lists.apply(change)

    def seal(self) -> pa.Table:
        return self.lists.seal()

    def snapshot(self, groups: Iterable[int] | None = None) -> pa.Table:
        return self.lists.snapshot(groups)

    def load(self, table: pa.Table) -> None:
        self.lists.load(table)

    def drop(self, groups: Iterable[int]) -> None:
        self.lists.drop(groups)

    @property
    def rows(self) -> int:
        return len(self.lists)

    @property
    def nbytes(self) -> int:
        return self.lists.nbytes


@dataclass(frozen=True, slots=True)
class TopK:
    """All columns and the rank. After a slice, the whole new ranking of every key whose ranking
    changed: keys in order of first appearance in the slice, rows by rank."""

    keys: tuple[str, ...]
    k: int
    by: str
    descending: bool = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise TopologyError(f"top_k with k = {self.k}: give at least 1", k=self.k)
        if self.by in self.keys:
            raise TopologyError(
                f"top_k ranks by {self.by!r}, which is a key: all rows of a key would be equal; "
                "rank by another column",
                column=self.by,
            )

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        schema = self._checked(schemas[0])
        check_unreserved(schema.names, (GROUP, DELETED, NUMBER, RANK))
        return schema.append(pa.field(RANK, pa.int64()))

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        return sealed_schema(*_split(self._checked(schemas[0]), self.by))

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> TopKState:
        return TopKState(self.keys, self._checked(schemas[0]), self.by, key_groups)

    def combine(self, port: int, table: pa.Table) -> pa.Table:
        """At most k rows per key; keys in order of first appearance, their rows in order."""
        table = canonical_table(table)
        if table.column(self.by).null_count:
            table = table.filter(pa.array(valid(table.column(self.by))))
        groups = group_rows(*hash_keys(table, self.keys))
        if groups.members is None:
            return table
        order = self._ranked(groups.members, plain(table.column(self.by)))
        kept = order[positions(groups.members[order]) < self.k]
        kept = kept[np.lexsort((kept, groups.members[kept]))]
        return table.take(pa.array(kept))

    def compute(self, state: TopKState, inputs: tuple[pa.Table, ...], time: SliceTime) -> Computed:
        table = canonical_table(inputs[0])
        hashes = hash_keys(table, self.keys)
        groups = group_rows(*hashes)
        keys = hashes[0][groups.firsts], hashes[1][groups.firsts]
        owners, slots = state.lists.find(*keys)
        members = np.concatenate([owners, members_of(groups)])
        values = np.concatenate(
            [state.lists.values(slots)[self.by], plain(table.column(self.by))],
            dtype=self._dtype(state),
        )
        order = self._ranked(members, values)  # stable: what was held comes first among equals
        order = order[positions(members[order]) < self.k]
        changed = np.zeros(groups.count, dtype=np.bool_)
        changed[members[order[order >= len(slots)]]] = True
        order = order[changed[members[order]]]
        rows = self._rows(state, slots, table, order)
        key = members[order]
        numbers = positions(key)
        by = {self.by: values[order]}
        change = Replacement(
            slots[changed[owners]], (keys[0][key], keys[1][key]), numbers, rows, by
        )
        ranked = {self.by: _typed(values[order], state.schema.field(self.by).type)}
        output = with_columns(rows, ranked).select(state.schema.names)
        return Computed(with_columns(output, {RANK: pa.array(numbers + 1)}), change)

    def _ranked(self, members: npt.NDArray[Any], values: Values) -> Rows:
        """Rows by key, then from the best value to the worst, then in order."""
        if self.descending:  # ~x reverses the order of integers without overflow
            values = -values if values.dtype.kind == "f" else ~values
        return np.lexsort((values, members))

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
        return schema


def _split(schema: pa.Schema, by: str) -> tuple[pa.Schema, dict[str, np.dtype[Any]]]:
    """The ranked column is a value, read without touching the rest of the row."""
    rows = schema.remove(schema.get_field_index(by))
    return rows, {by: storage_dtype(schema.field(by).type)}


def _typed(values: Values, kind: pa.DataType) -> pa.Array:
    return with_nulls(values, np.ones(len(values), dtype=np.bool_), kind)
