"""What a start is doing, for those who wait for it.

Phases are told by whatever carries them out (a cluster, a session, a driver), one sentence each.
They go to the log and to those who listen: the command line shows them, `anabranch status` the
newest one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

log = logging.getLogger("anabranch")
Listener = Callable[[str], None]

_listeners: list[Listener] = []
_newest = ""


def announce(phase: str) -> None:
    """This begins now, and lasts until the next one begins."""
    global _newest
    _newest = phase
    log.info("%s", phase)
    for listener in tuple(_listeners):
        listener(phase)


def newest_phase() -> str:
    """Of the start in hand; a process has one at a time, like its Spark session."""
    return _newest


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
