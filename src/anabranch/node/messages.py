"""What the driver sends to nodes: the job once, then one request per wave."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import SlicePlan
from anabranch.node.chain import ChainProgram
from anabranch.node.heartbeat import Pulse
from anabranch.storage.identity import Identity
from anabranch.storage.sinks import Sink


@dataclass(frozen=True)
class JobSpec:
    """The compiled job: chains with their kernels, sinks, where durable files go."""

    name: str
    identity: Identity
    programs: MappingOf[str, ChainProgram]
    sinks: MappingOf[str, Sink]
    root: str
    checkpoints: str  # the place of checkpoint files: below `root`, or a URL
    key_groups: int
    max_rows_per_slice: int | None
    event_times: MappingOf[str, str]  # source → its event-time column


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """Run one wave of one slice on one node."""

    job: str  # its checkpoint directory: jobs of one Spark application share node processes
    run: int  # the driver's generation; smaller ones are refused
    node: NodeId
    nodes: tuple[NodeId, ...]  # destination index → node
    plan: SlicePlan
    source_tasks: int
    depth: int
    last: bool
    confirmed: int  # slices up to this one are journalled
    trim: int  # backups up to this slice are not needed any more
    backups: frozenset[PartitionId] | None  # who backs up; None: all


@dataclass(frozen=True, slots=True)
class RecoverRequest:
    """Run one wave of a recovery on one node; the first one installs the partitions."""

    job: str
    spec: bytes | None  # pickled JobSpec, by the driver's pickler; with the first wave
    driver: str  # unique: a new job on a directory that was deleted counts from 1 again
    pulse: Pulse | None  # where the node sends its heartbeats
    run: int
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
    run: int
    node: NodeId
    plan: RecoveryPlan


@dataclass(frozen=True, slots=True)
class PollRequest:
    """Report, without running anything."""

    job: str
    run: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """Be ready for a job: load it and run its chains once on nothing, so that no slice has to
    wait for imports. From then on show that you live: there may be work at any moment."""

    job: str
    spec: bytes
    node: NodeId
    pulse: Pulse | None


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """The job has ended: drop its partitions."""

    job: str
