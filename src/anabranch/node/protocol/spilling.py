"""Backups that move to disk."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.node.protocol.carried import Process, R
from anabranch.node.protocol.partition import Output


def spilled(kept: Sequence[Output[R]], confirmed: int, process: Process[R]) -> bool:
    """The oldest, while there are too many in memory. Was there room on the disk?"""
    oldest_first = sorted(kept, key=lambda o: o.slice)
    excess = sum(o.nbytes for o in kept) - process.backup_memory_bytes
    for output in oldest_first:
        if excess <= 0 or output.slice > confirmed:
            return True
        if output.spilled is None and not output.sinks:
            try:
                output.edges, output.spilled = process.spill(output.edges)
            except OSError:
                return False  # it stays in memory; the driver slows down
            excess -= output.nbytes
            output.nbytes = 0
    return True
