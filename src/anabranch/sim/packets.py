"""What travels between simulated nodes: packets in blobs, and the calls that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.plan import Edge
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport, SourceReport, Staged
from anabranch.model.slices import SlicePlan
from anabranch.sim.workload import Row, rekey


@dataclass(frozen=True, slots=True)
class Bundle:
    """Packets of one source partition on one edge for the partitions of one node."""

    edge: int
    slice: int
    source: int
    epoch: int
    packets: dict[int, list[Row]]  # partition index → rows


@dataclass(frozen=True, slots=True)
class Blob:
    """All bundles from one task to one node, and what a source task has to report."""

    bundles: tuple[Bundle, ...] = ()
    sources: tuple[SourceReport, ...] = ()
    staged: tuple[Staged, ...] = ()
    replayed: tuple[tuple[tuple[int, int], dict[str, int]], ...] = ()


Answer = tuple[list[Blob], NodeReport | None]


@dataclass(frozen=True, slots=True)
class Wave:
    """Run one wave of one slice."""

    run: int
    nodes: tuple[NodeId, ...]
    plan: SlicePlan
    source_tasks: int
    depth: int
    last: bool
    confirmed: int
    trim: int
    backups: frozenset[PartitionId] | None


@dataclass(frozen=True, slots=True)
class Recover:
    """Run one wave of a recovery; the first one installs the partitions."""

    driver: str
    run: int
    node: NodeId
    nodes: tuple[NodeId, ...]
    plan: RecoveryPlan
    depth: int
    last: bool


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load ahead what a plan will install here; repeated, it asks how far that is."""

    run: int
    node: NodeId
    plan: RecoveryPlan


def needed(edge: Edge, recovery: RecoveryPlan) -> set[int]:
    """The partitions behind an edge that a recovery rebuilds."""
    return {p.index for p in recovery.rebuilt if p.chain == edge.target}


def cut(
    rows: Sequence[Row], edge: Edge, mapping: Mapping, only: set[int] | None
) -> list[dict[int, list[Row]]]:
    """Rows by destination: per node of the mapping, packets by partition index."""
    groups = mapping.groups[edge.target]
    position = {n: i for i, n in enumerate(mapping.nodes)}
    packets: list[dict[int, list[Row]]] = [{} for _ in mapping.nodes]
    for _, value in rows:
        key = rekey(edge.id, value)
        if key is None:
            continue
        index = groups[key % len(groups)]
        partition = PartitionId(edge.target, index)
        if only is None or index in only:
            node = position[mapping.owners[partition].node]
            packets[node].setdefault(index, []).append((key, value))
        if only is None and partition in mapping.copies:  # a recovery rebuilds no copies
            node = position[mapping.copies[partition]]
            packets[node].setdefault(index, []).append((key, value))
    return packets
