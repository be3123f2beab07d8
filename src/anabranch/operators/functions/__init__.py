"""What a user writes to keep state of their own: a function of what a slice has for a partition.

State is one row of typed fields per key. A key may have two timers, one of event time and one of
processing time, which are part of its row; when a timer has come, its key arrives with the slice,
with or without rows. More moments than one of a kind belong into a field (a list), with the timer
on the first of them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

import polars as pl
import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.operators.kernels.aggregates import check_names
from anabranch.operators.rows.canonical import to_table

EVENT_TIMER, PROCESSING_TIMER = "event_timer", "processing_timer"
EVENT_FIRED, PROCESSING_FIRED = "event_fired", "processing_fired"
TIMER_COLUMNS = (EVENT_TIMER, PROCESSING_TIMER, EVENT_FIRED, PROCESSING_FIRED)

Types = Mapping[str, Any]  # Polars (or Python) types by name, as polars.DataFrame(schema=…) takes


@dataclass(frozen=True)
class KeyedSlice:
    """The rows of one slice in one partition, and the state of every key that has rows in it or a
    timer that has come.

    `state` has one row per key: the key columns, the fields (null where the key has no state),
    `event_timer` and `processing_timer` (null where none is set), `event_fired` and
    `processing_fired` (for which moment a timer was set that has come, else null).
    `state_row` says for every row of `rows` which row of `state` is its key's.
    """

    keys: tuple[str, ...]
    rows: pl.DataFrame
    state: pl.DataFrame
    state_row: pl.Series
    watermark: datetime | None  # no more rows are expected below; None until there is one
    now: datetime  # the processing time of the slice, decided by the driver


@dataclass(frozen=True)
class SliceResult:
    """What a function makes of a slice; None stands for no rows.

    `output`: the key columns and the fields of `SliceFunction.output`. `state`: new state of keys
    of the slice, whole rows: the key columns and all fields; a timer column that is left out keeps
    its timers. `deleted`: keys to forget, with their timers. All other keys stay as they were,
    but for timers that have come, which are over.
    """

    output: pl.DataFrame | pa.Table | None = None
    state: pl.DataFrame | pa.Table | None = None
    deleted: pl.DataFrame | pa.Table | None = None


class SliceFunction:
    """Subclass, declare `output` and `state`, and implement `process`.

    `process` may be called again for the same slice, and in any number of partitions: it must give
    the same result for the same slice, treat each key by itself, keep nothing on `self` that
    changes, and take the time from the slice. It is called once with an empty slice before the job
    starts.
    """

    state: Types = MappingProxyType({})
    output: Types

    def process(self, given: KeyedSlice) -> SliceResult:
        raise NotImplementedError(f"{type(self).__name__} has no method process(self, given)")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed fields by name, in a form that a checkpoint can name: an Arrow schema in base64."""

    ipc: str

    @staticmethod
    def of(types: Any, what: str) -> Fields:
        try:
            frame = pl.DataFrame(schema=types)
            if pl.Object in frame.schema.dtypes():
                raise TypeError("pl.Object cannot be stored")
            schema = to_table(frame).schema
        except Exception as error:
            raise TopologyError(
                f"the {what} is declared as {types!r}: {error}; give Polars types by name, such "
                'as {"total": pl.Int64}'
            ) from error
        return Fields(base64.b64encode(schema.serialize()).decode())

    @property
    def schema(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.ipc)))


def state_fields(function: SliceFunction) -> Fields:
    return Fields.of(function.state, "state")


def output_schema(function: SliceFunction, keys: pa.Schema) -> pa.Schema:
    """The key columns, then what the function declares."""
    if not hasattr(function, "output"):
        raise TopologyError(
            f"{type(function).__name__} does not declare its output; add the columns it gives "
            'beside the key, such as output = {"total": pl.Int64}'
        )
    schema = pa.schema([*keys, *Fields.of(function.output, "output").schema])
    check_names(schema.names)
    return schema


def check_state_names(keys: pa.Schema, fields: pa.Schema) -> None:
    for name in keys.names:
        if name in TIMER_COLUMNS:
            raise TopologyError(
                f"the key column {name!r} has the name of a timer; rename it", column=name
            )
    for name in fields.names:
        if name in TIMER_COLUMNS or name in keys.names:
            what = "a key column" if name in keys.names else "a timer"
            raise TopologyError(
                f"the state has a field {name!r}, which is the name of {what}; rename it",
                column=name,
            )
    check_names(fields.names)
