"""The state behind a user's function: per key one row of fields, two timers, and when it was last
touched. A row that changes is written anew; timers and touches change in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.operators.base import DELETED
from anabranch.operators.rows.canonical import canonical_table
from anabranch.operators.rows.hashing import Hashes, hash_keys
from anabranch.operators.state.accumulators import plain
from anabranch.operators.state.deadlines import Alarms
from anabranch.operators.state.keyed_table import NEVER, Columns, KeyedTable, no_slots
from anabranch.operators.state.row_log import ABSENT, Slots
from anabranch.operators.state.ttl import ALARM, TOUCHED, Ttl

# How timers are kept: int64 microseconds, NEVER for none, and their alarms, which are not sealed.
EVENT_US, PROCESSING_US = "_event_timer_us", "_processing_timer_us"
EVENT_ALARM, PROCESSING_ALARM = "_event_alarm_us", "_processing_alarm_us"

_INT64: np.dtype[Any] = np.dtype(np.int64)
_NEVER_TOUCHED = np.iinfo(np.int64).min

Clocks = tuple[int | None, ...]  # of event timers, processing timers and, if there is one, the ttl


@dataclass(frozen=True, slots=True)
class ProcessChange:
    """Slots to forget, slots with new values, slots whose row is replaced, and rows to write."""

    clocks: Clocks
    forgotten: Slots
    kept: Slots
    kept_values: Columns
    replaced: Slots
    first: Hashes
    second: Hashes
    rows: pa.Table
    values: Columns


class ProcessState:
    """The fields and timers of every key."""

    def __init__(
        self, keys: pa.Schema, fields: pa.Schema, ttl: Ttl | None, key_groups: int
    ) -> None:
        self.keys = keys
        self.fields = fields
        schema = pa.schema([*keys, *fields])
        moments = [EVENT_ALARM, PROCESSING_ALARM, *([] if ttl is None else [ALARM])]
        self._sealed = sealed_values(ttl)
        self.table = KeyedTable(schema, self._sealed, key_groups, moments)
        self.event = Alarms(self.table, EVENT_US, EVENT_ALARM)
        self.processing = Alarms(self.table, PROCESSING_US, PROCESSING_ALARM)
        self.ttl = None if ttl is None else ttl.alarms(self.table)
        self._ttl_by_event = ttl is not None and ttl.time is not None
        self._alarms = [self.event, self.processing, *([] if self.ttl is None else [self.ttl])]

    def install(self, change: ProcessChange) -> None:
        self.table.write(change.kept, change.kept_values)
        self.table.delete(change.forgotten)
        self.table.delete(change.replaced, dirty=False)
        added = no_slots()
        if len(change.first):
            added = self.table.add(change.first, change.second, change.rows, change.values)
        for alarms, now in zip(self._alarms, change.clocks, strict=True):
            alarms.settle(now)
            alarms.watch(added)

    def values(self, slots: Slots) -> Columns:
        """Values of slots; where there is none, no timers and never touched."""
        held = slots != ABSENT
        found = {}
        for name, column in self.table.values(slots[held]).items():
            found[name] = np.full(len(slots), _NEVER_TOUCHED if name == TOUCHED else NEVER)
            found[name][held] = column
        return found

    def seal(self) -> pa.Table:
        return self.table.export(self.table.take_dirty())

    def snapshot(self) -> pa.Table:
        return self.table.snapshot()

    def load(self, table: pa.Table) -> None:
        rows = canonical_table(table.select([*self.keys.names, *self.fields.names]))
        first, second = hash_keys(rows, self.keys.names)
        old = self.table.find(first, second)
        self.table.delete(np.unique(old[old != ABSENT]), dirty=False)
        live = np.flatnonzero(~np.asarray(table.column(DELETED)))
        if not len(live):
            return
        values = {name: plain(table.column(name))[live] for name in self._sealed}
        if len(live) < rows.num_rows:
            rows = rows.take(pa.array(live))
        added = self.table.add(first[live], second[live], rows, values, dirty=False)
        for alarms in self._alarms:
            alarms.watch(added)

    @property
    def rows(self) -> int:
        return len(self.table)

    @property
    def due_us(self) -> int | None:
        lives = [] if self.ttl is None or self._ttl_by_event else [self.ttl]
        first = (alarms.first for alarms in (self.processing, *lives))
        return min((at for at in first if at is not None), default=None)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + sum(alarms.nbytes for alarms in self._alarms)


def sealed_values(ttl: Ttl | None) -> dict[str, np.dtype[Any]]:
    """What is kept, and sealed, beside the fields."""
    names = [EVENT_US, PROCESSING_US, *([] if ttl is None else [TOUCHED])]
    return dict.fromkeys(names, _INT64)
