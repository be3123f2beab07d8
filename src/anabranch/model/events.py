"""What the control plane hears: past tense, with the time it was heard."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.errors import AnabranchError
from anabranch.model.ids import NodeId
from anabranch.model.reports import NodeReport


@dataclass(frozen=True, slots=True)
class NodesJoined:
    """Nodes were warmed and may be given partitions."""

    nodes: tuple[NodeId, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class PartitionsInstalled:
    """Every node holds the mapping and the restored state of its partitions."""

    mapping: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """A node could not read a checkpoint file; no partition was installed anywhere for good."""

    error: AnabranchError
    now_ms: int


@dataclass(frozen=True, slots=True)
class BatchArrived:
    """The Spark query offers a batch of rows; it waits until the batch is finished."""

    batch: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class SliceRan:
    """The Spark job of a slice ended and every node reported."""

    number: int
    source_tasks: int
    reports: tuple[NodeReport, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class NodesPolled:
    """Reports that came without a slice."""

    reports: tuple[NodeReport, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class Idled:
    """No batch came for a slice interval."""

    now_ms: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user, or the end of the available data, asks for a graceful stop."""

    now_ms: int


Event = (
    NodesJoined
    | PartitionsInstalled
    | RestoreFailed
    | BatchArrived
    | SliceRan
    | NodesPolled
    | Idled
    | StopRequested
)
