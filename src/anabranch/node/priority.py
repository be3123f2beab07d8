"""Threads that work in the background, beside the one that runs slices."""

from __future__ import annotations

import contextlib
import os
import threading
import time

NICER = 10  # than the thread that runs slices, where both want the CPU


def give_way() -> None:
    """From now on this thread yields to others; on Linux, priority is a thread's own."""
    with contextlib.suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, 0) + NICER
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


class HalfTime:
    """Called between two pieces of work, sleeps as long as the last one took."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def __call__(self) -> None:
        time.sleep(time.monotonic() - self._since)
        self._since = time.monotonic()
