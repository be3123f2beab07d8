"""Which nodes have been silent for too long, by the ear of a driver that may itself have slept.

Silence counts only while somebody listens. The driver looks at short intervals; when a look comes
late by a good part of the time-out, the driver was stopped in between (a suspended machine, a long
garbage collection, a signal), and a silence of that time is its own: nobody could be heard. So
time is that of the looks: an interval without any counts for nothing, and every node then has the
rest of its time-out, nearly all of it, to be heard.
"""

from __future__ import annotations

from anabranch.model.ids import NodeId

LATE = 0.5  # of the time-out: a look that comes so late was no look


class Liveness:
    """When each node was last heard of. `look` is handed the time, in seconds of a steady clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._looked_s: float | None = None
        self.listened_s = 0.0  # for so long, up to the last look
        self._heard: dict[NodeId, float] = {}  # at that much of it

    def heard(self, node: NodeId, patience_s: float = 0.0) -> None:
        """It is alive; it may be silent for longer than others, by this much."""
        self._heard[node] = self.listened_s + patience_s

    def knows(self, node: NodeId) -> bool:
        return node in self._heard

    def forget(self, node: NodeId) -> None:
        self._heard.pop(node, None)

    def look(self, now_s: float) -> dict[NodeId, float]:
        """Nodes that were heard of once and then not for too long, and for how long."""
        passed = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if passed < LATE * self._timeout_s:
            self.listened_s += passed
        heard = self._heard.copy()  # a thread that listens goes on
        silent = {n: self.listened_s - at for n, at in heard.items()}
        return {n: s for n, s in silent.items() if s > self._timeout_s}
