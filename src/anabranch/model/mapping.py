"""Who owns what: key group → partition → node, versioned, with an epoch per partition.

A mapping changes only between two slices and its version is journalled with every slice, so a
replay routes rows as the first run did. Every change of a partition's owner raises its epoch;
whatever carries a smaller one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.errors import ClusterError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Ownership:
    """One partition's owner and the number of that ownership."""

    node: NodeId
    epoch: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """`groups[chain][g]` is the partition of key group g; `owners` says where partitions live."""

    version: int
    groups: MappingOf[str, tuple[int, ...]]
    owners: MappingOf[PartitionId, Ownership]

    def hosted_by(self, node: NodeId) -> dict[PartitionId, int]:
        """The partitions of a node and their epochs."""
        return {p: o.epoch for p, o in self.owners.items() if o.node == node}

    def partitions(self, chain: str) -> list[PartitionId]:
        return [p for p in self.owners if p.chain == chain]

    def to_json(self) -> dict[str, Any]:
        """The routing part; nodes are named anew by every run, so they are not kept."""
        return {"version": self.version, "groups": {c: list(g) for c, g in self.groups.items()}}


def even_groups(key_groups: int, parallelism: int) -> tuple[int, ...]:
    """Contiguous, even ranges of key groups: a split moves as few groups as it can."""
    return tuple(g * parallelism // key_groups for g in range(key_groups))


def place(
    plan: Plan,
    nodes: Sequence[NodeId],
    version: int,
    epochs: MappingOf[PartitionId, int],
    groups: MappingOf[str, tuple[int, ...]] | None = None,
) -> Mapping:
    """Spread partitions over nodes round-robin, continuing from chain to chain.

    Every partition gets the next epoch after the one in `epochs`, because it gets a new owner.
    """
    if not nodes:
        raise ClusterError("no node is ready; the Spark application has no executors")
    routing = dict(groups or {})
    for chain in plan.node_chains:
        routing.setdefault(chain.name, even_groups(plan.topology.key_groups, chain.parallelism))
    owners: dict[PartitionId, Ownership] = {}
    for chain in plan.node_chains:
        for index in range(max(routing[chain.name]) + 1):
            partition = PartitionId(chain.name, index)
            node = nodes[len(owners) % len(nodes)]
            owners[partition] = Ownership(node, epochs.get(partition, 0) + 1)
    return Mapping(version, routing, owners)
