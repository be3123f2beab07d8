"""The watermark: the least, over the sources, of the latest event time minus its delay.

Decided from the slices before, so that a slice's watermark is an input of the slice and the same
in every replay. It never goes back.
"""

from __future__ import annotations

from collections.abc import Mapping


class WatermarkTracker:
    """Folds the event times of finished slices; `delays_us` lists the sources that have one."""

    def __init__(self, delays_us: Mapping[str, int]) -> None:
        self._delays_us = dict(delays_us)
        self._latest_us: dict[str, int] = {}
        self._watermark_us: int | None = None

    def observe(self, max_time_us: Mapping[str, int]) -> None:
        """Take in the latest event times of one finished slice."""
        for source, latest in max_time_us.items():
            if source in self._delays_us:
                self._latest_us[source] = max(latest, self._latest_us.get(source, latest))
        if self._delays_us and self._latest_us.keys() == self._delays_us.keys():
            least = min(self._latest_us[s] - d for s, d in self._delays_us.items())
            self._watermark_us = max(least, self._watermark_us or least)

    @property
    def watermark_us(self) -> int | None:
        return self._watermark_us

    @property
    def latest_us(self) -> Mapping[str, int]:
        """Per source, the latest event time so far: what a restart needs."""
        return dict(self._latest_us)
