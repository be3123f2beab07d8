"""Event-time windows: aggregates per key and window, emitted once, when the window closes.

Windows are aligned to the epoch. State is kept by pane, the longest span that every window holds
whole (the window itself when tumbling): a row is stored once however many windows overlap, and a
window is the merge of its panes. Each pane is a table of its own, so closing drops it whole.

A window is closed when its end plus the lateness is at or below the watermark. Rows of a slice meet
the windows the watermark leaves open; then the windows it closes are emitted. A row is late when
all its windows are closed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import ConfigError
from anabranch.model.duration import microseconds, parse_duration
from anabranch.model.graph import Hold
from anabranch.operators.base import Computed, SliceTime
from anabranch.operators.kernels.aggregates import (
    Aggregate,
    AggregatePlan,
    Count,
    check_names,
    with_columns,
)
from anabranch.operators.kernels.punctual import Members, PunctualKernel
from anabranch.operators.rows.canonical import canonical_table
from anabranch.operators.rows.event_time import event_time_type, event_times
from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import hash_keys
from anabranch.operators.state.accumulators import plain, row_counts
from anabranch.operators.state.aggregate_state import AggregateState, AggregateUpdate
from anabranch.operators.state.closing import ClosingState

WINDOW_START = "window_start"
WINDOW_END = "window_end"
PANE = "_pane"  # int64, start of the pane in microseconds
ROWS = "_rows"  # int64, input rows behind a combined row, to count the late ones


@dataclass(frozen=True, slots=True)
class Window:
    """Windows [n·slide, n·slide + size), in microseconds."""

    size_us: int
    slide_us: int

    @property
    def pane_us(self) -> int:
        return math.gcd(self.size_us, self.slide_us)

    def starts_of(self, pane: int) -> range:
        """Starts of the windows that hold a pane."""
        last = self.last_start(pane)
        first = (pane - self.size_us) // self.slide_us * self.slide_us + self.slide_us
        return range(first, last + 1, self.slide_us)

    def last_start(self, pane: int) -> int:
        return pane // self.slide_us * self.slide_us


def tumbling(size: str | timedelta) -> Window:
    """Windows that follow each other."""
    return hopping(size, size)


def hopping(size: str | timedelta, slide: str | timedelta) -> Window:
    """Windows of one size, a new one every slide."""
    size_us, slide_us = (microseconds(parse_duration(d)) for d in (size, slide))
    if not 0 < slide_us <= size_us:
        raise ConfigError(
            f"a window of size {size} with slide {slide}: both must be positive and the slide at "
            "most the size, or rows would fall between windows",
            size=str(size),
            slide=str(slide),
        )
    return Window(size_us, slide_us)


@dataclass(frozen=True, slots=True)
class WindowChange:
    updates: tuple[tuple[int, AggregateUpdate], ...]
    closed_us: int | None


class WindowState(ClosingState):
    """The aggregates of every open pane."""

    def __init__(
        self,
        plan: AggregatePlan,
        window: Window,
        lateness_us: int,
        time_type: pa.DataType,
        key_groups: int,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.time_type = time_type
        self.panes: dict[int, AggregateState] = {}
        self._window = window
        self._lateness_us = lateness_us
        self._key_groups = key_groups
        self.empty = AggregateState(plan, key_groups)

    def pane(self, pane: int) -> AggregateState:
        """To read: an empty one for a pane that has no rows."""
        return self.panes.get(pane, self.empty)

    def install(self, change: WindowChange) -> None:
        for pane, update in change.updates:
            self._writable(pane).install(update)
        self.close(change.closed_us)

    def seal(self) -> pa.Table:
        return self._sealed([(pane, held.seal()) for pane, held in self._ordered()])

    def snapshot(self) -> pa.Table:
        return self._sealed([(pane, held.snapshot()) for pane, held in self._ordered()])

    def load(self, table: pa.Table) -> None:
        for pane, rows in rows_by_value(plain(table.column(PANE))):
            self._writable(pane).load(pick(table, rows))
        self.close(self.sealed_at(table))

    @property
    def rows(self) -> int:
        return sum(held.rows for held in self.panes.values())

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.panes.values())

    def closing(self, watermark_us: int | None) -> list[int]:
        """Starts of windows that hold rows and that this watermark closes."""
        if watermark_us is None:
            return []
        starts = {s for pane in self.panes for s in self._window.starts_of(pane)}
        due = (s for s in starts if self.deadline(s) <= watermark_us)
        return sorted(s for s in due if self.closed_us is None or self.deadline(s) > self.closed_us)

    def deadline(self, start: int) -> int:
        return start + self._window.size_us + self._lateness_us

    def _writable(self, pane: int) -> AggregateState:
        if pane not in self.panes:
            self.panes[pane] = AggregateState(self.plan, self._key_groups)
        return self.panes[pane]

    def _drop(self, closed_us: int) -> None:
        for pane in list(self.panes):
            if self.deadline(self._window.last_start(pane)) <= closed_us:
                del self.panes[pane]

    def _ordered(self) -> list[tuple[int, AggregateState]]:
        return sorted(self.panes.items())

    def _sealed(self, exports: list[tuple[int, pa.Table]]) -> pa.Table:
        tables = [self.empty.snapshot()]
        panes = [np.empty(0, dtype=np.int64)]
        for pane, table in exports:
            tables.append(table)
            panes.append(np.full(table.num_rows, pane))
        whole = with_columns(pa.concat_tables(tables), {PANE: pa.array(np.concatenate(panes))})
        return self._marked(whole)


@dataclass(frozen=True, slots=True)
class WindowedAggregate(PunctualKernel):
    """Aggregates per key and window: keys, window_start, window_end, aggregates. Windows come in
    order of their start, the rows of one in order of first arrival (by pane, when hopping)."""

    keys: tuple[str, ...]
    time: str
    window: Window
    aggregates: Mapping[str, Aggregate]
    lateness: timedelta = timedelta(0)

    @property
    def holds(self) -> tuple[tuple[str | None, Hold], ...]:
        """Windows that are still to come out begin after the watermark less their reach; so do
        all times of their rows."""
        size, slide = self.window.size_us, self.window.slide_us
        reach = size + microseconds(self.lateness)
        return ((WINDOW_END, Hold(reach, slide, size)), (None, Hold(reach, slide)))

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        check_names([*self.keys, WINDOW_START, WINDOW_END, *self.aggregates])
        plan, kind = self._plan(schemas[0]), self._time_type(schemas[0])
        bounds = [pa.field(WINDOW_START, kind), pa.field(WINDOW_END, kind)]
        return pa.schema([*plan.keys, *bounds, *plan.result_fields])

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        return self._plan(schemas[0]).sealed_schema.append(pa.field(PANE, pa.int64()))

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> WindowState:
        lateness_us = microseconds(self.lateness)
        plan, kind = self._plan(schemas[0]), self._time_type(schemas[0])
        return WindowState(plan, self.window, lateness_us, kind, key_groups)

    def grouped(self, port: int, table: pa.Table) -> tuple[pa.Table, Members]:
        """One row per key and pane."""
        table = canonical_table(table)
        plan = self._plan(table.schema)
        keys = table.select(self.keys)
        panes = self._panes(table)
        if len(panes) and panes.min() == panes.max():
            hashes = hash_keys(table, plan.grouped_by)  # one pane, as usual: nothing to tell apart
        else:
            marked = with_columns(table, {PANE: pa.array(panes)})
            hashes = hash_keys(marked, (*plan.grouped_by, PANE))
        groups = group_rows(*hashes)
        if groups.members is not None:
            keys = keys.take(pa.array(groups.firsts))
        parts = plan.reduce(table, groups)
        extra = {PANE: panes[groups.firsts]}
        if self._rows_column() == ROWS:
            extra[ROWS] = row_counts(groups)
        return with_columns(keys, {**parts, **extra}), groups.members

    def compute(
        self, state: WindowState, inputs: tuple[pa.Table, ...], time: SliceTime
    ) -> Computed:
        watermark = state.watermark(time)
        updates, late = self._updates(state, inputs[0], watermark)
        late_rows = int(plain(inputs[0].column(self._rows_column()))[late].sum())
        output = self._emit(state, state.closing(watermark))
        return Computed(output, WindowChange(updates, watermark), late_rows, (late,))

    def _updates(
        self, state: WindowState, table: pa.Table, watermark: int | None
    ) -> tuple[tuple[tuple[int, AggregateUpdate], ...], npt.NDArray[np.bool_]]:
        """The change of every pane that is still in an open window, and which rows are in none."""
        keys = canonical_table(table.select(self.keys))
        first, second = hash_keys(keys, self.keys)
        arriving = state.plan.of_combined(table)
        updates, late = [], np.zeros(table.num_rows, dtype=np.bool_)
        for pane, rows in rows_by_value(plain(table.column(PANE))):
            last = self.window.last_start(pane)
            if watermark is not None and state.deadline(last) <= watermark:
                late[rows] = True
                continue
            own = {name: column[rows] for name, column in arriving.items()}
            hashes = first[rows], second[rows]
            _, update = state.pane(pane).merge(hashes, pick(keys, rows), own)
            updates.append((pane, update))
        return tuple(updates), late

    def _emit(self, state: WindowState, starts: list[int]) -> pa.Table:
        kind = state.time_type
        bounds = [pa.field(WINDOW_START, kind), pa.field(WINDOW_END, kind)]
        schema = pa.schema([*state.plan.keys, *bounds, *state.plan.result_fields])
        tables = [schema.empty_table()]
        for start in starts:
            panes = range(start, start + self.window.size_us, self.window.pane_us)
            held = [state.panes[pane] for pane in panes if pane in state.panes]
            keys, values = state.empty.united(held)
            columns = {
                WINDOW_START: pa.repeat(pa.scalar(start, kind), keys.num_rows),
                WINDOW_END: pa.repeat(pa.scalar(start + self.window.size_us, kind), keys.num_rows),
                **state.plan.results(values),
            }
            tables.append(with_columns(keys, columns))
        return pa.concat_tables(tables)

    def _panes(self, table: pa.Table) -> npt.NDArray[np.int64]:
        return event_times(table, self.time) // self.window.pane_us * self.window.pane_us

    def _rows_column(self) -> str:
        """The combined column that counts rows: a count() among the aggregates serves."""
        counts = (f"{n}.rows" for n, spec in self.aggregates.items() if spec == Count())
        return next(counts, ROWS)

    def _plan(self, schema: pa.Schema) -> AggregatePlan:
        return AggregatePlan.bind(self.keys, self.aggregates, schema)

    def _time_type(self, schema: pa.Schema) -> pa.DataType:
        return event_time_type(schema, self.time, "the window's event time")


Picked = npt.NDArray[np.int64] | slice


def rows_by_value(values: npt.NDArray[np.int64]) -> Iterator[tuple[int, Picked]]:
    """Every value with its rows, ascending, rows in order; a slice when there is one value."""
    if not len(values):
        return
    if values.min() == values.max():
        yield int(values[0]), slice(None)
        return
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for rows in np.split(order, cuts):
        yield int(values[rows[0]]), rows


def pick(table: pa.Table, rows: Picked) -> pa.Table:
    return table if isinstance(rows, slice) else table.take(pa.array(rows))
