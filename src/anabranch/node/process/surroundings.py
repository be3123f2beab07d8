"""A host's process: threads that write and load in the background, a local disk, a heartbeat."""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.model.ids import NodeId
from anabranch.node.priority import give_way
from anabranch.node.process.heartbeat import Heartbeat, Pulse
from anabranch.node.protocol.carried import Vitals
from anabranch.node.protocol.host import Host
from anabranch.storage.checkpoint_files import decode_table, encode_table

BACKUP_MEMORY_BYTES = 256 << 20
MAX_WAITING = 256  # sealed partitions that wait for the disk; more would fill memory


class Background:
    """A thread that does one thing after the other and gives way to slices; it starts with the
    first of them."""

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._started = False

    def later(self, work: Callable[[], None]) -> None:
        if not self._started:
            self._started = True
            self._thread.start()
        self._queue.put(work)

    def close(self) -> None:
        self._queue.put(None)

    def join(self) -> None:
        """Wait until all that was queued before `close` is done."""
        if self._started:
            self._thread.join()

    def _work(self) -> None:
        give_way()
        while (work := self._queue.get()) is not None:
            work()


class Surroundings:
    """Those of a node process. A driver's own process, as in tests, has some too."""

    def __init__(self, spills: Path | None = None, executor_pid: int | None = None) -> None:
        self.incarnation = uuid.uuid4().hex
        self._spills = spills or Path(tempfile.gettempdir()) / self.incarnation
        self._executor_pid = executor_pid
        self._heartbeat: Heartbeat | None = None
        self._writer = Background("checkpoint-writer")
        self._loader = Background("loader")

    @property
    def backup_memory_bytes(self) -> int:
        return BACKUP_MEMORY_BYTES

    def write_later(self, work: Callable[[], None]) -> None:
        self._writer.later(work)

    def load_later(self, work: Callable[[], None]) -> None:
        self._loader.later(work)

    def spill(self, edges: Mapping[int, pa.Table]) -> tuple[dict[int, pa.Table], SpilledFile]:
        """To a file; tables are mapped from there when they are needed."""
        self._spills.mkdir(parents=True, exist_ok=True)
        file = SpilledFile(self._spills / f"{uuid.uuid4().hex}.arrow")
        return file.write(edges), file

    def belong_to(self, pulse: object | None, node: NodeId) -> None:
        assert pulse is None or isinstance(pulse, Pulse)
        if self._heartbeat is not None:
            if self._heartbeat.is_for(pulse, node):
                return
            self._heartbeat.stop()
        if pulse is not None:
            self._heartbeat = Heartbeat(pulse, node, self._executor_pid)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def vitals(self) -> Vitals:
        return Vitals(os.getpid(), _resident_bytes(), time.process_time())

    def close(self) -> None:
        self._writer.close()
        self._loader.close()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def join(self) -> None:
        self._writer.join()


class SpilledFile:
    """Backups that were moved to disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, edges: Mapping[int, pa.Table]) -> dict[int, pa.Table]:
        """The same tables, in the file; edges that carry the same rows share one."""
        ranges: dict[int, tuple[int, int]] = {}
        offset = 0
        try:
            with self.path.open("wb") as file:
                for table in {id(t): t for t in edges.values()}.values():
                    data = encode_table(table)
                    file.write(data)
                    ranges[id(table)] = (offset, data.size)
                    offset += data.size
        except OSError:
            self.drop()
            raise
        if not offset:
            return {}
        whole = pa.memory_map(str(self.path)).read_buffer()
        read = {key: decode_table(whole.slice(*where)) for key, where in ranges.items()}
        return {edge: read[id(table)] for edge, table in edges.items()}

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)


def new_host(
    spills: Path | None = None,
    executor_pid: int | None = None,
    load: Callable[[bytes], Any] = pickle.loads,
) -> Host[pa.Table]:
    """A host of Arrow tables in this process; `load` makes a job from what the driver sends."""
    return Host(Surroundings(spills, executor_pid), load)


def _resident_bytes() -> int:
    with Path("/proc/self/statm").open() as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
