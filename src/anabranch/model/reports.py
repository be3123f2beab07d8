"""What comes back with a wave: facts about partitions, sources, sinks and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.model.ids import NodeId, PartitionId


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """A partition after a slice. Loads are of this slice; sizes are of the whole state."""

    next_slice: int
    epoch: int
    rows_in: int = 0
    cpu_s: float = 0.0
    busy_s: float = 0.0  # that passed while it computed, whether the CPU was busy or not
    packet_bytes: int = 0
    state_rows: int = 0
    state_bytes: int = 0
    backup_bytes: int = 0
    out_bytes: int = 0
    due_ms: int | None = None  # the processing time at which its next timer comes
    rows_by_group: Mapping[int, int] = field(default_factory=dict)  # that came, where keys count
    rows_by_operator: Mapping[str, int] = field(default_factory=dict)
    late_by_operator: Mapping[str, int] = field(default_factory=dict)
    dead_by_operator: Mapping[str, int] = field(default_factory=dict)  # rows put aside


@dataclass(frozen=True, slots=True)
class SourceReport:
    """One source task's share of a batch. `chunks` counts the slices it was cut into."""

    partition: int
    chunks: int
    rows: Mapping[str, int]  # per source, of this slice
    max_time_us: Mapping[str, int]  # per source with an event time, of this slice
    log_bytes: int
    cpu_s: float
    rows_by_operator: Mapping[str, int] = field(default_factory=dict)
    dead_by_operator: Mapping[str, int] = field(default_factory=dict)  # rows put aside


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows for a sink that no reader can see yet: a file, or the Arrow bytes themselves."""

    sink: str
    writer: str
    rows: int
    path: str | None = None
    data: bytes | None = None
    slice: int | None = None  # of rows that come late: their slice


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """One partition is durable up to and including `slice`: by a file with its whole state, or one
    with what changed since the slice it was durable at before, or none where nothing did."""

    partition: PartitionId
    slice: int
    epoch: int
    path: str | None  # no file: nothing has changed
    full: bool
    nbytes: int
    after: int = 0  # if it is not full: the slice that it begins after


@dataclass(frozen=True, slots=True)
class Failure:
    """An operator function raised, or storage refused; the slice was not applied there."""

    where: str
    operator: str
    message: str
    detail: str
    kind: str = "operator"  # or "storage", or "restore"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Everything one node has to say after the last wave of a slice."""

    node: NodeId
    incarnation: str  # of the node process: a new one has lost its state
    slice: int
    partitions: Mapping[PartitionId, PartitionReport] = field(default_factory=dict)
    incomplete: Mapping[PartitionId, str] = field(default_factory=dict)
    not_hosted: tuple[PartitionId, ...] = ()
    failures: tuple[Failure, ...] = ()
    sources: tuple[SourceReport, ...] = ()
    staged: tuple[Staged, ...] = ()
    checkpoints: tuple[CheckpointWritten, ...] = ()
    # Of a recovery: rows read from the log, by slice and source task and source.
    replayed: Mapping[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)
    restore_s: float = 0.0
    prepared: tuple[PartitionId, ...] = ()  # state loaded ahead of its installation
    disk_full: bool = False  # backups could not be moved to disk: they stay in memory
    pid: int = 0
    memory_bytes: int = 0
    cpu_s: float = 0.0  # of the node process since its start
    placement: int | None = None  # the version that it goes by
