"""Rows on their way into PostgreSQL: column types, values the server cannot hold, and the text
that COPY reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from anabranch.errors import StorageError, TopologyError
from anabranch.operators.rows.failing import Refused

# Every value in quotes, null as nothing: an empty string stays one.
_CSV = csv.WriteOptions(include_header=False, quoting_style="all_valid")
_INTEGERS = ("smallint", "integer", "bigint", "numeric")
_FLOATS = ("real", "double precision")
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")
_YEARS = ("0001-01-01", "9999-12-31")  # what both sides spell alike


def column_type(field: pa.Field) -> str:
    """The type of a column in a table that the sink creates."""
    kind, t = field.type, pa.types
    if t.is_integer(kind):
        if t.is_unsigned_integer(kind) and kind.bit_width == 64:
            return "numeric(20,0)"
        bits = kind.bit_width + (kind.bit_width if t.is_unsigned_integer(kind) else 0)
        return {8: "smallint", 16: "smallint", 32: "integer", 64: "bigint"}[bits]
    if t.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if t.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    plain = {
        pa.float32(): "real",
        pa.float64(): "double precision",
        pa.bool_(): "boolean",
        pa.large_string(): "text",
        pa.large_binary(): "bytea",
        pa.date32(): "date",
        pa.time64("ns"): "time without time zone",
    }
    if kind not in plain:
        raise TopologyError(
            f"the PostgreSQL sink has no type for column {field.name!r}, {kind}; cast or drop it",
            column=field.name,
        )
    return plain[kind]


def fits(field: pa.Field, column: str) -> bool:
    """Whether a column of an existing table takes every value unchanged, or says so if not.

    Strings go anywhere: the server parses them (uuid, jsonb, …) and refuses what it cannot.
    """
    own = column_type(field)
    if own in (column, "text"):
        return True
    for widths in (_INTEGERS, _FLOATS):
        if own in widths and column in widths:
            return widths.index(own) <= widths.index(column)
    mine, theirs = _NUMERIC.fullmatch(own), _NUMERIC.fullmatch(column)
    if mine and theirs:
        (p, s), (precision, scale) = map(int, mine.groups()), map(int, theirs.groups())
        return s <= scale and p - s <= precision - scale
    return bool(mine) and column == "numeric"


def refuse_values(table: pa.Table, where: str) -> None:
    """What no column of PostgreSQL can hold must be refused before the journal knows of it:
    afterwards nobody could change it any more."""
    for column, bad, what in _unfit(table):
        if pc.any(bad).as_py():
            raise StorageError(
                f"column {column!r} of the sink {where!r} has {what}, which PostgreSQL cannot "
                "take; replace it before the sink and start again, or put such rows aside "
                '(on_error="dead_letter")',
                column=column,
            )


def unfit_rows(table: pa.Table) -> list[Refused]:
    """The rows with a value that no column of PostgreSQL can hold."""
    found: dict[int, Refused] = {}
    for column, bad, what in _unfit(table):
        reason = f"column {column!r} has {what}, which PostgreSQL cannot take"
        for row in np.flatnonzero(np.asarray(bad.fill_null(False))):
            found.setdefault(int(row), Refused(int(row), reason))
    return [found[row] for row in sorted(found)]


def _unfit(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray, str]]:
    """Columns with the rows whose values do not fit, and what is wrong with them."""
    for field in table.schema:
        column = table.column(field.name)
        if pa.types.is_large_string(field.type):
            yield field.name, pc.match_substring(column, "\0"), "the character NUL"
        elif pa.types.is_date(field.type) or pa.types.is_timestamp(field.type):
            day = column.cast(pa.timestamp("us")).cast(pa.date32(), safe=False)
            first, last = (pa.scalar(y).cast(pa.date32()) for y in _YEARS)
            bad = pc.or_(pc.less(day, first), pc.greater(day, last))
            yield field.name, bad, "a time before year 1 or after year 9999"


def copy_text(batches: Iterator[pa.RecordBatch]) -> Iterator[memoryview]:
    """The rows as COPY … (FORMAT csv) reads them."""
    for batch in batches:
        columns = [_spelled(c) for c in batch.columns]
        out = pa.BufferOutputStream()
        csv.write_csv(pa.RecordBatch.from_arrays(columns, batch.schema.names), out, _CSV)
        yield memoryview(out.getvalue())


def _spelled(column: pa.Array) -> pa.Array:
    """The column, where Arrow's own text is not PostgreSQL's."""
    kind = column.type
    if pa.types.is_large_binary(kind):
        text = pl.Series(values=column).bin.encode("hex")
        return (r"\x" + text).to_arrow().cast(pa.large_string())
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return column.cast(pa.timestamp("us", "UTC"))  # local offsets had seconds once
    return column
