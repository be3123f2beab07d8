"""What becomes of writes and reads in the simulated store: whose write it is decides what may
happen to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from anabranch.sim.store import SimStore, Weather

if TYPE_CHECKING:
    from anabranch.sim.cluster import SimCluster

# Below these names nodes and source tasks write; all else is the driver's.
OF_TASKS = ("source-log", "staged", "checkpoints")


class TaskKilledError(BaseException):
    """A task's process ends here; what it has written stays."""


class SimWeather(Weather):
    """As the faults of a cluster have it."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._left: int | None = None  # moments that a task has to live …
        self._then: Callable[[], object] = lambda: None  # … or until this happens in between
        self.torn: set[str] = set()  # checkpoint files that cannot be read

    @contextlib.contextmanager
    def killed_after(self, moments: int) -> Iterator[None]:
        """The writer is killed at one of its next writes, before or after it."""

        def kill() -> None:
            raise TaskKilledError

        with contextlib.suppress(TaskKilledError), self.visited_after(moments, kill):
            yield

    @contextlib.contextmanager
    def visited_after(self, moments: int, visit: Callable[[], object]) -> Iterator[None]:
        """Something happens before or after one of the next writes."""
        self._left, self._then = moments, visit
        try:
            yield
        finally:
            self._left = None

    def _live_on(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                self._then()

    def write(self, name: str, data: bytes, store: SimStore) -> None:
        self._live_on()
        if name.startswith(OF_TASKS):
            self._cluster.faults.task_writes(name, self._cluster)
        else:
            self._cluster.faults.driver_writes(name, data, self._cluster)

    def written(self, name: str) -> None:
        self._live_on()
        if not name.startswith(OF_TASKS):
            self._cluster.faults.driver_has_written(name, self._cluster)

    def read(self, name: str, data: bytes) -> bytes | None:
        if name.startswith("checkpoints"):
            if self._cluster.awaited:
                self._cluster.faults.reads(name, self._cluster)
            if name in self.torn:
                return data[: len(data) * 2 // 3] if len(data) % 3 else None
        return data
