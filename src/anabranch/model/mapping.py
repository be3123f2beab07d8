"""Who owns what: key group → partition → node, versioned, with an epoch per partition.

A mapping changes only between two slices and its version is journalled with every slice, so a
replay routes rows as the first run did. Every change of a partition's owner raises its epoch;
whatever carries a smaller one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingOf
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
    """`groups[chain][g]` is the partition of key group g; `owners` says where partitions live.

    `nodes` are those a wave runs on: the owners, or any one where there are no partitions.
    """

    version: int
    groups: MappingOf[str, tuple[int, ...]]
    owners: MappingOf[PartitionId, Ownership]
    nodes: tuple[NodeId, ...]

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
    return Mapping(version, routing, owners, _nodes_of(owners, nodes))


def _nodes_of(
    owners: MappingOf[PartitionId, Ownership], nodes: Sequence[NodeId]
) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys(o.node for o in owners.values())) or (nodes[0],)


def reassign(mapping: Mapping, lost: Iterable[PartitionId], nodes: Sequence[NodeId]) -> Mapping:
    """Give lost partitions new owners among `nodes`, the others stay: fewest partitions of the
    same chain first, then fewest at all. Every lost partition's epoch rises."""
    gone = frozenset(lost)
    owners = {p: o for p, o in mapping.owners.items() if p not in gone}
    total = dict.fromkeys(nodes, 0)
    of_chain: dict[tuple[NodeId, str], int] = {}
    for partition, owner in owners.items():
        total[owner.node] = total.get(owner.node, 0) + 1
        key = (owner.node, partition.chain)
        of_chain[key] = of_chain.get(key, 0) + 1
    for partition in sorted(gone):
        node = min(nodes, key=lambda n: (of_chain.get((n, partition.chain), 0), total[n]))
        owners[partition] = Ownership(node, mapping.owners[partition].epoch + 1)
        total[node] += 1
        of_chain[(node, partition.chain)] = of_chain.get((node, partition.chain), 0) + 1
    owners = {p: owners[p] for p in mapping.owners}
    return Mapping(mapping.version + 1, mapping.groups, owners, _nodes_of(owners, nodes))
