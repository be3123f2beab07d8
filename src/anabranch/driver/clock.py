"""The clocks that a driver goes by, handed in so that a test or a simulated world has its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def monotonic_ns() -> int:
    return time.monotonic_ns()


def now_ms() -> int:
    """For intervals: it goes on evenly, and means nothing by itself."""
    return monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """What people call the time, since 1970; it may be set, or leap."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class Clock:
    """`monotonic_ns` goes on evenly, `wall_ms` is what people call the time; `pause` lets others
    work for some seconds."""

    monotonic_ns: Callable[[], int] = monotonic_ns
    wall_ms: Callable[[], int] = wall_ms
    pause: Callable[[float], None] = time.sleep

    def now_ms(self) -> int:
        return self.monotonic_ns() // 1_000_000

    def seconds(self) -> float:
        return self.monotonic_ns() / 1e9
