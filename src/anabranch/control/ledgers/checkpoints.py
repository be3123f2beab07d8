"""Checkpoint coordination: when to seal, when a cut is complete, what may be deleted.

All partitions seal at the same slice (a punctuation is a slice boundary), one cut at a time. A
cut exists once every partition's file for that slice is durable. The last two cuts are kept, so
that a torn newest file can be skipped; storage is trimmed to the older one.

Chains that wait do not seal: a cut that is taken meanwhile does not cover them. For every chain the
last two cuts that cover it are kept, whole, because what is above it begins there with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

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

    def __init__(
        self,
        interval_ms: int,
        cut: Cut | None,
        previous: Cut | None,
        older: Iterable[Cut] = (),
    ) -> None:
        self._interval_ms = interval_ms
        self.cuts = [c for c in (cut, previous, *older) if c is not None]  # the newest first
        self.epochs: dict[PartitionId, int] = {}  # of owners whose files count
        self._chains: dict[PartitionId, list[str]] = {}
        self._newest: dict[PartitionId, int] = {}  # slice up to which a chain goes
        self._broken: set[PartitionId] = set()  # chains that need a full file to go on
        self._sealed: int | None = None  # the cut in flight
        self._missing: set[PartitionId] = set()
        self._files: dict[str, list[str]] = {}
        self._groups: dict[str, list[int]] = {}
        self._all_groups: dict[str, list[int]] = {}  # of chains that wait, too
        self._last_seal_ms: int | None = None

    @property
    def cut(self) -> Cut | None:
        return self.cuts[0] if self.cuts else None

    @property
    def previous(self) -> Cut | None:
        return self.cuts[1] if len(self.cuts) > 1 else None

    def covering(self, chain: str) -> Cut | None:
        """The newest cut that a chain can begin with; None: only the beginning will do."""
        return next(iter(self._covering(chain)), None)

    def covering_all(self, chains: Iterable[str]) -> Cut | None:
        """The newest cut that all of these can begin with together."""
        found = [self._covering(c) for c in chains]
        return next((cut for cut in self.cuts if all(cut in cuts for cuts in found)), None)

    def _covering(self, chain: str) -> list[Cut]:
        """The newest first. A chain that is in none is new: all of them found it empty."""
        found = [c for c in self.cuts if chain in c.groups]
        return found or list(self.cuts)

    @property
    def in_flight(self) -> bool:
        return self._sealed is not None

    @property
    def sealed_slice(self) -> int | None:
        """The slice of the cut in flight."""
        return self._sealed

    @property
    def whole(self) -> bool:
        """Has every partition a full file of its own by now, and is it in the newest cut? The next
        ones will be deltas."""
        covered = all(self.covering(p.chain) is self.cut for p in self.epochs)
        return covered and not self._broken and all(self._chains.get(p) for p in self.epochs)

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
        if self._missing - placement.owners.keys():
            self._give_up()
        self.epochs = {p: o.epoch for p, o in placement.owners.items()}
        self._broken &= self.epochs.keys()

    def _give_up(self) -> None:
        """The cut in flight will never be complete."""
        self._sealed, self._missing = None, set()
        self._last_seal_ms = (self._last_seal_ms or 0) - self._interval_ms

    def sealed(
        self, slice_no: int, placement: Placement, now_ms: int, paused: Collection[str] = ()
    ) -> None:
        """Every partition sealed at `slice_no`, but for those of `paused` chains; wait for their
        files."""
        self._sealed = slice_no
        self._last_seal_ms = now_ms
        self._all_groups = {c: list(g) for c, g in placement.groups.items()}
        self._groups = {c: g for c, g in self._all_groups.items() if c not in paused}
        self._missing = {p for p in self.epochs if p.chain not in paused}
        self._files = {}
        for partition in list(self._missing):
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
        if not self.cuts and self._groups != self._all_groups:
            # For the chains that wait, there is none but the beginning.
            self.cuts.append(Cut(0, {}, self._all_groups))
        cut = Cut(self._sealed, self._files, self._groups)
        self.cuts.insert(0, cut)
        chains = self._all_groups or {""}
        kept = {c.slice for chain in chains for c in self._covering(chain)[:2]}
        self.cuts = [c for c in self.cuts if c.slice in kept]
        self._sealed = None
        return cut

    def fall_back(self, upto: int | None = None) -> None:
        """The newest cut, or the one at the slice `upto`, cannot be read: the one before it, or the
        beginning, takes its place. A cut in flight is given up: what cannot be read may be one of
        its files, too."""
        torn = self.cut_slice if upto is None else upto
        found = [c for c in self.cuts if c.slice == torn]
        self.cuts = [c for c in self.cuts if c.slice != torn]
        left = {chain for c in self.cuts for chain in c.groups}
        for cut in found:
            if self.cuts and not cut.groups.keys() <= left:
                # Chains that waited are in none of the newer cuts, and yet they are not new.
                self.cuts.append(Cut(0, {}, cut.groups))
        if self.in_flight:
            self._give_up()

    def back_to_all(self, chains: Iterable[str]) -> None:
        """To the newest cut that covers all of these chains, or to the beginning."""
        some = list(chains)
        while self.cuts and any(self.covering(c) is not self.cuts[0] for c in some):
            self.fall_back()

    @property
    def replay_from(self) -> int:
        """Slices below are never replayed again, not even when a chain's newest cut is torn."""
        chains = {chain for c in self.cuts for chain in c.groups} or {""}
        seconds = [(*self._covering(chain), None, None)[1] for chain in chains]
        return min(c.slice + 1 if c else 1 for c in seconds)

    @property
    def keep_files(self) -> frozenset[str]:
        return frozenset(f for c in self.cuts for files in c.files.values() for f in files)
