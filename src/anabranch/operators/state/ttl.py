"""State with a time to live: a key that no row has touched for that long is forgotten.

By event time, a key was last touched at the latest event time of its rows, and the watermark is the
clock; else at the processing time of the last slice that had rows of it. Both come with the slice.
What is due is forgotten before the rows of a slice are looked at: a key that comes back in that
slice begins anew; who has to tell the two apart goes by the slice it was born in. No row is dropped
for being late: a key that only late rows bring back is forgotten in the next slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import ConfigError, TopologyError
from anabranch.model.duration import microseconds, parse_duration
from anabranch.operators.base import SliceTime
from anabranch.operators.rows.event_time import event_time_type, event_times
from anabranch.operators.rows.grouping import Groups
from anabranch.operators.state.accumulators import greatest_part, least_part, plain
from anabranch.operators.state.deadlines import Alarms
from anabranch.operators.state.keyed_table import KeyedTable

TOUCHED = "_touched_us"  # int64, when rows last touched a key
ALARM = "_touched_alarm_us"  # not sealed
TOUCHED_PART = greatest_part(TOUCHED, np.dtype(np.int64))
BORN = "_born"  # int64, the slice in which a key came
BORN_PART = least_part(BORN, np.dtype(np.int64))

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ttl:
    """How long untouched keys are kept, by the event-time column `time` or by processing time."""

    after_us: int
    time: str | None = None

    @staticmethod
    def of(duration: str | timedelta | None, time: str | None) -> Ttl | None:
        """What `ttl=` and `time=` of an operator mean."""
        if not isinstance(time, str | None):
            raise TopologyError(
                "time= names the event-time column that ttl= goes by; give an aggregate of that "
                "name another one"
            )
        if duration is None:
            if time is not None:
                raise TopologyError(
                    f"time={time!r} is what ttl= goes by, but there is no ttl=; give both, or "
                    "neither to keep keys for ever",
                    column=time,
                )
            return None
        after_us = microseconds(parse_duration(duration))
        if after_us < 1:
            raise ConfigError(f"ttl is {duration}; give a duration of at least a microsecond")
        return Ttl(after_us, time)

    def check(self, schema: pa.Schema) -> None:
        if self.time is not None:
            event_time_type(schema, self.time, "ttl")

    def now_us(self, time: SliceTime) -> int | None:
        return time.processing_ms * 1_000 if self.time is None else time.watermark_us

    def touches(self, table: pa.Table, groups: Groups) -> dict[str, Times]:
        """What a combined table must carry: by event time, the latest of each group of rows."""
        if self.time is None:
            return {}
        return {TOUCHED: TOUCHED_PART.per_group(event_times(table, self.time), groups)}

    def touched(self, combined: pa.Table, time: SliceTime) -> Times:
        """When the rows of a combined table touched their keys."""
        if self.time is None:
            return np.full(combined.num_rows, time.processing_ms * 1_000)
        return plain(combined.column(TOUCHED))

    def touched_by(self, rows: pa.Table, time: SliceTime) -> Times:
        """When rows as the stream has them touch their keys."""
        if self.time is None:
            return np.full(rows.num_rows, time.processing_ms * 1_000)
        return event_times(rows, self.time)

    def alarms(self, table: KeyedTable) -> Alarms:
        return Alarms(table, TOUCHED, ALARM, self.after_us)
