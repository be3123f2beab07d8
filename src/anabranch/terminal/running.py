"""Running a topology under the command line: a job, its view, a graceful end.

Ctrl-C asks for a graceful stop (the slice in hand is finished and checkpointed); a second one
gives up at once, which a restart with the same checkpoint directory repairs.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console

from anabranch.api import Job
from anabranch.driver.progress import Totals
from anabranch.errors import StorageError
from anabranch.model.plan import Plan
from anabranch.terminal.meter import Meter
from anabranch.terminal.view import REFRESHES_PER_S, View, megabytes, seconds


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a request, the second into KeyboardInterrupt.

    PySpark's own handler would cancel the running slice first. Install this one after the session
    was made, from the main thread.
    """

    def __init__(self) -> None:
        self.requested = threading.Event()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before = {s: signal.signal(s, self._on) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on(self, number: int, frame: FrameType | None) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.requested.set()


def watch(
    job: Job,
    plan: Plan,
    console: Console,
    is_over: Callable[[Meter], bool],
) -> Meter:
    """Show the job until it ends by itself or `is_over` says so; then stop it gracefully.

    Raises what ended the job. Returns what it did.
    """
    meter = Meter()
    view = View(console, plan, meter)
    try:
        with view.shown():
            while not job.await_termination(1 / REFRESHES_PER_S):
                _observe(meter, job)
                view.refresh()
                if is_over(meter):
                    job.stop()
            _observe(meter, job)
            view.refresh()
    except OSError as e:  # a pipe that nobody reads any more
        job.stop()
        raise StorageError(f"the view could not be written: {e}; the job was stopped") from e
    return meter


def _observe(meter: Meter, job: Job) -> None:
    meter.observe(job.recent_progress)
    meter.totals = job.totals
    meter.recoveries = job.recoveries[1:]
    meter.recovering = job.is_recovering
    meter.nodes = job.nodes
    meter.adjustments = job.adjustments
    meter.adjusting = job.is_adjusting
    meter.decisions = job.decisions
    meter.remarks = job.remarks
    status = job.status()
    meter.queries, meter.capacity = status.queries, status.capacity
    meter.partial_plan = status.partial_plan


def summarise(meter: Meter, elapsed_s: float) -> str:
    """What a run did, in a few lines."""
    newest, latency = meter.newest, meter.latency()
    if newest is None or latency is None:
        return f"no new rows in {seconds(elapsed_s)}"
    lines = [
        f"{meter.rows:,} rows in {meter.slices:,} slices and {seconds(elapsed_s)}, "
        f"{meter.rows_to_sinks:,} rows to sinks"
        + (f", {meter.late_rows:,} late rows" if meter.late_rows else ""),
        *_what_became(meter.totals),
        f"slice latency: median {seconds(latency.median)}, p99 {seconds(latency.p99)}",
        f"state: {newest.state_rows:,} rows, {megabytes(newest.state_bytes)}",
        *map(str, meter.adjustments),
        *map(str, meter.recoveries),
        *(f"note: {remark}" for remark in meter.remarks),
    ]
    return "\n".join(lines)


def _what_became(totals: Totals) -> list[str]:
    """Of all rows, by source, sink and operator."""
    parts = {
        "read": totals.read,
        "to sinks": totals.to_sinks,
        "late": totals.late,
        "dead letters": totals.dead,
    }
    return [
        f"{title}: {', '.join(f'{name} {rows:,}' for name, rows in sorted(counts.items()))}"
        for title, counts in parts.items()
        if counts
    ]


def quiet_py4j() -> None:
    """py4j logs the trace of every exception that passes through it; ours come as a sentence."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
