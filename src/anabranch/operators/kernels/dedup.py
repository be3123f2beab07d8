"""Deduplication: the first row of a key passes, its repetitions do not.

With a duration `within`, rows of a key are repetitions only if less than that lies between their
event times: in order of arrival, a row passes unless it is that close to one that passed. What has
passed is kept by span [n·within, (n+1)·within): passed rows of a key are at least `within` apart,
so a span holds at most one, and a row can only be close to those of its own span and the two beside
it. A span is dropped whole once the watermark has passed the end of the next one; a row is late
when the end of its own span is at or below the watermark, so no row asks for a dropped span.

Without a duration all rows count as simultaneous, in one span that never ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import ConfigError, TopologyError
from anabranch.model.duration import microseconds
from anabranch.operators.base import DELETED, GROUP, Computed, SliceTime
from anabranch.operators.kernels.aggregates import check_unreserved, with_columns
from anabranch.operators.kernels.punctual import Members, PunctualKernel
from anabranch.operators.kernels.windows import (
    ROWS,
    pick,
    rows_by_value,
)
from anabranch.operators.rows.canonical import canonical, canonical_table
from anabranch.operators.rows.event_time import event_time_type, event_times
from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import Hashes, check_key_types, hash_keys
from anabranch.operators.state.accumulators import load_rows, plain, row_counts, sum_part
from anabranch.operators.state.closing import ClosingState
from anabranch.operators.state.keyed_table import KeyedTable
from anabranch.operators.state.row_log import ABSENT

PASSED = "_passed_us"  # int64, event time of the row that passed
_PASSED_PART = sum_part(PASSED, np.int64)

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Passed:
    """Keys that pass in one span."""

    span: int
    first: Hashes
    second: Hashes
    keys: pa.Table
    times: Rows


@dataclass(frozen=True, slots=True)
class DedupChange:
    passed: tuple[_Passed, ...]
    closed_us: int | None


class DedupState(ClosingState):
    """Keys that passed, and when; one table per span."""

    def __init__(self, keys: pa.Schema, within_us: int, key_groups: int) -> None:
        super().__init__()
        self.spans: dict[int, KeyedTable] = {}
        self.within_us = within_us
        self._keys = keys
        self._key_groups = key_groups

    def install(self, change: DedupChange) -> None:
        for new in change.passed:
            table = self._writable(new.span)
            table.add(new.first, new.second, new.keys, {PASSED: new.times})
        self.close(change.closed_us)

    def seal(self) -> pa.Table:
        return self._sealed([table.export(table.take_dirty()) for table in self._ordered()])

    def snapshot(self) -> pa.Table:
        return self._sealed([table.export(table.live_slots()) for table in self._ordered()])

    def load(self, table: pa.Table) -> None:
        keys = canonical_table(table.select(self._keys.names))
        first, second = hash_keys(keys, self._keys.names)
        deleted = np.asarray(table.column(DELETED))
        for span, at in rows_by_value(plain(table.column(PASSED)) // self.within_us):
            hashes = first[at], second[at]
            rows, values = pick(keys, at), pick(table, at)
            load_rows(self._writable(span), (_PASSED_PART,), hashes, rows, values, deleted[at])
        self.close(self.sealed_at(table))

    @property
    def rows(self) -> int:
        return sum(len(table) for table in self.spans.values())

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.spans.values())

    def repeated(self, span: int, first: Hashes, second: Hashes, times: Rows) -> Rows:
        """Of rows of one span, those that are close to one that passed."""
        close = np.zeros(len(times), dtype=np.bool_)
        for beside in (span - 1, span, span + 1):
            if beside not in self.spans:
                continue
            table = self.spans[beside]
            slots = table.find(first, second)
            held = np.flatnonzero(slots != ABSENT)
            passed = table.values(slots[held])[PASSED]
            close[held] |= np.abs(times[held] - passed) < self.within_us
        return np.flatnonzero(close)

    def _writable(self, span: int) -> KeyedTable:
        if span not in self.spans:
            self.spans[span] = _new_table(self._keys, self._key_groups)
        return self.spans[span]

    def _drop(self, closed_us: int) -> None:
        for span in list(self.spans):
            if (span + 2) * self.within_us <= closed_us:
                del self.spans[span]

    def _ordered(self) -> list[KeyedTable]:
        return [self.spans[span] for span in sorted(self.spans)]

    def _sealed(self, tables: list[pa.Table]) -> pa.Table:
        return self._marked(pa.concat_tables([_state_schema(self._keys).empty_table(), *tables]))


@dataclass(frozen=True, slots=True)
class Deduplicate(PunctualKernel):
    """The rows that pass, whole, in order of arrival."""

    keys: tuple[str, ...]
    time: str | None = None
    within: timedelta | None = None

    def __post_init__(self) -> None:
        if (self.time is None) != (self.within is None):
            given, lacking = ("within", "time") if self.time is None else ("time", "within")
            raise TopologyError(
                f"deduplicate got {given}= but not {lacking}=; give both, or neither to remember "
                "keys for ever"
            )
        if self.within is not None and microseconds(self.within) < 1:
            raise ConfigError(
                f"deduplicate within {self.within}: give a duration of at least a microsecond"
            )

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        schema = canonical(schemas[0])
        self._key_schema(schema)
        check_unreserved(schema.names, (GROUP, DELETED, PASSED, ROWS))
        if self.time is not None:
            event_time_type(schema, self.time, "deduplicate within a duration")
        return schema

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        return _state_schema(self._key_schema(schemas[0]))

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> DedupState:
        return DedupState(self._key_schema(schemas[0]), self._within_us, key_groups)

    def late_schema(self, *schemas: pa.Schema) -> pa.Schema:
        if self.time is None:
            raise TopologyError("without within=, no row is late")
        return PunctualKernel.late_schema(self, *schemas)

    def grouped(self, port: int, table: pa.Table) -> tuple[pa.Table, Members]:
        """Of rows with the same key and time, the first. Others must go on: whether the row they
        are close to passes is only known where all rows of the key meet."""
        table = canonical_table(table)
        if self.time is not None:
            event_times(table, self.time)
        by = self.keys if self.time is None else (*self.keys, self.time)
        groups = group_rows(*hash_keys(table, by))
        if groups.members is not None:
            table = table.take(pa.array(groups.firsts))
        if self.time is not None:
            table = with_columns(table, {ROWS: row_counts(groups)})
        return table, groups.members

    def compute(self, state: DedupState, inputs: tuple[pa.Table, ...], time: SliceTime) -> Computed:
        table, late_rows = canonical_table(inputs[0]), 0
        times = np.zeros(table.num_rows, dtype=np.int64)
        late = np.zeros(table.num_rows, dtype=np.bool_)
        watermark = None
        if self.time is not None:
            watermark = state.watermark(time)
            times = event_times(table, self.time)
            if watermark is not None:
                late = (times // self._within_us + 1) * self._within_us <= watermark
                late_rows = int(plain(table.column(ROWS))[late].sum())
            table = table.drop_columns([ROWS])
        first, second = hash_keys(table, self.keys)
        passing = self._passing(state, np.flatnonzero(~late), first, second, times)
        keys = table.select(self.keys)
        passed = []
        for span, at in rows_by_value(times[passing] // self._within_us):
            own = passing[at]
            rows = keys.take(pa.array(own))
            passed.append(_Passed(span, first[own], second[own], rows, times[own]))
        output = table.take(pa.array(passing)) if len(passing) < table.num_rows else table
        return Computed(output, DedupChange(tuple(passed), watermark), late_rows, (late,))

    def _passing(
        self, state: DedupState, candidates: Rows, first: Hashes, second: Hashes, times: Rows
    ) -> Rows:
        """The candidates that pass, in order of arrival."""
        repeated = np.zeros(len(times), dtype=np.bool_)
        for span, at in rows_by_value(times[candidates] // self._within_us):
            rows = candidates[at]
            repeated[rows[state.repeated(span, first[rows], second[rows], times[rows])]] = True
        waiting = candidates[~repeated[candidates]]
        groups = group_rows(first[waiting], second[waiting])
        if groups.members is None:
            return waiting
        return waiting[first_come(groups.members, times[waiting], self._within_us)]

    @property
    def _within_us(self) -> int:
        return 1 if self.within is None else microseconds(self.within)

    def _key_schema(self, schema: pa.Schema) -> pa.Schema:
        schema = canonical(schema)
        check_key_types(schema, self.keys)
        return pa.schema([schema.field(name) for name in self.keys])


def first_come(keys: npt.NDArray[np.int32], times: Rows, within: int) -> Rows:
    """In order of arrival, rows that are not within reach of an earlier one of their key.

    In every round the first waiting row of each key passes and takes those within its reach along:
    as many rounds as rows of one key pass, each over what is left.
    """
    leader = np.empty(int(keys.max()) + 1, dtype=np.int64)
    waiting = np.arange(len(keys))
    passing = []
    while len(waiting):
        own = keys[waiting]
        leader[own[::-1]] = waiting[::-1]  # NumPy keeps the last assignment: the first row
        lead = leader[own]
        passing.append(waiting[lead == waiting])
        waiting = waiting[np.abs(times[waiting] - times[lead]) >= within]
    return np.sort(np.concatenate(passing))


def _new_table(keys: pa.Schema, key_groups: int) -> KeyedTable:
    return KeyedTable(keys, {PASSED: _PASSED_PART.dtype}, key_groups)


def _state_schema(keys: pa.Schema) -> pa.Schema:
    marks = [pa.field(GROUP, pa.uint16()), pa.field(DELETED, pa.bool_())]
    return pa.schema([*marks, *keys, _PASSED_PART.field])
