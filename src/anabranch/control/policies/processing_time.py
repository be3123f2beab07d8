"""Two clocks: a steady one for every interval, the wall clock for the time that slices carry.

The wall clock may be set, or leap. Forward, processing time follows it: that cannot be told from
a machine that was asleep. Back it never goes, for timers have come and rows been touched at the
time before: it goes on at half the pace of the steady clock until the wall clock has caught up.
Rejected: standing still, which would keep every timer and every time to live waiting for as long
as the clock was wrong; full pace, with which the times that users see would stay wrong.
"""

from __future__ import annotations


class ProcessingTime:
    """Begins with the time of the newest slice of earlier runs, if there is one."""

    def __init__(self, newest_ms: int | None) -> None:
        self._newest_ms = newest_ms
        self._right: tuple[int, int] | None = None  # when the wall clock was last followed: both

    def at(self, now_ms: int, wall_ms: int) -> int:
        """The processing time of a slice that begins now."""
        if self._right is None:
            if self._newest_ms is None or wall_ms >= self._newest_ms:
                self._right = now_ms, wall_ms
                return wall_ms
            self._right = now_ms, self._newest_ms
        began_ms, time_ms = self._right
        slowly_ms = time_ms + max(0, now_ms - began_ms) // 2
        if wall_ms >= slowly_ms:
            self._right = now_ms, wall_ms
        return max(wall_ms, slowly_ms)
