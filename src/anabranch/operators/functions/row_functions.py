"""A function of single rows with the state of their key, for logic that goes row by row.

It runs on top of `SliceFunction`, in a Python loop: much slower than a function of whole slices.
Rows of a key come in order; timers that have come are handled before the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import polars as pl

from anabranch.errors import OperatorError
from anabranch.operators.functions import (
    EVENT_FIRED,
    EVENT_TIMER,
    PROCESSING_FIRED,
    PROCESSING_TIMER,
    TIMER_COLUMNS,
    Fields,
    KeyedSlice,
    SliceFunction,
    SliceResult,
)
from anabranch.operators.rows.canonical import to_frame

EVENT, PROCESSING = "event", "processing"

Emitted = Iterable[Mapping[str, Any]] | None


class KeyState:
    """The state of one key: fields by name, and a timer of either kind."""

    def __init__(self, keys: tuple[str, ...], row: dict[str, Any], given: KeyedSlice) -> None:
        self.key = {name: row[name] for name in keys}
        self.watermark = given.watermark
        self.now = given.now
        own = {*keys, *TIMER_COLUMNS}
        self._values = {name: value for name, value in row.items() if name not in own}
        self._event_timer: datetime | None = row[EVENT_TIMER]
        self._processing_timer: datetime | None = row[PROCESSING_TIMER]
        self.changed = False
        self.cleared = False

    def get(self, field: str, default: Any = None) -> Any:
        """The field's value; the default where it is null or the key has no state."""
        value = self._values[self._known(field)]
        return default if value is None else value

    def set(self, **fields: Any) -> None:
        """Set some fields; the others stay as they are."""
        for name, value in fields.items():
            self._values[self._known(name)] = value
        self._touch()

    def clear(self) -> None:
        """Forget the key, with its timers."""
        self._values = dict.fromkeys(self._values)
        self._event_timer = self._processing_timer = None
        self.changed = self.cleared = True

    @property
    def event_timer(self) -> datetime | None:
        """Set it to a moment of event time, or to None."""
        return self._event_timer

    @event_timer.setter
    def event_timer(self, at: datetime | None) -> None:
        self._event_timer = at
        self._touch()

    @property
    def processing_timer(self) -> datetime | None:
        """Set it to a moment of processing time, or to None."""
        return self._processing_timer

    @processing_timer.setter
    def processing_timer(self, at: datetime | None) -> None:
        self._processing_timer = at
        self._touch()

    def _touch(self) -> None:
        self.changed, self.cleared = True, False

    def _known(self, field: str) -> str:
        if field not in self._values:
            raise OperatorError(
                f"the state has no field {field!r}; it declares {list(self._values)}", field=field
            )
        return field

    def _row(self) -> dict[str, Any]:
        timers = {EVENT_TIMER: self._event_timer, PROCESSING_TIMER: self._processing_timer}
        return {**self._values, **timers}


class RowFunction(SliceFunction):
    """Subclass, declare `output` and `state`, and implement `on_row`; with timers, `on_timer`.

    Both return output rows, as dicts of the fields of `output` (or yield them), or None. The key
    columns are added. Keep nothing on `self` that changes, and take the time from the state.
    """

    def on_row(self, row: dict[str, Any], state: KeyState) -> Emitted:
        raise NotImplementedError(f"{type(self).__name__} has no method on_row(self, row, state)")

    def on_timer(self, timer: str, at: datetime, state: KeyState) -> Emitted:
        """`timer` is "event" or "processing"; `at` is the moment it was set for."""
        raise NotImplementedError(
            f"{type(self).__name__} sets a timer but has no method on_timer(self, timer, at, state)"
        )

    def process(self, given: KeyedSlice) -> SliceResult:
        rows = list(given.state.iter_rows(named=True))
        states = [KeyState(given.keys, row, given) for row in rows]
        emitted: list[tuple[int, Mapping[str, Any]]] = []
        for number, row in enumerate(rows):
            for timer, fired in ((EVENT, EVENT_FIRED), (PROCESSING, PROCESSING_FIRED)):
                if row[fired] is not None:
                    found = self.on_timer(timer, row[fired], states[number])
                    emitted += [(number, output) for output in _rows_of("on_timer", found)]
        for number, row in zip(given.state_row, given.rows.iter_rows(named=True), strict=True):
            found = self.on_row(row, states[number])
            emitted += [(number, output) for output in _rows_of("on_row", found)]
        cleared = [n for n, state in enumerate(states) if state.cleared]
        changed = [n for n, state in enumerate(states) if state.changed and not state.cleared]
        keys = given.state.select(given.keys)
        types = given.state.drop(*given.keys, EVENT_FIRED, PROCESSING_FIRED).schema
        written = _columns([states[n]._row() for n in changed], types, "field", "the state")
        return SliceResult(
            output=self._output(keys, emitted),
            state=_rows(keys, changed).with_columns(written),
            deleted=_rows(keys, cleared),
        )

    def _output(
        self, keys: pl.DataFrame, emitted: list[tuple[int, Mapping[str, Any]]]
    ) -> pl.DataFrame:
        types = to_frame(Fields.of(self.output, "output").schema.empty_table()).schema
        for _, output in emitted:
            if not isinstance(output, Mapping) or not output.keys() <= types.keys():
                raise OperatorError(
                    f"a row of the output is {output!r}; give a dict with the declared columns "
                    f"{list(types)}"
                )
        columns = _columns([output for _, output in emitted], types, "column", "the output")
        return _rows(keys, [number for number, _ in emitted]).with_columns(columns)


def _rows(frame: pl.DataFrame, numbers: list[int]) -> pl.DataFrame:
    return frame[pl.Series(numbers, dtype=pl.Int64)]


def _rows_of(method: str, found: Emitted) -> Iterable[Mapping[str, Any]]:
    if isinstance(found, Mapping):
        raise OperatorError(f"{method} returned one row; yield it, or return a list of rows")
    return found or ()


def _columns(
    rows: list[Mapping[str, Any]] | list[dict[str, Any]],
    types: Mapping[str, pl.DataType],
    what: str,
    of: str,
) -> list[pl.Series]:
    """The values of each column, typed; what a row lacks is null."""
    columns = []
    for name, kind in types.items():
        values = [row.get(name) for row in rows]
        try:
            columns.append(pl.Series(name, values, dtype=kind, strict=True))
        except Exception as error:
            bad = next((value for value in values if not _fits(value, kind)), values)
            raise OperatorError(
                f"{what} {name!r} of {of} must be {kind}, but was given {bad!r} "
                f"({type(bad).__name__})",
                column=name,
            ) from error
    return columns


def _fits(value: Any, kind: pl.DataType) -> bool:
    try:
        pl.Series([value], dtype=kind, strict=True)
    except Exception:
        return False
    return True
