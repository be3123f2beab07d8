"""What the control plane asks for: imperative, executed in the order given.

A command that fails stops the ones after it; nothing later than a failed `WriteSlice` can have
been exposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.model.costs import Costs
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Layout, Placement
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import Staged
from anabranch.model.scaling import Decision
from anabranch.model.slices import Cut, Late, SlicePlan, SliceRecord


@dataclass(frozen=True, slots=True)
class RecoverPartitions:
    """Install partitions and bring them up to the others, as one Spark job."""

    plan: RecoveryPlan


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Begin a later part of a recovery, which goes on beside slices; an event says how it ended."""

    plan: RecoveryPlan


@dataclass(frozen=True, slots=True)
class AwaitCatchUp:
    """Nothing can be done before what was begun beside slices has ended."""


@dataclass(frozen=True, slots=True)
class PreparePartitions:
    """Let the nodes load state ahead of its installation, in the background; repeated, it asks
    how far they are."""

    plan: RecoveryPlan


@dataclass(frozen=True, slots=True)
class RequestNodes:
    """Ask the cluster for further nodes; whether and when they come is its own affair."""

    count: int


@dataclass(frozen=True, slots=True)
class ReleaseNodes:
    """These nodes were drained: the cluster may have them back."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Run one slice on every node that is not `busy`, as one job. Backups up to `trim` are not
    needed. A live slice has the `rows` that its batch came with. A recovery may be in hand `beside`
    it; nodes that have nothing else to do are busy with it."""

    plan: SlicePlan
    trim: int
    backups: frozenset[PartitionId] | None = None  # who backs up from this slice on; None: all
    rows: Any = field(default=None, repr=False, compare=False)
    beside: bool = False
    busy: frozenset[NodeId] = frozenset()

    def nodes(self, placement: Placement) -> tuple[NodeId, ...]:
        return tuple(n for n in placement.nodes if n not in self.busy)


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
class WriteLate:
    """Append to the journal that chains which waited have made up for a slice."""

    late: Late


@dataclass(frozen=True, slots=True)
class ExposeLate:
    """Let readers of these sinks see a slice that happened before; idempotent. The `record` names
    all that was staged for it; `staged` is what has come for it just now."""

    record: SliceRecord
    sinks: frozenset[str]
    staged: tuple[Staged, ...]


@dataclass(frozen=True, slots=True)
class WriteHead:
    """Begin a new journal file: the cuts a restart begins with, the slices after the older one,
    the placement and every epoch ever given out. Written before anything of it is used.

    `layout` is what a restart routes by; `layouts`, by version of the placement, what slices ran
    under that had another one. `older` cuts, the newest first, and `behind`, the first slice that
    a chain lacks, are for chains that wait; `costs` is what partitions are known to cost."""

    cut: Cut | None
    previous: Cut | None
    slices: tuple[SliceRecord, ...]
    placement: Placement
    epochs: Mapping[PartitionId, int]
    layout: Layout
    layouts: Mapping[int, Layout]
    older: tuple[Cut, ...] = ()
    behind: Mapping[str, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)


@dataclass(frozen=True, slots=True)
class TrimStorage:
    """Delete source log below a slice and checkpoint files no cut names any more."""

    log_below: int
    keep_files: frozenset[str]


@dataclass(frozen=True, slots=True)
class FinishBatch:
    """Tell the one who offered the batch that it is done: Spark's query commits its offsets."""

    batch: int


@dataclass(frozen=True, slots=True)
class NoteBackups:
    """Another set of partitions backs up from the next slice on: to keep the recovery bound, or
    because nodes were lost, or all is well again."""

    backups: frozenset[PartitionId]
    predicted_s: Mapping[PartitionId, float]
    problem: str = ""
    why: str = ""  # all back up from now on, or none, without a bound


@dataclass(frozen=True, slots=True)
class NoteDecision:
    """The job has decided something about itself; `memory` is what the autoscaler, if it was that,
    should know after a restart."""

    decision: Decision
    memory: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class AwaitNodes:
    """No node is left: wait until one joins."""


@dataclass(frozen=True, slots=True)
class PollNodes:
    """Ask every node for a report without running a slice (checkpoints in flight)."""


@dataclass(frozen=True, slots=True)
class FailRun:
    """Stop the run with this error; everything journalled stays."""

    error: Exception


@dataclass(frozen=True, slots=True)
class FinishRun:
    """The graceful stop is complete."""


Command = (
    RecoverPartitions
    | CatchUp
    | AwaitCatchUp
    | PreparePartitions
    | RequestNodes
    | ReleaseNodes
    | RunSlice
    | WriteSlice
    | WriteLate
    | ExposeLate
    | ExposeSlice
    | WriteHead
    | TrimStorage
    | FinishBatch
    | NoteBackups
    | NoteDecision
    | AwaitNodes
    | PollNodes
    | FailRun
    | FinishRun
)
