"""Who owns what: key group → partition → node, versioned, with an epoch per partition.

A placement changes only between two slices and its version is journalled with every slice, so a
replay routes rows as the first run did. Every change of a partition's owner raises its epoch;
whatever carries a smaller one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from anabranch.errors import ClusterError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.plan import Plan

Layout = Mapping[str, tuple[int, ...]]  # per chain, the partition of every key group
PARTS = 4  # of the mean cost of a partition: what is nearer to each other counts as the same


@dataclass(frozen=True, slots=True)
class Ownership:
    """One partition's owner and the number of that ownership."""

    node: NodeId
    epoch: int


@dataclass(frozen=True, slots=True)
class Placement:
    """`groups[chain][g]` is the partition of key group g; `owners` says where partitions live.

    `nodes` are those a wave runs on: the owners, or any one where there are no partitions, and
    those that have a copy of a partition (active replication), which applies all it does.
    Partitions of chains that wait have an owner only if they have state, or just get one.
    """

    version: int
    groups: Layout
    owners: Mapping[PartitionId, Ownership]
    nodes: tuple[NodeId, ...]
    copies: Mapping[PartitionId, NodeId] = field(default_factory=dict)

    def hosted_by(self, node: NodeId) -> dict[PartitionId, int]:
        """The partitions of a node and their epochs."""
        return {p: o.epoch for p, o in self.owners.items() if o.node == node}

    def copied_by(self, node: NodeId) -> dict[PartitionId, int]:
        """The partitions that a node has a copy of, and the epochs of their owners."""
        return {p: self.owners[p].epoch for p, n in self.copies.items() if n == node}

    def held_by(self, node: NodeId) -> dict[PartitionId, int]:
        """The partitions of a node and those it has a copy of, with their epochs."""
        return self.hosted_by(node) | self.copied_by(node)

    def partitions(self, chain: str) -> list[PartitionId]:
        return [p for p in self.owners if p.chain == chain]

    def owned(self, owners: Mapping[PartitionId, Ownership], nodes: Sequence[NodeId]) -> Placement:
        """The next one, with these owners."""
        return replace(
            self, version=self.version + 1, owners=owners, nodes=_nodes_of(owners, nodes)
        )


def partitions_of(layout: Layout, chain: str) -> list[PartitionId]:
    """All of a chain, whether they have an owner or not."""
    return [PartitionId(chain, index) for index in range(count_of(layout[chain]))]


def routing(plan: Plan, groups: Layout | None) -> Layout:
    """Key groups as they are, and even ones for chains that are new."""
    found = dict(groups or {})
    for chain in plan.node_chains:
        found.setdefault(chain.name, even_groups(plan.graph.key_groups, chain.parallelism))
    return found


def count_of(groups: Sequence[int]) -> int:
    """The number of partitions; each has a key group, the last one, too."""
    return max(groups) + 1


def even_groups(key_groups: int, parallelism: int) -> tuple[int, ...]:
    """Contiguous, even ranges of key groups: a split moves as few groups as it can."""
    return tuple(g * parallelism // key_groups for g in range(key_groups))


def evenly(layout: Layout, parallelism: Mapping[str, int]) -> Layout:
    """Of these chains, with another number of partitions."""
    return {c: even_groups(len(layout[c]), count) for c, count in parallelism.items()}


def place(
    plan: Plan,
    nodes: Sequence[NodeId],
    version: int,
    epochs: Mapping[PartitionId, int],
    groups: Layout | None = None,
    hosts: Mapping[NodeId, str] | None = None,
) -> Placement:
    """Spread partitions evenly over nodes, those of a chain over machines first.

    Every partition gets the next epoch after the one in `epochs`, because it gets a new owner.
    """
    if not nodes:
        raise ClusterError("no node is ready; the Spark application has no executors")
    layout = routing(plan, groups)
    loads = _Loads(nodes, hosts or {})
    owners: dict[PartitionId, Ownership] = {}
    for chain in plan.node_chains:
        for partition in partitions_of(layout, chain.name):
            node = loads.best(partition)
            loads.add(partition, node)
            owners[partition] = Ownership(node, epochs.get(partition, 0) + 1)
    return Placement(version, layout, owners, _nodes_of(owners, nodes))


def _nodes_of(
    owners: Mapping[PartitionId, Ownership],
    nodes: Sequence[NodeId],
    copies: Mapping[PartitionId, NodeId] | None = None,
) -> tuple[NodeId, ...]:
    used = [o.node for o in owners.values()] + list((copies or {}).values())
    return tuple(dict.fromkeys(used)) or tuple(nodes[:1])


class _Loads:
    """What every node has, while partitions are being placed: their number or, where it is known
    what each costs, their cost."""

    def __init__(
        self,
        nodes: Sequence[NodeId],
        hosts: Mapping[NodeId, str],
        costs: Mapping[PartitionId, float] | None = None,
    ) -> None:
        self._nodes, self._hosts = nodes, hosts
        self._count: dict[tuple[str, str], int] = {}
        self._costs = dict(costs or {})
        self._unit = (sum(self._costs.values()) / len(self._costs) if self._costs else 0) / PARTS

    def cost(self, partition: PartitionId) -> int:
        if not self._unit:
            return 1
        return max(1, round(self._costs.get(partition, PARTS * self._unit) / self._unit))

    def total(self, node: NodeId) -> int:
        return self._count.get((node, ""), 0)

    def of_chain(self, node: NodeId, chain: str) -> int:
        return self._count.get((node, chain), 0)

    def add(self, partition: PartitionId, node: NodeId, by: int = 1) -> None:
        by *= self.cost(partition)
        for key in ((node, ""), (node, partition.chain), (self._host(node), partition.chain)):
            self._count[key] = self._count.get(key, 0) + by

    def best(self, partition: PartitionId) -> NodeId:
        """Least of the same chain first, on the node and then on its host, then least at all."""
        chain = partition.chain
        return min(
            self._nodes,
            key=lambda n: (
                self.of_chain(n, chain),
                self._count.get((self._host(n), chain), 0),
                self.total(n),
            ),
        )

    def _host(self, node: NodeId) -> str:
        return f"@{self._hosts.get(node, '')}"


def reassign(
    placement: Placement,
    lost: Iterable[PartitionId],
    nodes: Sequence[NodeId],
    hosts: Mapping[NodeId, str] | None = None,
    costs: Mapping[PartitionId, float] | None = None,
) -> Placement:
    """Give lost partitions new owners among `nodes`, the others stay: the dearest first, where
    least is. Every lost partition's epoch rises."""
    gone = frozenset(lost)
    owners = {p: o for p, o in placement.owners.items() if p not in gone}
    loads = _Loads(nodes, hosts or {}, costs)
    for partition, owner in owners.items():
        loads.add(partition, owner.node)
    for partition in sorted(gone, key=lambda p: (-loads.cost(p), p)):
        node = loads.best(partition)
        owners[partition] = Ownership(node, placement.owners[partition].epoch + 1)
        loads.add(partition, node)
    owners = {p: owners[p] for p in placement.owners}
    copies = {p: n for p, n in placement.copies.items() if n in nodes and p not in gone}
    used = _nodes_of(owners, nodes, copies)
    return Placement(placement.version + 1, placement.groups, owners, used, copies)


def promote(
    placement: Placement, lost: Iterable[PartitionId], nodes: Sequence[NodeId]
) -> tuple[Placement, frozenset[PartitionId]]:
    """Copies on `nodes` take the place of lost partitions; those whose copies do."""
    found = {p: n for p in lost if (n := placement.copies.get(p)) in nodes and n is not None}
    owners = {
        p: Ownership(found[p], o.epoch + 1) if p in found else o
        for p, o in placement.owners.items()
    }
    copies = {p: n for p, n in placement.copies.items() if p not in found}
    return replace(placement, owners=owners, copies=copies), frozenset(found)


def copied(
    placement: Placement, nodes: Sequence[NodeId], hosts: Mapping[NodeId, str] | None = None
) -> Placement:
    """A copy of every partition on another node than its own, on another machine if there is one;
    copies that are there stay."""
    machine = {n: (hosts or {}).get(n, n) for n in nodes}
    copies = dict(placement.copies)
    count: dict[NodeId, int] = dict.fromkeys(nodes, 0)
    for node in (*(o.node for o in placement.owners.values()), *copies.values()):
        count[node] = count.get(node, 0) + 1
    for partition, owner in placement.owners.items():
        others = [n for n in nodes if n != owner.node]
        if partition not in copies and others:
            home = machine.get(owner.node)
            best = min(others, key=lambda n: (machine[n] == home, count[n]))
            copies[partition] = best
            count[best] += 1
    return replace(placement, copies=copies, nodes=_nodes_of(placement.owners, nodes, copies))


def split(
    placement: Placement, lost: Iterable[PartitionId], ways: int, epochs: Mapping[PartitionId, int]
) -> Placement:
    """Every lost partition divided into at most this number, each with a part of its key groups;
    none has an owner that lives. The new ones are numbered after those that are there, so nobody
    else is touched."""
    groups = {c: list(g) for c, g in placement.groups.items()}
    owners = dict(placement.owners)
    for partition in sorted(lost):
        layout = groups[partition.chain]
        mine = [g for g, index in enumerate(layout) if index == partition.index]
        parts = min(ways, len(mine))
        first = max(layout)  # the share that stays is number 0
        for place, part in enumerate(even_groups(len(mine), parts)):
            if part:
                layout[mine[place]] = first + part
        for index in range(first + 1, first + parts):
            new = PartitionId(partition.chain, index)
            owners[new] = Ownership(placement.owners[partition].node, epochs.get(new, 0))
    frozen = {c: tuple(g) for c, g in groups.items()}
    return replace(placement, groups=frozen, owners=owners)


def adjust(
    placement: Placement,
    layouts: Layout,
    nodes: Sequence[NodeId],
    epochs: Mapping[PartitionId, int],
    hosts: Mapping[NodeId, str] | None = None,
) -> Placement:
    """Some chains in another layout, and all partitions spread evenly over `nodes`.

    A partition that keeps its node and its key groups keeps its epoch: it is not touched. As few
    as possible are.
    """
    groups = {**placement.groups, **layouts}
    loads = _Loads(nodes, hosts or {})
    homes: dict[PartitionId, NodeId | None] = {}
    for chain in dict.fromkeys(p.chain for p in placement.owners):
        for index in range(max(groups[chain]) + 1):
            partition = PartitionId(chain, index)
            owner = placement.owners.get(partition)
            homes[partition] = owner.node if owner and owner.node in nodes else None
            if owner and owner.node in nodes:
                loads.add(partition, owner.node)
    placed: dict[PartitionId, NodeId] = {}
    for partition, home in homes.items():
        placed[partition] = home or loads.best(partition)
        if home is None:
            loads.add(partition, placed[partition])
    placed = _evened(placed, loads, nodes)
    owners = {
        p: placement.owners[p]
        if _unchanged(p, node, placement, groups)
        else Ownership(node, epochs.get(p, 0) + 1)
        for p, node in placed.items()
    }
    copies = {
        p: n
        for p, n in placement.copies.items()
        if n in nodes and owners.get(p) == placement.owners[p]
    }
    used = _nodes_of(owners, nodes, copies)
    return Placement(placement.version + 1, groups, owners, used, copies)


def _unchanged(partition: PartitionId, node: NodeId, before: Placement, groups: Layout) -> bool:
    owner = before.owners.get(partition)
    if owner is None or owner.node != node:
        return False
    old, new = before.groups[partition.chain], groups[partition.chain]
    return old == new or all(
        (a == partition.index) == (b == partition.index) for a, b in zip(old, new, strict=True)
    )


def _evened(
    homes: Mapping[PartitionId, NodeId], loads: _Loads, nodes: Sequence[NodeId]
) -> dict[PartitionId, NodeId]:
    """Move partitions from the fullest node to the emptiest while that makes them more even."""
    placed = dict(homes)
    while True:
        full, empty = max(nodes, key=loads.total), min(nodes, key=loads.total)
        if loads.total(full) - loads.total(empty) < 2:
            return placed
        here = [p for p, n in placed.items() if n == full]
        moved = max(
            here, key=lambda p: loads.of_chain(full, p.chain) - loads.of_chain(empty, p.chain)
        )
        loads.add(moved, full, -1)
        loads.add(moved, empty)
        placed[moved] = empty
