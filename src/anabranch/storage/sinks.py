"""Sinks: where rows leave, whole slices at a time.

Two steps. Where rows are made, `stage` puts them aside, out of every reader's sight; the driver
journals the slice with the names of what was staged and then calls `expose`, which is idempotent:
a crash between the two is mended by exposing the newest journalled slice again at the next start.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.errors import ConfigError, StorageError, TopologyError
from anabranch.model.reports import Staged
from anabranch.storage.checkpoint_files import decode_table, encode_table
from anabranch.storage.files import explained


class Sink(Protocol):
    """What `Stream.to` takes."""

    def check(self, schema: pa.Schema) -> None:
        """Refuse, before the first slice, rows this sink cannot take."""
        ...

    def stage(self, name: str, table: pa.Table, slice_no: int, run: int, writer: str) -> Staged:
        """Put rows aside; runs on nodes and in source tasks. `run` is the driver's generation."""
        ...

    def expose(self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]) -> None:
        """Let readers see the slice; runs on the driver. `staged` is empty after a restart."""
        ...

    def begin(self, newest: int) -> None:
        """At the start of a run whose journal ends with slice `newest` (0: a new one): remove what
        earlier runs staged and never exposed, refuse a place that holds another job's rows."""
        ...


def _inline(name: str, table: pa.Table, writer: str) -> Staged:
    return Staged(name, writer, table.num_rows, data=encode_table(table).to_pybytes())


@dataclass
class Memory:
    """Keeps rows in the driver: `rows()` gives them as one Arrow table, in slice order.

    For tests and notebooks: a restarted driver starts with an empty one.
    """

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

    def begin(self, newest: int) -> None:
        pass

    def rows(self) -> pa.Table:
        tables = [t for k in sorted(self.slices) for t in self.slices[k]]
        return pa.concat_tables(tables) if tables else self._schema.empty_table()


@dataclass(frozen=True)
class Console:
    """Prints the first rows of every slice on the driver."""

    limit: int = 20
    write: Callable[[str], None] = print

    def check(self, schema: pa.Schema) -> None:
        pass

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

    def begin(self, newest: int) -> None:
        pass


@dataclass(frozen=True)
class Parquet:
    """A directory of Parquet files, one sub-directory `slice=K` per slice with rows.

    A slice's files are staged under `_staging`, which readers ignore, and appear by one rename of
    their directory: all rows of a slice or none, also for a reader in the middle of it. Readers
    find the slice number as a partition column named `slice`.
    """

    path: str

    def __post_init__(self) -> None:
        # Nodes have working directories of their own: a relative path means the driver's.
        object.__setattr__(self, "path", str(Path(self.path).absolute()))

    def check(self, schema: pa.Schema) -> None:
        if "slice" in schema.names:
            raise TopologyError(
                "a Parquet sink adds the partition column 'slice', which the stream already has; "
                "rename the stream's column",
                column="slice",
            )

    def _staging(self, slice_no: int, run: int) -> Path:
        return Path(self.path) / "_staging" / f"{slice_no:012d}-{run}"

    def stage(self, name: str, table: pa.Table, slice_no: int, run: int, writer: str) -> Staged:
        target = self._staging(slice_no, run) / f"{writer}.parquet"
        with explained("write", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            # A retried task writes the same rows again: under another name, then over the first.
            temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            with temporary.open("wb") as file:
                pq.write_table(table, file, compression="zstd", use_dictionary=False)
                file.flush()
                # A replay does not write it again: it must be there before the journal says so.
                os.fsync(file.fileno())
            temporary.replace(target)
        return Staged(name, writer, table.num_rows, path=str(target))

    def expose(self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]) -> None:
        named = [Path(f) for f in files]
        final = Path(self.path) / f"slice={slice_no}"
        if not named or final.exists():
            return
        directory = named[0].parent
        with explained("expose", final):
            present = {p.name for p in directory.iterdir()} if directory.exists() else set()
            missing = [p.name for p in named if p.name not in present]
            if missing:
                raise StorageError(
                    f"slice {slice_no} of the Parquet sink {self.path} lost its staged files "
                    f"{', '.join(missing)}; restore them, or start with a new checkpoint directory",
                    path=self.path,
                )
            for extra in present - {p.name for p in named}:
                (directory / extra).unlink()  # of a task attempt that did not count
            directory.rename(final)

    def begin(self, newest: int) -> None:
        """A slice that this job has not journalled was written by another job. Exposing would
        take its directory for one's own and drop rows, so it is refused."""
        exposed = [p.name.removeprefix("slice=") for p in Path(self.path).glob("slice=*")]
        foreign = sorted(int(n) for n in exposed if n.isdigit() and int(n) > newest)
        if foreign:
            raise ConfigError(
                f"the Parquet sink {self.path} holds slice {foreign[-1]} of another job (this "
                f"job's checkpoint ends at slice {newest}); give the sink a directory of its own, "
                "or go on with the checkpoint directory that belongs to it",
                path=self.path,
            )
        shutil.rmtree(Path(self.path) / "_staging", ignore_errors=True)
