"""Sinks as a run has them: taken over when it starts, shown one journalled slice after the other.

Rows that targets refuse go to the sink of dead letters, which is therefore shown last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from anabranch.driver.holding import Holding
from anabranch.errors import AnabranchError, StorageError
from anabranch.model.reports import Staged
from anabranch.model.slices import SliceRecord
from anabranch.sinks import Sink, refuse_lost_slice
from anabranch.storage.identity import Identity


class Showing:
    """All sinks of a run."""

    def __init__(
        self, sinks: Mapping[str, Sink], holding: Holding, dead_letters: str | None = None
    ) -> None:
        self._sinks = sinks
        self._holding = holding
        self._dead_letters = dead_letters

    def take_over(self, job: Identity) -> None:
        """A crash between journal and sink leaves the newest slice unexposed: show it now."""
        slices = self._holding.past.slices
        newest = slices[-1] if slices else None
        with self._holding.as_owner():
            if newest is not None:
                refuse_lost_slice(newest, self._sinks, self._holding.store)
            for sink in self._sinks.values():
                sink.take_over(job, self._holding.generation, newest.number if newest else 0)
            if newest is not None:
                self.show(newest, ())
            for sink in self._sinks.values():
                self._holding.check()
                sink.begin()

    def show(self, record: SliceRecord, staged: Sequence[Staged]) -> dict[str, int]:
        """Let readers see a slice; how many rows each target refused."""
        refused: dict[str, pa.Table] = {}
        for name in sorted(self._sinks, key=lambda n: n == self._dead_letters):
            sink = self._sinks[name]
            mine = [s for s in staged if s.sink == name]
            if name == self._dead_letters and refused:
                rows = pa.concat_tables(refused.values())
                mine.append(
                    sink.stage(name, rows, record.number, self._holding.generation, "driver")
                )
            self._holding.check()
            letters = _shown(sink, name, record.number, record.staged.get(name, []), mine)
            if letters is not None:
                refused[name] = letters
        return {name: letters.num_rows for name, letters in refused.items()}

    def close(self) -> None:
        for sink in self._sinks.values():
            sink.close()


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
