"""What the control plane hears: past tense, with the time it was heard.

`now_ms` is by a clock that goes on evenly, whatever the wall clock does: the difference of two is
an interval, and one alone means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.model.ids import NodeId
from anabranch.model.reports import NodeReport


@dataclass(frozen=True, slots=True)
class NodesJoined:
    """Nodes were warmed and may be given partitions. `hosts` names their machines, if known."""

    nodes: tuple[NodeId, ...]
    now_ms: int
    hosts: Mapping[NodeId, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodesLost:
    """Nodes are gone for good; what ran when they went was cancelled.

    `logged` is the number of source tasks of the slice that was running, if all of them had
    logged their rows; None otherwise: then no node has seen any of them.
    """

    nodes: tuple[NodeId, ...]
    reason: str
    logged: int | None
    now_ms: int


@dataclass(frozen=True, slots=True)
class PartitionsRecovered:
    """A recovery, or a part of it, ended and every node of its placement reported."""

    reports: tuple[NodeReport, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A part of a recovery that went on beside slices has ended: this one, under the placement of
    this version; with an `error`, unless nobody waits for it any longer."""

    version: int
    part: int
    reports: tuple[NodeReport, ...]
    now_ms: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """A node could not read a checkpoint file: the recovery it belongs to did not happen."""

    error: AnabranchError
    now_ms: int


@dataclass(frozen=True, slots=True)
class PartitionsPrepared:
    """The nodes said which partitions they have loaded ahead."""

    reports: tuple[NodeReport, ...]
    now_ms: int


@dataclass(frozen=True, slots=True)
class ScaleRequested:
    """Run an operator (and those fused with it) at another parallelism from soon on."""

    operator: str
    parallelism: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Move every partition off a node and let it go."""

    node: NodeId
    now_ms: int


@dataclass(frozen=True, slots=True)
class BatchArrived:
    """The Spark query offers a batch of rows, and again after every slice of it, until it is
    finished. The `rows` are the cluster's own: nobody else looks at them."""

    batch: int
    now_ms: int
    rows: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class SliceRan:
    """The Spark job of a slice ended and every node reported."""

    number: int
    source_tasks: int
    reports: tuple[NodeReport, ...]
    now_ms: int
    # Has every source task logged its rows? One that failed has not, and its failure may be lost.
    logged: bool = True


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
    | NodesLost
    | PartitionsRecovered
    | CaughtUp
    | RestoreFailed
    | PartitionsPrepared
    | ScaleRequested
    | DrainRequested
    | BatchArrived
    | SliceRan
    | NodesPolled
    | Idled
    | StopRequested
)
