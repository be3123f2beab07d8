"""How long each partition keeps its node busy, and how many rows the sources bring.

A node process does one thing at a time, so what fills it is the time that passes while it computes,
be it that its CPU is busy or that an operator waits for a service. It is counted per row that the
sources bring, over the newest slices that the partition ran in; older ones count less and less. So
what waits keeps what it has cost. It is kept when the placement changes, too: what a partition
costs is divided evenly over its key groups, and goes with them; and from run to run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from anabranch.model.costs import Costs
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Layout, Placement
from anabranch.model.plan import Plan
from anabranch.model.reports import NodeReport

KEPT = 0.9  # of what is known, with every slice
PAUSE_S = 10.0  # between two slices, or ten intervals: longer ones say nothing about sources
PAUSE_INTERVALS = 10
FIXED_KEPT = 20  # slices


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one partition: seconds, and the source rows that they were for."""

    busy_s: float = 0.0
    rows: float = 0.0

    def then(self, busy_s: float, rows: float) -> _Seen:
        return _Seen(KEPT * self.busy_s + busy_s, KEPT * self.rows + rows)


@dataclass(frozen=True, slots=True)
class _Rate:
    """Of all sources: rows and CPU seconds, and the time in which they came."""

    seconds: float = 0.0
    rows: float = 0.0
    cpu_s: float = 0.0

    def then(self, seconds: float, rows: float, cpu_s: float) -> _Rate:
        return _Rate(
            KEPT * self.seconds + seconds, KEPT * self.rows + rows, KEPT * self.cpu_s + cpu_s
        )


class CostLedger:
    """What slices have shown so far. `known` is what an earlier run knew, of partitions of the
    `layout` that it had."""

    def __init__(
        self,
        plan: Plan,
        known: Costs | None = None,
        *,
        layout: Layout | None = None,
        interval_ms: int = 1_000,
    ) -> None:
        known = known or Costs()
        self._depth = {c.name: c.depth for c in plan.node_chains}
        self._pause_s = max(PAUSE_S, PAUSE_INTERVALS * interval_ms / 1000)
        self._layout: Layout = {c: g for c, g in (layout or {}).items() if c in self._depth}
        # What was known counts as one second's rows: a few slices correct it.
        rows = max(1.0, known.rows_per_s)
        self._seen = {
            p: _Seen(row_s * rows, rows)
            for p, row_s in known.row_s.items()
            if p.chain in self._depth
        }
        self._rate = _Rate(1.0, known.rows_per_s) if known.rows_per_s else _Rate()
        self._began_ms: int | None = None
        self._fixed: deque[float] = deque(maxlen=FIXED_KEPT)  # of slices, seconds

    def observe(
        self,
        placement: Placement,
        reports: Sequence[NodeReport],
        began_ms: int,
        ended_ms: int = 0,
        alone: bool = False,
    ) -> None:
        """Fold in a slice that has happened, and when; had it the nodes for itself?"""
        self._follow(placement.groups)
        sources = [s for r in reports for s in r.sources]
        rows = sum(sum(s.rows.values()) for s in sources)
        ran = {
            p: x.busy_s
            for r in reports
            for p, x in r.partitions.items()
            if x.next_slice > r.slice  # else it waits, and has not run
        }
        for partition in placement.owners:
            if partition in ran:
                before = self._seen.get(partition, _Seen())
                self._seen[partition] = before.then(ran[partition], rows)
        if alone:
            self._fixed.append((ended_ms - began_ms) / 1000 - self._path_s(placement, ran))
        before_ms, self._began_ms = self._began_ms, began_ms
        if before_ms is not None:
            seconds = (began_ms - before_ms) / 1000
            if seconds <= self._pause_s:
                self._rate = self._rate.then(seconds, rows, sum(s.cpu_s for s in sources))

    def _path_s(self, placement: Placement, ran: Mapping[PartitionId, float]) -> float:
        """Wave after wave, each as long as its fullest node."""
        waves: dict[int, Counter[NodeId]] = {}
        for partition, seconds in ran.items():
            if partition in placement.owners:
                taken = waves.setdefault(self._depth[partition.chain], Counter())
                taken[placement.owners[partition].node] += seconds  # type: ignore[assignment]
        return sum(max(taken.values()) for taken in waves.values())

    @property
    def fixed_s(self) -> float:
        """What a slice takes beside the work of nodes: of those just seen, a short one, because
        what else a machine is busy with passes. 0: not known yet."""
        return max(0.0, sorted(self._fixed)[len(self._fixed) // 4]) if self._fixed else 0.0

    @property
    def rows_per_s(self) -> float:
        """That the sources bring; 0: not known yet."""
        return self._rate.rows / self._rate.seconds if self._rate.seconds else 0.0

    def source_share(self, nodes: int) -> float:
        """Share of each of this number of nodes that source tasks take."""
        if not nodes or not self._rate.seconds:
            return 0.0
        return self._rate.cpu_s / self._rate.seconds / nodes

    def costs(self, placement: Placement) -> Costs:
        """What is known by now, of all partitions of this placement's layout, whether they have an
        owner or not."""
        self._follow(placement.groups)
        known = {p: s.busy_s / s.rows for p, s in sorted(self._seen.items()) if s.rows}
        return Costs(known, self.rows_per_s)

    def of(self, placement: Placement) -> Mapping[PartitionId, float]:
        """What partitions of this placement cost, each beside the others; empty: not known."""
        self._follow(placement.groups)
        rows = self._rows
        known = {
            p: s.busy_s * (rows / s.rows if s.rows else 1.0)
            for p, s in self._seen.items()
            if p in placement.owners
        }
        return known if any(known.values()) else {}

    def slice_s(
        self, placement: Placement, rows: float, waiting: Collection[str] = ()
    ) -> float | None:
        """How long a slice of this size keeps the nodes busy: wave after wave, each as long as its
        fullest node. Chains that wait have no part in it. None: not known yet."""
        if not self._rows or not self.of(placement):
            return None
        return self.row_s(placement, self._depth.keys() - set(waiting)) * rows

    def row_s(self, placement: Placement, chains: Collection[str]) -> float:
        """For how long a source row keeps the nodes busy with these chains, likewise; 0: not known
        yet."""
        waves: dict[tuple[int, NodeId], float] = {}
        for partition, seconds in self.of(placement).items():
            if partition.chain in chains:
                at = self._depth[partition.chain], placement.owners[partition].node
                waves[at] = waves.get(at, 0.0) + seconds
        longest: dict[int, float] = {}
        for (depth, _), seconds in waves.items():
            longest[depth] = max(seconds, longest.get(depth, 0.0))
        return sum(longest.values()) / self._rows if self._rows else 0.0

    def node_row_s(self, placement: Placement, chains: Collection[str]) -> Mapping[NodeId, float]:
        """For how long a source row keeps each node busy with these chains; empty: not known."""
        taken: dict[NodeId, float] = {}
        for partition, seconds in self.of(placement).items():
            if partition.chain in chains and self._rows:
                node = placement.owners[partition].node
                taken[node] = taken.get(node, 0.0) + seconds / self._rows
        return taken

    @property
    def _rows(self) -> float:
        """That partitions which always ran have seen."""
        return max((s.rows for s in self._seen.values()), default=0.0)

    def _follow(self, layout: Layout) -> None:
        """Key groups may belong to other partitions than before."""
        for chain, groups in layout.items():
            old = self._layout.get(chain)
            if old is None or old == groups:
                continue
            had = Counter(old)
            before = {i: self._seen.pop(PartitionId(chain, i), _Seen()) for i in had}
            # As if each had seen as many rows as the one that saw most.
            rows = max(s.rows for s in before.values())
            scaled = {i: s.busy_s * (rows / s.rows if s.rows else 1.0) for i, s in before.items()}
            for was, now in zip(old, groups, strict=True):
                mine = PartitionId(chain, now)
                busy_s = self._seen.get(mine, _Seen()).busy_s + scaled[was] / had[was]
                self._seen[mine] = _Seen(busy_s, rows)
        self._layout = dict(layout)
