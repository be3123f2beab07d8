"""The contract between an operator's kernel and the node that runs it.

A kernel computes, a state installs. `Stateful.compute` reads the state and returns the output of
the slice together with a change; nothing is modified until the node, having computed every
operator of the chain, calls `State.install` on each change. So a function that raises, or a
cancelled slice, leaves the state exactly at the slice before (atomic, repeatable apply).

Kernels are immutable, picklable and deterministic: the same state, inputs and `SliceTime` give
the same output, row for row. They never read a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# Every table a state seals or loads starts with these two columns.
GROUP = "_group"  # uint16, the key group of the row
DELETED = "_deleted"  # bool, a tombstone: only the key columns are meaningful


@dataclass(frozen=True, slots=True)
class SliceTime:
    """Time as a slice sees it: decided and journalled by the driver, never read from a clock.

    `watermark_us` is the event time (microseconds since the epoch) below which no more rows are
    expected, computed from the slices before this one; None until a source has shown a time.
    `watermarks` has that of operators whose rows come from others that emit when time passes.
    """

    slice: int
    watermark_us: int | None
    processing_ms: int
    watermarks: Mapping[str, int | None] = field(default_factory=dict)

    def of(self, operator: str) -> SliceTime:
        """Time as an operator sees it."""
        own = self.watermarks.get(operator, self.watermark_us)
        return SliceTime(self.slice, own, self.processing_ms)


class Stateless(Protocol):
    """An operator without state: a table in, a table out, order kept."""

    # True when the operator never changes values of columns it keeps (filter, select by name):
    # a keyed stream stays keyed across it, so the next keyed operator may be fused.
    keeps_columns: bool

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        """The schema of `process`'s result; raises TopologyError for columns that do not fit."""
        ...

    def process(self, table: pa.Table) -> pa.Table: ...


class State(Protocol):
    """Keyed state of one operator in one partition, addressed by key group.

    One that waits for moments of processing time has a property `due_us`: no key has anything to
    do before it, None when no key waits.
    """

    def install(self, change: Any) -> None:
        """Make a change computed by the kernel current. Cannot fail halfway."""
        ...

    def seal(self) -> pa.Table:
        """Rows written or deleted since the last seal (`GROUP`, `DELETED`, then the state's own
        columns); clears the marks. Whatever else must survive (e.g. the watermark up to which
        windows were closed) goes into the schema metadata."""
        ...

    def snapshot(self) -> pa.Table:
        """All live rows, in the form `seal` gives, so there may be deleted ones among them; marks
        untouched."""
        ...

    def load(self, table: pa.Table) -> None:
        """Upsert rows from `seal` or `snapshot`, oldest table first; loaded rows are not dirty."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Computed:
    """What `Stateful.compute` returns: rows for downstream and a change for the state.

    `late_rows` counts rows of the stream that came too late; `late` says, per input, which rows
    of `compute`'s input they are in.
    """

    output: pa.Table
    change: Any
    late_rows: int = 0
    late: tuple[npt.NDArray[np.bool_], ...] = ()


@dataclass(frozen=True, slots=True)
class LateRows:
    """The kernel of the stream of rows that came too late for a keyed operator, its producer."""

    keeps_columns = True  # they are where their key is


class Stateful(Protocol):
    """An operator with keyed state. Its inputs arrive partitioned by `keys`."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Key columns, the same names on every input and on the output."""
        ...

    def output_schema(self, *schemas: pa.Schema) -> pa.Schema:
        """The schema of the output for the schemas of the inputs (as the streams have them,
        before `combine`); raises TopologyError for columns that are missing or do not fit."""
        ...

    def state_schema(self, *schemas: pa.Schema) -> pa.Schema:
        """The schema of sealed rows; two kernels with the same one can exchange state."""
        ...

    def new_state(self, key_groups: int, *schemas: pa.Schema) -> State: ...

    def combine(self, port: int, table: pa.Table) -> pa.Table:
        """Shrink rows of input `port` before they are shuffled; identity where nothing is won.
        Deterministic; keeps the key columns. `compute` accepts combined and any concatenation
        of combined tables, and never uncombined ones."""
        ...

    def compute(self, state: Any, inputs: tuple[pa.Table, ...], time: SliceTime) -> Computed: ...


def stateless(kernel: object) -> Stateless:
    """The kernel of an operator without state. What kind it is, the topology says."""
    return cast("Stateless", kernel)


def stateful(kernel: object) -> Stateful:
    return cast("Stateful", kernel)


def punctual(kernel: object) -> Punctual:
    return cast("Punctual", kernel)


class Punctual(Stateful, Protocol):
    """A stateful operator for which rows can be too late."""

    def late_schema(self, *schemas: pa.Schema) -> pa.Schema:
        """The schema of the rows that came too late."""
        ...

    def grouped(self, port: int, table: pa.Table) -> tuple[pa.Table, npt.NDArray[Any] | None]:
        """The combined table, and in which of its rows each row of the given one is (None: in
        the one with the same number)."""
        ...

    def late_table(self, port: int, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        """Late rows of an input in the form of `late_schema`."""
        ...
