"""A node's sign of life, sent from a thread of the node process to the driver.

It speaks for the whole executor: a stopped JVM or Python worker below it (SIGSTOP, a debugger)
keeps it silent, for no task would come through. The driver answers every beat. A node that hears
it was declared lost ends itself at once: it was a zombie, its partitions have other owners.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from anabranch.model.ids import NodeId

ALIVE, LOST = b".", b"!"
BEATS_PER_TIMEOUT = 8
RECONNECTS = 20  # in a row, before the driver is taken to be gone


@dataclass(frozen=True, slots=True)
class Pulse:
    """Where to send beats, how often, and the word that makes the driver listen."""

    address: tuple[str, int]
    token: str
    interval_s: float


class Heartbeat:
    """Beats until it is stopped, or the driver is gone."""

    def __init__(self, pulse: Pulse, node: NodeId, executor_pid: int | None) -> None:
        self._pulse = pulse
        self._node = node
        self._executor_pid = executor_pid
        self._stopped = threading.Event()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def is_for(self, pulse: Pulse | None, node: NodeId) -> bool:
        return (self._pulse, self._node) == (pulse, node)

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        failures = 0
        while failures < RECONNECTS and not self._stopped.is_set():
            try:
                with socket.create_connection(self._pulse.address, timeout=5.0) as driver:
                    hello = {"token": self._pulse.token, "node": self._node}
                    driver.sendall(json.dumps(hello).encode() + b"\n")
                    failures = 0
                    self._beat_on(driver)
            except OSError:
                failures += 1
            self._stopped.wait(self._pulse.interval_s)

    def _beat_on(self, driver: socket.socket) -> None:
        while not self._stopped.wait(self._pulse.interval_s):
            if self._executor_pid is not None and any_stopped(self._executor_pid):
                continue
            driver.sendall(ALIVE)
            answer = driver.recv(1)
            if answer == LOST:
                os._exit(1)
            if not answer:
                return


def any_stopped(pid: int) -> bool:
    """Is this process, or one below it, stopped by a signal?"""
    with contextlib.suppress(OSError):
        root = Path("/proc") / str(pid)
        state = (root / "stat").read_text().rpartition(")")[2].split()[0]
        if state in "Tt":
            return True
        for thread in (root / "task").iterdir():
            children = (thread / "children").read_text().split()
            if any(any_stopped(int(child)) for child in children):
                return True
    return False
