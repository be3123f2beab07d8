"""Other systems' ways to survive a loss (paper 000, table 3), as settings of the same machinery.

For experiments: same detector, same data plane, no artificial sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Strategy:
    """What is kept, what is checkpointed and how, and how much a loss takes back."""

    backups: bool = True  # operators keep their output; otherwise only the source log is there
    checkpoints: bool = True
    synchronous: bool = False  # a slice that seals a checkpoint is out when its files are durable
    whole: bool = False  # every checkpoint has the whole state, not only what changed
    rollback: bool = False  # every partition goes back to the cut, not only the lost ones
    # A loss after a scaling goes back to the checkpoint before it; a rollback undoes it, too.
    behind_scaling: bool = False
    copies: bool = False  # every partition has a copy on another node, which takes its place
    # By which planner of policies/capacity.py queries are chosen that come back first.
    planner: str = "exact"

    @property
    def is_ours(self) -> bool:
        """But for the planner."""
        return replace(self, planner="exact") == Strategy()


STRATEGIES = {
    "ours": Strategy(),
    # As ours, but a scaling splits the newest checkpoint instead of making one. Slices from before
    # it are replayed by the partitions after it: operators that depend on order may see another.
    "R+SM": Strategy(behind_scaling=True),
    "UB": Strategy(checkpoints=False),  # the whole history is replayed
    "SB": Strategy(checkpoints=False, backups=False),  # … from the sources
    # As Spark Streaming does: a checkpoint writes the RDD that is the state, as part of the batch.
    "SC": Strategy(backups=False, synchronous=True, whole=True, rollback=True, behind_scaling=True),
    # Active replication: everything is sent and computed twice.
    "AR": Strategy(checkpoints=False, backups=False, copies=True),
    # As ours, but who comes back first is chosen as paper 001 does it, or one of its baselines.
    "DP": Strategy(planner="dp"),
    "BestDensity": Strategy(planner="best_density"),
    "PRG": Strategy(planner="progressive"),
    "OC": Strategy(planner="operator_centric"),
}
