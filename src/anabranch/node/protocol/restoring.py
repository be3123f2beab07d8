"""What a node owns after a recovery begins: partitions that it keeps, and such that it restores."""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.recovery import RecoveryPlan
from anabranch.node.protocol.carried import Job, R
from anabranch.node.protocol.partition import Partition
from anabranch.node.protocol.preparation import Preparations


def kept_of(
    partitions: Mapping[PartitionId, Partition[R]],
    plan: RecoveryPlan,
    node: NodeId,
    same_driver: bool,
) -> dict[PartitionId, Partition[R]]:
    """Partitions of this node that stay as they are, and copies that become partitions. Nothing of
    an earlier driver's is kept, nor a copy that is to be made: one that is there all the same comes
    from a call that was late."""
    if not same_driver:
        return {}
    mine = plan.placement.held_by(node)
    made = plan.copied & plan.placement.copied_by(node).keys()
    return {
        p: x
        for p, x in partitions.items()
        if p in mine and p not in made and (mine[p] == x.epoch or p in plan.promoted)
    }


def restored(
    job: Job[R],
    preparations: Preparations[R],
    plan: RecoveryPlan,
    pid: PartitionId,
    epoch: int,
) -> Partition[R]:
    """A partition as it was at the cut; what was loaded ahead need not be read again."""
    loaded: set[str] = set()
    try:
        state, loaded = preparations.take(pid, epoch, plan)
    except KeyError:
        state = job.new_state(pid)
    owned = {g for g, p in enumerate(plan.placement.groups[pid.chain]) if p == pid.index}
    state.restore([f for f in plan.files.get(pid, ()) if f not in loaded], owned)
    partition = Partition(pid, epoch, job.chains[pid.chain], state, plan.cut + 1)
    partition.backs_up = plan.backups is None or pid in plan.backups
    return partition
