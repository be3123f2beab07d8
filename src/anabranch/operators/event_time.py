"""Event-time columns: timestamps, in microseconds, that every row has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import OperatorError, TopologyError
from anabranch.operators.accumulators import plain
from anabranch.operators.canonical import canonical_type, require_column


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
        raise OperatorError(
            f"column {column!r} holds event times, and {times.null_count} of {len(times)} rows "
            "have none; filter rows without a time out first",
            column=column,
            rows=times.null_count,
        )
    return plain(times)
