"""Checkpoint coordination: when to seal, when a cut is complete, what may be deleted.

All partitions seal at the same slice (a punctuation is a slice boundary), one cut at a time. A
cut exists once every partition's file for that slice is durable. The last two cuts are kept, so
that a torn newest file can be skipped; storage is trimmed to the older one.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.model.ids import PartitionId
from anabranch.model.placement import Placement
from anabranch.model.reports import CheckpointWritten
from anabranch.model.slices import Cut


def partition_key(partition: PartitionId) -> str:
    return f"{partition.chain}/{partition.index}"


class CheckpointLedger:
    """The owner of what is durable, per partition.

    A partition's files form a chain: a full one, then deltas. A file belongs to it also when the
    cut it was sealed for was given up, because the next delta begins where it ended. A node repeats
    only its newest reports, so one may never be heard of: what comes after it does not count, and
    the next checkpoint has to be a full one.
    """

    def __init__(self, interval_ms: int, cut: Cut | None, previous: Cut | None) -> None:
        self._interval_ms = interval_ms
        self.cut = cut
        self.previous = previous
        self.epochs: dict[PartitionId, int] = {}  # of owners whose files count
        self._chains: dict[PartitionId, list[str]] = {}
        self._newest: dict[PartitionId, int] = {}  # slice up to which a chain goes
        self._broken: set[PartitionId] = set()  # chains that need a full file to go on
        self._sealed: int | None = None  # the cut in flight
        self._missing: set[PartitionId] = set()
        self._files: dict[str, list[str]] = {}
        self._groups: dict[str, list[int]] = {}
        self._last_seal_ms: int | None = None

    @property
    def in_flight(self) -> bool:
        return self._sealed is not None

    @property
    def sealed_slice(self) -> int | None:
        """The slice of the cut in flight."""
        return self._sealed

    @property
    def whole(self) -> bool:
        """Has every partition a full file of its own by now? The next ones will be deltas."""
        return not self._broken and all(self._chains.get(p) for p in self.epochs)

    @property
    def broken(self) -> bool:
        """Must the next checkpoint have the whole state?"""
        return bool(self._broken)

    @property
    def cut_slice(self) -> int:
        return self.cut.slice if self.cut else 0

    def is_due(self, now_ms: int) -> bool:
        """Is it time to seal? The interval starts with the first slice."""
        if self._last_seal_ms is None:
            self._last_seal_ms = now_ms
        return not self.in_flight and now_ms - self._last_seal_ms >= self._interval_ms

    def installed(self, partitions: Iterable[PartitionId], placement: Placement) -> None:
        """These partitions have new owners, which begin with a full checkpoint. A cut that still
        waits for one of them is given up; the next one is due at once."""
        for partition in partitions:
            self._chains[partition], self._newest[partition] = [], 0
            self._broken.discard(partition)
            if partition in self._missing:
                self._give_up()
        self.epochs = {p: o.epoch for p, o in placement.owners.items()}
        self._broken &= self.epochs.keys()

    def _give_up(self) -> None:
        """The cut in flight will never be complete."""
        self._sealed, self._missing = None, set()
        self._last_seal_ms = (self._last_seal_ms or 0) - self._interval_ms

    def sealed(self, slice_no: int, placement: Placement, now_ms: int) -> None:
        """Every partition sealed at `slice_no`; wait for their files."""
        self._sealed = slice_no
        self._last_seal_ms = now_ms
        self._groups = {c: list(g) for c, g in placement.groups.items()}
        self._missing = set(self.epochs)
        self._files = {}
        for partition in self.epochs:
            if self._newest.get(partition) == slice_no:  # reported before the slice was run again
                self._has_file(partition)

    def _has_file(self, partition: PartitionId) -> None:
        self._missing.discard(partition)
        self._files[partition_key(partition)] = list(self._chains[partition])

    def written(self, reports: Iterable[CheckpointWritten]) -> Cut | None:
        """Take in written files; the new cut, when this completes it."""
        for report in sorted(reports, key=lambda r: r.slice):
            partition = report.partition
            if (
                self.epochs.get(partition) != report.epoch
                or report.slice <= self._newest[partition]
            ):
                continue  # from an owner that was replaced, or repeated
            if report.full:
                self._chains[partition] = []
                self._broken.discard(partition)
            elif report.after != self._newest[partition]:
                self._broken.add(partition)  # what lies between was never heard of
                if report.slice == self._sealed:
                    self._give_up()
                continue
            if report.path is not None:
                self._chains[partition] = [*self._chains[partition], report.path]
            self._newest[partition] = report.slice
            if report.slice == self._sealed:
                self._has_file(partition)
        if self._sealed is None or self._missing:
            return None
        self.previous, self.cut = self.cut, Cut(self._sealed, self._files, self._groups)
        self._sealed = None
        return self.cut

    def fall_back(self) -> None:
        """The newest cut cannot be read: the one before it, or the beginning, takes its place. A
        cut in flight is given up: what cannot be read may be one of its files, too."""
        self.cut, self.previous = self.previous, None
        if self.in_flight:
            self._give_up()

    @property
    def replay_from(self) -> int:
        """Slices below are never replayed again, not even when the newest cut is unreadable."""
        return self.previous.slice + 1 if self.previous else 1

    @property
    def keep_files(self) -> frozenset[str]:
        cuts = [c for c in (self.cut, self.previous) if c]
        return frozenset(f for c in cuts for files in c.files.values() for f in files)
