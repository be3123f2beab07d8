"""What a job costs: the CPU of partitions and nodes, and the time its slices take.

Slices are folded into measurements of one interval each, all under the same placement. The first
slice under a placement only starts the clock: it may have waited for a recovery. Every node has one
core; source tasks run anywhere, so each node is charged an even share of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed, SlicePlan

INTERVAL_MS = 5_000  # paper 000, section 6
DRAIN_LIMIT = 0.8  # CPU of the nodes that stay; papers 001 and 004 fill nodes up to that


@dataclass(frozen=True, slots=True)
class Measurement:
    """One interval. CPU is in shares of a core; a batch is one slice or, cut up, several."""

    seconds: float
    batches: int
    batch_s: float  # how long the slices of a batch take
    rows: float  # of a batch
    cpu: Mapping[PartitionId, float]
    nodes: Mapping[NodeId, float]

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows * self.batches / self.seconds

    def of_chain(self, chain: str) -> float:
        return sum(cpu for p, cpu in self.cpu.items() if p.chain == chain)


@dataclass
class _Sums:
    """The interval in hand."""

    placement: int
    start_ms: int
    batches: int = 0
    busy_ms: int = 0
    rows: int = 0
    source_s: float = 0.0
    cpu_s: dict[PartitionId, float] = field(default_factory=dict)
    node_s: dict[NodeId, float] = field(default_factory=dict)


class Load:
    """The newest measurements under the placement in force, oldest first."""

    def __init__(self, interval_ms: int = INTERVAL_MS, kept: int = 2) -> None:
        self._interval_ms = interval_ms
        self.measured: deque[Measurement] = deque(maxlen=kept)
        self._sums: _Sums | None = None
        self._seen: dict[NodeId, tuple[str, float]] = {}  # incarnation, CPU since its start

    def observe(
        self, plan: SlicePlan, reports: Sequence[NodeReport], began_ms: int, now_ms: int
    ) -> None:
        """Fold in a slice that has happened."""
        node_s = {r.node: self._since(r) for r in reports}
        sums = self._sums
        if sums is None or sums.placement != plan.placement:
            self.measured.clear()
            self._sums = _Sums(plan.placement, now_ms)
            return
        sums.batches += plan.feed is not Feed.LOG  # which is the rest of a batch
        sums.busy_ms += now_ms - began_ms
        for report in reports:
            for source in report.sources:
                sums.rows += sum(source.rows.values())
                sums.source_s += source.cpu_s
            for partition, seen in report.partitions.items():
                sums.cpu_s[partition] = sums.cpu_s.get(partition, 0.0) + seen.cpu_s
        for node, seconds in node_s.items():
            sums.node_s[node] = sums.node_s.get(node, 0.0) + seconds

    def measure(self, now_ms: int) -> bool:
        """End the interval if it is over; was it?"""
        sums = self._sums
        if sums is None or now_ms - sums.start_ms < self._interval_ms:
            return False
        seconds = (now_ms - sums.start_ms) / 1000
        batches = max(1, sums.batches)
        source_s = sums.source_s / max(1, len(sums.node_s))
        self.measured.append(
            Measurement(
                seconds,
                sums.batches,
                sums.busy_ms / 1000 / batches,
                sums.rows / batches,
                {p: s / seconds for p, s in sums.cpu_s.items()},
                {n: (s + source_s) / seconds for n, s in sums.node_s.items()},
            )
        )
        self._sums = _Sums(sums.placement, now_ms)
        return True

    def if_moved_to(self, nodes: int) -> float | None:
        """How busy this number of nodes would be with all the work, by the newest measurement."""
        if not self.measured or nodes < 1:
            return None
        return sum(self.measured[-1].nodes.values()) / nodes

    def _since(self, report: NodeReport) -> float:
        incarnation, before = self._seen.get(report.node, ("", 0.0))
        self._seen[report.node] = report.incarnation, report.cpu_s
        return report.cpu_s - before if incarnation == report.incarnation else 0.0
