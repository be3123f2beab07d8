"""Sinks of the driver's own process: for tests, notebooks and a first look."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from anabranch.errors import ConfigError
from anabranch.model.reports import Staged
from anabranch.sinks.base import Sink
from anabranch.storage.checkpoint_files import decode_table, encode_table


def _inline(name: str, table: pa.Table, writer: str) -> Staged:
    return Staged(name, writer, table.num_rows, data=encode_table(table).to_pybytes())


@dataclass
class Memory(Sink):
    """Keeps rows in the driver: `rows()` gives them as one Arrow table, in slice order.

    For tests and notebooks: a restarted driver starts with an empty one.
    """

    durable: ClassVar[bool] = False
    slices: dict[int, list[pa.Table]] = field(default_factory=dict)
    _schema: pa.Schema | None = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {"slices": {}}  # the copy on nodes only stages

    def check(self, schema: pa.Schema) -> None:
        self._schema = schema

    def stage(
        self, name: str, table: pa.Table, slice_no: int, generation: int, writer: str
    ) -> Staged:
        return _inline(name, table, writer)

    def expose(self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]) -> None:
        tables = [decode_table(s.data) for s in staged if s.data is not None]
        if tables:
            self.slices[slice_no] = tables

    def rows(self, after: int = 0) -> pa.Table:
        """Those of slices that came after slice `after`."""
        tables = [t for k in sorted(self.slices) if k > after for t in self.slices[k]]
        if self._schema is None:
            raise ConfigError(
                "this Memory sink has no rows: the topology that it was given to has not been run "
                "yet; call rows() after topology.run(...)"
            )
        return pa.concat_tables(tables) if tables else self._schema.empty_table()


@dataclass
class Console(Sink):
    """Prints the first rows of every slice on the driver."""

    durable: ClassVar[bool] = False
    limit: int = 20
    write: Callable[[str], None] = print

    def stage(
        self, name: str, table: pa.Table, slice_no: int, generation: int, writer: str
    ) -> Staged:
        return _inline(name, table, writer)

    def expose(self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]) -> None:
        tables = [decode_table(s.data) for s in staged if s.data is not None]
        if not tables:
            return
        rows = pa.concat_tables(tables)
        self.write(f"slice {slice_no}: {rows.num_rows} rows")
        for row in rows.slice(0, self.limit).to_pylist():
            self.write("  " + ", ".join(f"{k}={v}" for k, v in row.items()))
        if rows.num_rows > self.limit:
            self.write(f"  … and {rows.num_rows - self.limit} more")
