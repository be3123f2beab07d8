"""Running a user's function with keyed state (see functions): what it is given, what it may return,
and what becomes of it.

A slice first takes note of timers that have come, by the watermark and by processing time, and of
keys whose time to live is over; a key whose timer comes in the same slice is not forgotten before
the next. Then the function is called once with all rows and the state of all keys concerned. Keys
come in order of their first row; those without rows after them, by timer and hash, so that what is
emitted does not depend on how keys are spread over partitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from anabranch.errors import AnabranchError, OperatorError, TopologyError
from anabranch.operators.base import DELETED, GROUP, Computed, SliceTime
from anabranch.operators.functions import (
    EVENT_FIRED,
    EVENT_TIMER,
    PROCESSING_FIRED,
    PROCESSING_TIMER,
    Fields,
    KeyedSlice,
    SliceFunction,
    SliceResult,
    check_state_names,
    output_schema,
)
from anabranch.operators.functions.returned import as_table, fitted, guarded
from anabranch.operators.kernels.aggregates import with_columns
from anabranch.operators.rows.canonical import canonical, canonical_table, to_frame
from anabranch.operators.rows.event_time import event_time_type, shown_time
from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import Hashes, check_key_types, hash_keys
from anabranch.operators.state.accumulators import plain
from anabranch.operators.state.key_lists import members_of
from anabranch.operators.state.keyed_table import NEVER, Columns, no_slots
from anabranch.operators.state.process_state import (
    EVENT_US,
    PROCESSING_US,
    Clocks,
    ProcessChange,
    ProcessState,
    sealed_values,
)
from anabranch.operators.state.row_log import ABSENT, Slots
from anabranch.operators.state.ttl import TOUCHED, TOUCHED_PART, Ttl

_UTC = pa.timestamp("us", "UTC")

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Concerned:
    """The keys of a slice: their slots (ABSENT: no state), what is kept of them beside the fields
    (timers that have come taken out), and which timers have come (NEVER: not)."""

    first: Hashes
    second: Hashes
    keys: pa.Table
    slots: Slots
    values: Columns
    event_fired: Rows
    processing_fired: Rows
    state_row: Rows
    forgotten: Slots

    def __len__(self) -> int:
        return len(self.slots)

    def places(self, rows: pa.Table, what: str) -> Rows:
        """Which key each of these rows has; all must have one of the slice's."""
        first, second = hash_keys(rows, self.keys.schema.names)
        # The keys come first and are distinct: a group's number is the position of its key.
        groups = group_rows(
            np.concatenate([self.first, first]), np.concatenate([self.second, second])
        )
        places = members_of(groups)[len(self) :].astype(np.int64)
        strange = np.flatnonzero(places >= len(self))
        if len(strange):
            raise OperatorError(
                f"{what} names the key {_example(rows, self.keys.schema, strange[0])}, which has "
                "neither rows nor a timer that has come in this slice; return rows of given keys"
            )
        return places


@dataclass(frozen=True, slots=True)
class KeyedProcess:
    """The rows the function gives, key by key. The function is None only where state is read
    without the job."""

    keys: tuple[str, ...]
    function: SliceFunction | None
    state: Fields
    time: str | None = None
    ttl: Ttl | None = None

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        assert self.function is not None
        schema = canonical(schemas[0])
        keys = self._key_schema(schema)
        check_state_names(keys, self.state.schema)
        output = output_schema(self.function, keys)
        if self.time is not None:
            event_time_type(schema, self.time, "process")
        self._try_out(schema)
        return output

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        marks = [pa.field(GROUP, pa.uint16()), pa.field(DELETED, pa.bool_())]
        values = [pa.field(name, pa.int64()) for name in sealed_values(self.ttl)]
        return pa.schema([*marks, *self._key_schema(schemas[0]), *self.state.schema, *values])

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> ProcessState:
        return ProcessState(self._key_schema(schemas[0]), self.state.schema, self.ttl, key_groups)

    def combine(self, port: int, table: pa.Table) -> pa.Table:
        return canonical_table(table)

    def compute(
        self, state: ProcessState, inputs: tuple[pa.Table, ...], time: SliceTime
    ) -> Computed:
        table = canonical_table(inputs[0])
        concerned = self._concerned(state, table, time)
        result = SliceResult()
        if len(concerned):
            result = self._call(self._given(state, table, concerned, time))
        output = self._output(state, concerned, result.output)
        return Computed(output, self._change(state, concerned, result, time))

    def _clocks(self, time: SliceTime) -> Clocks:
        timers = (time.watermark_us, time.processing_ms * 1_000)
        return timers if self.ttl is None else (*timers, self.ttl.now_us(time))

    def _concerned(self, state: ProcessState, table: pa.Table, time: SliceTime) -> _Concerned:
        watermark, now, *ttl = self._clocks(time)
        event_due, processing_due = state.event.due(watermark), state.processing.due(now)
        due = np.union1d(event_due, processing_due)
        forgotten = no_slots() if state.ttl is None else np.setdiff1d(state.ttl.due(*ttl), due)
        hashes = hash_keys(table, self.keys)
        groups = group_rows(*hashes)
        first, second = hashes[0][groups.firsts], hashes[1][groups.firsts]
        slots = state.table.find(first, second)
        slots[np.isin(slots, forgotten)] = ABSENT
        alone = self._by_timer(state, np.setdiff1d(due, slots))
        slots = np.concatenate([slots, alone])
        alone_first, alone_second = state.table.hashes(alone)
        values = state.values(slots)
        fired = []
        for name, due_slots in ((EVENT_US, event_due), (PROCESSING_US, processing_due)):
            come = np.isin(slots, due_slots)
            fired.append(np.where(come, values[name], NEVER))
            values[name] = np.where(come, NEVER, values[name])
        if self.ttl is not None:
            touched = TOUCHED_PART.per_group(self.ttl.touched_by(table, time), groups)
            own = values[TOUCHED][: groups.count]
            values[TOUCHED][: groups.count] = np.maximum(own, touched)
        with_rows = table.select(self.keys).take(pa.array(groups.firsts))
        keys = pa.concat_tables([with_rows, state.table.rows(alone).select(self.keys)])
        return _Concerned(
            np.concatenate([first, alone_first]),
            np.concatenate([second, alone_second]),
            keys,
            slots,
            values,
            fired[0],
            fired[1],
            members_of(groups).astype(np.int64),
            forgotten,
        )

    def _by_timer(self, state: ProcessState, slots: Slots) -> Slots:
        values = state.table.values(slots)
        first, second = state.table.hashes(slots)
        return slots[np.lexsort((second, first, values[PROCESSING_US], values[EVENT_US]))]

    def _given(
        self, state: ProcessState, table: pa.Table, concerned: _Concerned, time: SliceTime
    ) -> KeyedSlice:
        event_type = self._event_type(table.schema)
        held = concerned.slots != ABSENT
        rows = state.table.rows(concerned.slots[held]).select(state.fields.names)
        place = pa.array(np.cumsum(held) - 1, mask=~held)
        fields = rows.combine_chunks().take(place) if held.any() else _nulls(rows, len(held))
        columns = {name: fields.column(name) for name in state.fields.names}
        columns[EVENT_TIMER] = _moments(concerned.values[EVENT_US], event_type)
        columns[PROCESSING_TIMER] = _moments(concerned.values[PROCESSING_US], _UTC)
        columns[EVENT_FIRED] = _moments(concerned.event_fired, event_type)
        columns[PROCESSING_FIRED] = _moments(concerned.processing_fired, _UTC)
        return KeyedSlice(
            self.keys,
            to_frame(table),
            to_frame(with_columns(concerned.keys, columns)),
            pl.Series("state_row", concerned.state_row),
            None if time.watermark_us is None else shown_time(time.watermark_us, event_type),
            shown_time(time.processing_ms * 1_000, _UTC),
        )

    def _call(self, given: KeyedSlice) -> SliceResult:
        function = self.function
        assert function is not None
        result = guarded(lambda: function.process(given))
        if not isinstance(result, SliceResult):
            raise OperatorError(
                f"process returned {type(result).__name__}; return an anabranch.SliceResult"
            )
        return result

    def _output(self, state: ProcessState, concerned: _Concerned, output: Any | None) -> pa.Table:
        assert self.function is not None
        schema = output_schema(self.function, state.keys)
        if output is None:
            return schema.empty_table()
        table = fitted(as_table(output), schema, "the output that process returned")
        places = concerned.places(table, "the output that process returned")
        if np.all(places[1:] >= places[:-1]):
            return table
        return table.take(pa.array(np.argsort(places, kind="stable")))

    def _change(
        self, state: ProcessState, concerned: _Concerned, result: SliceResult, time: SliceTime
    ) -> ProcessChange:
        deleted = self._deleted(state, concerned, result.deleted)
        written, fields, timers = self._written(state, concerned, result.state)
        both = np.intersect1d(deleted, written)
        if len(both):
            raise OperatorError(
                f"process returned new state for the key "
                f"{_example(concerned.keys, state.keys, both[0])} and deleted it; do one"
            )
        slots = concerned.slots
        changed = (concerned.event_fired != NEVER) | (concerned.processing_fired != NEVER)
        if self.ttl is not None:
            changed[concerned.state_row] = True
        changed &= slots != ABSENT
        changed[deleted] = changed[written] = False
        kept = np.flatnonzero(changed)
        exported = sealed_values(self.ttl)
        keys = concerned.keys.take(pa.array(written))
        values = {name: column[written] for name, column in concerned.values.items()} | timers
        return ProcessChange(
            clocks=self._clocks(time),
            forgotten=np.union1d(concerned.forgotten, _held(slots[deleted])),
            kept=slots[kept],
            kept_values={name: concerned.values[name][kept] for name in exported},
            replaced=_held(slots[written]),
            first=concerned.first[written],
            second=concerned.second[written],
            rows=with_columns(keys, {n: fields.column(n) for n in fields.schema.names}),
            values=values,
        )

    def _deleted(self, state: ProcessState, concerned: _Concerned, rows: Any | None) -> Rows:
        """Places of the keys to forget."""
        if rows is None:
            return no_slots()
        what = "what process returned as deleted"
        table = as_table(rows)
        own = [name for name in table.schema.names if name in self.keys]
        return np.unique(concerned.places(fitted(table.select(own), state.keys, what), what))

    def _written(
        self, state: ProcessState, concerned: _Concerned, rows: Any | None
    ) -> tuple[Rows, pa.Table, Columns]:
        """Places of the keys with new state, their fields, and the timers that were given."""
        if rows is None:
            return no_slots(), state.fields.empty_table(), {}
        what = "the state that process returned"
        table = as_table(rows)
        timers = {}
        for name, kept in ((EVENT_TIMER, EVENT_US), (PROCESSING_TIMER, PROCESSING_US)):
            if name in table.schema.names:
                timers[kept] = _timer(table.column(name), name)
        given = (EVENT_TIMER, PROCESSING_TIMER, EVENT_FIRED, PROCESSING_FIRED)
        table = table.select([name for name in table.schema.names if name not in given])
        table = fitted(table, pa.schema([*state.keys, *state.fields]), what)
        places = concerned.places(table, what)
        once, first = np.unique(places, return_index=True)
        if len(once) < len(places):
            again = np.setdiff1d(np.arange(len(places)), first)[0]
            raise OperatorError(
                f"{what} has the key {_example(table, state.keys, again)} more than once; return "
                "one row per key"
            )
        return places, table.select(state.fields.names), timers

    def _try_out(self, schema: pa.Schema) -> None:
        """Call the function with nothing, to find what does not fit before the job starts."""
        state = self.new_state(1, schema)
        empty = schema.empty_table()
        time = SliceTime(0, None, 0)
        concerned = self._concerned(state, empty, time)
        try:
            result = self._call(self._given(state, empty, concerned, time))
            self._output(state, concerned, result.output)
            self._change(state, concerned, result, time)
        except AnabranchError as error:
            raise TopologyError(
                f"{error.message} (process is called once with an empty slice before the job "
                "starts, and must accept it)",
                **error.fields,
            ) from error

    def _event_type(self, schema: pa.Schema) -> pa.DataType:
        return _UTC if self.time is None else schema.field(self.time).type

    def _key_schema(self, schema: pa.Schema) -> pa.Schema:
        schema = canonical(schema)
        check_key_types(schema, self.keys)
        return pa.schema([schema.field(name) for name in self.keys])


def _held(slots: Slots) -> Slots:
    return slots[np.flatnonzero(slots != ABSENT)]


def _nulls(rows: pa.Table, count: int) -> pa.Table:
    return pa.table([pa.nulls(count, field.type) for field in rows.schema], schema=rows.schema)


def _moments(values: Rows, kind: pa.DataType) -> pa.Array:
    return pa.array(values, mask=values == NEVER).cast(kind)


def _timer(column: pa.ChunkedArray, name: str) -> Rows:
    if pa.types.is_null(column.type):
        column = column.cast(_UTC)
    if not pa.types.is_timestamp(column.type):
        raise OperatorError(
            f"the state that process returned: column {name!r} must be a timestamp, but came as "
            f"{column.type}",
            column=name,
        )
    return np.asarray(plain(column, fill=int(NEVER)), dtype=np.int64)


def _example(rows: pa.Table, keys: pa.Schema, row: Any) -> Any:
    return rows.select(keys.names).slice(int(row), 1).to_pylist()[0]
