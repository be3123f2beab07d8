"""Shows what a start is doing, and remembers how long each of its phases took."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from anabranch.driver.starting import listening
from anabranch.terminal.view import seconds


class Startup:
    """One line for each phase, as it begins, with the time since the command was started."""

    def __init__(self, console: Console, clock: Callable[[], float] | None = None) -> None:
        """A `clock` takes the place of this process's, and begins now."""
        self._console = console
        self._clock = clock or time.monotonic
        self._began = command_began() if clock is None else clock()
        self._phases: list[tuple[str, float]] = []  # what, and when it began
        self._ended: float | None = None
        self._status: Status | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While a start is under way; in a terminal something also moves."""
        with contextlib.ExitStack() as stack:
            if self._console.is_terminal:
                self._status = stack.enter_context(self._console.status("starting"))
            stack.enter_context(listening(self.tell))
            yield
        self._status = None

    def tell(self, phase: str) -> None:
        """A phase begins; the one before it ends."""
        now = self._clock()
        self._phases.append((phase, now))
        self._console.print(f"{now - self._began:5.1f} s  {escape(phase)}", soft_wrap=True)
        if self._status is not None:
            self._status.update(escape(phase))

    def done(self) -> None:
        """What was waited for is there: the last phase has ended. May be called again."""
        if self._ended is None:
            self._ended = self._clock()

    @property
    def is_done(self) -> bool:
        return self._ended is not None

    def summary(self, until: str) -> str:
        """How long it took, and what took longest."""
        if self._ended is None:
            return f"{until} was not reached"
        times = [self._began, *(at for _, at in self._phases), self._ended]
        names = ["starting Python", *(phase for phase, _ in self._phases)]
        took = [after - before for before, after in pairwise(times)]
        slowest = max(range(len(took)), key=lambda i: took[i])
        return (
            f"{seconds(self._ended - self._began)} from the start of the command to {until}; "
            f"most of it, {seconds(took[slowest])}, was: {names[slowest]}"
        )


def command_began() -> float:
    """When this process was started, by the clock of `time.monotonic`; now, where Linux does not
    tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        booted = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return ticks / os.sysconf("SC_CLK_TCK") - booted
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
