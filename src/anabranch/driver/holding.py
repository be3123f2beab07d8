"""The checkpoint directory as one driver's own: the generation it has claimed and the journal.

Whatever is written or shown is written by the newest driver: `check` refuses to go on where a
newer one has taken over, and what goes wrong for one that was replaced has that as its reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from anabranch.control.settings import Past
from anabranch.driver import notes
from anabranch.errors import AnabranchError
from anabranch.model.behind import Behind
from anabranch.model.commands import WriteHead
from anabranch.model.slices import Late, SliceRecord
from anabranch.storage.generations import Generation
from anabranch.storage.journal import Head, Journal
from anabranch.storage.store import Store
from anabranch.upgrade.going_on import continue_from


class Holding:
    """Taken over when it is made. `past` is what the runs before have journalled; the state of
    operators that are `dropped` is given up."""

    def __init__(
        self, store: Store, fingerprint: Mapping[str, Any], dropped: Collection[str] = ()
    ) -> None:
        self.store = store
        self._fingerprint = fingerprint
        self._journal = Journal(store, self.check)
        before_claim = self._journal.read()
        self._generation = Generation.claim(
            store, before_claim[0].generation if before_claim else 0
        )
        self.generation = self._generation.number
        try:
            self.past = self._resume(dropped)
        except BaseException:
            self.close()
            raise
        self.confirmed = self.past.slices[-1].number if self.past.slices else 0  # newest journalled
        self.behind = Behind(self.past.behind, self.confirmed)  # as the journal says by now

    def _resume(self, dropped: Collection[str]) -> Past:
        past = Past(generation=self.generation)
        found = self._journal.read()  # once more: nothing that is written from here on counts
        if found is not None:
            head, slices = continue_from(self.store, *found, self._fingerprint, dropped)
            before: Mapping[str, int] = head.fingerprint["parallelism"]
            declared: Mapping[str, int] = self._fingerprint["parallelism"]
            past = Past(
                cut=head.cut,
                previous=head.previous,
                slices=(*head.slices, *slices),
                epochs=head.epochs,
                groups=head.groups,
                layouts=head.layouts,
                rescaled=frozenset(c for c in declared if before.get(c) != declared[c]),
                placement_version=head.placement_version,
                generation=self.generation,
                autoscaler=self._autoscaler_memory(),
                older=head.older,
                behind=head.behind,
                costs=head.costs,
            )
            # From here on an older driver's journal is not read by anybody, whatever becomes of
            # this one; only now may sinks and storage be touched.
            read, after = found
            self._journal.begin(
                replace(read, generation=self.generation, slices=(*read.slices, *after))
            )
        with self.as_owner():
            self._generation.clean_up()
        return past

    def _autoscaler_memory(self) -> Mapping[str, Any]:
        """As the newest run before has left it; this one's, too, from now on."""
        memory = notes.autoscaler_memory(self.store)
        if memory:
            self.remember(memory)
        return memory

    def check(self) -> None:
        """Refuse to go on where a newer driver has taken over."""
        self._generation.check()

    @contextlib.contextmanager
    def as_owner(self) -> Iterator[None]:
        """Whatever goes wrong for a driver that was replaced, that is the reason."""
        try:
            yield
        except AnabranchError:
            self.check()
            raise

    def write_slice(self, record: SliceRecord) -> None:
        """From here on it has happened."""
        self._journal.append(record)
        self.confirmed = record.number
        self.behind.happened(record)

    def write_late(self, late: Late) -> None:
        """From here on chains have made up for a slice; what they staged for it is its own."""
        self._journal.append(late)
        self.behind.made_up(late)

    def write_head(self, command: WriteHead) -> None:
        """Begin a new segment of the journal."""
        self._journal.begin(
            Head(
                generation=self.generation,
                fingerprint=self._fingerprint,
                cut=command.cut,
                previous=command.previous,
                slices=command.slices,
                epochs=command.epochs,
                groups=command.layout,
                layouts=command.layouts,
                placement_version=command.placement.version,
                older=command.older,
                behind=command.behind,
                costs=command.costs,
            )
        )
        self.behind = Behind(command.behind, self.confirmed)

    def remember(self, memory: Mapping[str, Any]) -> None:
        """What the autoscaler knows, for the next run."""
        notes.remember(self.store, self.generation, memory)

    def close(self) -> None:
        self._journal.close()
