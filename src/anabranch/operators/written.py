"""What users write where: checked when it is written, and taken in the forms they know.

Everything here runs while a topology is declared, so that a mistake is met in the line that has it,
and not by a node in the middle of a slice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from anabranch.errors import TopologyError
from anabranch.operators.aggregates import Aggregate, Count, Max, Mean, Min, Sum
from anabranch.operators.distinct import CountDistinct
from anabranch.operators.sessions import Session
from anabranch.operators.windows import Window

_AGGREGATES = (Count, Sum, Mean, Min, Max, CountDistinct)
_KNOWN = "ab.count(), ab.sum(column), ab.min, ab.max, ab.mean, ab.count_distinct"
_SQL = re.compile(r"[()+\-*/<>=%'|]|\bas\b", re.IGNORECASE)  # no name of a column has these


def operator_name(name: Any, method: str, example: str) -> str:
    if not isinstance(name, str):
        raise TopologyError(
            f"{method} takes the operator's name first (state and counts are found by it), but "
            f"got {_shown(name)}; write .{method}({example})"
        )
    return name


def predicate_of(operator: str, given: Any) -> Any:
    """A Polars expression, SQL, or a function of a frame."""
    if isinstance(given, str):
        return _sql(operator, given)
    if not isinstance(given, pl.Expr) and not callable(given):
        raise TopologyError(
            f"operator {operator!r}: filter takes a name and a predicate: a Polars expression, SQL "
            f'or a function of a frame, such as .filter({operator!r}, "v > 1"), but got '
            f"{_shown(given)}",
            operator=operator,
        )
    return given


def columns_of(
    operator: str, given: Sequence[Any], named: Mapping[str, Any]
) -> tuple[str | pl.Expr, ...]:
    """Names of columns, Polars expressions, or SQL; by keyword under another name."""
    columns = [_column(operator, c) for c in _flat(given)]
    for name, value in named.items():
        column = _column(operator, value)
        columns.append((pl.col(column) if isinstance(column, str) else column).alias(name))
    if not columns:
        raise TopologyError(
            f"operator {operator!r}: select takes a name and the columns it keeps, such as "
            f'.select({operator!r}, "user", total=pl.col("n") * 2)',
            operator=operator,
        )
    return tuple(columns)


def _column(operator: str, given: Any) -> str | pl.Expr:
    if isinstance(given, str):
        return _sql(operator, given) if _SQL.search(given) else given
    if not isinstance(given, pl.Expr):
        raise TopologyError(
            f"operator {operator!r}: a column is given by its name, as a Polars expression or in "
            f"SQL, but not as {_shown(given)}",
            operator=operator,
        )
    return given


def _sql(operator: str, text: str) -> pl.Expr:
    try:
        return pl.sql_expr(text)
    except Exception as e:
        raise TopologyError(
            f"operator {operator!r}: {text!r} is no SQL that Polars knows: {e}", operator=operator
        ) from e


def key_columns(given: Sequence[Any]) -> tuple[str, ...]:
    names = tuple(_flat(given))
    if not names:
        raise TopologyError("key_by needs at least one column")
    for name in names:
        if not isinstance(name, str):
            raise TopologyError(
                f"key_by takes names of columns, but got {_shown(name)}; compute a key first, with "
                '.select("keyed", pl.all(), key=…)'
            )
    return names


def aggregates_of(operator: str, given: Mapping[str, Any]) -> Mapping[str, Aggregate]:
    if not given:
        raise TopologyError(
            f"operator {operator!r} has nothing to aggregate; name what comes out, such as "
            f".aggregate({operator!r}, n=ab.count()); there are {_KNOWN}",
            operator=operator,
        )
    for name, aggregate in given.items():
        if isinstance(aggregate, type) and issubclass(aggregate, _AGGREGATES):
            raise TopologyError(
                f"operator {operator!r}: {name}={_spelled(aggregate)} is not called; write "
                f"{name}={_spelled(aggregate)}({'' if aggregate is Count else 'column'})",
                operator=operator,
            )
        if not isinstance(aggregate, _AGGREGATES):
            raise TopologyError(
                f"operator {operator!r}: {name} is {_shown(aggregate)}, which is no aggregate; "
                f"there are {_KNOWN}. What Polars computes goes into .process(...)",
                operator=operator,
            )
    return given


def window_of(given: Any) -> Window | Session:
    if not isinstance(given, Window | Session):
        raise TopologyError(
            f"a window is ab.tumbling(size), ab.hopping(size, slide) or ab.session(gap), but got "
            f"{_shown(given)}"
        )
    return given


def _flat(given: Sequence[Any]) -> list[Any]:
    """Lists among arguments, as Polars and Spark take them."""
    return [v for g in given for v in (g if isinstance(g, list | tuple) else (g,))]


def _spelled(aggregate: type) -> str:
    return f"ab.{re.sub('(?<!^)(?=[A-Z])', '_', aggregate.__name__).lower()}"


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, pl.Expr):
        return f"the Polars expression {value}"
    return f"{value!r} ({type(value).__name__})"
