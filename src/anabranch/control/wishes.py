"""What is wanted of the placement: the parallelism of chains, nodes to be emptied, partitions
spread over nodes that joined. All of it is turned into one change, which adjustment.py makes;
requests that cannot be fulfilled are refused here, with a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anabranch.control.policies.load import DRAIN_LIMIT, Load
from anabranch.errors import AdjustmentError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement, adjust, copied, even_groups, evenly
from anabranch.model.plan import Plan


@dataclass(frozen=True)
class Change:
    """A change of the placement."""

    placement: Placement  # after it
    moved: frozenset[PartitionId]  # installed anew by it
    what: str
    copied: frozenset[PartitionId] = frozenset()  # get a copy

    @property
    def loaded(self) -> set[tuple[NodeId, PartitionId]]:
        """What has to be loaded, and where."""
        owners, copies = self.placement.owners, self.placement.copies
        return {(owners[p].node, p) for p in self.moved} | {(copies[p], p) for p in self.copied}


class Wishes:
    """What the placement is to become."""

    def __init__(self, plan: Plan, copies: bool = False) -> None:
        self._plan = plan
        self._copies = copies  # of every partition
        self._parallelism: dict[str, int] = {}  # that was asked for
        self._layouts: dict[str, tuple[int, ...]] = {}  # of chains that keep theirs
        self.drained: set[NodeId] = set()
        self._spread = False

    def chain_of(self, operator: str) -> str:
        """The chain that runs an operator; AdjustmentError where there is nothing to scale."""
        chains = [c for c in self._plan.chains if operator in c.operators]
        if not chains:
            known = ", ".join(n for c in self._plan.node_chains for n in c.operators)
            raise AdjustmentError(
                f"there is no operator {operator!r}; operators that can be scaled: {known}"
            )
        if all(c.is_source for c in chains):
            raise AdjustmentError(
                f"{operator!r} runs in Spark's own source tasks, as many as the source has "
                "partitions; scale a keyed operator"
            )
        return next(c.name for c in chains if not c.is_source)

    def scale(
        self, operator: str, parallelism: int, placement: Placement, instead: bool = False
    ) -> None:
        """`instead` of another parallelism that is wanted already, if there is one."""
        chain = self.chain_of(operator)
        groups = self._plan.graph.key_groups
        if parallelism < 1:
            raise AdjustmentError(
                f"{operator!r} cannot run at parallelism {parallelism}; give at least 1"
            )
        if parallelism > groups:
            raise AdjustmentError(
                f"{operator!r} cannot run at parallelism {parallelism}: the topology has {groups} "
                "key groups, and a partition needs at least one"
            )
        under_way = self._parallelism.get(chain)
        if under_way not in (None, parallelism) and not instead:
            raise AdjustmentError(
                f"{operator!r} is being scaled to {under_way} already; wait until that is done"
            )
        if under_way is not None or placement.groups[chain] != even_groups(groups, parallelism):
            self._parallelism[chain] = parallelism
            self._layouts.pop(chain, None)

    def lay_out(self, chain: str, groups: tuple[int, ...], placement: Placement) -> None:
        """Its key groups are to be of these partitions, unless another number of them was asked
        for."""
        if chain not in self._parallelism and placement.groups[chain] != groups:
            self._layouts[chain] = groups

    def drain(self, node: NodeId, nodes: Sequence[NodeId], load: Load) -> None:
        if node not in nodes:
            raise AdjustmentError(
                f"there is no node {node!r}; the job has {', '.join(nodes) or 'none'}"
            )
        left = [n for n in nodes if n != node and n not in self.drained]
        if not left:
            raise AdjustmentError(
                f"node {node!r} cannot be drained: no other node is left for its partitions; "
                "add one first"
            )
        busy = load.if_moved_to(len(left))
        if busy is not None and busy > DRAIN_LIMIT:
            raise AdjustmentError(
                f"node {node!r} cannot be drained: those that stay ({len(left)}) would be busy at "
                f"{busy:.0%} of their CPU, and {DRAIN_LIMIT:.0%} is the limit; add one first"
            )
        self.drained.add(node)

    def is_scaling(self, chain: str) -> bool:
        return chain in self._parallelism or chain in self._layouts

    @property
    def wanted(self) -> bool:
        """Is there anything that no change has been made of yet?"""
        return bool(self._parallelism or self._layouts or self._spread)

    def spread(self) -> None:
        """Nodes joined: give them their share."""
        self._spread = True

    def allowed(self, nodes: Sequence[NodeId]) -> list[NodeId]:
        """Nodes that may be given partitions: those that are not drained, if there are any."""
        return [n for n in nodes if n not in self.drained] or list(nodes)

    def empty(self, placement: Placement, nodes: Sequence[NodeId]) -> tuple[NodeId, ...]:
        """Drained nodes that have nothing any more."""
        return tuple(n for n in nodes if n in self.drained and n not in placement.nodes)

    def change(
        self,
        placement: Placement,
        nodes: Sequence[NodeId],
        epochs: Mapping[PartitionId, int],
        hosts: Mapping[NodeId, str],
    ) -> Change | None:
        """The change of the placement that fulfils everything; None when there is nothing to do."""
        leaving = self.drained & set(placement.nodes)
        allowed = self.allowed(nodes)
        uncopied = (
            self._copies and len(allowed) > 1 and len(placement.copies) < len(placement.owners)
        )
        if not (self.wanted or leaving or uncopied):
            return None
        layouts = {**self._layouts, **evenly(placement.groups, self._parallelism)}
        after = adjust(placement, layouts, allowed, epochs, hosts)
        if self._copies:
            after = copied(after, allowed, hosts)
        moved = frozenset(p for p, o in after.owners.items() if placement.owners.get(p) != o)
        new = frozenset(
            p for p, n in after.copies.items() if p in moved or placement.copies.get(p) != n
        )
        same = after.owners.keys() == placement.owners.keys() and after.nodes == placement.nodes
        if not moved and not new and same:
            self.done()
            return None
        return Change(after, moved, self._said(placement, after, leaving), new)

    def done(self) -> None:
        """The placement is as it was wanted."""
        self._parallelism.clear()
        self._layouts.clear()
        self._spread = False

    def _said(self, before: Placement, after: Placement, leaving: set[NodeId]) -> str:
        parts = [
            f"{c} from {len(before.partitions(c))} to {len(after.partitions(c))} partitions"
            for c in (*self._parallelism, *self._layouts)
            if len(before.partitions(c)) != len(after.partitions(c)) or c in self._parallelism
        ]
        same = [c for c in self._layouts if len(before.partitions(c)) == len(after.partitions(c))]
        parts += [f"keys of {c} moved between its partitions" for c in same]
        parts += [f"node {n} drained" for n in sorted(leaving)]
        new = [n for n in after.nodes if n not in before.nodes]
        if new:
            parts.append(f"partitions moved to node {', '.join(new)}")
        if len(after.copies) > len(before.copies):
            parts.append(f"copies of {len(after.copies) - len(before.copies)} partitions made")
        return "; ".join(parts) or "partitions spread over the nodes"
