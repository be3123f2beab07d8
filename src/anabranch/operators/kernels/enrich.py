"""Enrichment: every row gets the columns of the one row of a static table that has its key.

The table is taken once, when the topology is built, and travels with the job; where it is first
used it is indexed by the hash of its key, so that a slice costs by its own rows. A null key finds
nothing, as in SQL. Rows of the stream keep their order and their columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.operators.kernels.aggregates import with_columns
from anabranch.operators.rows.canonical import canonical, canonical_table, require_column, to_table
from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import check_key_types, hash_keys
from anabranch.operators.state.accumulators import valid
from anabranch.operators.state.keyed_table import KeyedTable
from anabranch.operators.state.row_log import ABSENT, Slots

# The table is part of the job, which every source task and every node is given.
MAX_BYTES = 16 << 20
MAX_ROWS = 1_000_000

_IPC = pa.ipc.IpcWriteOptions(compression="zstd")


class StaticTable:
    """Rows by key: key columns without nulls, then the columns to add. Only the rows travel."""

    def __init__(self, rows: pa.Table, on: tuple[str, ...]) -> None:
        self.rows = rows
        self.on = on

    def __reduce__(self) -> tuple[Any, ...]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.rows.schema, options=_IPC) as writer:
            writer.write_table(self.rows)
        return _unpacked, (sink.getvalue().to_pybytes(), self.on)

    def find(self, table: pa.Table) -> Slots:
        """For every row of a table the row here with its key, or ABSENT."""
        slots = self._index.find(*hash_keys(table, self.on))
        slots[~_without_nulls(table, self.on)] = ABSENT
        return slots

    @cached_property
    def _index(self) -> KeyedTable:
        """Slots are numbered as the rows are."""
        index = KeyedTable(pa.schema([("row", pa.int32())]), {}, 1)
        numbers = pa.table({"row": np.arange(self.rows.num_rows, dtype=np.int32)})
        index.add(*hash_keys(self.rows, self.on), numbers, {})
        return index


@dataclass(frozen=True, slots=True)
class Enrich:
    """The columns of the stream, then those of the table: null (left) where there is no match, or
    only rows that match (inner)."""

    static: StaticTable
    columns: tuple[str, ...]
    how: str
    keeps_columns = True

    @staticmethod
    def of(data: Any, on: Sequence[str], columns: Sequence[str] | None, how: str) -> Enrich:
        """Take the table now, from a Polars frame, an Arrow table or a batch Spark DataFrame."""
        if how not in ("left", "inner"):
            raise TopologyError(f"enrich how={how!r}; it can be 'left' or 'inner'")
        known = _column_names(data)
        if columns is None:
            columns = [name for name in known if name not in on]
        _check_columns(known, on, columns)
        table = _taken(data, [*on, *columns])
        _check_size(table)
        check_key_types(table.schema, on)
        table = table.filter(pa.array(_without_nulls(table, on))).combine_chunks()
        _check_unique(table, on)
        return Enrich(StaticTable(table, tuple(on)), tuple(columns), how)

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        schema = canonical(schema)
        own = self.static.rows.schema
        for name in self.static.on:
            theirs = require_column(schema, name, "enrich")
            if not _comparable(theirs, own.field(name).type):
                raise TopologyError(
                    f"enrich on {name!r}: the stream has {theirs}, the table "
                    f"{own.field(name).type}; cast one of them",
                    column=name,
                )
        for name in self.columns:
            if name in schema.names:
                raise TopologyError(
                    f"enrich would add column {name!r}, which the stream has already; rename it "
                    "in the table, or leave it out of columns",
                    column=name,
                )
        return pa.schema([*schema, *(own.field(name) for name in self.columns)])

    def process(self, table: pa.Table) -> pa.Table:
        table = canonical_table(table)
        slots = self.static.find(table)
        missing = slots == ABSENT
        if self.how == "inner" and missing.any():
            found = np.flatnonzero(~missing)
            table, slots, missing = table.take(pa.array(found)), slots[found], missing[found]
        rows = pa.array(slots, mask=missing if missing.any() else None)
        added = self.static.rows.select(self.columns).take(rows)
        return with_columns(table, {name: added.column(name) for name in self.columns})


def _unpacked(rows: bytes, on: tuple[str, ...]) -> StaticTable:
    return StaticTable(pa.ipc.open_stream(rows).read_all().combine_chunks(), on)


def _column_names(data: Any) -> list[str]:
    if isinstance(data, pl.DataFrame):
        return data.columns
    if isinstance(data, pa.Table):
        return list(data.schema.names)
    if _is_spark(data):
        if data.isStreaming:
            raise TopologyError(
                "enrich takes a table that stands still, but got a streaming DataFrame; read it "
                "with spark.read, or make it a source and join the two streams"
            )
        return list(data.columns)
    raise TopologyError(
        f"enrich takes a Spark DataFrame, a pyarrow.Table or a polars.DataFrame, but got "
        f"{type(data).__name__}"
    )


def _is_spark(data: Any) -> bool:
    """Told by what it can do: this module must not import pyspark."""
    return hasattr(data, "toArrow") and hasattr(data, "isStreaming")


def _check_columns(known: list[str], on: Sequence[str], columns: Sequence[str]) -> None:
    if not on:
        raise TopologyError("enrich needs at least one column in on=[...]")
    for name in [*on, *columns]:
        if name not in known:
            raise TopologyError(
                f"enrich needs column {name!r} of the table, which has {known}", column=name
            )
    for name in columns:
        if name in on or list(columns).count(name) > 1:
            raise TopologyError(
                f"enrich would add column {name!r} twice; name it once, in on or in columns",
                column=name,
            )


def _taken(data: Any, columns: list[str]) -> pa.Table:
    if isinstance(data, pl.DataFrame):
        return to_table(data.select(columns))
    if isinstance(data, pa.Table):
        return canonical_table(data.select(columns))
    # One row too many is enough to know, and a mistake does not fill the driver.
    return canonical_table(data.select(*columns).limit(MAX_ROWS + 1).toArrow())


def _check_size(table: pa.Table) -> None:
    if table.num_rows > MAX_ROWS or table.nbytes > MAX_BYTES:
        rows = "more than " * (table.num_rows > MAX_ROWS)
        rows += f"{min(table.num_rows, MAX_ROWS):,} rows"
        raise TopologyError(
            f"the table of enrich has {rows} and {table.nbytes / 2**20:,.1f} MB, and it would "
            f"travel with the job; at most {MAX_ROWS:,} rows and {MAX_BYTES >> 20} MB may. Name "
            "fewer columns, or join it in Spark, in the DataFrame of the source",
            rows=table.num_rows,
            bytes=table.nbytes,
        )


def _check_unique(table: pa.Table, on: Sequence[str]) -> None:
    groups = group_rows(*hash_keys(table, on))
    if groups.members is None:
        return
    repeated = np.flatnonzero(groups.firsts[groups.members] != np.arange(table.num_rows))
    example = table.select(on).slice(int(repeated[0]), 1).to_pylist()[0]
    raise TopologyError(
        f"the table of enrich has {len(repeated)} rows too many: a key must occur once, but "
        f"{example} occurs again in row {repeated[0]}; drop the repetitions, or name all columns "
        "of the key in on",
        key=example,
    )


def _without_nulls(table: pa.Table, on: Sequence[str]) -> npt.NDArray[np.bool_]:
    present = np.ones(table.num_rows, dtype=np.bool_)
    for name in on:
        present &= valid(table.column(name))
    return present


def _comparable(one: pa.DataType, other: pa.DataType) -> bool:
    """Do equal values have equal hashes? Integers of any width do, but for the upper half of
    uint64; moments do in any zone, if both have one."""
    t = pa.types
    if t.is_timestamp(one) and t.is_timestamp(other):
        return bool((one.tz is None) == (other.tz is None))
    if t.is_integer(one) and t.is_integer(other):
        return bool((one == pa.uint64()) == (other == pa.uint64()))
    return bool(one == other)
