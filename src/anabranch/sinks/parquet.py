"""A directory of Parquet files, a sub-directory per slice."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.errors import StorageError, TopologyError
from anabranch.sinks.notes import read_marker
from anabranch.sinks.staged import Held, StagedSink
from anabranch.storage.files import directory, explained, refuse_unwritable
from anabranch.storage.local import LocalStore
from anabranch.storage.versions import check_format

FORMAT = 1
OWN = ".anabranch"  # below the path: no reader of Parquet looks there
OWNER = f"{OWN}/owner"
_SLICE = re.compile(r"slice=([0-9]+)", re.ASCII)


@dataclass
class Parquet(StagedSink):
    """A directory of Parquet files, one sub-directory `slice=K` per slice with rows.

    A slice's files are staged below `.anabranch`, without the suffix by which readers look for
    Parquet, and appear by one rename of their directory: all rows of a slice or none, also for a
    reader in the middle of it. Readers find the slice number as a partition column named `slice`.
    Slices that have appeared may be compacted or deleted. The directory is one job's.
    """

    path: str

    def __post_init__(self) -> None:
        # Also because a slice appears by a rename, which object stores do not have.
        given = directory(self.path, "the path of a Parquet sink", "or use ab.Delta")
        self.path = str(given.absolute())

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "path": self.path}

    @property
    def target(self) -> str:
        return self.path

    def check(self, schema: pa.Schema) -> None:
        if "slice" in schema.names:
            raise TopologyError(
                "a Parquet sink adds the partition column 'slice', which the stream already has; "
                "rename the stream's column",
                column="slice",
            )

    def _place(self) -> str:
        return f"the Parquet sink {self.path}"

    def _staging(self) -> Path:
        """Not below the checkpoint directory: a rename needs one file system."""
        return Path(self.path) / OWN / "staged"

    # -- whose it is ---------------------------------------------------------------------------

    def _look(self) -> Held:
        refuse_unwritable(Path(self.path))
        found = max(self._slices(), default=0)
        owner = self._owner()
        if owner is None:
            if found and not self._job.inherits:
                self._refuse_other_job("which left no name")
            return Held("", found)
        if owner["job"] != self._job.job:
            name, checkpoint = owner["topology"], owner["checkpoint"]
            self._refuse_other_job(f"topology {name!r} with the checkpoint directory {checkpoint}")
        return Held(owner["place"], found)

    def _claim(self, newest: int) -> Held:
        held = self._look()
        if not held.place:
            self._refuse_behind(held, newest)
            mine = {
                "format": FORMAT,
                "job": self._job.job,
                "topology": self.home.job,
                "checkpoint": str(self.home.root),
                "place": uuid.uuid4().hex,
            }
            LocalStore(Path(self.path)).create(OWNER, [json.dumps(mine).encode()])
            held = self._look()
        return held

    def _owned(self) -> Path:
        return Path(self.path) / OWNER

    def _owner(self) -> Mapping[str, Any] | None:
        with explained("read", self._owned()):
            try:
                data = self._owned().read_bytes()
            except FileNotFoundError:
                return None
        try:
            found: dict[str, Any] = json.loads(data)
            check_format(self._owned(), found["format"], FORMAT)
            return {k: found[k] for k in ("job", "topology", "checkpoint", "place")}
        except (ValueError, KeyError, TypeError) as e:
            raise StorageError(
                f"{self._owned()} should say whose slices these are, but cannot be read ({e}); "
                "restore it from a copy",
                path=str(self._owned()),
            ) from e

    def _slices(self) -> Iterator[int]:
        with explained("list", self.path):
            entries = list(Path(self.path).iterdir()) if Path(self.path).is_dir() else []
        for entry in entries:
            if found := _SLICE.fullmatch(entry.name):
                yield int(found[1])

    # -- one slice -----------------------------------------------------------------------------

    def _deliver(self, slice_no: int, exposure: str, files: Sequence[Path]) -> None:
        """What is there counts only if it is these very files: a driver that had been replaced
        without knowing it may have left others."""
        if self._note is None and read_marker(LocalStore(Path(self.path)), "_newest") == slice_no:
            return  # shown, and perhaps compacted since, before there were notes
        final = Path(self.path) / f"slice={slice_no}"
        named = {f"{p.stem}.parquet": p for p in files}
        with explained("expose", final):
            if final.is_dir() and {p.name for p in final.iterdir()} == named.keys():
                return
            self._refuse_missing(slice_no, files)
            ready = self._made_ready(slice_no, named)
            self._still_mine()
            if final.exists():
                _replace(final, ready)
            else:
                ready.rename(final)

    def _made_ready(self, slice_no: int, named: Mapping[str, Path]) -> Path:
        """A directory with links to the files under the names they will have. No task writes to
        it: an attempt that does not count may still add files beside those that do."""
        for place in self._places():
            ready = place / f"{slice_no}-{self._generation}.ready"
            shutil.rmtree(ready, ignore_errors=True)
            ready.mkdir(parents=True)
            try:
                for name, path in named.items():
                    os.link(path, ready / name)
                break
            except OSError as e:
                if e.errno != errno.EXDEV or place == self._staging():
                    raise
                shutil.rmtree(ready, ignore_errors=True)
        return ready

    def _places(self) -> tuple[Path, Path]:
        """Where slices are made ready: out of the way of readers that search every directory below
        the path for Parquet, if the checkpoint directory is on the same file system."""
        return super()._staging(), self._staging()

    def begin(self, keep: Collection[str] = ()) -> None:
        super().begin(keep)
        path = Path(self.path)
        self._sweep(super()._staging())
        # Of the version before; what it kept there is in the job's note.
        self._sweep(path / "_staging")
        with explained("remove", path / "_staging"):
            if (path / "_staging").is_dir() and not any((path / "_staging").iterdir()):
                shutil.rmtree(path / "_staging", ignore_errors=True)
            (path / "_newest").unlink(missing_ok=True)
            for pattern in ("._newest.*.tmp", f"{OWN}/.owner.*.tmp"):
                for leftover in path.glob(pattern):
                    leftover.unlink(missing_ok=True)


def _replace(final: Path, ready: Path) -> None:
    """Readers miss the slice for a moment. If `ready` is gone, a newer driver has taken over and
    what is there is its own."""
    replaced = ready.with_suffix(".replaced")
    final.rename(replaced)
    try:
        ready.rename(final)
    except OSError:
        replaced.rename(final)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
