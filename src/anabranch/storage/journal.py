"""The journal: which slices have happened, and where a restart begins.

A directory of segments `GENERATION-NUMBER.jsonl`, of which only the newest counts: the last one of
the newest generation, so that a driver which does not know yet that it has been replaced cannot
take its successor's place. A segment's first line is the head (format version, driver generation,
fingerprint of the topology, the cuts, the slices after the oldest that is needed, epochs, routing
and which chains lack slices); each further line is one slice, or says that chains which had waited
have made up for one. A line is its CRC-32 in hex, a blank, JSON. A torn last line is dropped: that
has not happened. A new segment is written whole and renamed, at every start and
at every completed checkpoint, so a restart reads a bounded amount however long the job has run.
Whatever was written counts only once no newer generation is found afterwards (generations.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from anabranch.errors import CheckpointLockedError, StorageError
from anabranch.model.behind import Behind
from anabranch.model.costs import Costs
from anabranch.model.ids import PartitionId
from anabranch.model.slices import Cut, Late, SliceRecord
from anabranch.storage.files import explained, make_private
from anabranch.storage.store import Growing, Store
from anabranch.storage.versions import check_format

FORMAT = 2
READ = (1, FORMAT)  # the first one knew no chains that wait
DIRECTORY = "journal"
LATE = "late"  # only lines of what came late have it


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a segment: everything a restart needs from before it.

    `older` cuts, the newest first, are for chains that the two newest do not cover; `behind` is
    the first slice that a chain lacks."""

    generation: int
    fingerprint: Mapping[str, Any]
    cut: Cut | None = None
    previous: Cut | None = None
    slices: tuple[SliceRecord, ...] = ()
    epochs: Mapping[PartitionId, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    placement_version: int = 0
    layouts: Mapping[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    older: tuple[Cut, ...] = ()
    behind: Mapping[str, int] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)

    def cut_of(self, chain: str) -> Cut | None:
        """The newest cut that covers the chain; the newest of all, where none does."""
        cuts = (self.cut, self.previous, *self.older)
        return next((c for c in cuts if c is not None and chain in c.groups), self.cut)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "generation": self.generation,
            "fingerprint": self.fingerprint,
            "cut": self.cut and self.cut.to_json(),
            "previous": self.previous and self.previous.to_json(),
            "older": [c.to_json() for c in self.older],
            "slices": [s.to_json() for s in self.slices],
            "epochs": [[p.chain, p.index, e] for p, e in self.epochs.items()],
            "groups": {c: list(g) for c, g in self.groups.items()},
            "mapping_version": self.placement_version,
            "layouts": [[v, {c: list(g) for c, g in x.items()}] for v, x in self.layouts.items()],
            "behind": self.behind,
            "costs": self.costs.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Head:
        return Head(
            generation=data["generation"],
            fingerprint=data["fingerprint"],
            cut=Cut.from_json(data["cut"]) if data["cut"] else None,
            previous=Cut.from_json(data["previous"]) if data["previous"] else None,
            slices=tuple(SliceRecord.from_json(s) for s in data["slices"]),
            epochs={PartitionId(c, i): e for c, i, e in data["epochs"]},
            groups={c: tuple(g) for c, g in data["groups"].items()},
            placement_version=data["mapping_version"],
            layouts={v: {c: tuple(g) for c, g in x.items()} for v, x in data.get("layouts", [])},
            older=tuple(Cut.from_json(c) for c in data.get("older", [])),
            behind=data.get("behind", {}),
            costs=Costs.from_json(data["costs"]) if "costs" in data else Costs(),
        )


class DirectoryLock:
    """One driver per checkpoint directory: a kernel lock that dies with its process.

    A start that is refused leaves no directory that was not there before: where nothing but the
    lock has come into a new one, it goes with the lock. So the one who gets the lock makes sure
    that its file is still the one in the directory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._made = [d for d in (directory, *directory.parents) if not d.exists()]
        with explained("create", directory):
            while not self._taken():
                pass
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()}")
            self._file.flush()

    def _taken(self) -> bool:
        """Is the lock ours? If not, its file was removed meanwhile, and there may be another."""
        directory = self._path.parent
        make_private(directory)
        try:
            self._file = self._path.open("a+")
        except FileNotFoundError:
            if directory.is_symlink():  # to nowhere
                raise
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise CheckpointLockedError(
                f"the checkpoint directory {directory} is in use by {owner}; stop that job, or "
                "give this one a directory of its own",
                directory=str(directory),
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
                return True
        self._file.close()
        return False

    def release(self) -> None:
        made, self._made = self._made, []
        try:
            with contextlib.suppress(OSError):
                if made and [p.name for p in self._path.parent.iterdir()] == ["lock"]:
                    self._path.unlink()
                    for directory in made:
                        directory.rmdir()
        finally:
            self._file.close()


class Journal:
    """The newest segment, open for appending by the driver of one generation.

    `still_mine` raises when there is a newer one. It is asked after every write and before the
    caller can act on it: what it lets pass, a newer driver will have read.
    """

    def __init__(self, store: Store, still_mine: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._still_mine = still_mine
        self._segment: Growing | None = None
        self._number = 0

    def read(self) -> tuple[Head, list[SliceRecord]] | None:
        """The newest segment's head and slices; None for a new directory. What came late is told
        as if it had been there when the head was written: files with their slices, and in `behind`
        of the head what is lacked at the end."""
        segments = self._segments()
        if not segments:
            return None
        name = segments[max(segments)]
        newest = self._store.where(name)
        lines = (self._store.read_grown(name) or b"").split(b"\n")
        # Only the line that was being written may be torn: the last one with anything on it.
        while lines and not lines[-1]:
            lines.pop()
        records = [
            _parse(line, newest, i, last=i == len(lines) - 1) for i, line in enumerate(lines)
        ]
        found = [r for r in records if r is not None]
        if not found:
            raise StorageError(
                f"the journal {newest} is empty; restore the directory from a copy, or start "
                "with a new checkpoint directory",
                path=newest,
            )
        check_format(newest, found[0].get("format"), *READ)
        head = Head.from_json(found[0])
        return _told(head, found[1:], newest)

    def begin(self, head: Head) -> None:
        """Start a new segment, which replaces all older ones."""
        mine = head.generation, self._number + 1
        name = f"{DIRECTORY}/{mine[0]}-{mine[1]}.jsonl"
        if self._store.create(name, [_line(head.to_json())]) is None:
            raise StorageError(
                f"{self._store.where(name)} is there already, though only this driver writes it; "
                "look for who else uses the directory",
                path=self._store.where(name),
            )
        self._still_mine()
        self.close()
        self._segment = self._store.grow(name)
        self._number += 1
        segments = self._segments()
        for old in sorted(s for s in segments if s < mine)[:-1]:
            self._store.delete(segments[old])

    def _segments(self) -> dict[tuple[int, int], str]:
        """By generation and number. Before names had a generation, all were numbered in one."""
        found = {}
        for name in self._store.names(DIRECTORY):
            stem, _, suffix = name.rpartition(".")
            generation, _, number = stem.rpartition("-")
            if suffix == "jsonl" and number.isdecimal() and (generation or "0").isdecimal():
                found[int(generation or 0), int(number)] = f"{DIRECTORY}/{name}"
        return found

    def append(self, happened: SliceRecord | Late) -> None:
        """Make a slice have happened, or chains have made up for one: durable when this
        returns."""
        assert self._segment is not None
        self._segment.add(_line(happened.to_json()))
        self._still_mine()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()


def _told(
    head: Head, lines: Sequence[Mapping[str, Any]], path: str
) -> tuple[Head, list[SliceRecord]]:
    """The head and the slices after it, with all that the lines say."""
    slices = [*head.slices, *(SliceRecord.from_json(r) for r in lines if LATE not in r)]
    _check_order(slices, path)
    records, later = {s.number: s for s in slices}, iter(slices[len(head.slices) :])
    behind = Behind(head.behind, newest_of(head, ()))
    for line in lines:
        if LATE not in line:
            behind.happened(next(later))
            continue
        late = Late.from_json(line)
        if late.slice not in records or late.slice > behind.newest:
            raise StorageError(
                f"the journal {path} says that {', '.join(late.chains)} made up for slice "
                f"{late.slice}, which it does not have; restore the directory from a copy, or "
                "start with a new checkpoint directory",
                path=path,
            )
        records[late.slice] = records[late.slice].with_late(late)
        behind.made_up(late)
    told = tuple(records.values())
    first = len(head.slices)
    return replace(head, slices=told[:first], behind=behind.chains), list(told[first:])


def newest_of(head: Head, slices: Sequence[SliceRecord]) -> int:
    """The number of the newest slice that has happened."""
    records = slices or head.slices
    return records[-1].number if records else head.cut.slice if head.cut else 0


def _check_order(slices: Sequence[SliceRecord], path: str) -> None:
    for before, after in pairwise(slices):
        if after.number != before.number + 1:
            raise StorageError(
                f"the journal {path} has slice {after.number} after slice {before.number}; "
                "restore the directory from a copy, or start with a new checkpoint directory",
                path=path,
            )


def _line(data: Mapping[str, Any]) -> bytes:
    body = json.dumps(data, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(line: bytes, path: str, number: int, last: bool) -> dict[str, Any] | None:
    crc, _, body = line.partition(b" ")
    if crc == b"%08x" % zlib.crc32(body):
        parsed: dict[str, Any] = json.loads(body)
        return parsed
    if last and number > 0:
        return None  # torn by a crash while it was written
    raise StorageError(
        f"the journal {path} is damaged at line {number + 1}; restore the directory from a copy, "
        "or start with a new checkpoint directory",
        path=path,
    )
