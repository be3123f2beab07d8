"""Aggregates (count, sum, min, max, mean) and the running aggregate per key.

Nulls are ignored as in SQL; an aggregate that saw only nulls is null. Integer sums are int64, and
one that leaves it is an error; NaN is ignored by min and max beside a number. An aggregate is a
value that names its parts (see accumulators); a distinct count also keeps the pairs it has seen
(see distinct).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.operators.base import Computed, SliceTime
from anabranch.operators.kernels.distinct import CountDistinct
from anabranch.operators.rows.canonical import canonical, canonical_table, require_column
from anabranch.operators.rows.grouping import Groups, group_rows
from anabranch.operators.rows.hashing import check_key_types, hash_keys
from anabranch.operators.state.accumulators import (
    Part,
    Values,
    greatest_part,
    integer_sum_part,
    least_part,
    plain,
    row_counts,
    rows_part,
    seen_part,
    storage_dtype,
    sum_part,
    valid,
    with_nulls,
)
from anabranch.operators.state.aggregate_state import AggregateState, sealed_schema
from anabranch.operators.state.keyed_table import Columns
from anabranch.operators.state.ttl import BORN, BORN_PART, TOUCHED, TOUCHED_PART, Ttl


class Aggregate(Protocol):
    """What an aggregate must say about itself, for an output column `name`."""

    @property
    def column(self) -> str | None:
        """What it aggregates; None: rows."""
        ...

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        """Raises TopologyError when the column is missing or cannot be aggregated."""
        ...

    def parts(self, name: str, schema: pa.Schema) -> tuple[Part, ...]: ...

    def reduce(self, table: pa.Table, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
        """The parts of each group of rows."""
        ...

    def result(self, values: Sequence[Values], kind: pa.DataType) -> pa.Array: ...


@dataclass(frozen=True, slots=True)
class Count:
    """Rows, or the non-null values of a column."""

    column: str | None = None

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        if self.column is not None:
            require_column(schema, self.column, "count")
        return pa.int64()

    def parts(self, name: str, schema: pa.Schema) -> tuple[Part, ...]:
        return (rows_part(f"{name}.rows"),)

    def reduce(self, table: pa.Table, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
        if self.column is None or not table.column(self.column).null_count:
            return [row_counts(groups)]
        present = valid(table.column(self.column)).astype(np.int64)
        return [parts[0].per_group(present, groups)]

    def result(self, values: Sequence[Values], kind: pa.DataType) -> pa.Array:
        return pa.array(values[0])


@dataclass(frozen=True, slots=True)
class Sum:
    """Exact in int64 for integers, float64 for floats."""

    column: str

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        kind = require_column(schema, self.column, "sum")
        return _sum_type(self.column, "sum", kind)

    def parts(self, name: str, schema: pa.Schema) -> tuple[Part, ...]:
        total = _total_part(name, f"sum({self.column!r})", self.result_type(schema))
        return total, seen_part(f"{name}.seen")

    def reduce(self, table: pa.Table, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
        return _reduced(table.column(self.column), groups, parts)

    def result(self, values: Sequence[Values], kind: pa.DataType) -> pa.Array:
        return with_nulls(values[0], values[1], kind)


@dataclass(frozen=True, slots=True)
class Mean:
    """The sum (as `Sum` keeps it) over the number of values, as float64."""

    column: str

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        _sum_type(self.column, "mean", require_column(schema, self.column, "mean"))
        return pa.float64()

    def parts(self, name: str, schema: pa.Schema) -> tuple[Part, ...]:
        kind = _sum_type(self.column, "mean", require_column(schema, self.column, "mean"))
        total = _total_part(name, f"the sum for mean({self.column!r})", kind)
        return total, rows_part(f"{name}.rows")

    def reduce(self, table: pa.Table, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
        total = _reduced(table.column(self.column), groups, parts[:1])
        return [*total, *Count(self.column).reduce(table, groups, parts[1:])]

    def result(self, values: Sequence[Values], kind: pa.DataType) -> pa.Array:
        total, rows = values
        present = rows > 0
        return with_nulls(total / np.where(present, rows, 1), present, kind)


@dataclass(frozen=True, slots=True)
class Min:
    """The least number or time; NaN only where there is nothing else."""

    column: str

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        return ordered_type(self.column, "min", require_column(schema, self.column, "min"))

    def parts(self, name: str, schema: pa.Schema) -> tuple[Part, ...]:
        dtype = storage_dtype(self.result_type(schema))
        return least_part(f"{name}.min", dtype), seen_part(f"{name}.seen")

    def reduce(self, table: pa.Table, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
        return _reduced(table.column(self.column), groups, parts)

    def result(self, values: Sequence[Values], kind: pa.DataType) -> pa.Array:
        return with_nulls(values[0], values[1], kind)


@dataclass(frozen=True, slots=True)
class Max:
    """The greatest number or time; NaN only where there is nothing else."""

    column: str

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        return ordered_type(self.column, "max", require_column(schema, self.column, "max"))

    def parts(self, name: str, schema: pa.Schema) -> tuple[Part, ...]:
        dtype = storage_dtype(self.result_type(schema))
        return greatest_part(f"{name}.max", dtype), seen_part(f"{name}.seen")

    def reduce(self, table: pa.Table, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
        return _reduced(table.column(self.column), groups, parts)

    def result(self, values: Sequence[Values], kind: pa.DataType) -> pa.Array:
        return with_nulls(values[0], values[1], kind)


count, sum, min, max, mean = Count, Sum, Min, Max, Mean  # how topologies spell them
count_distinct = CountDistinct


def _reduced(column: pa.ChunkedArray, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
    """The value part and, where there is one, the seen part of each group."""
    value = parts[0]
    numbers = plain(column, fill=_fill(value)).astype(value.dtype, copy=False)
    if value.dtype.kind == "f":
        numbers = numbers + 0.0  # one zero: which of two equal ones is least must not be seen
    if column.null_count and value.dtype.kind == "f":
        numbers = np.where(valid(column), numbers, value.identity)
    reduced = [value.per_group(numbers, groups)]
    for seen in parts[1:]:
        if column.null_count:
            reduced.append(seen.per_group(valid(column), groups))
        else:
            reduced.append(np.ones(groups.count, dtype=np.bool_))
    return reduced


def _fill(part: Part) -> Any:
    return 0.0 if part.dtype.kind == "f" else int(part.identity)


def _sum_type(column: str, what: str, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return pa.int64()
    raise TopologyError(
        f"{what}({column!r}): the column has type {kind}; {what} takes integers up to 64 bits "
        "signed and floats, so cast it first",
        column=column,
    )


def _total_part(name: str, of: str, kind: pa.DataType) -> Part:
    if pa.types.is_integer(kind):
        return integer_sum_part(f"{name}.sum", of)
    return sum_part(f"{name}.sum", storage_dtype(kind))


def ordered_type(column: str, what: str, kind: pa.DataType) -> pa.DataType:
    t = pa.types
    times = t.is_temporal(kind) and not t.is_interval(kind)
    if t.is_integer(kind) or t.is_floating(kind) or times:
        return kind
    raise TopologyError(
        f"{what}({column!r}): the column has type {kind}; {what} takes numbers, dates and times",
        column=column,
    )


@dataclass(frozen=True, slots=True)
class AggregatePlan:
    """Aggregates bound to the schema of their input: parts, and results from parts."""

    keys: pa.Schema
    parts: tuple[Part, ...]
    _bound: tuple[tuple[str, Aggregate, tuple[Part, ...], pa.DataType], ...]
    ttl: Ttl | None = None

    @staticmethod
    def bind(
        keys: Sequence[str],
        aggregates: Mapping[str, Aggregate],
        schema: pa.Schema,
        ttl: Ttl | None = None,
    ) -> AggregatePlan:
        schema = canonical(schema)
        check_key_types(schema, keys)
        bound = tuple(
            (name, aggregate, aggregate.parts(name, schema), aggregate.result_type(schema))
            for name, aggregate in aggregates.items()
        )
        parts = tuple(part for _, _, own, _ in bound for part in own)
        if ttl is not None:
            ttl.check(schema)
            parts = (*parts, TOUCHED_PART)
            if any(isinstance(a, CountDistinct) for a in aggregates.values()):
                parts = (*parts, BORN_PART)
        key_schema = pa.schema([schema.field(name) for name in keys])
        return AggregatePlan(key_schema, parts, bound, ttl)

    @property
    def distinct(self) -> dict[str, CountDistinct]:
        return {name: a for name, a, _, _ in self._bound if isinstance(a, CountDistinct)}

    @property
    def grouped_by(self) -> tuple[str, ...]:
        """What rows must share to be combined into one: a distinct count needs every value."""
        return (*self.keys.names, *(a.column for a in self.distinct.values()))

    @property
    def sealed_schema(self) -> pa.Schema:
        return sealed_schema(self)

    @property
    def result_fields(self) -> list[pa.Field]:
        return [pa.field(name, kind) for name, _, _, kind in self._bound]

    def reduce(self, table: pa.Table, groups: Groups) -> Columns:
        """All parts of each group of input rows, and the identities of values to count."""
        reduced: Columns = {}
        for _, aggregate, own, _ in self._bound:
            for part, values in zip(own, aggregate.reduce(table, groups, own), strict=True):
                reduced[part.name] = values
        for name, distinct in self.distinct.items():
            reduced[f"{name}.a"], reduced[f"{name}.b"] = distinct.identities(table, groups)
        if self.ttl is not None:
            reduced |= self.ttl.touches(table, groups)
        return reduced

    def results(self, values: Columns) -> dict[str, pa.Array]:
        return {
            name: aggregate.result([values[part.name] for part in own], kind)
            for name, aggregate, own, kind in self._bound
        }

    def of_combined(self, table: pa.Table) -> Columns:
        identities = [f"{name}.{half}" for name in self.distinct for half in "ab"]
        return {
            **{part.name: part.of_table(table) for _, _, own, _ in self._bound for part in own},
            **{name: plain(table.column(name)) for name in identities},
        }


def check_names(names: Sequence[str]) -> None:
    """Refuse output names that clash with each other or with the state's own columns."""
    for name in names:
        if name.startswith("_"):
            raise TopologyError(
                f"{name!r}: names that start with an underscore are reserved; rename the column",
                column=name,
            )
        if names.count(name) > 1:
            raise TopologyError(
                f"{name!r} would be two columns of the output; rename one", column=name
            )


def check_unreserved(names: Sequence[str], reserved: Sequence[str]) -> None:
    """Refuse input columns with names that an operator gives to its own."""
    for name in names:
        if name in reserved:
            raise TopologyError(
                f"column {name!r} has a name this operator needs for itself; rename it",
                column=name,
            )


@dataclass(frozen=True, slots=True)
class KeyedAggregate:
    """Running aggregates per key; every slice gives the keys it changed, with their new values,
    in the order in which they first appear in the slice."""

    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    ttl: Ttl | None = None

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        plan = self._plan(schemas[0])
        check_names([*self.keys, *self.aggregates])
        return pa.schema([*plan.keys, *plan.result_fields])

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        return self._plan(schemas[0]).sealed_schema

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> AggregateState:
        return AggregateState(self._plan(schemas[0]), key_groups)

    def combine(self, port: int, table: pa.Table) -> pa.Table:
        table = canonical_table(table)
        plan = self._plan(table.schema)
        keys = table.select(self.keys)
        groups = group_rows(*hash_keys(table, plan.grouped_by))
        if groups.members is not None:
            keys = keys.take(pa.array(groups.firsts))
        return with_columns(keys, plan.reduce(table, groups))

    def compute(
        self, state: AggregateState, inputs: tuple[pa.Table, ...], time: SliceTime
    ) -> Computed:
        table = inputs[0]
        keys = canonical_table(table.select(self.keys))
        arriving = state.plan.of_combined(table)
        now_us = None
        if self.ttl is not None:
            arriving[TOUCHED] = self.ttl.touched(table, time)
            arriving[BORN] = np.full(table.num_rows, time.slice)
            now_us = self.ttl.now_us(time)
        merged, update = state.merge(hash_keys(keys, self.keys), keys, arriving, now_us)
        return Computed(with_columns(merged.keys, state.plan.results(merged.values)), update)

    def _plan(self, schema: pa.Schema) -> AggregatePlan:
        return AggregatePlan.bind(self.keys, self.aggregates, schema, self.ttl)


def with_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """The table's columns followed by others of the same length."""
    kept = {name: table.column(name) for name in table.schema.names}
    return pa.table({**kept, **columns})
