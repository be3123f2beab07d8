"""What a recovery restores and replays (paper 000, algorithm 1, over slices).

Only lost partitions are restored, all from the same cut. Their input of the slices since then
comes from the nearest place that still has it: the source log, the backups of a healthy upstream,
another lost partition that produces it again, or, where a healthy upstream kept nothing, a shadow
of it that is restored from the same cut and replays as well, recursively.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from anabranch.control.ledgers.checkpoints import partition_key
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import Cut, SlicePlan, SliceRecord

# A replay is cut into parts, so that its packets fit in memory however long it is.
MAX_PART_SLICES = 64
MAX_PART_ROWS = 4_000_000


def plan_recovery(
    plan: Plan,
    placement: Placement,
    lost: frozenset[PartitionId],
    cut: Cut | None,
    slices: Sequence[SlicePlan],
    has_backups: Callable[[PartitionId], bool],
    backups: frozenset[PartitionId] | None = None,
    copied: frozenset[PartitionId] = frozenset(),
    promoted: frozenset[PartitionId] = frozenset(),
) -> RecoveryPlan:
    """Walk from the last wave to the first: who needs input again, and who can give it."""
    shadows: set[PartitionId] = set()
    senders: set[PartitionId] = set()
    reads_log = False
    for chain in sorted(plan.node_chains, key=lambda c: -c.depth):
        if not any(p in lost or p in shadows for p in placement.partitions(chain.name)):
            continue
        for edge in chain.inputs:
            reads_log |= plan.by_name[edge.source].is_source
            for upstream in placement.partitions(edge.source):
                if upstream not in lost:
                    (senders if has_backups(upstream) else shadows).add(upstream)
    if not slices:
        shadows, senders = set(), set()
    return RecoveryPlan(
        placement=placement,
        cut=cut.slice if cut else 0,
        files={p: files_of(p, placement, cut) for p in lost | shadows | copied},
        restored=lost,
        shadows=frozenset(shadows),
        senders=frozenset(senders),
        slices=tuple(slices),
        backups=backups,
        reads_log=reads_log and bool(slices),
        copied=copied,
        promoted=promoted,
    )


def files_of(partition: PartitionId, placement: Placement, cut: Cut | None) -> tuple[str, ...]:
    """The cut's files that hold the partition's key groups, each old partition's in order."""
    if cut is None or partition.chain not in cut.groups:
        return ()
    old, mine = cut.groups[partition.chain], placement.groups[partition.chain]
    owners = sorted({o for o, m in zip(old, mine, strict=True) if m == partition.index})
    keys = [partition_key(PartitionId(partition.chain, o)) for o in owners]
    return tuple(f for k in keys for f in cut.files.get(k, ()))


def in_parts(records: Iterable[SliceRecord]) -> Iterator[tuple[SliceRecord, ...]]:
    """The slices of a replay in parts of a bounded size; at least one part, maybe empty."""
    part: list[SliceRecord] = []
    rows = 0
    for record in records:
        size = sum(record.rows.values())
        if part and (len(part) == MAX_PART_SLICES or rows + size > MAX_PART_ROWS):
            yield tuple(part)
            part, rows = [], 0
        part.append(record)
        rows += size
    yield tuple(part)
