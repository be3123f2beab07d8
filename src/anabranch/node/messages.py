"""What the driver sends to nodes: the job once, then one request per wave."""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.slices import SlicePlan
from anabranch.node.chain import ChainProgram
from anabranch.storage.sinks import Sink


@dataclass(frozen=True)
class JobSpec:
    """The compiled job: chains with their kernels, sinks, where durable files go."""

    name: str
    programs: MappingOf[str, ChainProgram]
    sinks: MappingOf[str, Sink]
    root: str
    key_groups: int
    max_rows_per_slice: int | None
    event_times: MappingOf[str, str]  # source → its event-time column


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """Take these partitions, restored from these files, at this mapping."""

    job: str  # its checkpoint directory: jobs of one Spark application share node processes
    spec: bytes  # pickled JobSpec, by the driver's pickler
    run: int
    node: NodeId
    mapping: Mapping
    restore: MappingOf[PartitionId, tuple[str, ...]]
    next_slice: int


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """Run one wave of one slice on one node."""

    job: str
    run: int  # the driver's generation; smaller ones are refused
    node: NodeId
    nodes: tuple[NodeId, ...]  # destination index → node
    plan: SlicePlan
    source_tasks: int
    depth: int
    last: bool
    confirmed: int  # slices up to this one are journalled


@dataclass(frozen=True, slots=True)
class PollRequest:
    """Report, without running anything."""

    job: str
    run: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """The job has ended: drop its partitions."""

    job: str
