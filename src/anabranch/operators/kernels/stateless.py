"""Filter, Select, Map and FlatMap: a table in, a table out, order kept.

What a user gives is either Polars expressions or a function from a Polars DataFrame to a Polars
DataFrame (or pyarrow Table). A function is called with an empty frame to learn its output schema
and must return that schema for every slice, which is checked: a stream has one schema for life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from anabranch.errors import AnabranchError, OperatorError, TopologyError
from anabranch.operators.functions.returned import as_table, fitted, guarded
from anabranch.operators.rows.canonical import canonical, canonical_table, to_frame, to_table

TableFunction = Callable[[pl.DataFrame], pl.DataFrame | pa.Table]
Predicate = pl.Expr | Callable[[pl.DataFrame], pl.Series]
# Schema in → schema out, filled where the topology is built and carried to nodes with the kernel.
Learned = dict[pa.Schema, pa.Schema]


@dataclass(frozen=True, slots=True)
class Filter:
    """Keep the rows for which the predicate is true; null counts as false, as in SQL."""

    predicate: Predicate
    keeps_columns = True

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        empty = _empty_frame(schema)
        try:
            _mask(self.predicate, empty)
        except AnabranchError as error:
            raise TopologyError(error.message, **error.fields) from error
        except Exception as error:
            raise _schema_error("predicate", schema, error) from error
        return canonical(schema)

    def process(self, table: pa.Table) -> pa.Table:
        table = canonical_table(table)
        mask = guarded(lambda: _mask(self.predicate, to_frame(table)))
        if mask.all(ignore_nulls=False):
            return table
        return table.filter(mask.fill_null(False).to_arrow())


@dataclass(frozen=True, slots=True)
class Select:
    """Columns by name or expression; one row out for every row in."""

    columns: tuple[str | pl.Expr, ...]

    def __init__(self, columns: str | pl.Expr | Sequence[str | pl.Expr]) -> None:
        if isinstance(columns, str | pl.Expr):
            columns = (columns,)
        object.__setattr__(self, "columns", tuple(columns))

    @property
    def keeps_columns(self) -> bool:
        return all(isinstance(column, str) for column in self.columns)

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        empty = _empty_frame(schema)
        try:
            return canonical(to_table(empty.select(self.columns)).schema)
        except AnabranchError:
            raise
        except Exception as error:
            raise _schema_error("select", schema, error) from error

    def process(self, table: pa.Table) -> pa.Table:
        table = canonical_table(table)
        if self.keeps_columns:
            return table.select(list(self.columns))
        frame = to_frame(table)
        result = guarded(lambda: frame.select(self.columns))
        if result.height != frame.height:
            raise _row_count_error("select", frame.height, result.height)
        return to_table(result)


@dataclass(frozen=True, slots=True)
class Map:
    """A function of whole columns that gives exactly one row for every row, in order."""

    function: TableFunction
    _learned: Learned = field(default_factory=dict, init=False, repr=False, compare=False)
    keeps_columns = False

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        return _learn(self._learned, self.function, schema)

    def process(self, table: pa.Table) -> pa.Table:
        result = _call(self._learned, self.function, table)
        if result.num_rows != table.num_rows:
            raise _row_count_error("map", table.num_rows, result.num_rows)
        return result


@dataclass(frozen=True, slots=True)
class FlatMap:
    """A function of whole columns that gives any number of rows."""

    function: TableFunction
    _learned: Learned = field(default_factory=dict, init=False, repr=False, compare=False)
    keeps_columns = False

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        return _learn(self._learned, self.function, schema)

    def process(self, table: pa.Table) -> pa.Table:
        return _call(self._learned, self.function, table)


def _mask(predicate: Predicate, frame: pl.DataFrame) -> pl.Series:
    if isinstance(predicate, pl.Expr):
        # with_columns broadcasts a literal (pl.lit(True)) to every row
        mask = frame.with_columns(predicate.alias("")).get_column("")
    else:
        mask = predicate(frame)
    if not isinstance(mask, pl.Series) or mask.dtype != pl.Boolean:
        got = mask.dtype if isinstance(mask, pl.Series) else type(mask).__name__
        raise OperatorError(
            f"a filter's predicate gave {got}; it must give a Boolean column (polars.Series)"
        )
    if len(mask) != frame.height:
        raise _row_count_error("filter", frame.height, len(mask))
    return mask


def _call(learned: Learned, function: TableFunction, table: pa.Table) -> pa.Table:
    table = canonical_table(table)
    result = as_table(guarded(lambda: function(to_frame(table))))
    return fitted(result, _learn(learned, function, table.schema), "what the function returned")


def _learn(learned: Learned, function: TableFunction, schema: pa.Schema) -> pa.Schema:
    schema = canonical(schema)
    if schema not in learned:
        learned[schema] = _function_schema(function, schema)
    return learned[schema]


def _function_schema(function: TableFunction, schema: pa.Schema) -> pa.Schema:
    empty = _empty_frame(schema)
    try:
        return as_table(function(empty)).schema
    except AnabranchError as error:
        raise TopologyError(error.message, **error.fields) from error
    except Exception as error:
        raise _schema_error("function", schema, error) from error


def _empty_frame(schema: pa.Schema) -> pl.DataFrame:
    return to_frame(canonical(schema).empty_table())


def _schema_error(what: str, schema: pa.Schema, error: Exception) -> TopologyError:
    said = " ".join(str(error).split()).rstrip(".?")  # of several lines, where Polars explains
    return TopologyError(
        f"the {what} raised {type(error).__name__} on an empty frame with columns {schema.names}: "
        f"{said}. It is called once with no rows to learn the schema of its output: name only "
        "columns that exist and accept an empty frame",
        error=type(error).__name__,
    )


def _row_count_error(what: str, before: int, after: int) -> OperatorError:
    return OperatorError(
        f"a {what} got {before} rows and gave {after}; it must give one row for every row, in "
        "order (use flat_map to change the number of rows)",
        rows=before,
        given=after,
    )
