"""What a node has of the slice, or the recovery, in hand: what it will report, what has arrived."""

from __future__ import annotations

from typing import Any, Generic

from anabranch.model.ids import PartitionId
from anabranch.model.reports import Failure, PartitionReport, SourceReport, Staged
from anabranch.node.protocol.carried import R
from anabranch.node.protocol.exchange import Inbox, SideFacts


class SliceNotes:
    """Kept from the first wave to the last, and repeated when asked for again."""

    def __init__(self, slice_no: int, restore_s: float = 0.0) -> None:
        self.slice = slice_no
        self.partitions: dict[PartitionId, PartitionReport] = {}
        self.incomplete: dict[PartitionId, str] = {}
        self.not_hosted: dict[PartitionId, None] = {}
        self.failures: dict[tuple[str, str], Failure] = {}
        self.sources: dict[int, SourceReport] = {}
        self.staged: dict[tuple[str, str, int | None], Staged] = {}
        self.replayed: dict[tuple[int, int], Any] = {}
        self.restore_s = restore_s

    def forget(self, partition: PartitionId) -> None:
        """A wave that is run again answers anew for its partitions."""
        self.incomplete.pop(partition, None)
        self.not_hosted.pop(partition, None)
        self.failures = {k: f for k, f in self.failures.items() if k[0] != str(partition)}

    def take(self, facts: SideFacts) -> None:
        """What source tasks have to say."""
        self.sources.update((s.partition, s) for s in facts.sources)
        self.staged.update(((s.sink, s.writer, s.slice), s) for s in facts.staged)
        self.failed(*facts.failures)
        self.replayed.update(facts.replayed)

    def failed(self, *failures: Failure) -> None:
        self.failures.update(((f.where, f.operator), f) for f in failures)

    @property
    def problems(self) -> bool:
        return bool(self.incomplete or self.not_hosted or self.failures)


class Hand(Generic[R]):
    """A slice's or a recovery's."""

    def __init__(self) -> None:
        self.notes = SliceNotes(0)
        self.inbox: Inbox[R] = Inbox()
