"""A directory of Parquet files, a sub-directory per slice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.storage.files import explained
from anabranch.storage.sinks.staged import StagedSink, read_marker, write_marker


@dataclass
class Parquet(StagedSink):
    """A directory of Parquet files, one sub-directory `slice=K` per slice with rows.

    A slice's files are staged under `_staging`, which readers ignore, and appear by one rename of
    their directory: all rows of a slice or none, also for a reader in the middle of it. Readers
    find the slice number as a partition column named `slice`. Slices that have appeared may be
    compacted or deleted: the file `_newest` remembers which ones there were.
    """

    path: str

    def __post_init__(self) -> None:
        # Nodes have working directories of their own: a relative path means the driver's.
        self.path = str(Path(self.path).absolute())

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "path": self.path}

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
        return Path(self.path) / "_staging"

    def _deliver(self, slice_no: int, files: Sequence[Path]) -> None:
        marker, final = Path(self.path) / "_newest", Path(self.path) / f"slice={slice_no}"
        if self._has(slice_no, read_marker(marker)):
            return
        if not final.exists():
            self._refuse_missing(slice_no, files)
            # Links in a directory that no task writes to: an attempt that does not count may
            # still add files beside those that do.
            ready = files[0].parent.with_name(f"{files[0].parent.name}.ready")
            with explained("expose", final):
                shutil.rmtree(ready, ignore_errors=True)
                ready.mkdir(parents=True)
                for path in files:
                    os.link(path, ready / f"{path.name.rsplit('.', 2)[0]}.parquet")
                final.parent.mkdir(parents=True, exist_ok=True)
                ready.rename(final)
        write_marker(marker, slice_no)

    def _newest(self) -> int:
        exposed = [p.name.removeprefix("slice=") for p in Path(self.path).glob("slice=*")]
        marked = read_marker(Path(self.path) / "_newest")
        return max([marked, *(int(n) for n in exposed if n.isdigit())])
