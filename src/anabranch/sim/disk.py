"""Everything durable in a simulated job: it survives drivers and nodes.

Journal, source log, checkpoint files, staged and exposed rows, and Spark's own offsets. A write
happens whole or not at all; a checkpoint file may turn out to be unreadable later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from anabranch.control.controller import Past
from anabranch.errors import StorageError
from anabranch.model.commands import TrimStorage, WriteHead
from anabranch.model.ids import PartitionId
from anabranch.model.slices import Cut, SliceRecord
from anabranch.sim.workload import Row, Share

LogName = tuple[int, int, int, int]  # slice, generation, attempt, task
StagedName = tuple[str, int, int, str]  # sink, slice, generation, writer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint file: keys with their hash and whether they are open; whole or a delta."""

    partition: PartitionId
    slice: int
    full: bool
    keys: dict[int, tuple[int, bool]]
    closed_us: int
    after: int = 0  # the slice of the one before it
    changed: bool = True


@dataclass(frozen=True, slots=True)
class Logged:
    """A source task's share of a slice, and the number of slices its batch was cut into."""

    share: Share
    chunks: int


@dataclass
class Disk:
    head: WriteHead | None = None
    generation: int = 0  # the newest that was claimed
    records: list[SliceRecord] = field(default_factory=list)  # after the head
    logs: dict[LogName, Logged] = field(default_factory=dict)
    files: dict[str, Snapshot] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    staged: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    exposed: dict[int, dict[tuple[str, str], tuple[Row, ...]]] = field(default_factory=dict)
    committed_batch: int = -1  # Spark's offsets
    on_read: Callable[[str], None] = lambda path: None
    _stagings: int = 0

    # -- the journal ---------------------------------------------------------------------------

    def write_head(self, head: WriteHead) -> None:
        copied = replace(head, cut=_copy(head.cut), previous=_copy(head.previous))
        self.head, self.records = copied, []

    def take_over(self) -> Past:
        """A new driver claims a generation; what it finds."""
        self.generation += 1
        head = self.head
        if head is None:
            return Past(generation=self.generation)
        return Past(
            cut=_copy(head.cut),
            previous=_copy(head.previous),
            slices=self.slices,
            epochs=dict(head.epochs),
            groups=dict(head.layout),
            layouts=dict(head.layouts),
            mapping_version=head.mapping.version,
            generation=self.generation,
        )

    @property
    def slices(self) -> tuple[SliceRecord, ...]:
        return (*self.head.slices, *self.records) if self.head else ()

    @property
    def newest_slice(self) -> int:
        slices = self.slices
        return slices[-1].number if slices else 0

    @property
    def older_cut(self) -> int:
        """No recovery, not even from an unreadable newest cut, begins before this slice."""
        return self.head.previous.slice if self.head and self.head.previous else 0

    # -- files ---------------------------------------------------------------------------------

    def read_checkpoint(self, path: str) -> Snapshot:
        self.on_read(path)
        if path in self.torn or path not in self.files:
            raise StorageError(f"{path} cannot be read", path=path)
        return self.files[path]

    def logged_tasks(self, slice_no: int, generation: int, attempt: int) -> int:
        return sum(1 for name in self.logs if name[:3] == (slice_no, generation, attempt))

    def trim(self, command: TrimStorage) -> None:
        for name in [n for n in self.logs if n[0] < command.log_below]:
            del self.logs[name]
        for path, file in list(self.files.items()):
            if path not in command.keep_files and file.slice < command.log_below:
                del self.files[path]

    # -- sinks ---------------------------------------------------------------------------------

    def stage(self, name: StagedName, rows: tuple[Row, ...]) -> str:
        """Under a name of its own: a task that outlived its attempt must not touch another's."""
        self._stagings += 1
        path = self.staged_path(name, self._stagings)
        self.staged[path] = rows
        return path

    @staticmethod
    def staged_path(name: StagedName, staging: int) -> str:
        return "{}/{}-{}/{}.{}".format(*name, staging)

    def expose(self, record: SliceRecord) -> None:
        """Show what the journal names; a slice that is shown stays as it is."""
        if record.number in self.exposed:
            return
        rows: dict[tuple[str, str], tuple[Row, ...]] = {}
        for sink, paths in record.staged.items():
            for path in paths:
                if path not in self.staged:
                    raise StorageError(f"{path} is not there to be exposed", path=path)
                writer = path.rpartition("/")[2].rpartition(".")[0]
                rows[(sink, writer)] = self.staged.pop(path)
        self.exposed[record.number] = rows

    def discard_staged(self) -> None:
        self.staged.clear()


def _copy(cut: Cut | None) -> Cut | None:
    if cut is None:
        return None
    return Cut(cut.slice, {p: list(f) for p, f in cut.files.items()}, dict(cut.groups))
