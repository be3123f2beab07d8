"""Rows that an operator cannot take: which they are, and the dead letters they become.

A function is run on a whole table. Only when it raises is the table cut into halves until single
rows are left that make it raise by themselves; rows are expected not to depend on their
neighbours. With the same table, state and time this finds the same rows.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import OperatorError
from anabranch.operators.base import SliceTime, Stateful
from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import hash_keys
from anabranch.operators.state.key_lists import members_of

# What a dead letter says. A Parquet sink has a column `slice` of its own.
LETTERS = pa.schema(
    [
        ("slice_number", pa.int64()),
        ("operator", pa.large_string()),
        ("reason", pa.large_string()),
        ("record", pa.large_string()),  # JSON
    ]
)
RECORD_SHOWN = 1_000  # characters of a record in an error message


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The kernel of the sink that dead letters go to: its input is no stream."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row, by its number, that an operator could not take."""

    row: int
    reason: str


Process = Callable[[pa.Table], pa.Table]


def sift(process: Process, table: pa.Table) -> tuple[list[pa.Table], list[Refused]]:
    """What `process` makes of the rows it takes, in order, and the rows it refuses."""
    made: list[pa.Table] = []
    refused: list[Refused] = []

    def take(start: int, rows: int) -> None:
        try:
            made.append(process(table.slice(start, rows)))
        except OperatorError as e:
            if rows == 0:
                raise
            if rows == 1:
                refused.append(Refused(start, e.message))
                return
            take(start, rows // 2)
            take(start + rows // 2, rows - rows // 2)

    take(0, table.num_rows)
    return made, refused


def first_refused(process: Process, table: pa.Table) -> int | None:
    """The first row that `process` refuses by itself; None when only rows together fail."""
    start, rows = 0, table.num_rows
    while rows > 1:
        half = rows // 2
        if _raises(process, table.slice(start, half)):
            rows = half
        elif _raises(process, table.slice(start + half, rows - half)):
            start, rows = start + half, rows - half
        else:
            return None
    return start if rows else None


def _raises(process: Process, table: pa.Table) -> bool:
    try:
        process(table)
    except OperatorError:
        return True
    return False


def refused_by_key(
    kernel: Stateful, state: Any, table: pa.Table, time: SliceTime
) -> Iterator[Refused]:
    """The rows without which a function with keyed state takes the slice, key by key.

    A key's rows are tried in order, each with those of its key that were taken before it: a row
    is refused if it makes the function raise after them. What raises without any row (a timer)
    is no row's fault and is raised.
    """
    members = members_of(group_rows(*hash_keys(table, kernel.keys)))
    order = np.argsort(members, kind="stable")
    ordered = members[order]
    taken = np.zeros(len(order), dtype=np.bool_)

    def error_of(rows: npt.NDArray[np.int64]) -> OperatorError | None:
        try:
            kernel.compute(state, (table.take(pa.array(np.sort(rows))),), time)
        except OperatorError as e:
            return e
        return None

    def search(start: int, stop: int) -> Iterator[Refused]:
        same_key = order[np.searchsorted(ordered, ordered[start]) : start]
        error = error_of(np.concatenate([same_key[taken[same_key]], order[start:stop]]))
        if error is None:
            taken[order[start:stop]] = True
        elif stop - start == 1:
            yield Refused(int(order[start]), error.message)
        else:
            middle = (start + stop) // 2
            yield from search(start, middle)
            yield from search(middle, stop)

    error = error_of(order[:0])
    if error is not None:
        raise error
    if len(order):
        yield from search(0, len(order))


def without(table: pa.Table, refused: Sequence[Refused]) -> pa.Table:
    """The rows that were not refused."""
    kept = np.ones(table.num_rows, dtype=np.bool_)
    kept[[r.row for r in refused]] = False
    return table.filter(pa.array(kept))


def letters(slice_no: int, operator: str, table: pa.Table, refused: Sequence[Refused]) -> pa.Table:
    """The refused rows of a table as dead letters."""
    rows = _records(table.take(pa.array([r.row for r in refused], pa.int64())))
    columns = [
        [slice_no] * len(refused),
        [operator] * len(refused),
        [r.reason for r in refused],
        [as_json(row) for row in rows],
    ]
    return pa.table(columns, schema=LETTERS)


def shown(table: pa.Table, row: int) -> str:
    """A record for an error message."""
    text = as_json(_records(table.slice(row, 1))[0])
    return text if len(text) <= RECORD_SHOWN else f"{text[:RECORD_SHOWN]} …"


def _records(table: pa.Table) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    except (ValueError, OverflowError):  # times that Python has no form for: by their number
        numbers = {pa.timestamp("us"): pa.int64(), pa.timestamp("us", "UTC"): pa.int64()}
        numbers[pa.date32()] = pa.int32()
        columns = [c.cast(numbers.get(c.type, c.type)) for c in table.columns]
        rows = pa.table(columns, names=table.column_names).to_pylist()
    return rows


def as_json(record: dict[str, Any]) -> str:
    """A record as JSON; what JSON has no form for, as text."""
    return json.dumps(_plain(record), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if value is None or isinstance(value, bool | int | str) else str(value)
