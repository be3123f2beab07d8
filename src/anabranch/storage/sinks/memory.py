"""Sinks of the driver's own process: for tests, notebooks and a first look."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from anabranch.model.reports import Staged
from anabranch.storage.checkpoint_files import decode_table, encode_table
from anabranch.storage.sinks.base import Sink


def _inline(name: str, table: pa.Table, writer: str) -> Staged:
    return Staged(name, writer, table.num_rows, data=encode_table(table).to_pybytes())


@dataclass
class Memory(Sink):
    """Keeps rows in the driver: `rows()` gives them as one Arrow table, in slice order.

    For tests and notebooks: a restarted driver starts with an empty one.
    """

    durable: ClassVar[bool] = False
    slices: dict[int, list[pa.Table]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, object]:
        return {"slices": {}}  # the copy on nodes only stages

    def check(self, schema: pa.Schema) -> None:
        self._schema = schema

    def stage(self, name: str, table: pa.Table, slice_no: int, run: int, writer: str) -> Staged:
        return _inline(name, table, writer)

    def expose(self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]) -> None:
        tables = [decode_table(s.data) for s in staged if s.data is not None]
        if tables:
            self.slices[slice_no] = tables

    def rows(self) -> pa.Table:
        tables = [t for k in sorted(self.slices) for t in self.slices[k]]
        return pa.concat_tables(tables) if tables else self._schema.empty_table()


@dataclass
class Console(Sink):
    """Prints the first rows of every slice on the driver."""

    durable: ClassVar[bool] = False
    limit: int = 20
    write: Callable[[str], None] = print

    def stage(self, name: str, table: pa.Table, slice_no: int, run: int, writer: str) -> Staged:
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
