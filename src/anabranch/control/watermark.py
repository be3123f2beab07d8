"""The watermark: the least, over the sources, of the latest event time minus its delay.

Decided from the batches before, so that a slice's watermark is an input of the slice and the same
in every replay. It never goes back, and it stands still between the slices of one batch: their
rows are in no order, one of the first may be the latest of all.
"""

from __future__ import annotations

from collections.abc import Mapping


class WatermarkTracker:
    """Folds the event times of finished slices; `delays_us` lists the sources that have one."""

    def __init__(self, delays_us: Mapping[str, int]) -> None:
        self._delays_us = dict(delays_us)
        self._latest_us: dict[str, int] = {}
        self._watermark_us: int | None = None

    def resume(self, watermark_us: int | None) -> None:
        """Go on from the watermark of a slice that an earlier run finished."""
        if watermark_us is not None:
            before = self._watermark_us
            self._watermark_us = watermark_us if before is None else max(before, watermark_us)

    def observe(self, max_time_us: Mapping[str, int], batch_end: bool) -> None:
        """Take in the latest event times of one finished slice."""
        for source, latest in max_time_us.items():
            if source in self._delays_us:
                self._latest_us[source] = max(latest, self._latest_us.get(source, latest))
        if batch_end and self._delays_us and self._latest_us.keys() == self._delays_us.keys():
            least = min(self._latest_us[s] - d for s, d in self._delays_us.items())
            self.resume(least)

    @property
    def watermark_us(self) -> int | None:
        return self._watermark_us

    @property
    def latest_us(self) -> Mapping[str, int]:
        """Per source, the latest event time so far: what a restart needs."""
        return dict(self._latest_us)
