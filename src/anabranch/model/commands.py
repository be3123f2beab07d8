"""What the control plane asks for: imperative, executed in the order given.

A command that fails stops the ones after it; nothing later than a failed `WriteSlice` can have
been exposed.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass

from anabranch.errors import AnabranchError
from anabranch.model.ids import PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.reports import Staged
from anabranch.model.slices import Cut, SlicePlan, SliceRecord


@dataclass(frozen=True, slots=True)
class InstallPartitions:
    """Give every node its partitions, restored from these checkpoint files."""

    mapping: Mapping
    restore: MappingOf[PartitionId, tuple[str, ...]]
    next_slice: int


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Run one slice on every node, as one Spark job."""

    plan: SlicePlan


@dataclass(frozen=True, slots=True)
class WriteSlice:
    """Append a slice to the journal: the point from which it has happened."""

    record: SliceRecord


@dataclass(frozen=True, slots=True)
class ExposeSlice:
    """Let readers of the sinks see a journalled slice. Idempotent."""

    record: SliceRecord
    staged: tuple[Staged, ...]


@dataclass(frozen=True, slots=True)
class WriteCut:
    """Make a completed checkpoint the one a restart begins with, and start a new journal file.

    `carried` are the slices after the cut before it: what a restart may have to replay.
    """

    cut: Cut
    carried: tuple[SliceRecord, ...]
    mapping: Mapping
    epochs: MappingOf[PartitionId, int]


@dataclass(frozen=True, slots=True)
class TrimStorage:
    """Delete source log below a slice and checkpoint files no cut names any more."""

    log_below: int
    keep_files: frozenset[str]


@dataclass(frozen=True, slots=True)
class FinishBatch:
    """Let the Spark query commit the batch's offsets."""

    batch: int


@dataclass(frozen=True, slots=True)
class PollNodes:
    """Ask every node for a report without running a slice (checkpoints in flight)."""


@dataclass(frozen=True, slots=True)
class FailRun:
    """Stop the run with this error; everything journalled stays."""

    error: AnabranchError


@dataclass(frozen=True, slots=True)
class FinishRun:
    """The graceful stop is complete."""


Command = (
    InstallPartitions
    | RunSlice
    | WriteSlice
    | ExposeSlice
    | WriteCut
    | TrimStorage
    | FinishBatch
    | PollNodes
    | FailRun
    | FinishRun
)
