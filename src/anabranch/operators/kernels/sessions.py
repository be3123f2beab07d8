"""Session windows: rows of a key less than a gap apart belong together, whatever their order.

A session reaches from its first row to its last plus the gap, and is closed, like any window, when
that end plus the lateness is at or below the watermark. In a slice, first what the watermark closes
is emitted; then the rows of the slice are merged with what is open of their keys. A session that
comes out of this already closed consists of late rows, and is dropped. Merging is transitive, so
parts of a slice can be merged before the shuffle, in any cut, with the same result.

Open sessions are a list per key, the newest with number 0: closing takes from the list's end. A
slice looks only at the keys of its rows and at keys whose deadline has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import ConfigError, TopologyError
from anabranch.model.duration import microseconds, parse_duration
from anabranch.model.graph import Hold
from anabranch.operators.base import Computed, SliceTime
from anabranch.operators.kernels.aggregates import (
    Aggregate,
    AggregatePlan,
    check_names,
    with_columns,
)
from anabranch.operators.kernels.punctual import Members, PunctualKernel
from anabranch.operators.kernels.windows import (
    ROWS,
    WINDOW_END,
    WINDOW_START,
)
from anabranch.operators.rows.canonical import canonical_table
from anabranch.operators.rows.event_time import event_time_type, event_times
from anabranch.operators.rows.grouping import Groups, group_rows
from anabranch.operators.rows.hashing import hash_keys
from anabranch.operators.state.accumulators import plain, row_counts
from anabranch.operators.state.closing import ClosingState
from anabranch.operators.state.deadlines import DeadlineIndex, Hashed
from anabranch.operators.state.key_lists import (
    KeyLists,
    Replacement,
    Rows,
    members_of,
    positions,
    sealed_schema,
)
from anabranch.operators.state.keyed_table import Columns
from anabranch.operators.state.row_log import Slots

START, LAST = "_start_us", "_last_us"  # int64, event times of a session's first and last row


@dataclass(frozen=True, slots=True)
class Session:
    """Sessions that end when no row came for `gap_us` microseconds."""

    gap_us: int


def session(gap: str | timedelta) -> Session:
    """Windows that last as long as rows of a key follow each other in less than the gap."""
    gap_us = microseconds(parse_duration(gap))
    if gap_us < 1:
        raise ConfigError(
            f"a session with gap {gap}: give a duration of at least a microsecond", gap=str(gap)
        )
    return Session(gap_us)


@dataclass(frozen=True, slots=True)
class SessionChange:
    """Lists to write, and of the keys with sessions that did not grow out of an open one, the
    deadlines to watch."""

    lists: Replacement
    deadlines: Rows
    keys: Hashed
    closed_us: int | None


class SessionState(ClosingState):
    """The open sessions of every key."""

    def __init__(
        self, plan: AggregatePlan, reach_us: int, time_type: pa.DataType, key_groups: int
    ) -> None:
        super().__init__()
        self.plan = plan
        self.time_type = time_type
        self.lists = KeyLists(tuple(plan.keys.names), plan.keys, _dtypes(plan), key_groups)
        self._reach_us = reach_us  # from a session's last row to its deadline
        # Invariant: every open session's key has an entry at or before the session's deadline.
        self._index = DeadlineIndex()

    def install(self, change: SessionChange) -> None:
        self.lists.apply(change.lists)
        self._index.add(change.deadlines, change.keys)
        self.close(change.closed_us)

    def seal(self) -> pa.Table:
        return self._marked(self.lists.seal())

    def snapshot(self) -> pa.Table:
        return self._marked(self.lists.snapshot())

    def load(self, table: pa.Table) -> None:
        self.lists.load(table)
        keys = canonical_table(table.select(self.plan.keys.names))
        hashes = hash_keys(keys, self.plan.keys.names)
        self._index.add(self.deadlines(plain(table.column(LAST))), hashes)
        watermark = self.sealed_at(table)
        self.lists.remove(self.due(watermark))
        self.close(watermark)

    @property
    def rows(self) -> int:
        return len(self.lists)

    @property
    def nbytes(self) -> int:
        return self.lists.nbytes + self._index.nbytes

    def due(self, watermark_us: int | None) -> Slots:
        """Sessions that this watermark closes, by end, start and age."""
        if watermark_us is None:
            return np.empty(0, dtype=np.int64)
        _, slots = self.lists.find(*self._index.until(watermark_us))
        values = self.lists.values(slots)
        order = np.lexsort((slots, values[START], values[LAST]))
        return slots[order][self.closed(values[LAST][order], watermark_us)]

    def closed(self, last: Rows, watermark_us: int | None) -> npt.NDArray[np.bool_]:
        """Are sessions with these last rows closed?"""
        if watermark_us is None:
            return np.zeros(len(last), dtype=np.bool_)
        return self.deadlines(last) <= watermark_us

    def deadlines(self, last: Rows) -> Rows:
        return last + self._reach_us

    def _drop(self, closed_us: int) -> None:
        """Take passed deadlines out of the index; sessions that grew since go back in."""
        keys = self._index.until(closed_us)
        self._index.remove(closed_us)
        owners, slots = self.lists.find(*keys)
        deadlines = self.deadlines(self.lists.values(slots)[LAST])
        self._index.add(deadlines, (keys[0][owners], keys[1][owners]))


@dataclass(frozen=True, slots=True)
class SessionAggregate(PunctualKernel):
    """Aggregates per key and session: keys, window_start, window_end, aggregates; sessions come
    by end and start."""

    keys: tuple[str, ...]
    time: str
    session: Session
    aggregates: Mapping[str, Aggregate]
    lateness: timedelta = timedelta(0)

    @property
    def holds(self) -> tuple[tuple[str | None, Hold], ...]:
        """Sessions that are still to come out end after the watermark; they may have begun at any
        time."""
        return ((WINDOW_END, Hold(microseconds(self.lateness))),)

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        check_names([*self.keys, WINDOW_START, WINDOW_END, *self.aggregates])
        return _output_schema(self._plan(schemas[0]), self._time_type(schemas[0]))

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        plan = self._plan(schemas[0])
        return sealed_schema(plan.keys, _dtypes(plan))

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> SessionState:
        reach_us = self.session.gap_us + microseconds(self.lateness)
        plan, kind = self._plan(schemas[0]), self._time_type(schemas[0])
        return SessionState(plan, reach_us, kind, key_groups)

    def grouped(self, port: int, table: pa.Table) -> tuple[pa.Table, Members]:
        """One row per key and session of these rows alone; keys in order of first appearance."""
        table = canonical_table(table)
        times = event_times(table, self.time)
        members = members_of(group_rows(*hash_keys(table, self.keys)))
        merged = merge_sessions(members, times, times, self.session.gap_us)
        plan = self._plan(table.schema)
        columns = plan.reduce(table, merged.groups)
        columns |= {START: merged.start, LAST: merged.last, ROWS: row_counts(merged.groups)}
        keys = table.select(self.keys).take(pa.array(merged.groups.firsts))
        return with_columns(keys, columns), merged.of_row

    def compute(
        self, state: SessionState, inputs: tuple[pa.Table, ...], time: SliceTime
    ) -> Computed:
        watermark = state.watermark(time)
        due = state.due(watermark)
        keys = canonical_table(inputs[0].select(self.keys))
        hashes = hash_keys(keys, self.keys)
        groups = group_rows(*hashes)
        touched = _pick(hashes, groups.firsts)
        owners, slots = state.lists.find(*touched)
        going_on = ~state.closed(state.lists.values(slots)[LAST], watermark)
        arriving = _Spans.arriving(state, inputs[0], members_of(groups))
        spans = _Spans.held(state, owners[going_on], slots[going_on]).followed_by(arriving)
        merged = merge_sessions(spans.owner, spans.start, spans.last, self.session.gap_us)
        late = state.closed(merged.last, watermark)
        late_spans = late[merged.of_row]
        late_rows = int(spans.rows[late_spans].sum())
        owner = spans.owner[merged.groups.firsts]
        kept, new = np.flatnonzero(~late), np.flatnonzero(~late & ~merged.holds(spans.rows == 0))
        values: Columns = {START: merged.start, LAST: merged.last}
        for part in state.plan.parts:
            values[part.name] = part.per_group(spans.parts[part.name], merged.groups)
        lists = Replacement(
            np.union1d(slots, due),
            _pick(touched, owner[kept]),
            _newest_first(owner[kept]),
            keys.take(pa.array(groups.firsts[owner[kept]])),
            {name: column[kept] for name, column in values.items()},
        )
        to_watch = state.deadlines(merged.last[new]), _pick(touched, owner[new])
        change = SessionChange(lists, *to_watch, watermark)
        arrived_late = late_spans[len(spans.rows) - inputs[0].num_rows :]
        return Computed(self._emit(state, due), change, late_rows, (arrived_late,))

    def _emit(self, state: SessionState, slots: Slots) -> pa.Table:
        values = state.lists.values(slots)
        end = values[LAST] + self.session.gap_us
        columns = {
            WINDOW_START: pa.array(values[START]).cast(state.time_type),
            WINDOW_END: pa.array(end).cast(state.time_type),
            **state.plan.results(values),
        }
        return with_columns(state.lists.rows(slots), columns)

    def _plan(self, schema: pa.Schema) -> AggregatePlan:
        plan = AggregatePlan.bind(self.keys, self.aggregates, schema)
        if plan.distinct:
            names = ", ".join(plan.distinct)
            raise TopologyError(
                f"{names}: sessions merge, and count_distinct does not keep its values by session; "
                "count distinct values in tumbling or hopping windows",
                aggregates=list(plan.distinct),
            )
        return plan

    def _time_type(self, schema: pa.Schema) -> pa.DataType:
        return event_time_type(schema, self.time, "the session's event time")


@dataclass(frozen=True, slots=True)
class _Spans:
    """Sessions that are to be merged: the number of their key, their bounds and parts, and how
    many rows of the slice they bring (none, if they were held)."""

    owner: npt.NDArray[Any]
    start: Rows
    last: Rows
    rows: Rows
    parts: Columns

    @staticmethod
    def held(state: SessionState, owner: Rows, slots: Slots) -> _Spans:
        values = state.lists.values(slots)
        none = np.zeros(len(slots), dtype=np.int64)
        return _Spans(owner, values[START], values[LAST], none, values)

    @staticmethod
    def arriving(state: SessionState, table: pa.Table, owner: npt.NDArray[Any]) -> _Spans:
        start, last, rows = (plain(table.column(name)) for name in (START, LAST, ROWS))
        return _Spans(owner, start, last, rows, state.plan.of_combined(table))

    def followed_by(self, other: _Spans) -> _Spans:
        return _Spans(
            np.concatenate([self.owner, other.owner]),
            np.concatenate([self.start, other.start]),
            np.concatenate([self.last, other.last]),
            np.concatenate([self.rows, other.rows]),
            {
                name: np.concatenate([self.parts[name], column])
                for name, column in other.parts.items()
            },
        )


@dataclass(frozen=True, slots=True)
class MergedSessions:
    """Sessions by key and start; `groups` gives the rows of each, `of_row` the session of each
    row."""

    groups: Groups
    of_row: npt.NDArray[np.int32]
    start: Rows
    last: Rows

    def holds(self, rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which sessions hold one of these rows."""
        found = np.zeros(len(self.start), dtype=np.bool_)
        found[self.of_row[rows]] = True
        return found


def merge_sessions(
    members: npt.NDArray[Any], start: Rows, last: Rows, gap_us: int
) -> MergedSessions:
    """Merge spans [start, last] of the same key that are less than the gap apart."""
    order = np.lexsort((start, members))
    key, begin = members[order].astype(np.int64), start[order]
    reach = _running_max(key, last[order])
    opens = np.ones(len(order), dtype=np.bool_)
    opens[1:] = (key[1:] != key[:-1]) | (begin[1:] >= reach[:-1] + gap_us)
    closes = np.ones(len(order), dtype=np.bool_)
    closes[:-1] = opens[1:]
    of_row = np.empty(len(order), dtype=np.int32)
    of_row[order] = np.cumsum(opens, dtype=np.int32) - 1
    return MergedSessions(Groups(order[opens], of_row), of_row, begin[opens], reach[closes])


def _running_max(key: Rows, values: Rows) -> Rows:
    """The largest value so far among the rows of the same key; keys ascend.

    Values are replaced by their ranks, so that key and rank fit into one integer that grows with
    the key: one running maximum serves all keys.
    """
    ranked = np.sort(values)
    base = key * (len(values) + 1)
    best = np.maximum.accumulate(base + np.searchsorted(ranked, values))
    return ranked[best - base]


def _newest_first(owner: Rows) -> Rows:
    """Numbers of sessions that come by key and start: the last of each key is 0."""
    return positions(owner[::-1])[::-1]


def _pick(hashes: Hashed, rows: Rows) -> Hashed:
    return hashes[0][rows], hashes[1][rows]


def _dtypes(plan: AggregatePlan) -> dict[str, np.dtype[Any]]:
    times = {START: np.dtype(np.int64), LAST: np.dtype(np.int64)}
    return {**times, **{part.name: part.dtype for part in plan.parts}}


def _output_schema(plan: AggregatePlan, kind: pa.DataType) -> pa.Schema:
    bounds = [pa.field(WINDOW_START, kind), pa.field(WINDOW_END, kind)]
    return pa.schema([*plan.keys, *bounds, *plan.result_fields])
