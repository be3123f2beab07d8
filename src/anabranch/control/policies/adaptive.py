"""When operators keep their output: only after several nodes were lost (paper 004, adaptive
upstream backup).

The source log is enough to make up for a loss: what is above a lost partition produces once more
what it sent. Backups pay off when loss follows loss: what has come back need not do so again for
what is lost next. So they begin with the second node that is lost between two checkpoints of
everything, and end with the first checkpoint of everything that is complete when all is back. The
paper counts losses within a time window; what a loss costs depends on the slices since the
checkpoint, so that is the window here.
"""

from __future__ import annotations

ENOUGH_LOST = 2  # nodes: the paper's X


class AdaptiveBackups:
    """`on`: operators keep their output, all of them. A run begins without."""

    def __init__(self) -> None:
        self.on = False
        self._lost = 0  # nodes, since everything was in a checkpoint

    def nodes_lost(self, count: int) -> bool:
        """So many nodes are gone, or have forgotten all they had; do backups begin with it?"""
        self._lost += count
        begins = not self.on and self._lost >= ENOUGH_LOST
        self.on |= begins
        return begins

    def all_in_a_cut(self) -> bool:
        """A checkpoint of everything is complete, and all runs; do backups end with it?"""
        ends, self.on, self._lost = self.on, False, 0
        return ends
