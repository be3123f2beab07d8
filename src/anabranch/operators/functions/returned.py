"""What a user's function returned: an Arrow table with the promised columns, or an error that says
which column is wrong, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pyarrow as pa

from anabranch.errors import AnabranchError, OperatorError
from anabranch.operators.rows.canonical import canonical_table, to_table


def guarded(call: Callable[[], Any]) -> Any:
    """The result of a user's function; whatever it raises becomes an OperatorError."""
    try:
        return call()
    except AnabranchError:
        raise
    except Exception as error:
        raise OperatorError(
            f"the operator's function raised {type(error).__name__}: {error}",
            error=type(error).__name__,
        ) from error


def as_table(result: Any) -> pa.Table:
    """A Polars frame or Arrow table in the canonical form."""
    if isinstance(result, pl.DataFrame):
        return to_table(result)
    if isinstance(result, pa.Table):
        return canonical_table(result)
    what = "None" if result is None else f"a {type(result).__name__}"
    collect = "; call .collect()" if isinstance(result, pl.LazyFrame) else ""
    raise OperatorError(
        f"the function returned {what}; return a polars.DataFrame or a pyarrow.Table{collect}"
    )


def fitted(table: pa.Table, schema: pa.Schema, what: str) -> pa.Table:
    """The table with exactly the columns of the schema, in their order.

    Only nulls without a type are converted: a slice that holds nothing else is no mistake.
    """
    if table.schema.equals(schema):
        return table
    for name in table.schema.names:
        if schema.get_field_index(name) < 0:
            raise OperatorError(
                f"{what} has a column {name!r} that was not expected; expected are {schema.names}",
                column=name,
            )
    columns = []
    for field in schema:
        if table.schema.get_field_index(field.name) < 0:
            raise OperatorError(
                f"{what} lacks column {field.name!r} ({field.type}); it has {table.schema.names}",
                column=field.name,
            )
        column = table.column(field.name)
        if pa.types.is_null(column.type):
            column = column.cast(field.type)
        if column.type != field.type:
            raise OperatorError(
                f"{what}: column {field.name!r} must be {field.type}, but came as {column.type}; "
                "a stream has one schema for life, so cast it in the function",
                column=field.name,
                expected=str(field.type),
                got=str(column.type),
            )
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
