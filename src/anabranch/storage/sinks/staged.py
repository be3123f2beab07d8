"""Sinks whose rows wait in Parquet files until their slice is exposed.

The files lie where nodes and driver both reach them, below the job's checkpoint directory, so
that a driver which died after the journal named them can be followed by one that delivers them:

    <checkpoint>/staged/SINK/000000000017-3/part-counter-0.9f86d081.parquet   slice 17, generation 3

No two attempts share a file, so one that nobody waits for any more cannot touch what the journal
names. A subclass delivers a slice at most once to its target, which itself remembers the newest
slice it has; only then are the files removed. Whatever step a crash hits, either the target has
the slice and says so, or all files are there.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.errors import ConfigError, InvariantError, StorageError, TopologyError
from anabranch.model.reports import Staged
from anabranch.storage.files import explained, write_atomic
from anabranch.storage.sinks.base import Home, Sink

BATCH_ROWS = 65_536  # at a time in the driver's memory


class StagedSink(Sink):
    """Stages, reads and removes files; what to do with the rows of a slice is the subclass's."""

    _home: Home | None = None

    def __getstate__(self) -> dict[str, object]:
        """Nodes only stage: neither functions nor passwords travel to them."""
        return {"_home": self._home}

    def bind(self, home: Home) -> None:
        old = self._home
        if old is not None and old.root == home.root and old.sink != home.sink:
            raise TopologyError(
                f"the sinks {old.sink!r} and {home.sink!r} are one object; make one for each",
                operator=home.sink,
            )
        self._home = home

    @property
    def home(self) -> Home:
        if self._home is None:
            raise InvariantError(f"a {type(self).__name__} sink was used before it was bound")
        return self._home

    # -- the subclass's part -------------------------------------------------------------------

    def _place(self) -> str:
        """The target, for messages."""
        raise NotImplementedError

    def _deliver(self, slice_no: int, files: Sequence[Path]) -> None:
        """Give the slice to the target, unless it has it already."""
        raise NotImplementedError

    def _newest(self) -> int:
        """The newest slice of this sink that the target has; 0 for none."""
        raise NotImplementedError

    # -- staging -------------------------------------------------------------------------------

    def _staging(self) -> Path:
        return self.home.root / "staged" / self.home.sink

    def stage(self, name: str, table: pa.Table, slice_no: int, run: int, writer: str) -> Staged:
        attempt = f"{writer}.{uuid.uuid4().hex[:8]}.parquet"
        target = self._staging() / f"{slice_no:012d}-{run}" / attempt
        with explained("write", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                pq.write_table(table, file, compression="zstd", use_dictionary=False)
                file.flush()
                # A replay does not write it again: it must be there before the journal says so.
                os.fsync(file.fileno())
        return Staged(name, writer, table.num_rows, path=self._journalled(target))

    def _journalled(self, path: Path) -> str:
        """Relative to the checkpoint directory where possible, so that it can be moved."""
        if self._home is not None and path.is_relative_to(self._home.root):
            return str(path.relative_to(self._home.root))
        return str(path)

    def expose(
        self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]
    ) -> pa.Table | None:
        root = self._home.root if self._home is not None else Path()
        named = [root / f for f in files]
        if named:
            self._deliver(slice_no, named)
            for directory in {p.parent for p in named}:
                shutil.rmtree(directory, ignore_errors=True)
        return self._refused_by_target(slice_no)

    def _refused_by_target(self, slice_no: int) -> pa.Table | None:
        """The dead letters of a slice that the target has."""
        return None

    def begin(self, newest: int) -> None:
        self._refuse_foreign(self._newest(), newest)
        shutil.rmtree(self._staging(), ignore_errors=True)

    def _refuse_foreign(self, found: int, newest: int) -> None:
        """A slice that this job has not journalled was written by another job. To take it for
        one's own would drop rows."""
        if found > newest:
            raise ConfigError(
                f"{self._place()} holds slice {found} of another job (this job's checkpoint ends "
                f"at slice {newest}); give the sink a place or a name of its own, or go on with "
                "the checkpoint directory that belongs to it",
                sink=self._home.sink if self._home else "",
                slice=found,
            )

    def _has(self, slice_no: int, found: int) -> bool:
        """Whether the target, whose newest slice is `found`, has this one."""
        self._refuse_foreign(found, slice_no)
        return found == slice_no

    # -- reading -------------------------------------------------------------------------------

    def _refuse_missing(self, slice_no: int, files: Sequence[Path]) -> None:
        missing = [p.name for p in files if not p.exists()]
        if missing:
            raise StorageError(
                f"slice {slice_no} of {self._place()} lost its staged files {', '.join(missing)} "
                f"in {files[0].parent}; restore them, or start with a new checkpoint directory",
                path=str(files[0].parent),
            )

    def _batches(self, files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
        """The staged rows, in the order of the files; a few at a time in memory."""
        for path in files:
            with explained("read", path):
                try:
                    yield from pq.ParquetFile(path).iter_batches(BATCH_ROWS)
                except pa.ArrowException as e:
                    raise StorageError(f"the staged file {path} is damaged: {e}") from e


def read_marker(path: Path) -> int:
    """The number a sink without a memory of its own keeps in a file; 0 without one."""
    with explained("read", path):
        try:
            text = path.read_text()
        except FileNotFoundError:
            return 0
    if not text.strip().isdigit():
        raise StorageError(
            f"{path} should hold the number of the newest exposed slice, but holds {text[:40]!r}; "
            "restore it from a copy",
            path=str(path),
        )
    return int(text)


def write_marker(path: Path, slice_no: int) -> None:
    write_atomic(path, [f"{slice_no}\n".encode()])
