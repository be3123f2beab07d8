"""Packets: the rows of a slice for a partition, how they are addressed and found again.

Rows of one (edge, slice, source partition) for all partitions of one node travel as one **bundle**;
a packet is what it has for one of them, possibly nothing. All bundles from one task to one node
form one **parcel**: exactly one per pair of task and node, so that a missing one is noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Edge
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import Failure, SourceReport, Staged
from anabranch.node.protocol.carried import Job, Packets, R
from anabranch.node.protocol.partition import Output, Partition


@dataclass(frozen=True, slots=True)
class Bundle(Generic[R]):
    """Packets of one source partition on one edge for the partitions of one node."""

    edge: int
    slice: int
    source: int  # index of the source partition (or source task)
    epoch: int  # of the source partition (or generation of the driver)
    packets: Packets[R] | None  # None: every packet is empty


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What a source task has to report; it rides to one node and from there to the driver."""

    sources: tuple[SourceReport, ...] = ()
    staged: tuple[Staged, ...] = ()
    failures: tuple[Failure, ...] = ()
    # Of a replay: rows by source, per slice and the source task that logged them.
    replayed: Mapping[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parcel(Generic[R]):
    """All that one task sends to one node."""

    bundles: Sequence[Bundle[R]] = ()
    facts: SideFacts | None = None


Sent = tuple[int, Bundle[R]]  # the index of the node it goes to


class Inbox(Generic[R]):
    """Bundles that arrived on a node, until their slice is applied and confirmed."""

    def __init__(self) -> None:
        self._bundles: dict[tuple[int, int], dict[int, Bundle[R]]] = {}  # (slice, edge) → source
        self.floor = 0  # packets of slices below are late

    def add(self, bundle: Bundle[R]) -> None:
        """Keep a bundle; a repeated one is dropped."""
        self._bundles.setdefault((bundle.slice, bundle.edge), {}).setdefault(bundle.source, bundle)

    def missing(self, slice_no: int, sources: Mapping[int, int]) -> str | None:
        """What a slice lacks, given the number of sources per edge; None when it is complete."""
        for edge, count in sources.items():
            have = self._bundles.get((slice_no, edge), {})
            if len(have) < count:
                absent = [s for s in range(count) if s not in have]
                return f"edge {edge}: packets of {len(absent)} of {count} sources, e.g. {absent[0]}"
        return None

    def packets(self, slice_no: int, edges: Iterable[int], partition: int) -> dict[int, list[R]]:
        """A partition's rows per edge, in the order of the sources."""
        found: dict[int, list[R]] = {}
        for edge in edges:
            bundles = self._bundles.get((slice_no, edge), {})
            for source in sorted(bundles):
                packets = bundles[source].packets
                rows = packets.of(partition) if packets is not None else None
                if rows is not None:
                    found.setdefault(edge, []).append(rows)
        return found

    def slices(self) -> list[int]:
        return sorted({slice_no for slice_no, _ in self._bundles})

    def drop(self, upto: int) -> None:
        """Forget slices that every partition has applied."""
        self._bundles = {k: v for k, v in self._bundles.items() if k[0] > upto}


class Exchange(Generic[R]):
    """What a node sends to whom, and takes from whom, under one placement. What arrives is kept in
    the inbox of those whom it is for: a slice's, or a recovery's."""

    def __init__(self, job: Job[R], generation: int, node: NodeId, placement: Placement) -> None:
        self._job, self._generation, self._node, self._placement = job, generation, node, placement
        self._edges = {e.id: e for c in job.chains.values() for e in c.inputs}
        self._routes: dict[tuple[int, tuple[NodeId, ...]], Any] = {}

    def sources_of(self, edge: int, tasks: int) -> int:
        """How many source partitions an edge has, given the number of source tasks."""
        source = self._edges[edge].source
        if self._job.chains[source].is_source:
            return tasks
        return max(self._placement.groups[source]) + 1

    def route(
        self,
        partition: Partition[R],
        output: Output[R],
        nodes: tuple[NodeId, ...],
        recovery: RecoveryPlan | None = None,
        paused: Collection[str] = (),
    ) -> Iterator[Sent[R]]:
        """The output as bundles; in a recovery, only what is rebuilt gets any, and chains that are
        `paused` never do."""
        for edge in partition.chain.outputs:
            if edge.target in paused:
                continue
            only: Collection[int] | None = None
            if recovery is not None:
                only = {p.index for p in recovery.rebuilt if p.chain == edge.target}
                if not only or not recovery.takes(edge.target, output.slice):
                    continue
            cuts = self._job.cut(output.edges[edge.id], self._route_of(edge, nodes), only)
            for node, packets in enumerate(cuts):
                source = (partition.id.index, partition.epoch)
                yield node, Bundle(edge.id, output.slice, *source, packets)

    def _route_of(self, edge: Edge, nodes: tuple[NodeId, ...]) -> Any:
        key = (edge.id, nodes)
        if key not in self._routes:
            self._routes[key] = self._job.route(edge, self._placement, nodes)
        return self._routes[key]

    def send(
        self, sent: Iterable[Sent[R]], nodes: tuple[NodeId, ...], inbox: Inbox[R]
    ) -> list[Parcel[R]]:
        """One parcel per node; what is for a partition of this one stays here, in the inbox."""
        bundles: list[list[Bundle[R]]] = [[] for _ in nodes]
        here = nodes.index(self._node)
        for destination, bundle in sent:
            if destination == here:
                self.deliver(bundle, inbox)
            else:
                bundles[destination].append(bundle)
        return [Parcel(b) for b in bundles]

    def deliver(self, bundle: Bundle[R], inbox: Inbox[R]) -> None:
        """Keep a bundle, unless an owner that was replaced sent it or its slice is past."""
        edge = self._edges.get(bundle.edge)
        if (
            edge is not None
            and bundle.epoch == self._epoch_of(edge, bundle.source)
            and bundle.slice >= inbox.floor
        ):
            inbox.add(bundle)

    def _epoch_of(self, edge: Edge, source: int) -> int:
        owner = self._placement.owners.get(PartitionId(edge.source, source))
        return owner.epoch if owner is not None else self._generation
