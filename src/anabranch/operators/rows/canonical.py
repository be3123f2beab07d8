"""The one form of a schema that travels between operators.

Polars and Spark spell the same type differently (string, large_string, string_view; timestamps in
s, ms, us, ns). Every kernel gives tables in the canonical form, so that a stream has one schema
whatever produced its rows, and a round trip through Polars changes nothing.

A timestamp with a zone is an instant. The zone is only how somebody would like to see it (Spark
takes that of its session), so here it is always UTC: schemas and state do not depend on who
started the job.
"""

from __future__ import annotations

import polars as pl
import pyarrow as pa

from anabranch.errors import OperatorError, TopologyError


def canonical(schema: pa.Schema) -> pa.Schema:
    """Large strings and binaries, microseconds in UTC, plain values for dictionaries; no
    metadata."""
    names = schema.names
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise TopologyError(f"columns {twice} occur more than once; rename them", columns=twice)
    return pa.schema([pa.field(field.name, canonical_type(field.type)) for field in schema])


def canonical_table(table: pa.Table) -> pa.Table:
    """The table with its canonical schema; the table itself when it already has it."""
    schema = canonical(table.schema)
    if table.schema.equals(schema, check_metadata=True):
        return table
    try:
        return table.cast(schema)
    except pa.ArrowInvalid as e:
        raise OperatorError(
            f"rows do not fit the types streams have ({e}); times have microseconds, so cut or "
            'round finer ones yourself, such as pl.col("…").dt.truncate("1us")'
        ) from e


def canonical_type(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_string(kind) or t.is_string_view(kind):
        return pa.large_string()
    if t.is_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind):
        return pa.large_binary()
    if t.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if t.is_duration(kind):
        return pa.duration("us")
    if t.is_time(kind):
        return pa.time64("ns")
    if t.is_date(kind):
        return pa.date32()
    if t.is_float16(kind):
        return pa.float32()
    if t.is_decimal(kind):
        return pa.decimal128(min(kind.precision, 38), kind.scale)
    return _canonical_nested(kind)


def _canonical_nested(kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_dictionary(kind):
        return canonical_type(kind.value_type)
    if t.is_list(kind) or t.is_large_list(kind):
        return pa.large_list(canonical_type(kind.value_type))
    if t.is_fixed_size_list(kind):
        return pa.list_(canonical_type(kind.value_type), kind.list_size)
    if t.is_struct(kind):
        return pa.struct([pa.field(f.name, canonical_type(f.type)) for f in kind.fields])
    return kind


def to_frame(table: pa.Table) -> pl.DataFrame:
    """The table as a Polars frame, its buffers shared where the layouts agree."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def to_table(frame: pl.DataFrame) -> pa.Table:
    return canonical_table(frame.to_arrow())


def require_column(schema: pa.Schema, name: str, what: str) -> pa.DataType:
    """The type of a column, or a TopologyError that names what asked for it."""
    if schema.get_field_index(name) < 0:
        raise TopologyError(
            f"{what} needs column {name!r}, but the input has {schema.names}", column=name
        )
    return schema.field(name).type
