"""Sinks as a run has them: taken over when it starts, shown one journalled slice after the other.

A sink to which a chain gives rows that waits for nodes is shown its slices later, in the same order
and each of them once. Until then the journal has the names of what others have staged for it, and
rows that came with a report stay here.

Rows that targets refuse go to the sink of dead letters, which is therefore shown last. Where that
one is to show the slice later, they are kept beside the checkpoint:

    <checkpoint>/refused/17/SINK.parquet

They are written before the next slice is shown, while the target can still tell them again, and
removed when the sink of dead letters has shown theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.driver.holding import Holding
from anabranch.errors import AnabranchError, StorageError
from anabranch.model.reports import Staged
from anabranch.model.slices import SliceRecord, order_of
from anabranch.operators.rows.failing import LETTERS
from anabranch.sinks import Sink, refuse_lost_slices
from anabranch.storage.identity import Identity

REFUSED = "refused"


class Showing:
    """All sinks of a run; `feeds` are the chains in nodes that give each of them rows."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        holding: Holding,
        feeds: Mapping[str, Collection[str]],
        dead_letters: str | None = None,
    ) -> None:
        self._sinks = sinks
        self._holding = holding
        self._feeds = feeds
        self._dead_letters = dead_letters
        # By sink and slice, then by writer: rows that no file has.
        self._kept: dict[tuple[str, int], dict[str, Staged]] = {}
        self._letters = {int(n) for n in holding.store.names(REFUSED) if n.isdecimal()}

    def shown(self, sink: str) -> int:
        """The newest slice that the sink is to have shown, as the journal says by now."""
        return self._holding.behind.shown(self._feeds.get(sink, ()))

    def take_over(self, job: Identity) -> None:
        """A crash between journal and sink leaves the newest slice unexposed, or the newest that
        chains have made up for: show it now."""
        slices, shown = self._holding.past.slices, {n: self.shown(n) for n in self._sinks}
        records = {r.number: r for r in slices}
        with self._holding.as_owner():
            refuse_lost_slices(slices, shown, self._sinks, self._holding.store)
            for name, sink in self._sinks.items():
                sink.take_over(job, self._holding.generation, shown[name])
            self._show({n: records[k] for n, k in shown.items() if k in records}, ())
            for name, sink in self._sinks.items():
                self._holding.check()
                later = (r.staged.get(name, ()) for r in slices if r.number > shown[name])
                sink.begin([file for files in later for file in files])

    def show(self, record: SliceRecord, staged: Sequence[Staged]) -> dict[str, int]:
        """Let readers see a slice, but for what waiting chains still owe; how many rows each
        target refused."""
        waiting = set(record.paused)
        now = {n for n in self._sinks if not waiting.intersection(self._feeds.get(n, ()))}
        return self._shown_by(now, record, staged)

    def show_late(
        self, record: SliceRecord, sinks: Collection[str], staged: Sequence[Staged]
    ) -> dict[str, int]:
        """Let readers of these sinks see a slice that happened before. What has come for others
        is kept until theirs is complete."""
        return self._shown_by(sinks, record, staged)

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()

    def _shown_by(
        self, sinks: Collection[str], record: SliceRecord, staged: Sequence[Staged]
    ) -> dict[str, int]:
        for rows in staged:
            number = record.number if rows.slice is None else rows.slice
            if rows.data is not None:
                self._kept.setdefault((rows.sink, number), {})[rows.writer] = rows
        files = [s for s in staged if s.data is None and s.sink in sinks]
        return self._show(dict.fromkeys(sinks, record), files)

    def _show(self, due: Mapping[str, SliceRecord], files: Sequence[Staged]) -> dict[str, int]:
        """Expose a slice in each of these sinks; what targets refuse is shown or kept."""
        refused: dict[str, pa.Table] = {}
        dead = due.get(self._dead_letters) if self._dead_letters is not None else None
        for name in sorted(due, key=lambda n: n == self._dead_letters):
            sink, number = self._sinks[name], due[name].number
            kept = self._kept.pop((name, number), {})
            mine = [s for s in files if s.sink == name]
            mine += sorted(kept.values(), key=lambda s: order_of(s.writer))
            if name == self._dead_letters:
                mine += self._stage_letters(sink, number, refused)
            self._holding.check()
            letters = _shown(sink, name, number, due[name].staged.get(name, []), mine)
            if name == self._dead_letters:
                self._forget_letters(number)
            if letters is not None:
                refused[name] = letters
                if dead is None or dead.number < number:
                    self._keep_letters(name, number, letters)
        return {name: letters.num_rows for name, letters in refused.items()}

    # -- dead letters that are shown later -----------------------------------------------------

    def _stage_letters(
        self, sink: Sink, number: int, refused: Mapping[str, pa.Table]
    ) -> list[Staged]:
        """What targets refused of the slice: some when they had it, some just now."""
        assert self._dead_letters is not None
        found = {**self._kept_letters(number), **_of_slice(refused, number)}
        if not found:
            return []
        rows = pa.concat_tables([found[name] for name in sorted(found)])
        generation = self._holding.generation
        return [sink.stage(self._dead_letters, rows, number, generation, "driver")]

    def _keep_letters(self, sink: str, number: int, letters: pa.Table) -> None:
        if self._dead_letters is None:
            return
        out = pa.BufferOutputStream()
        pq.write_table(letters, out)
        self._holding.check()
        self._holding.store.put(f"{REFUSED}/{number}/{sink}.parquet", [out.getvalue()])
        self._letters.add(number)

    def _kept_letters(self, number: int) -> dict[str, pa.Table]:
        store, below = self._holding.store, f"{REFUSED}/{number}"
        found = {}
        for file in store.names(below) if number in self._letters else ():
            if not file.startswith("."):
                data = store.read(f"{below}/{file}")
                found[PurePosixPath(file).stem] = _decoded(data, store.where(f"{below}/{file}"))
        return found

    def _forget_letters(self, number: int) -> None:
        """The sink of dead letters has shown all slices up to this one."""
        for shown in sorted(n for n in self._letters if n <= number):
            self._holding.check()
            self._holding.store.delete(f"{REFUSED}/{shown}")
            self._letters.discard(shown)


def _of_slice(refused: Mapping[str, pa.Table], number: int) -> dict[str, pa.Table]:
    """At a start, sinks show slices of several numbers."""
    return {n: t for n, t in refused.items() if t.column("slice_number")[0].as_py() == number}


def _decoded(data: bytes | None, path: str) -> pa.Table:
    try:
        return pq.read_table(pa.BufferReader(data or b""), schema=LETTERS)
    except pa.ArrowException as e:
        raise StorageError(
            f"{path}, which has rows that a sink refused, is damaged: {e}; restore it from a copy",
            path=path,
        ) from e


def _shown(
    sink: Sink, name: str, number: int, files: Sequence[str], staged: Sequence[Staged]
) -> pa.Table | None:
    """Expose a slice; what a sink raises that is not ours becomes a sentence."""
    try:
        return sink.expose(number, files, staged)
    except AnabranchError:
        raise
    except Exception as e:
        raise StorageError(
            f"the sink {name!r} could not show slice {number}: {type(e).__name__}: {e}; start the "
            "job again with the same checkpoint directory, nothing committed is lost",
            sink=name,
            slice=number,
        ) from e
