"""What users write where: checked when it is written, and taken in the forms they know.

Everything here runs while a topology is declared, so that a mistake is met in the line that has it,
and not by a node in the middle of a slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, cast

import polars as pl

from anabranch.errors import TopologyError
from anabranch.operators.kernels.aggregates import Aggregate, Count, Max, Mean, Min, Sum
from anabranch.operators.kernels.distinct import CountDistinct
from anabranch.operators.kernels.sessions import Session
from anabranch.operators.kernels.windows import Window

_AGGREGATES = (Count, Sum, Mean, Min, Max, CountDistinct)
_KNOWN = "ab.count(), ab.sum(column), ab.min, ab.max, ab.mean, ab.count_distinct"
_SQL = re.compile(r"[()+\-*/<>=%'|]|\bas\b", re.IGNORECASE)  # no name of a column has these

# What to write here ← what Polars, Spark, Flink and Kafka Streams call it.
_HERE = {
    '.filter("name", predicate)': "where filterNot",
    '.select("name", pl.all(), column=expression)': "with_columns withColumn withColumns mapValues",
    '.select("name", columns)': "drop rename selectExpr",
    ".key_by(columns)": "groupBy group_by groupby groupByKey keyBy partitionBy",
    '.flat_map("name", function)': "flatMap flatMapValues explode",
    '.map("name", function)': "apply transform pipe map_batches mapInPandas mapInArrow",
    '.key_by(columns).aggregate("name", n=ab.count())': "agg count sum min max mean avg len",
    '.key_by(columns).window(ab.tumbling("1m"), time=column)': "windowedBy group_by_dynamic",
    '.key_by(columns).process("name", function)': "reduce fold transformWithState",
    '.key_by(columns).deduplicate("name")': "dropDuplicates drop_duplicates distinct unique",
    '.top_k("name", 10, by=column)': "sort orderBy limit head",
    '.enrich("name", table, on=column), or .key_by(columns).join_windows(...)': "join leftJoin",
    'topology.source("name", data, time=column, watermark="10s")': "withWatermark",
    '.to("name", ab.Console()), or another sink': "writeStream sink sinkTo addSink print show",
    "topology.run(spark, ...)": "start run execute awaitTermination",
}
_ELSEWHERE = {name: here for here, names in _HERE.items() for name in names.split()}


def no_such_method(what: str, name: str, hint: str = "") -> AttributeError:
    """What a user looked for, and what it is called here."""
    if not hint and name in _ELSEWHERE:
        written = _ELSEWHERE[name]
        hint = f"write {written.removeprefix('.key_by(columns)') if 'key' in what else written}"
    return AttributeError(f"{what} has no {name!r}{hint and '; ' + hint}")


def operator_name(name: Any, method: str, example: str) -> str:
    if not isinstance(name, str):
        raise TopologyError(
            f"{method} takes the operator's name first (state and counts are found by it), but "
            f"got {_shown(name)}; write .{method}({example})"
        )
    return name


def sink_priority(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise TopologyError(
            f"the sink {name!r} has the priority {given!r}; give a whole number, 1 or more: sinks "
            "with more come back first when too few nodes are left",
            operator=name,
        )
    return given


def function_of(operator: str, given: Any, method: str) -> Callable[[Any], Any]:
    if isinstance(given, pl.Expr) or not callable(given):
        hint = "; expressions go into .select(...)" if isinstance(given, pl.Expr) else ""
        raise TopologyError(
            f"operator {operator!r}: {method} takes a name and a function from a Polars frame to a "
            f"frame, but got {_shown(given)}{hint}",
            operator=operator,
        )
    return cast("Callable[[Any], Any]", given)


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


def column_name(what: str, given: Any) -> str:
    if not isinstance(given, str):
        raise TopologyError(f"{what} is {_shown(given)}; give the name of a column")
    return given


def column_names(what: str, given: Any) -> tuple[str, ...]:
    """Names of columns; one may come without a list."""
    names = (given,) if isinstance(given, str) else tuple(given)
    return tuple(column_name(what, name) for name in names)


def source_data(name: str, given: Any) -> Any:
    """A streaming DataFrame, a function that makes one, or None where a test gives the rows."""
    if given is None or callable(given) or getattr(given, "isStreaming", False) is True:
        return given
    if hasattr(given, "isStreaming"):
        raise TopologyError(
            f"the source {name!r} is a batch DataFrame; read it with spark.readStream",
            operator=name,
        )
    raise TopologyError(
        f"the source {name!r} is {_shown(given)}; give a Spark streaming DataFrame or a "
        "function that takes the session and returns one, such as lambda spark: "
        "spark.readStream.schema(columns).parquet(directory). For rows of your own, see "
        "anabranch.testing.play",
        operator=name,
    )


def aggregates_of(
    operator: str, given: Mapping[str, Any], unnamed: Sequence[Any] = ()
) -> Mapping[str, Aggregate]:
    if unnamed:
        raise TopologyError(
            f"operator {operator!r}: {_shown(unnamed[0])} has no name; name what comes out, such "
            f"as .aggregate({operator!r}, n=ab.count())",
            operator=operator,
        )
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
        if aggregate.column is not None:
            column_name(f"operator {operator!r}: the column of {name}", aggregate.column)
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
    if value is None:
        return "None"
    if isinstance(value, FunctionType):
        return f"the function {value.__name__}"
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) < 60 else f"a {kind}"
