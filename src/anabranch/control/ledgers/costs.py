"""How long each partition keeps its node busy.

A node process does one thing at a time, so what fills it is the time that passes while it computes,
be it that its CPU is busy or that an operator waits for a service. It is counted per row that the
sources bring, over the newest slices; older ones count less and less. It is kept when the placement
changes: what a partition costs is divided evenly over its key groups, and goes with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Layout, Placement
from anabranch.model.plan import Plan
from anabranch.model.reports import NodeReport

KEPT = 0.9  # of what is known, with every slice


class CostLedger:
    """What slices have shown so far."""

    def __init__(self, plan: Plan) -> None:
        self._depth = {c.name: c.depth for c in plan.node_chains}
        self._layout: Layout = {}
        self._busy_s: dict[PartitionId, float] = {}
        self._rows = 0.0  # for which that was

    def observe(self, placement: Placement, reports: Sequence[NodeReport]) -> None:
        """Fold in a slice that has happened."""
        self._follow(placement.groups)
        rows = sum(sum(s.rows.values()) for r in reports for s in r.sources)
        self._rows = KEPT * self._rows + rows
        seen = {p: x.busy_s for r in reports for p, x in r.partitions.items()}
        for partition in placement.owners:
            before = self._busy_s.get(partition, 0.0)
            self._busy_s[partition] = KEPT * before + seen.get(partition, 0.0)

    def of(self, placement: Placement) -> Mapping[PartitionId, float]:
        """What partitions of this placement cost, each beside the others; empty: not known."""
        self._follow(placement.groups)
        known = {p: s for p, s in self._busy_s.items() if p in placement.owners}
        return known if any(known.values()) else {}

    def slice_s(self, placement: Placement, rows: float) -> float | None:
        """How long a slice of this size keeps the nodes busy: wave after wave, each as long as its
        fullest node. None: not known yet."""
        costs = self.of(placement)
        if not self._rows or not costs:
            return None
        waves: dict[tuple[int, NodeId], float] = {}
        for partition, seconds in costs.items():
            at = self._depth[partition.chain], placement.owners[partition].node
            waves[at] = waves.get(at, 0.0) + seconds
        longest: dict[int, float] = {}
        for (depth, _), seconds in waves.items():
            longest[depth] = max(seconds, longest.get(depth, 0.0))
        return sum(longest.values()) / self._rows * rows

    def _follow(self, layout: Layout) -> None:
        """Key groups may belong to other partitions than before."""
        for chain, groups in layout.items():
            old = self._layout.get(chain)
            if old is None or old == groups:
                continue
            had = Counter(old)
            before = {i: self._busy_s.pop(PartitionId(chain, i), 0.0) for i in had}
            for was, now in zip(old, groups, strict=True):
                mine = PartitionId(chain, now)
                self._busy_s[mine] = self._busy_s.get(mine, 0.0) + before[was] / had[was]
        self._layout = dict(layout)
