"""Who owns what: the nodes there are, the placement in force, how far every partition is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from anabranch.control import verdict
from anabranch.errors import InvariantError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.reports import NodeReport


class OwnerLedger:
    """The only writer of the placement. An epoch that was given out once never comes again."""

    def __init__(self, epochs: Mapping[PartitionId, int]) -> None:
        self.nodes: list[NodeId] = []
        self.hosts: dict[NodeId, str] = {}
        self.epochs = dict(epochs)  # every one ever given out
        self.frontier: dict[PartitionId, int] = {}  # the next slice of each partition
        self.in_force: Placement | None = None  # none before the first node has come
        self._incarnations: dict[NodeId, str] = {}
        self._due_ms: dict[PartitionId, int] = {}  # when a partition's next timer comes

    @property
    def placement(self) -> Placement:
        if self.in_force is None:
            raise InvariantError("no partition has an owner yet", machine="rebuild")
        return self.in_force

    @property
    def chains(self) -> set[str]:
        """That have owners."""
        return {p.chain for p in self.in_force.owners} if self.in_force else set()

    # -- nodes ---------------------------------------------------------------------------------

    def join(self, nodes: Iterable[NodeId], hosts: Mapping[NodeId, str]) -> None:
        self.nodes += [n for n in nodes if n not in self.nodes]
        self.hosts |= hosts

    def leave(self, nodes: Collection[NodeId]) -> None:
        self.nodes = [n for n in self.nodes if n not in nodes]

    def replaced(
        self, reports: Sequence[NodeReport], asked: Sequence[NodeId] | None = None
    ) -> list[NodeId]:
        """Of the nodes that were `asked`, all unless that is said, those whose process is another
        one than before; of others, it is learnt."""
        nodes = self.placement.nodes if asked is None else asked
        found = verdict.replaced(reports, nodes, self._incarnations, self.placement.version)
        for node, incarnation in {r.node: r.incarnation for r in reports}.items():
            if node in nodes and node not in found:
                self._incarnations.setdefault(node, incarnation)
        return found

    def forget_processes(self, nodes: Iterable[NodeId]) -> None:
        """The next process that answers for these nodes is another one."""
        for node in nodes:
            self._incarnations.pop(node, None)

    # -- partitions ----------------------------------------------------------------------------

    def owned_by(self, nodes: Collection[NodeId]) -> frozenset[PartitionId]:
        return frozenset(p for p, o in self.placement.owners.items() if o.node in nodes)

    def copied_by(self, nodes: Collection[NodeId]) -> frozenset[PartitionId]:
        return frozenset(p for p, n in self.placement.copies.items() if n in nodes)

    def drop_copies(self, partitions: Collection[PartitionId]) -> None:
        """Whether their copies are there is not known any more."""
        copies = {p: n for p, n in self.placement.copies.items() if p not in partitions}
        self.in_force = replace(self.placement, copies=copies)

    def use(self, placement: Placement, anew: frozenset[PartitionId], first: int) -> None:
        """From now on; partitions that are built anew begin with the slice `first`."""
        self.in_force = placement
        self.epochs |= {p: o.epoch for p, o in placement.owners.items()}
        self.frontier |= dict.fromkeys(anew, first)
        self.frontier = {p: n for p, n in self.frontier.items() if p in placement.owners}

    def advance(
        self,
        reports: Sequence[NodeReport],
        upto: int,
        partitions: Iterable[PartitionId],
        ahead: frozenset[PartitionId] = frozenset(),
    ) -> None:
        """Move the frontier of these partitions; each must be exactly there, or may be `ahead`."""
        due = verdict.advanced(reports, upto, partitions, self.placement, self.frontier, ahead)
        for partition, due_ms in due.items():
            self.frontier[partition] = max(upto, self.frontier[partition])
            self._due_ms.pop(partition, None)
            if due_ms is not None:
                self._due_ms[partition] = due_ms

    def timer_is_due(self, time_ms: int, paused: Collection[str] = ()) -> bool:
        """Has a timer of processing time come, or a time to live ended, but in `paused` chains?"""
        owners = self.placement.owners
        due = (p for p, ms in self._due_ms.items() if ms <= time_ms)
        return any(p in owners and p.chain not in paused for p in due)
