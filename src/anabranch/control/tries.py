"""How often something is tried again: losses of many nodes, however many, are not what kills a job.

A state that kills every node it meets is: one partition that is lost again and again, or tries that
lack something though nothing is lost, and no progress between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from anabranch.control import verdict
from anabranch.errors import AnabranchError, ClusterError
from anabranch.model.ids import PartitionId
from anabranch.model.reports import NodeReport

MAX_TRIES = 10
AGAIN = "start the job again with the same checkpoint directory"


class Tries:
    """Counted since the last progress."""

    def __init__(self) -> None:
        self._lacked = 0
        self._losses: Counter[PartitionId] = Counter()

    def may_go_on(self, lost: Collection[PartitionId]) -> bool:
        """One more, because these were lost, or because something lacked."""
        self._lacked += not lost
        self._losses.update(lost)
        return max(self._lacked, *self._losses.values(), 0) <= MAX_TRIES

    def progress(self) -> None:
        """What was tried has helped."""
        self._lacked = 0
        self._losses.clear()

    def lost_too_often(self, lost: Collection[PartitionId]) -> AnabranchError:
        often = [p for p, times in self._losses.items() if times > MAX_TRIES]
        names = ", ".join(map(str, sorted(often or lost))) or "a node process"
        return ClusterError(
            f"{names} was lost {MAX_TRIES} times in a row before another slice could run; look at "
            f"the executors' logs (out of memory?), then {AGAIN}"
        )

    def lacked_too_often(
        self, slice_no: int, reports: Sequence[NodeReport]
    ) -> AnabranchError | None:
        """Some partition could not run a slice once more; the error, if that was too often."""
        if self.may_go_on(()):
            return None
        partition, why = next(iter(verdict.lacking(reports).items()))
        return ClusterError(
            f"slice {slice_no}: {partition} lacked input {MAX_TRIES} times ({why}); {AGAIN}, "
            "nothing committed is lost",
            slice=slice_no,
        )
