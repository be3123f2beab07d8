"""Hands every slice to a function on the driver: for any writer Spark or Python has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.errors import AnabranchError, ConfigError, OperatorError, TopologyError
from anabranch.sinks.notes import OLD, read_marker
from anabranch.sinks.staged import Held, StagedSink


@dataclass
class ForEachSlice(StagedSink):
    """Calls `function(rows, slice_number)` on the driver for every journalled slice with rows.

    `rows` is a Spark DataFrame, or with `arrow=True` an Arrow table; both end with the call. The
    calls come in the order of the slices. A slice is followed by the next only when the function
    has returned, and is repeated only if the driver died, or the function raised, before that
    was noted: at least once for the newest slice, exactly once if the function does nothing when
    it sees a slice number again.
    """

    function: Callable[[Any, int], object] = field(repr=False)  # may hold a password
    arrow: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                f"ForEachSlice was given a {type(self.function).__name__}; give a function of the "
                "rows of a slice and its number"
            )

    def check(self, schema: pa.Schema) -> None:
        for column in schema if not self.arrow else ():
            if pa.types.is_time(column.type) or pa.types.is_duration(column.type):
                raise TopologyError(
                    f"Spark has no type for column {column.name!r}, {column.type}; cast it, or "
                    "take Arrow tables with ForEachSlice(function, arrow=True)",
                    column=column.name,
                )
        self._schema = schema

    def _place(self) -> str:
        return f"the function of the sink {self.home.sink!r}"

    def _claim(self, newest: int) -> Held:
        """A function remembers nothing: what it has had is the job's own note."""
        return Held("a function")

    def _deliver(self, slice_no: int, exposure: str, files: Sequence[Path]) -> None:
        if self._note is None and self._marked() == slice_no:
            return
        self._refuse_missing(slice_no, files)
        rows = self._rows(files)
        self._still_mine()
        try:
            self.function(rows, slice_no)
        except AnabranchError:
            raise
        except Exception as e:
            reason = (str(e).splitlines() or [""])[0]
            raise OperatorError(
                f"the function of the sink {self.home.sink!r} raised on slice {slice_no}: "
                f"{type(e).__name__}: {reason}; the slice is kept: correct the function and start "
                "again with the same checkpoint directory, it gets the slice again",
                operator=self.home.sink,
                slice=slice_no,
            ) from e

    def _rows(self, files: Sequence[Path]) -> Any:
        if self.arrow:
            return pa.Table.from_batches(self._batches(files), self._schema)
        return self.home.spark.read.parquet(*(p.as_uri() for p in files))

    def _marked(self) -> int:
        return read_marker(self.home.store, f"{OLD}/{self.home.sink}")
