"""What the rules of a node are written over: a job, its state and rows, and a process.

Rows of type `R` are never looked into here. A real job carries Arrow tables; the simulator carries
tuples of small numbers.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from anabranch.errors import AnabranchError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Chain, Edge
from anabranch.model.reports import Failure, PartitionReport, Staged
from anabranch.model.slices import SlicePlan
from anabranch.node.protocol.messages import SourceRequest

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class ChainError(Exception):
    """A kernel raised. Carries what the user should see; never leaves this package."""

    def __init__(self, operator: str, cause: BaseException, record: str | None = None) -> None:
        super().__init__(str(cause))
        self.operator = operator
        self.cause = cause
        self.record = record

    def failure(self, where: str) -> Failure:
        cause = self.cause
        if isinstance(cause, AnabranchError):
            message = cause.message
        else:
            message = f"its function raised {type(cause).__name__}: {cause}"
        if self.record is not None:
            message += f"; the first record that fails is {self.record}"
        detail = "".join(traceback.format_exception(cause))
        return Failure(where=where, operator=self.operator, message=message, detail=detail)


class Packets(Protocol[R_co]):
    """Rows for partitions of one node."""

    def of(self, partition: int) -> R_co | None:
        """The rows of one partition; None: it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Result(Generic[R]):
    """What a slice made of a state: rows per edge and sink, and how much work that was."""

    edges: Mapping[int, R]
    sinks: Mapping[str, R]
    loads: PartitionReport
    nbytes: int = 0  # memory that the rows on edges take


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed since the seal before; `changed` is False where nothing did."""

    rows: int
    changed: bool
    content: Any


class State(Protocol[R]):
    """The state of one partition."""

    def apply(self, plan: SlicePlan, packets: Mapping[int, list[R]]) -> Result[R]:
        """Compute the slice from packets per edge, then install it in one step. Raises ChainError,
        changing nothing."""
        ...

    def seal(self) -> Delta:
        """What changed since the last seal, once: a second delta would be empty."""
        ...

    def snapshot(self) -> Any:
        """The whole of it, as a seal would give it."""
        ...

    def restore(self, files: Iterable[str], owned: Collection[int], gently: bool = False) -> None:
        """Load checkpoint files, oldest first; only rows of these key groups. Raises StorageError.
        Gently: beside slices, in half of the time."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def due_ms(self) -> int | None:
        """The processing time at which a key may have something to do, rows or not."""
        ...


@dataclass(frozen=True, slots=True)
class Share(Generic[R]):
    """One source task's share of one slice: what is logged and sent on."""

    tables: Mapping[str, R]  # "edge:ID" and "sink:NAME"
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sealed:
    """One partition's state at a slice, or what changed since the seal at the slice `before`; no
    content: nothing did."""

    generation: int
    partition: PartitionId
    slice: int
    epoch: int
    full: bool
    before: int
    content: Any


class Job(Protocol[R]):
    """A compiled job: its chains, what they compute, and where its durable things are."""

    @property
    def chains(self) -> Mapping[str, Chain]: ...

    def rehearse(self) -> None:
        """Run every chain once, on no rows."""
        ...

    def new_state(self, partition: PartitionId) -> State[R]: ...

    def route(self, edge: Edge, placement: Placement, nodes: Sequence[NodeId]) -> Any:
        """How rows of an edge find their partition and its node, for `cut`."""
        ...

    def cut(self, rows: R, route: Any, only: Collection[int] | None) -> Sequence[Packets[R] | None]:
        """Rows by node; `only`: for these partitions, not for copies."""
        ...

    def stage(self, sink: str, rows: R, slice_no: int, generation: int, writer: str) -> Staged:
        """Put a slice's rows aside for a sink, where no reader sees them."""
        ...

    def write_checkpoint(self, sealed: Sealed) -> tuple[str, int]:
        """Make sealed state durable: the name of its file, and its size."""
        ...

    def compute(self, request: SourceRequest, task: int, batch: Any) -> list[Share[R]]:
        """Run the source chains on a source task's rows: a share for the slice, and one for each
        that follows it where the batch is cut."""
        ...

    def log_name(self, plan: SlicePlan, task: int) -> str:
        """Of the log of one source task, for people."""
        ...

    def read_log(self, plan: SlicePlan, task: int) -> Share[R] | None:
        """What a source task has logged for a slice."""
        ...

    def write_log(self, plan: SlicePlan, task: int, shares: Sequence[Share[R]]) -> tuple[int, bool]:
        """Log the shares of this slice and those that follow, unless another attempt has: the size,
        and whether these count."""
        ...

    def finish_log(self, plan: SlicePlan, task: int, share: Share[R]) -> None:
        """Let the later slices of a share appear whose first one is in the log."""
        ...


class Kept(Protocol):
    """Rows that were moved to the node's own disk."""

    def drop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Vitals:
    """Of the node process."""

    pid: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0


class Process(Protocol[R]):
    """What a host has around it: other threads, a local disk, a clock, a driver to show life to."""

    @property
    def incarnation(self) -> str: ...

    @property
    def backup_memory_bytes(self) -> int:
        """Backups of a node above this go to its local disk."""
        ...

    def write_later(self, work: Callable[[], None]) -> None:
        """Do it some time, each after the one before; waits where too much is waiting."""
        ...

    def load_later(self, work: Callable[[], None]) -> None:
        """The same, on another thread."""
        ...

    def spill(self, edges: Mapping[int, R]) -> tuple[Mapping[int, R], Kept]:
        """Move rows to the local disk. Raises OSError."""
        ...

    def belong_to(self, pulse: Any, node: NodeId) -> None:
        """A driver owns the node from now on: it gets the heartbeats."""
        ...

    def monotonic_s(self) -> float: ...

    def vitals(self) -> Vitals: ...

    def close(self) -> None:
        """The job has ended; what was to be written is still written."""
        ...

    def join(self) -> None:
        """Wait, after `close`, until nothing is written any more."""
        ...
