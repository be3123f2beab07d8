"""What the driver sends to nodes (the job once, then one request per wave) and to source tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import SlicePlan


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """Run one wave of one slice on one node."""

    job: str  # its checkpoint directory: jobs of one Spark application share node processes
    generation: int  # the driver's; smaller ones are refused
    node: NodeId
    nodes: tuple[NodeId, ...]  # destination index → node
    plan: SlicePlan
    source_tasks: int
    depth: int
    last: bool
    confirmed: int  # slices up to this one are journalled
    trim: int  # backups up to this slice are not needed any more
    backups: frozenset[PartitionId] | None  # who backs up; None: all
    beside: bool = False  # is a recovery in hand that goes on beside slices?


@dataclass(frozen=True, slots=True)
class RecoverRequest:
    """Run one wave of a recovery on one node; the first one installs the partitions."""

    job: str
    spec: bytes | None  # the job, pickled by the driver; with the first wave
    driver: str  # unique: a new job on a directory that was deleted counts from 1 again
    pulse: object | None  # where the node's process sends its heartbeats
    generation: int
    node: NodeId
    nodes: tuple[NodeId, ...]
    plan: RecoveryPlan
    depth: int
    last: bool


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Load the state that a plan will install here, in the background, and report how far."""

    job: str
    spec: bytes
    generation: int
    node: NodeId
    plan: RecoveryPlan


@dataclass(frozen=True, slots=True)
class PollRequest:
    """Report, without running anything."""

    job: str
    generation: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """Be ready for a job: load it and run its chains once on nothing, so that no slice has to
    wait for imports. From then on show that you live: there may be work at any moment."""

    job: str
    spec: bytes
    node: NodeId
    pulse: object | None


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """The job has ended: drop its partitions."""

    job: str


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """One slice as the source tasks see it."""

    generation: int
    nodes: tuple[NodeId, ...]
    placement: Placement
    plan: SlicePlan
    tasks: int
    # Sources in the order of the batch's columns. With several, each is one struct column.
    sources: tuple[str, ...]
    schema: Any  # of the batch


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A recovery as its source stage sees it; `tasks` of them share the logs evenly."""

    generation: int
    nodes: tuple[NodeId, ...]
    plan: RecoveryPlan
    tasks: int
