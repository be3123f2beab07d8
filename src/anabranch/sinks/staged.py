"""Sinks whose rows wait in Parquet files until their slice is exposed.

The files lie where nodes and driver both reach them, below the job's checkpoint directory, so
that a driver which died after the journal named them can be followed by one that delivers them:

    <checkpoint>/staged/SINK/17-3/part-counter-0.3-9f86d081.staged   slice 17, generation 3

No two attempts share a file, so one that nobody waits for any more cannot touch what the journal
names. A subclass delivers a slice at most once to its target, which itself remembers the newest
slice it has and whose it is; then the job notes it (`notes`), and only then are the files removed.
Whatever step a crash hits, either the target has the slice and says so, or all files are there.

A target may be exchanged for another once the note tells that the newest slice has been shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.errors import (
    ConfigError,
    InvariantError,
    StorageError,
    TopologyError,
)
from anabranch.model.reports import Staged
from anabranch.sinks.base import Home, Sink
from anabranch.sinks.notes import (
    Note,
    exposure_of,
    forget_older,
    read_note,
    write_note,
)
from anabranch.storage.files import explained
from anabranch.storage.generations import Generation
from anabranch.storage.identity import Identity

BATCH_ROWS = 65_536  # at a time in the driver's memory
# What is staged below one directory: slice and generation, in older ones with zeros before.
_STAGED = re.compile(r"[0-9]+-([0-9]+)(\..*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Held:
    """What a target says it holds of this sink: its own name, the newest slice, and which rows
    that showed (None: it was shown before exposures were recorded)."""

    place: str
    slice: int = 0
    exposure: str | None = ""


class StagedSink(Sink):
    """Stages, reads and removes files; what to do with the rows of a slice is the subclass's."""

    _home: Home | None = None
    _run = 0
    _job: Identity
    _place_id: str
    _note: Note | None

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

    def _look(self) -> Held | None:
        """What the target holds of this sink, None if nothing; refused if it is another job's.
        The rows' schema is not known yet, and nothing may change."""
        return None

    def _claim(self, newest: int) -> Held:
        """Make the target this job's, unless it is another's, and shut out older drivers. What it
        recorded before jobs had identities is this job's if that inherits."""
        raise NotImplementedError

    def _deliver(self, slice_no: int, exposure: str, files: Sequence[Path]) -> None:
        """Give the slice to the target, unless it has it already."""
        raise NotImplementedError

    # -- a start -------------------------------------------------------------------------------

    def look(self, job: Identity, newest: int) -> None:
        self._job = job
        held = self._look()
        if held is not None:
            self._refuse_behind(held, newest)

    def take_over(self, job: Identity, generation: int, newest: int) -> None:
        self._job, self._generation = job, generation
        self._note = read_note(self.home.store, self.home.sink)
        held = self._claim(newest)
        self._refuse_behind(held, newest)
        self._place_id = held.place

    def begin(self, keep: Collection[str] = ()) -> None:
        before = self._note or Note("")
        self._write_note(before.slice, before.exposure)
        self._sweep(self._staging(), {Path(name).parent.name for name in keep})
        forget_older(self.home.store, self.home.sink, self._generation)

    def _write_note(self, slice_no: int, exposure: str) -> None:
        self._note = Note(self._place_id, slice_no, exposure)
        write_note(self.home.store, self.home.sink, self._generation, self._note)

    def _sweep(self, staging: Path, keep: Collection[str] = ()) -> None:
        """Remove what earlier generations left, and nothing of a later one: this driver may be
        the one that has been replaced. Each at once: an older driver that still wants to use it
        finds all of it or nothing. What to `keep` are names of directories."""
        for name in sorted(self.home.store.names(str(staging))):
            found = _STAGED.fullmatch(name)
            earlier = found and int(found[1]) < self._generation
            if earlier and name not in keep:
                self._drop(staging / name)

    def _drop(self, directory: Path) -> None:
        dropped = directory.with_name(f"{directory.name}.dropped")
        with explained("remove", directory.parent):
            directory.rename(dropped)
            shutil.rmtree(dropped, ignore_errors=True)

    def _still_mine(self) -> None:
        """Asked right before something is shown by a target that cannot refuse an older driver."""
        Generation(self.home.store, self._generation).check()

    # -- refusals ------------------------------------------------------------------------------

    def _refuse_other_job(self, whose: str) -> None:
        raise ConfigError(
            f"{self._place()} belongs to another job, {whose}; each would take the other's slices "
            f"for its own. Give the sink {self.home.sink!r} another place, or a topology or sink "
            "of another name where the place has room for several, or go on with the checkpoint "
            "directory that belongs to it",
            sink=self.home.sink,
        )

    def _refuse_behind(self, held: Held, newest: int) -> None:
        """A target is never ahead of its job. To take a slice that was shown before for the one
        that comes now would drop rows."""
        if held.slice > newest:
            raise ConfigError(
                f"{self._place()} has slice {held.slice} of this job, whose checkpoint directory "
                f"{self.home.root} ends with slice {newest}: that is an older copy, or a copy has "
                "run since; go on with the newest one, or start a new checkpoint directory with "
                "another place for the sink",
                sink=self.home.sink,
                slice=held.slice,
            )

    def _has(self, held: Held, slice_no: int, exposure: str) -> bool:
        """Whether the target has the slice, with the rows that the journal names."""
        self._refuse_behind(held, slice_no)
        if held.slice < slice_no:
            return False
        if held.exposure not in (None, exposure):
            raise StorageError(
                f"{self._place()} has another slice {slice_no} than the journal in "
                f"{self.home.root}: two copies of the checkpoint directory have run; go on with "
                "the other one, or remove the rows of that slice and start a new checkpoint "
                "directory with another place for the sink",
                sink=self.home.sink,
                slice=slice_no,
            )
        return True

    def _refuse_moved(self, slice_no: int) -> None:
        """Whether the place before has the newest slice is known to nobody but itself."""
        note = self._note
        if note is not None and note.place != self._place_id:
            raise ConfigError(
                f"the sink {self.home.sink!r} has another place than before, {self._place()}, and "
                f"the job ended before it noted that slice {slice_no} was shown at the old one; "
                "start once with the sink as it was and stop, then change it",
                sink=self.home.sink,
                slice=slice_no,
            )

    # -- staging -------------------------------------------------------------------------------

    def _staging(self) -> Path:
        return self.home.root / "staged" / self.home.sink

    def stage(
        self, name: str, table: pa.Table, slice_no: int, generation: int, writer: str
    ) -> Staged:
        target = self._attempt(slice_no, generation, writer)
        with explained("write", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                try:
                    pq.write_table(table, file, compression="zstd", use_dictionary=False)
                except pa.ArrowException as e:
                    raise StorageError(
                        f"the rows of the sink {name!r} cannot be written as Parquet: {e}; cast "
                        "or drop the column",
                        sink=name,
                    ) from e
                file.flush()
                # A replay does not write it again: it must be there before the journal says so.
                os.fsync(file.fileno())
        return Staged(name, writer, table.num_rows, path=self._journalled(target))

    def _attempt(self, slice_no: int, generation: int, writer: str) -> Path:
        """A name that no other attempt has."""
        attempt = f"{writer}.{generation}-{self.home.store.token()[-8:]}.staged"
        return self._staging() / f"{slice_no}-{generation}" / attempt

    def _journalled(self, path: Path) -> str:
        """Relative to the checkpoint directory where possible, so that it can be moved."""
        root = self.home.root
        return str(path.relative_to(root) if path.is_relative_to(root) else path)

    def expose(
        self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]
    ) -> pa.Table | None:
        named = tuple(files)
        # Dead letters that another target refused just now are not in the journal.
        added = [s.path for s in staged if s.path is not None and s.path not in named]
        paths = [self.home.root / f for f in (*named, *added)]
        if paths:
            exposure = exposure_of(slice_no, named)
            if self._note is None or not self._note.tells_of(slice_no, exposure):
                if not self._shown_before(paths):
                    self._refuse_moved(slice_no)
                    self._deliver(slice_no, exposure, paths)
                self._write_note(slice_no, exposure)
            for directory in {p.parent for p in paths}:
                with contextlib.suppress(StorageError):  # the next start removes it
                    self.home.store.delete(str(directory))
        return self._refused_by_target(slice_no)

    def _shown_before(self, files: Sequence[Path]) -> bool:
        """Before there were notes, files that are gone said that their slice has been shown."""
        return (
            self._note is None and self._job.inherits and not any(self._has_file(p) for p in files)
        )

    def _refused_by_target(self, slice_no: int) -> pa.Table | None:
        """The dead letters of a slice that the target has."""
        return None

    # -- reading -------------------------------------------------------------------------------

    def _has_file(self, path: Path) -> bool:
        return self.home.store.has(str(path))

    def _refuse_missing(self, slice_no: int, files: Sequence[Path]) -> None:
        missing = [p.name for p in files if not self._has_file(p)]
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
