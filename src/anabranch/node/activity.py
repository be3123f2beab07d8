"""What an executor is busy with, readable while it is: a heartbeat tells the driver.

An executor does one thing at a time: a source task in a Python worker of Spark's, or a wave in the
node process. A process that evaluates a chain writes a line into a small file beside the node's
socket before each operator, and wipes it when the chain is done. The node's heartbeat thread reads
it. A process that keeps no slate, as in tests, writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SIZE = 240  # bytes of a line; a beat carries at most 255
SLATE = ".slate"  # beside the socket


@dataclass(frozen=True, slots=True)
class Activity:
    """What, since when by the clock that all processes of a machine share, and who."""

    what: str
    since_s: float
    pid: int


class Slate:
    """One line that is overwritten again and again."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, what: str) -> None:
        line = f"{time.monotonic()} {os.getpid()} {what}" if what else ""
        data = line.encode()[:SIZE].ljust(SIZE)
        with contextlib.suppress(OSError):  # a full disk is not what a chain should fail of
            os.pwrite(self._file, data, 0)

    def read(self) -> Activity | None:
        """None: nobody works, or the process that did is gone."""
        line = os.pread(self._file, SIZE, 0).decode(errors="ignore").rstrip()
        since, _, rest = line.partition(" ")
        pid, _, what = rest.partition(" ")
        if not what or not (Path("/proc") / pid).exists():
            return None
        return Activity(what, float(since), int(pid))


_slate: Slate | None = None
_where: str = ""


def keep_slate(socket_path: Path) -> None:
    """This process tells what it does, on the slate of the executor with this socket."""
    global _slate
    if _slate is None:
        _slate = Slate(socket_path.with_suffix(SLATE))


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """A chain is evaluated there; wiped when that is over."""
    global _where
    _where = where
    try:
        yield
    finally:
        _where = ""
        if _slate is not None:
            _slate.write("")


def enter(operator: str) -> None:
    """The next operator of the chain."""
    if _slate is not None and _where:
        _slate.write(f"operator {operator!r} ({_where})")


def current() -> Activity | None:
    """Of this executor."""
    return _slate.read() if _slate is not None else None
