"""What is left of a simulated job when everything else is gone, as somebody outside finds it: the
store, Spark's commits, and what the targets of sinks have been given.

The journal is read here once more, by a reader of its own: checks must not depend on the code that
they check.
"""

from __future__ import annotations

import json
import marshal
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

from anabranch.model.commands import WriteHead
from anabranch.model.ids import PartitionId
from anabranch.model.slices import Cut, Late, SliceRecord
from anabranch.sim.payload import Keys
from anabranch.sim.sinks import Target
from anabranch.sim.store import SimStore

_SEGMENT = re.compile(r"(\d+)-(\d+)\.jsonl")
_SHARE = re.compile(rb'"share_read": (\d+)')


@dataclass(frozen=True)
class Journalled:
    """The newest segment: what has happened."""

    name: str
    cut: Cut | None
    previous: Cut | None
    before: tuple[SliceRecord, ...]  # in its head
    after: tuple[SliceRecord, ...]  # line by line
    epochs: dict[PartitionId, int]

    @property
    def slices(self) -> tuple[SliceRecord, ...]:
        return (*self.before, *self.after)


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint file: whole or a delta."""

    partition: PartitionId
    slice: int
    full: bool
    keys: Keys


@dataclass
class Disk:
    store: SimStore
    targets: dict[str, Target]
    offered_batch: int = -1  # Spark's offsets
    committed_batch: int = -1  # … and commits
    head: WriteHead | None = None  # as the newest driver has written it
    _read: tuple[int, Journalled | None] = field(default=(0, None), repr=False)

    @property
    def journal(self) -> Journalled | None:
        changes = self.store.changes["journal"]
        if self._read[0] != changes:
            self._read = changes, self._parsed()
        return self._read[1]

    def _parsed(self) -> Journalled | None:
        found = [(m, n) for n in self.store.names("journal") if (m := _SEGMENT.fullmatch(n))]
        if not found:
            return None
        _, last = max(found, key=lambda f: (int(f[0][1]), int(f[0][2])))
        name = f"journal/{last}"
        parts = sorted(map(int, self.store.names(name)))
        data = b"".join([self.store.files[f"{name}/{n}"] for n in parts])
        return _parsed(name, self.store.files[name] + data)

    @property
    def slices(self) -> tuple[SliceRecord, ...]:
        journal = self.journal
        return journal.slices if journal else ()

    @property
    def newest_slice(self) -> int:
        slices = self.slices
        return slices[-1].number if slices else 0

    @property
    def older_cut(self) -> int:
        """No recovery, not even from an unreadable newest cut, begins before this slice."""
        journal = self.journal
        return journal.previous.slice if journal and journal.previous else 0

    # -- files -----------------------------------------------------------------------------------

    def logged(self, record: SliceRecord, task: int) -> int | None:
        """Which of the shares that source tasks read is the one in the log."""
        slice_no, generation, attempt = record.number, record.generation, record.attempt
        name = f"source-log/{slice_no:012d}-{generation}-{attempt}/{task:05d}.log"
        found = _SHARE.search(self.store.files.get(name, b""))
        return int(found[1]) if found else None

    def logged_slices(self) -> list[int]:
        return [int(n.partition("-")[0]) for n in self.store.names("source-log")]

    def snapshot(self, name: str) -> Snapshot:
        data = self.store.files[name]
        begins = 20 + int.from_bytes(data[8:16], "big")
        header = json.loads(data[20:begins])
        keys, _, full = marshal.loads(data[begins + 12 :])
        return Snapshot(PartitionId(header["chain"], header["index"]), header["slice"], full, keys)

    def checkpoints(self) -> list[str]:
        store = self.store
        below = ["checkpoints"]
        for _ in range(3):
            below = [f"{b}/{n}" for b in below for n in store.names(b)]
        return below


def _parsed(name: str, data: bytes) -> Journalled:
    """A torn last line has not happened."""
    lines: list[dict[str, Any]] = []
    for line in data.split(b"\n"):
        crc, body = line[:8], line[9:]
        if crc != b"%08x" % zlib.crc32(body):
            break
        lines.append(json.loads(body))
    head = lines[0]
    told = [*head["slices"], *(r for r in lines[1:] if "late" not in r)]
    slices = {r["number"]: SliceRecord.from_json(r) for r in told}
    for late in (Late.from_json(r) for r in lines[1:] if "late" in r):
        slices[late.slice] = slices[late.slice].with_late(late)
    return Journalled(
        name,
        Cut.from_json(head["cut"]) if head["cut"] else None,
        Cut.from_json(head["previous"]) if head["previous"] else None,
        tuple(slices.values())[: len(head["slices"])],
        tuple(slices.values())[len(head["slices"]) :],
        {PartitionId(chain, index): epoch for chain, index, epoch in head["epochs"]},
    )
