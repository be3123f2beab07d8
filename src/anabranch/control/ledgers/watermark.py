"""The watermark: the least, over the sources, of the latest event time minus its delay.

Decided from the batches before, so that a slice's watermark is an input of the slice and the same
in every replay. It never goes back, and it stands still between the slices of one batch: their
rows are in no order, one of the first may be the latest of all.

A source with an idle time-out that has brought no rows for that long does not hold it back. Every
slice that takes a batch, or finds that there is none, looks at all sources; the time between two
of these slices counts, by the steady clock, and the time between two runs does not. If all
sources are idle, the most that any of them allows is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.model.progress import Clocks, Promise
from anabranch.model.slices import SliceRecord


class WatermarkTracker:
    """Folds the event times of finished slices; `delays_us` lists the sources that have one,
    `idle_ms` the time-outs of those that have one."""

    def __init__(
        self, delays_us: Mapping[str, int], idle_ms: Mapping[str, int] | None = None
    ) -> None:
        self._delays_us = dict(delays_us)
        self._idle_ms = dict(idle_ms or {})
        self._latest_us: dict[str, int] = {}
        self._watermark_us: int | None = None
        self._quiet_ms: dict[str, int] = {}
        self._looked_ms: int | None = None  # in this run

    def resume(self, watermark_us: int | None, quiet_ms: Mapping[str, int] | None = None) -> None:
        """Go on from a slice that an earlier run finished."""
        self._raise(watermark_us)
        self._quiet_ms = {s: ms for s, ms in (quiet_ms or {}).items() if s in self._idle_ms}

    def look(self, rows: Mapping[str, int], now_ms: int, anew: bool) -> None:
        """A slice had `rows` of each source; `anew`: it asked the sources for them, and was not fed
        from the log."""
        passed = 0 if self._looked_ms is None or not anew else max(0, now_ms - self._looked_ms)
        for source in self._idle_ms:
            quiet = self._quiet_ms.get(source, 0) + passed
            self._quiet_ms[source] = 0 if rows.get(source) else quiet
        if anew:
            self._looked_ms = now_ms

    def look_is_due(self, now_ms: int) -> bool:
        """Would a look find a source idle that was not, or start its clock in this run?"""
        passed = None if self._looked_ms is None else now_ms - self._looked_ms
        waiting = (s for s in self._idle_ms if not self._is_idle(s))
        return any(
            passed is None or self._quiet_ms.get(s, 0) + passed >= self._idle_ms[s] for s in waiting
        )

    def observe(self, max_time_us: Mapping[str, int], batch_end: bool) -> None:
        """Take in the latest event times of one finished slice."""
        for source, latest in max_time_us.items():
            if source in self._delays_us:
                self._latest_us[source] = max(latest, self._latest_us.get(source, latest))
        if not batch_end:
            return
        known = {s: t - self._delays_us[s] for s, t in self._latest_us.items()}
        active = [s for s in self._delays_us if not self._is_idle(s)]
        if not active:
            self._raise(max(known.values(), default=None))
        elif all(s in known for s in active):
            self._raise(min(known[s] for s in active))

    def _is_idle(self, source: str) -> bool:
        limit = self._idle_ms.get(source)
        return limit is not None and self._quiet_ms.get(source, 0) >= limit

    def _raise(self, watermark_us: int | None) -> None:
        if watermark_us is not None:
            before = self._watermark_us
            self._watermark_us = watermark_us if before is None else max(before, watermark_us)

    @property
    def watermark_us(self) -> int | None:
        return self._watermark_us

    @property
    def latest_us(self) -> Mapping[str, int]:
        """Per source, the latest event time so far: what a restart needs."""
        return dict(self._latest_us)

    @property
    def quiet_ms(self) -> Mapping[str, int]:
        """Per source with a time-out, how long it has brought no rows: what a restart needs."""
        return dict(self._quiet_ms)


class OperatorClocks:
    """The watermarks of operators behind others that emit when time passes (model/progress.py)."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks

    def next(self, watermark_us: int | None, before: SliceRecord | None) -> dict[str, int | None]:
        """Those of the slice after `before`, given the sources' watermark of that slice."""
        return {
            operator: _later(
                self._had(before, operator),
                _least(self._bound(promise, watermark_us, before) for promise in promises),
            )
            for operator, promises in self._clocks.items()
        }

    def _bound(
        self, promise: Promise, watermark_us: int | None, before: SliceRecord | None
    ) -> int | None:
        if promise.operator is None or promise.hold is None:
            return watermark_us
        had = self._had(before, promise.operator)
        return None if had is None else promise.hold.after(had)

    def _had(self, record: SliceRecord | None, operator: str) -> int | None:
        """The watermark an operator had in a slice; None for one that was not there."""
        if record is None:
            return None
        if record.watermarks is None or operator not in self._clocks:
            return record.watermark_us
        return record.watermarks.get(operator)


def _later(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)


def _least(bounds: Iterable[int | None]) -> int | None:
    """The least; None, nothing is promised, where one is missing."""
    known = list(bounds)
    return min((b for b in known if b is not None), default=None) if None not in known else None
