"""What the command line shows of a start."""

from __future__ import annotations

import io
import time

from rich.console import Console

from anabranch.driver.starting import announce, newest_phase
from anabranch.terminal.starting import Startup, command_began


def test_every_phase_is_a_line_and_the_slowest_is_named() -> None:
    shown = io.StringIO()
    now = [100.0]
    startup = Startup(Console(file=shown, width=20), clock=lambda: now[0])
    with startup.shown():
        now[0] += 1
        announce("opening [the] checkpoint")
        now[0] += 2
        announce("starting a cluster")
        now[0] += 5.25
        announce("waiting for the first slice")
    announce("of another start")
    assert shown.getvalue().splitlines() == [
        "  1.0 s  opening [the] checkpoint",
        "  3.0 s  starting a cluster",
        "  8.2 s  waiting for the first slice",
    ]
    assert startup.summary("the first slice") == "the first slice was not reached"
    now[0] += 1
    startup.done()
    now[0] += 100
    startup.done()
    assert startup.summary("the first slice") == (
        "9.2 s from the start of the command to the first slice; most of it, 5.2 s, was: "
        "starting a cluster"
    )
    assert newest_phase() == "of another start"


def test_a_terminal_shows_the_same_lines() -> None:
    shown = io.StringIO()
    startup = Startup(Console(file=shown, force_terminal=True, width=60))
    with startup.shown():
        announce("starting a cluster")
    assert "starting a cluster" in shown.getvalue()


def test_the_command_began_before_now() -> None:
    assert 0 < command_began() < time.monotonic()
