"""A Delta Lake table: one transaction per slice, remembered by the table itself.

A table keeps a number for each application that writes to it, and refuses a commit that was
prepared before another one set a number it sets, too. Ours, below `anabranch/TOPOLOGY/SINK`:

    (itself)      the newest slice
    /job          the job's identity
    /generation   of the newest driver: an older one's commit sets it, too, and is refused
    /exposure     which rows the newest slice showed
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.errors import (
    AnabranchError,
    CheckpointLockedError,
    ConfigError,
    StorageError,
    TopologyError,
)
from anabranch.sinks.staged import Held, StagedSink
from anabranch.storage.checkpoint_store import is_url
from anabranch.storage.credentials import masked, refuse_credentials
from anabranch.storage.files import directory, refuse_unwritable
from anabranch.storage.identity import DIGITS
from anabranch.storage.versions import check_format

FORMAT = 1
_AS_TEXT = "or the URL as a string"
CLAIMS = 10  # tries to write down a new driver while an older one commits


@dataclass
class Delta(StagedSink):
    """Appends every slice to a Delta Lake table in one commit; needs `anabranch[delta]`.

    The commit carries the slice's number, so a slice that is exposed again is recognised and adds
    nothing. A table that is not there is created; one that is must have the stream's columns.
    `path` is a directory or a URL that delta-rs understands; an object store's settings come from
    the environment variables of delta-rs.
    """

    path: str

    def __post_init__(self) -> None:
        if not (isinstance(self.path, str) and is_url(self.path)):
            self.path = str(directory(self.path, "the path of a Delta sink", _AS_TEXT).absolute())
            return
        refuse_credentials(
            self.path, "the path of a Delta sink", "set the environment variables of delta-rs"
        )

    @property
    def target(self) -> str:
        return masked(self.path)

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

    def _place(self) -> str:
        return f"the Delta table {self.path}"

    # -- whose it is ---------------------------------------------------------------------------

    def _look(self) -> Held | None:
        deltalake = _deltalake()
        with self._explained("open"):
            try:
                return self._recorded(deltalake.DeltaTable(self.path))
            except deltalake.exceptions.TableNotFoundError:
                if "://" not in self.path:
                    refuse_unwritable(Path(self.path))
                return None

    def _claim(self, newest: int) -> Held:
        """One commit without rows, which makes an older driver's next one fail."""
        deltalake = _deltalake()
        tries = CLAIMS
        while True:
            with self._explained("open"):
                table = self._table()
                held = self._held(table)
                self._refuse_behind(held, newest)
                try:
                    table.create_write_transaction(
                        [],
                        "append",
                        table.schema(),
                        table.metadata().partition_columns,
                        commit_properties=self._marked(
                            job=self._job.number, generation=self._generation, format=FORMAT
                        ),
                    )
                    return held
                except deltalake.exceptions.CommitFailedError:
                    tries -= 1
                    if not tries:
                        raise

    def _held(self, table: Any) -> Held:
        """What the table has of this sink; refused if another job or a newer driver wrote it."""
        held, generation = self._recorded(table), self._number(table, "/generation")
        if generation is not None and generation > self._generation:
            raise CheckpointLockedError(
                f"a newer driver of this job (generation {generation}) writes to {self._place()} "
                f"than this one (generation {self._generation}), which ends; look for who "
                "started it",
                path=self.path,
                generation=self._generation,
            )
        return held

    def _recorded(self, table: Any) -> Held:
        found = self._number(table, "/format")  # before it had one, it was 1
        check_format(self._place(), 1 if found is None else found, FORMAT)
        slice_no, job = self._number(table, ""), self._number(table, "/job")
        exposure = self._number(table, "/exposure")
        if job is None and slice_no is not None and not self._job.inherits:
            self._refuse_other_job(f"topology {self.home.job!r}, which left no identity")
        if job is not None and job != self._job.number:
            whose = f"{job:0{DIGITS}x}, not {self._job.job}"
            self._refuse_other_job(f"topology {self.home.job!r} of another identity ({whose})")
        shown = None if exposure is None else f"{exposure:0{DIGITS}x}"
        return Held(str(table.metadata().id), slice_no or 0, shown)

    def _number(self, table: Any, name: str) -> int | None:
        found: int | None = table.transaction_version(self.home.app_id + name)
        return found

    def _marked(self, **numbers: int) -> Any:
        """Of a commit that sets these numbers; "slice" is the sink's own."""
        deltalake = _deltalake()
        names = {n: "" if n == "slice" else f"/{n}" for n in numbers}
        return deltalake.CommitProperties(
            app_transactions=[
                deltalake.Transaction(self.home.app_id + names[n], number)
                for n, number in numbers.items()
            ]
        )

    # -- one slice -----------------------------------------------------------------------------

    def _deliver(self, slice_no: int, exposure: str, files: Sequence[Path]) -> None:
        deltalake = _deltalake()
        with self._explained(f"add slice {slice_no} to"):
            table = self._table()
            if self._has(self._held(table), slice_no, exposure):
                return
            self._refuse_missing(slice_no, files)
            # delta-rs takes columns by position.
            order = [f.name for f in table.schema().fields]
            schema = pa.schema([self._schema.field(name) for name in order])
            batches = (b.select(order).cast(schema) for b in self._batches(files))
            try:
                deltalake.write_deltalake(
                    table,
                    pa.RecordBatchReader.from_batches(schema, batches),
                    mode="append",
                    commit_properties=self._marked(
                        slice=slice_no, generation=self._generation, exposure=int(exposure, 16)
                    ),
                )
            except deltalake.exceptions.CommitFailedError:
                self._held(self._table())  # says so if this driver has been replaced
                raise

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
