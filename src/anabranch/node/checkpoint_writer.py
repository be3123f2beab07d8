"""Turns sealed state into durable files, in the background, never on the path of a slice."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

from anabranch.errors import AnabranchError
from anabranch.model.ids import PartitionId
from anabranch.model.reports import CheckpointWritten, Failure
from anabranch.node.priority import give_way
from anabranch.storage.checkpoint_files import checkpoint_name, write_checkpoint

MAX_CHECKPOINT_QUEUE = 256  # sealed partitions that wait for the disk; more would fill memory
# Files per partition that reports repeat: a cut that was given up leaves one the driver may not
# have heard of, and one more may follow before it has. If even more do, the driver finds out.
REPORTED_CHECKPOINTS = 4


class CheckpointWriter:
    """One background thread that turns sealed state into durable files, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, ...] | None] = queue.Queue(MAX_CHECKPOINT_QUEUE)
        self._lock = threading.Lock()
        self._run = 0
        self._written: dict[tuple[PartitionId, int], CheckpointWritten] = {}
        self._failures: list[Failure] = []
        self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def begin(self, run: int) -> None:
        """Speak only of this run from now on: another's partitions may have the same names."""
        with self._lock:
            self._run, self._written, self._failures = run, {}, []

    def submit(self, *sealed: Any) -> None:
        """Queue one partition's sealed state; waits when the disk is far behind."""
        self._queue.put(sealed)

    def close(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        """Wait until all that was queued before `close` is written."""
        self._thread.join()

    def written(self) -> tuple[CheckpointWritten, ...]:
        """The newest durable files; repeated in every report, so none gets lost."""
        with self._lock:
            return tuple(self._written.values())

    def failures(self) -> tuple[Failure, ...]:
        """Repeated in every report, too: one of them ends the run."""
        with self._lock:
            return tuple(self._failures)

    def _work(self) -> None:
        give_way()
        while True:
            sealed = self._queue.get()
            if sealed is None:
                return
            self.write(*sealed)

    def write(
        self,
        run: int,
        root: str,
        place: str,
        job: str,
        partition: PartitionId,
        slice_no: int,
        epoch: int,
        full: bool,
        before: int,
        states: Any,
    ) -> None:
        """Make one partition's sealed state durable, on the caller's time: by no file where nothing
        changed since the seal at the slice `before`."""
        name = checkpoint_name(partition, slice_no, epoch, place) if full or states else None
        failure, size = None, 0
        try:
            if name is not None:
                size = write_checkpoint(
                    Path(root), name, job, partition, slice_no, epoch, full, states
                )
        except Exception as e:
            message = e.message if isinstance(e, AnabranchError) else repr(e)
            failure = Failure(str(partition), "checkpoint", message, repr(e), kind="storage")
        with self._lock:
            if run != self._run:
                return
            if failure is not None:
                self._failures.append(failure)
                return
            done = CheckpointWritten(partition, slice_no, epoch, name, full, size, before)
            self._written[(partition, slice_no)] = done
            mine = sorted(n for p, n in self._written if p == partition)
            for old in mine[:-REPORTED_CHECKPOINTS]:
                del self._written[(partition, old)]
