"""Checkpoint coordination: when to seal, when a cut is complete, what may be deleted.

All partitions seal at the same slice (a punctuation is a slice boundary), one cut at a time. A
cut exists once every partition's file for that slice is durable. The last two cuts are kept, so
that a torn newest file can be skipped; storage is trimmed to the older one.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.model.ids import PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.reports import CheckpointWritten
from anabranch.model.slices import Cut


def partition_key(partition: PartitionId) -> str:
    return f"{partition.chain}/{partition.index}"


class CheckpointLedger:
    """The owner of what is durable, per partition."""

    def __init__(self, interval_ms: int, cut: Cut | None, previous: Cut | None) -> None:
        self._interval_ms = interval_ms
        self.cut = cut
        self.previous = previous
        self._sealed: int | None = None  # the cut in flight
        self._missing: dict[PartitionId, int] = {}  # … and the epochs it waits for
        self._files: dict[str, list[str]] = {}
        self._groups: dict[str, list[int]] = {}
        self._last_seal_ms: int | None = None

    @property
    def in_flight(self) -> bool:
        return self._sealed is not None

    def is_due(self, now_ms: int) -> bool:
        """Is it time to seal? The interval starts with the first slice."""
        if self._last_seal_ms is None:
            self._last_seal_ms = now_ms
        return not self.in_flight and now_ms - self._last_seal_ms >= self._interval_ms

    def sealed(self, slice_no: int, mapping: Mapping, now_ms: int) -> None:
        """Every partition sealed at `slice_no`; wait for their files."""
        self._sealed = slice_no
        self._missing = {p: o.epoch for p, o in mapping.owners.items()}
        self._last_seal_ms = now_ms
        known = self.cut.files if self.cut else {}
        keys = [partition_key(p) for p in self._missing]
        self._files = {k: list(known.get(k, [])) for k in keys}
        self._groups = {c: list(g) for c, g in mapping.groups.items()}

    def written(self, reports: Iterable[CheckpointWritten]) -> Cut | None:
        """Take in written files; the new cut, when this completes it."""
        for report in reports:
            if report.slice != self._sealed or self._missing.get(report.partition) != report.epoch:
                continue  # late, repeated, or from an owner that was replaced
            key = partition_key(report.partition)
            self._files[key] = ([] if report.full else self._files[key]) + [report.path]
            del self._missing[report.partition]
        if self._sealed is None or self._missing:
            return None
        self.previous, self.cut = self.cut, Cut(self._sealed, self._files, self._groups)
        self._sealed = None
        return self.cut

    def fall_back(self) -> None:
        """The newest cut cannot be read: the one before it, or the beginning, takes its place."""
        self.cut, self.previous = self.previous, None

    @property
    def replay_from(self) -> int:
        """Slices below are never replayed again, not even when the newest cut is unreadable."""
        return self.previous.slice + 1 if self.previous else 1

    @property
    def keep_files(self) -> frozenset[str]:
        cuts = [c for c in (self.cut, self.previous) if c]
        return frozenset(f for c in cuts for files in c.files.values() for f in files)
