"""Event-time columns: timestamps, in microseconds, that every row has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import OperatorError, TopologyError
from anabranch.operators.accumulators import plain
from anabranch.operators.canonical import canonical_type, require_column
from anabranch.operators.failing import Refused, shown


def event_time_type(schema: pa.Schema, column: str, what: str) -> pa.DataType:
    """The type of an event-time column, or a TopologyError that names what asked for it."""
    kind = canonical_type(require_column(schema, column, what))
    if not pa.types.is_timestamp(kind):
        raise TopologyError(
            f"column {column!r} has type {kind}; an event time must be a timestamp, so cast it "
            "first",
            column=column,
        )
    return kind


def event_times(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """Event times in microseconds; every row must have one."""
    times = table.column(column)
    if times.null_count:
        first = shown(table, Timed(column).refused(table)[0].row)
        raise OperatorError(
            f"column {column!r} holds event times, and {times.null_count} of {len(times)} rows "
            f"have none, the first is {first}; filter rows without a time out first, or let "
            'their source put them aside (on_error="dead_letter")',
            column=column,
            rows=times.null_count,
        )
    return plain(times)


@dataclass(frozen=True, slots=True)
class Timed:
    """The kernel of a source that puts rows without an event time aside."""

    column: str

    def refused(self, table: pa.Table) -> list[Refused]:
        reason = f"column {self.column!r} is null; a row must have an event time"
        nulls = np.flatnonzero(np.asarray(table.column(self.column).is_null()))
        return [Refused(int(row), reason) for row in nulls]
