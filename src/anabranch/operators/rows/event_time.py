"""Event-time columns: timestamps, in microseconds, that every row has."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import OperatorError, TopologyError
from anabranch.operators.rows.canonical import canonical_type, require_column
from anabranch.operators.rows.failing import Refused, shown
from anabranch.operators.state.accumulators import plain

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_US, _LAST_US = (
    (moment.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
    for moment in (datetime.min, datetime.max)  # noqa: DTZ901 - the calendar's ends, in UTC
)


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
        first = shown(table, int(np.flatnonzero(times.is_null())[0]))
        raise OperatorError(
            f"column {column!r} holds event times, and {times.null_count} of {len(times)} rows "
            f"have none, the first is {first}; filter rows without a time out first, or let "
            'their source put them aside (on_error="dead_letter")',
            column=column,
            rows=times.null_count,
        )
    return plain(times)


def shown_time(us: int, kind: pa.DataType) -> datetime:
    """A time as users see it, within what Python's datetime can say."""
    moment: datetime = pa.scalar(min(max(us, _FIRST_US), _LAST_US), kind).as_py()
    return moment


@dataclass(frozen=True, slots=True)
class Timed:
    """The kernel of a source with event times: the rows it does not let in.

    Rows may be `max_ahead_us` ahead of the slice's time, which is journalled, so that one wrong
    clock does not take the watermark with it for good; and within the years 1 to 9999, since
    windows reckon on from there. Rows without a time are refused if they can be put aside.
    """

    column: str
    max_ahead_us: int | None = None
    refuses_nulls: bool = False

    def refused(self, table: pa.Table, now_ms: int) -> list[Refused]:
        times = table.column(self.column)
        found = []
        if self.refuses_nulls and times.null_count:
            reason = f"column {self.column!r} is null; a row must have an event time"
            found += [Refused(int(row), reason) for row in np.flatnonzero(times.is_null())]
        last = _LAST_US
        if self.max_ahead_us is not None:
            last = min(last, now_ms * 1_000 + self.max_ahead_us)
        us = plain(times, fill=last)  # where there is none, nothing is wrong with it
        if not len(us) or (us.min() >= _FIRST_US and us.max() <= last):
            return found
        for row in np.flatnonzero((us < _FIRST_US) | (us > last)):
            found.append(Refused(int(row), self._reason(int(us[row]), now_ms)))
        return sorted(found, key=lambda r: r.row)

    def _reason(self, us: int, now_ms: int) -> str:
        if not _FIRST_US <= us <= _LAST_US:
            return f"the event time {self.column!r} is outside of the years 1 to 9999"
        ahead = timedelta(microseconds=us - now_ms * 1_000)
        return (
            f"the event time {self.column!r} is {ahead} ahead of the clock; the source takes up "
            f"to {timedelta(microseconds=self.max_ahead_us or 0)} (max_ahead=)"
        )
