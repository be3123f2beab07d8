"""Turns sealed state into durable files, in order, never on the path of a slice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.model.ids import PartitionId
from anabranch.model.reports import CheckpointWritten, Failure
from anabranch.node.protocol.carried import Job, Sealed

# Files per partition that reports repeat: a cut that was given up leaves one the driver may not
# have heard of, and one more may follow before it has. If even more do, the driver finds out.
REPORTED_CHECKPOINTS = 4


class CheckpointWriter:
    """`later` does things in order, on another thread; what is written is asked from this one."""

    def __init__(self, later: Callable[[Callable[[], None]], None]) -> None:
        self._later = later
        self._lock = threading.Lock()
        self._generation = 0
        self._written: dict[tuple[PartitionId, int], CheckpointWritten] = {}
        self._failures: list[Failure] = []

    def begin(self, generation: int) -> None:
        """Speak only of this run from now on: another's partitions may have the same names."""
        with self._lock:
            self._generation, self._written, self._failures = generation, {}, []

    def submit(self, job: Job[Any], sealed: Sealed) -> None:
        """Write one partition's sealed state some time."""
        self._later(partial(self.write, job, sealed))

    def write(self, job: Job[Any], sealed: Sealed) -> None:
        """Write it now: by no file where nothing changed."""
        pid, name, size = sealed.partition, None, 0
        failure = None
        try:
            if sealed.content is not None:
                name, size = job.write_checkpoint(sealed)
        except Exception as e:
            message = e.message if isinstance(e, AnabranchError) else repr(e)
            failure = Failure(str(pid), "checkpoint", message, repr(e), kind="storage")
        with self._lock:
            if sealed.generation != self._generation:
                return
            if failure is not None:
                self._failures.append(failure)
                return
            self._written[(pid, sealed.slice)] = CheckpointWritten(
                pid, sealed.slice, sealed.epoch, name, sealed.full, size, sealed.before
            )
            mine = sorted(n for p, n in self._written if p == pid)
            for old in mine[:-REPORTED_CHECKPOINTS]:
                del self._written[(pid, old)]

    def written(self) -> tuple[CheckpointWritten, ...]:
        """The newest durable files; repeated in every report, so none gets lost."""
        with self._lock:
            return tuple(self._written.values())

    def failures(self) -> tuple[Failure, ...]:
        """Repeated in every report, too: one of them ends the run."""
        with self._lock:
            return tuple(self._failures)
