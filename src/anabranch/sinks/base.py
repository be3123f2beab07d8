"""What a sink is: rows leave in two steps, whole slices at a time.

Where rows are made, `stage` puts them aside, out of every reader's sight; the driver journals the
slice with the names of what was staged and then calls `expose`, which may be repeated: a crash
between the two is mended by exposing the newest journalled slice again at the next start.

A start is `bind`, `look`, `check`, `take_over`, `expose` of the newest journalled slice, `begin`.
A sink whose rows are still to be made up for stays behind the journal: to it, the newest slice is
the last that is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from anabranch.errors import ConfigError
from anabranch.model.reports import Staged
from anabranch.model.slices import SliceRecord
from anabranch.operators.rows.failing import Refused
from anabranch.sinks.notes import exposure_of, read_note
from anabranch.storage.identity import Identity
from anabranch.storage.local import LocalStore
from anabranch.storage.store import Store


@dataclass(frozen=True)
class Home:
    """Whose sink it is and what it may use. The session stays on the driver."""

    job: str
    sink: str
    root: Path  # the job's checkpoint directory, under the same path on nodes and driver
    spark: Any = None
    puts_aside: bool = False  # rows it cannot take become dead letters

    def __reduce__(self) -> tuple[Any, ...]:
        return Home, (self.job, self.sink, self.root, None, self.puts_aside)

    @property
    def store(self) -> Store:
        return LocalStore(self.root)

    @property
    def app_id(self) -> str:
        """Under this name a table remembers the sink. Names have no slash."""
        return f"anabranch/{self.job}/{self.sink}"


class Sink:
    """What `Stream.to` takes. A subclass stages and exposes; the rest it may leave as it is."""

    # Whether `expose` can still find rows after a restart, from the names in the journal.
    durable: ClassVar[bool] = True
    # Whether it can tell the rows it cannot take from the others.
    tells_rows: ClassVar[bool] = False

    @property
    def target(self) -> str:
        """Where rows go, for people; never a secret."""
        return ""

    def bind(self, home: Home) -> None:
        """Before anything else, on the driver; what nodes get is a copy made after it."""

    def look(self, job: Identity, newest: int) -> None:
        """Refuse, before Spark is started, a target that cannot be reached or that `take_over`
        would refuse, as far as that can be told without the rows' schema; change nothing."""

    def check(self, schema: pa.Schema) -> None:
        """Refuse, before the first slice, rows this sink cannot take."""

    def refused(self, table: pa.Table) -> list[Refused]:
        """The rows that must not be staged, where the sink puts them aside."""
        return []

    def take_over(self, job: Identity, generation: int, newest: int) -> None:
        """At a start, on the driver, before anything is exposed or removed. `generation` is this
        driver's, `newest` the slice with which the job's journal ends for this sink (0: a new one).

        Refuses a target that holds another job's slices, or later ones of this job than its
        journal knows. No other driver on the job's checkpoint directory ever has the same
        generation, and a newer one has a greater. An older one that has lost its lock may still be
        in the middle of an `expose` or a `begin`, of slices that this one knows, too: from here on
        what it does late must change nothing, nor remove what this one has staged.
        """

    def stage(
        self, name: str, table: pa.Table, slice_no: int, generation: int, writer: str
    ) -> Staged:
        """Put rows aside; runs on nodes and in source tasks. `generation` is the driver's."""
        raise NotImplementedError

    def expose(
        self, slice_no: int, files: Iterable[str], staged: Iterable[Staged]
    ) -> pa.Table | None:
        """Let readers see the slice; runs on the driver. `files` are those that the journal names;
        `staged` has the rows that the driver holds, and after a restart none but those it has
        staged itself since.

        Returns the rows that the target refused, as dead letters, also when it had the slice
        already.
        """
        raise NotImplementedError

    def begin(self, keep: Collection[str] = ()) -> None:
        """The newest slice is shown: remove what earlier generations staged and never exposed, but
        for the files to `keep`, which the journal names for slices that are shown later."""

    def close(self) -> None:
        """The run has ended: let go of connections."""


def refuse_lost_slices(
    records: Sequence[SliceRecord],
    shown: Mapping[str, int],
    sinks: Mapping[str, Sink],
    store: Store,
) -> None:
    """At a start, before anything is exposed again: what is still to be shown must have a sink to
    go to. `shown` says of sinks up to which slice they are; the newest one, if nothing."""
    newest = records[-1].number if records else 0
    for record in records:
        due = {n: f for n, f in record.staged.items() if record.number >= shown.get(n, newest)}
        refuse_lost_slice(replace(record, staged=due), sinks, store)


def refuse_lost_slice(record: SliceRecord, sinks: Mapping[str, Sink], store: Store) -> None:
    """At a start, before the newest slice is exposed again: its rows must have a sink to go to.

    Sinks note what they have shown, and remove staged files after that.
    """
    for name, files in record.staged.items():
        if name in sinks and sinks[name].durable:
            continue
        note = read_note(store, name)
        if note is not None and note.tells_of(record.number, exposure_of(record.number, files)):
            continue
        if any(store.has(f) for f in files):
            now = "no longer has it" if name not in sinks else "has another kind of sink there"
            raise ConfigError(
                f"slice {record.number} has rows for the sink {name!r} that were not exposed when "
                f"the job ended, and the topology {now}; start once with the sink as it was and "
                "stop, then change it",
                sink=name,
                slice=record.number,
            )
