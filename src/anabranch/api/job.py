"""A running job, as its user holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from anabranch.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.driver.progress import Progress, Totals
    from anabranch.driver.reading import Reading
    from anabranch.driver.status import JobStatus
    from anabranch.model.recovery import Adjustment, Recovery
    from anabranch.model.scaling import Decision


def inside(job: Job) -> Reading:
    """What a job is made of, for tests and benchmarks that have to look inside: no part of the
    API, and another one tomorrow."""
    return job._reading


class Job:
    """A running topology."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._run = reading.run

    def stop(self) -> None:
        """Finish the slice in hand, checkpoint, and end. What is left of a batch that was cut into
        slices is where the next run begins. May be called by a function given to `on_progress`
        too: then the job ends when that has returned."""
        self._reading.stop()

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when `timeout` seconds passed first. Raises what ended it."""
        ended = self._reading.await_termination(timeout)
        if ended and self._run.error is not None:
            raise self._run.error
        return ended

    @property
    def is_active(self) -> bool:
        return self._reading.active

    @property
    def exception(self) -> AnabranchError | None:
        """What ended the job, if something went wrong."""
        return self._run.error

    def status(self) -> JobStatus:
        """What the job does, on which nodes, and with how much state: what `anabranch status`
        shows, as a value."""
        return self._run.status()

    @property
    def nodes(self) -> dict[str, str]:
        """All nodes there are: "" for one with work, else "spare", "joining" or "draining"."""
        return {str(node): role for node, role in self._run.nodes.items()}

    @property
    def last_progress(self) -> Progress | None:
        """The newest slice."""
        return self._run.history.progress[-1] if self._run.history.progress else None

    @property
    def recent_progress(self) -> list[Progress]:
        """The newest slices, oldest first."""
        return list(self._run.history.progress)

    @property
    def totals(self) -> Totals:
        """What became of all rows since the run started."""
        return self._run.history.totals

    @property
    def remarks(self) -> list[str]:
        """What the job has said of itself, once each: rows that were dropped as late or put aside,
        state that grows for ever, a job that falls behind. They are logged as warnings, too."""
        return list(self._run.history.remarks)

    @property
    def recoveries(self) -> list[Recovery]:
        """Every recovery of this run; the first one is its start."""
        return list(self._run.history.recoveries)

    @property
    def adjustments(self) -> list[Adjustment]:
        """Every online adjustment of this run: scalings, and moves to and from nodes."""
        return list(self._run.history.adjustments)

    @property
    def decisions(self) -> list[Decision]:
        """What the job decided about itself in this run (`autoscale`, `balance`), and why."""
        return list(self._run.history.decisions)

    def scale(self, operator: str, parallelism: int) -> None:
        """Run an operator at another parallelism, without a stop. Returns once the request is
        accepted; `adjustments` says when it is done. Operators fused with it are scaled too."""
        self._run.scale(operator, parallelism)

    def add_nodes(self, count: int) -> None:
        """Ask the cluster for more nodes; partitions move to them when they have joined."""
        self._run.add_nodes(count)

    def drain(self, node: str) -> None:
        """Move every partition off a node, then give it back to the cluster."""
        self._run.drain(node)

    @property
    def is_adjusting(self) -> bool:
        """Is a scaling, or a move of partitions, on its way?"""
        return self._run.controller.adjusting

    @property
    def is_recovering(self) -> bool:
        """Are partitions being restored right now?"""
        return self._run.recovering

    def on_progress(self, observe: Callable[[Progress], None]) -> None:
        """Call `observe` after every slice, on a thread of the driver: be quick. What it raises is
        logged once, and does not touch the job."""
        self._run.steps.on_progress.append(observe)
