"""A Delta Lake table: one transaction per slice, remembered by the table itself."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.errors import AnabranchError, ConfigError, StorageError, TopologyError
from anabranch.storage.sinks.staged import StagedSink


@dataclass
class Delta(StagedSink):
    """Appends every slice to a Delta Lake table in one commit; needs `anabranch[delta]`.

    The commit carries the transaction identifier (job and sink, slice number), so a slice that is
    exposed again is recognised and adds nothing. A table that is not there is created; one that is
    must have the stream's columns. `path` is a directory or a URL that delta-rs understands; an
    object store's settings come from the environment variables of delta-rs.
    """

    path: str

    def __post_init__(self) -> None:
        if "://" not in self.path:
            self.path = str(Path(self.path).absolute())

    def check(self, schema: pa.Schema) -> None:
        deltalake = _deltalake()
        self._schema = pa.schema([pa.field(f.name, _delta_type(f.type)) for f in schema])
        for field in self._schema:
            try:
                deltalake.Schema.from_arrow(pa.schema([field]))
            except Exception as e:  # delta-rs raises plain Exceptions for types
                raise TopologyError(
                    f"Delta Lake has no type for column {field.name!r}, {field.type}; cast or "
                    "drop it",
                    column=field.name,
                ) from e

    def begin(self, newest: int) -> None:
        with self._explained("open"):
            super().begin(newest)

    def _place(self) -> str:
        return f"the Delta table {self.path}"

    def _newest(self) -> int:
        return self._newest_of(self._table())

    def _newest_of(self, table: Any) -> int:
        return table.transaction_version(self.home.app_id) or 0

    def _deliver(self, slice_no: int, files: Sequence[Path]) -> None:
        deltalake = _deltalake()
        with self._explained(f"add slice {slice_no} to"):
            table = self._table()
            if self._has(slice_no, self._newest_of(table)):
                return
            self._refuse_missing(slice_no, files)
            # delta-rs takes columns by position.
            order = [f.name for f in table.schema().fields]
            schema = pa.schema([self._schema.field(name) for name in order])
            batches = (b.select(order).cast(schema) for b in self._batches(files))
            transaction = deltalake.Transaction(self.home.app_id, slice_no)
            deltalake.write_deltalake(
                table,
                pa.RecordBatchReader.from_batches(schema, batches),
                mode="append",
                commit_properties=deltalake.CommitProperties(app_transactions=[transaction]),
            )

    def _table(self) -> Any:
        """The table as it is now, with the stream's columns."""
        deltalake = _deltalake()
        try:
            table = deltalake.DeltaTable(self.path)
        except deltalake.exceptions.TableNotFoundError:
            return deltalake.DeltaTable.create(self.path, self._schema)
        wanted = {f.name: f.type for f in deltalake.Schema.from_arrow(self._schema).fields}
        found = {f.name: f.type for f in table.schema().fields}
        if found != wanted:
            raise ConfigError(
                f"{self._place()} has the columns {_columns(found)}, but the stream of the sink "
                f"{self.home.sink!r} has {_columns(wanted)}; change one of them, or give the sink "
                "another table",
                path=self.path,
            )
        return table

    @contextlib.contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        try:
            yield
        except AnabranchError:
            raise
        except Exception as e:  # of any class: delta-rs has no common one
            reason = (str(e).splitlines() or [type(e).__name__])[0]
            raise StorageError(
                f"could not {action} {self._place()}: {reason}; nothing is lost: when this is "
                "mended, start again with the same checkpoint directory",
                path=self.path,
            ) from e


def _deltalake() -> Any:
    try:
        return importlib.import_module("deltalake")
    except ImportError as e:
        raise ConfigError(
            "a Delta sink needs the package deltalake on the driver: pip install 'anabranch[delta]'"
        ) from e


def _delta_type(kind: pa.DataType) -> pa.DataType:
    """Delta has no unsigned numbers and no time zone but UTC: the next type that holds all."""
    t = pa.types
    if t.is_unsigned_integer(kind):
        wider = {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20)}
        return wider[kind.bit_width]
    if t.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp("us", "UTC")
    if t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return pa.large_list(_delta_type(kind.value_type))
    if t.is_struct(kind):
        return pa.struct([pa.field(f.name, _delta_type(f.type)) for f in kind.fields])
    return kind


def _columns(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {getattr(kind, 'type', kind)}" for name, kind in fields.items())
