"""Checkpoint coordination: when to seal, when a cut is complete, what may be deleted.

All partitions seal at the same slice (a punctuation is a slice boundary), one cut at a time. A
cut exists once every partition's file for that slice is durable. The last two cuts are kept, so
that a torn newest file can be skipped; storage is trimmed to the older one.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.model.ids import PartitionId
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
        self._last_seal_ms: int | None = None

    @property
    def in_flight(self) -> bool:
        return self._sealed is not None

    def is_due(self, now_ms: int) -> bool:
        """Is it time to seal? The interval starts with the first slice."""
        if self._last_seal_ms is None:
            self._last_seal_ms = now_ms
        return not self.in_flight and now_ms - self._last_seal_ms >= self._interval_ms

    def sealed(self, slice_no: int, epochs: dict[PartitionId, int], now_ms: int) -> None:
        """Every partition sealed at `slice_no`; wait for their files."""
        self._sealed = slice_no
        self._missing = dict(epochs)
        self._last_seal_ms = now_ms
        known = self.cut.files if self.cut else {}
        self._files = {partition_key(p): list(known.get(partition_key(p), [])) for p in epochs}

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
        self.previous, self.cut = self.cut, Cut(self._sealed, self._files)
        self._sealed = None
        return self.cut

    @property
    def trim_below(self) -> int:
        """Slices up to the older cut are never replayed again."""
        return self.previous.slice + 1 if self.previous else 0

    @property
    def keep_files(self) -> frozenset[str]:
        cuts = [c for c in (self.cut, self.previous) if c]
        return frozenset(f for c in cuts for files in c.files.values() for f in files)
