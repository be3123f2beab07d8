"""A recovery as it is planned and as it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Chain
from anabranch.model.slices import SlicePlan

Span = tuple[int, int]


class Cause(Enum):
    """Why partitions are rebuilt."""

    START = "start"
    NODES_LOST = "nodes lost"
    NODES_CAME = "nodes came, when none was left"
    PROCESS_REPLACED = "node process replaced"
    INPUT_LACKED = "input lacked"  # a partition was not there, or packets were lost
    RECOVERY_LACKED = "recovery incomplete"
    CHECKPOINT_TORN = "checkpoint unreadable"
    ADJUSTMENT = "adjustment"  # nothing was lost: the placement changes
    ROOM = "room for chains that waited"

    @property
    def concerns_nodes(self) -> bool:
        """Must the nodes hear of the job though no partition may be lost? Otherwise there is
        something to do only for partitions and nodes that are lost."""
        return self not in (Cause.NODES_LOST, Cause.INPUT_LACKED)


@dataclass(frozen=True)
class RecoveryPlan:
    """Which partitions are restored where, and what they replay. A start restores all of them.

    `restored` are rebuilt for good under the new placement; `shadows` are copies of healthy
    partitions, rebuilt beside them only to produce once more what they did not back up; `senders`
    are healthy partitions that send their backups. All begin after slice `cut` and end, equal to
    the healthy ones, after the last of `slices`.
    """

    placement: Placement
    cut: int
    files: Mapping[PartitionId, tuple[str, ...]]  # checkpoint files, oldest first
    restored: frozenset[PartitionId]
    shadows: frozenset[PartitionId]
    senders: frozenset[PartitionId]
    slices: tuple[SlicePlan, ...]
    backups: frozenset[PartitionId] | None  # who backs up from now on; None: all
    reads_log: bool  # does anything rebuilt take input from a source?
    # A long replay comes in several parts; the first one installs.
    part: int = 0
    more: bool = False  # parts follow
    cause: Cause = Cause.START
    what: str = ""  # of an adjustment: what it changes
    copied: frozenset[PartitionId] = frozenset()  # get a copy, from the cut; nothing is replayed
    promoted: frozenset[PartitionId] = frozenset()  # their copies take their place as they are
    # Per chain that lacks slices, the first one whose rows for sinks are staged.
    late: Mapping[str, int] = field(default_factory=dict)
    # Chains that are not as far as each other: the first slice that each replays, and the one after
    # the last. Others replay all of `slices`.
    spans: Mapping[str, Span] = field(default_factory=dict)
    # Of chains that are ahead of others below them: from which slice on these need their output.
    kept: Mapping[str, int] = field(default_factory=dict)

    @property
    def adjusts(self) -> bool:
        """Is it an online adjustment, and no recovery from a loss?"""
        return self.cause is Cause.ADJUSTMENT

    @cached_property
    def chains_restored(self) -> frozenset[str]:
        return frozenset(p.chain for p in self.restored)

    @property
    def first(self) -> int:
        return self.slices[0].number if self.slices else self.cut + 1

    @property
    def next_slice(self) -> int:
        return self.slices[-1].number + 1 if self.slices else self.cut + 1

    def span(self, chain: str) -> Span:
        """The first slice that it replays, and the one that it is at when it is done."""
        return self.spans.get(chain, (self.first, self.next_slice))

    def takes(self, chain: str, number: int) -> bool:
        """Does it replay this slice?"""
        first, end = self.span(chain)
        return first <= number < end

    def confirmed(self, chain: str) -> int:
        """The newest slice of which nobody needs its output."""
        return min(self.span(chain)[0], self.kept.get(chain, self.next_slice)) - 1

    def wants(self, chain: Chain, number: int) -> bool:
        """Does anything that is rebuilt need its output of this slice?"""
        below = (e.target for e in chain.outputs)
        return any(c in self.chains and self.takes(c, number) for c in below)

    @property
    def at(self) -> tuple[int, int]:
        """The version of its placement, and which part it is."""
        return self.placement.version, self.part

    @property
    def seals(self) -> bool:
        """Do all partitions seal a checkpoint after the last slice?"""
        return bool(self.slices) and self.slices[-1].seal

    @cached_property
    def nodes(self) -> tuple[NodeId, ...]:
        """The first part is for everybody; later ones are for those who have something to do."""
        if self.part == 0 or self.seals:
            return self.placement.nodes
        having = self.rebuilt | self.senders | self.promoted
        busy = {self.placement.owners[p].node for p in having}
        return tuple(n for n in self.placement.nodes if n in busy)

    @cached_property
    def rebuilt(self) -> frozenset[PartitionId]:
        return self.restored | self.shadows

    @cached_property
    def chains(self) -> frozenset[str]:
        """Chains with partitions that need their input again."""
        return frozenset(p.chain for p in self.rebuilt)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery as it went, for the log and the live view. Times in seconds."""

    nodes: tuple[NodeId, ...]  # lost
    partitions: tuple[PartitionId, ...]  # restored
    shadows: int
    from_slice: int  # the cut
    to_slice: int  # the newest slice replayed
    reason: str
    restore_s: float
    replay_s: float
    total_s: float  # from the moment the loss was known
    known_ms: int  # that moment, since 1970
    predicted_s: float | None = None  # with a recovery bound
    promoted: tuple[PartitionId, ...] = ()  # whose copies took over

    def __str__(self) -> str:
        count = len(self.partitions) + len(self.promoted)
        what = f"{count} partition{'s' if count != 1 else ''}"
        whose = f" of node {', '.join(self.nodes)} ({self.reason})" if self.nodes else ""
        cut = f"the checkpoint of slice {self.from_slice}" if self.from_slice else "the beginning"
        slices = self.to_slice - self.from_slice
        shadows = f", {self.shadows} shadows" if self.shadows else ""
        copies = f"the copies of {len(self.promoted)} took over; " if self.promoted else ""
        return (
            f"recovered {what}{whose} in {self.total_s:.2f} s: {copies}restored from {cut} in "
            f"{self.restore_s:.2f} s, replayed {slices} slices in {self.replay_s:.2f} s{shadows}"
            + (f" (predicted: {self.predicted_s:.2f} s)" if self.predicted_s is not None else "")
        )


@dataclass(frozen=True, slots=True)
class Adjustment:
    """One online adjustment as it went, for the log and the live view."""

    what: str
    partitions: tuple[PartitionId, ...]  # installed anew
    slice: int  # the last one under the placement before
    seconds: float  # for which no slice ran

    def __str__(self) -> str:
        return f"adjusted after slice {self.slice}: {self.what}; no slice for {self.seconds:.2f} s"
