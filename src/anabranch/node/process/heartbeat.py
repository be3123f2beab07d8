"""A node's sign of life, sent from a thread of the node process to the driver.

It speaks for the whole executor: a stopped JVM or Python worker below it (SIGSTOP, a debugger)
keeps it silent, for no task would come through. The driver answers every beat. A node that hears
it was declared lost ends itself at once: it was a zombie, its partitions have other owners.

Anybody can reach the driver's port, and after its end somebody else may get it. So each side first
proves that it knows the key of the pulse, which never travels on this connection:

    driver → node   nonce                                   32 bytes
    node → driver   nonce, proof, length of its name, name  65 bytes and the name
    driver → node   proof                                   32 bytes

A proof is the HMAC-SHA256 of who speaks, both nonces and the name. Then beats and answers, one byte
each; a beat of a node that is in the middle of an operator goes on with what and for how long: the
length of the text, and the text.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from anabranch.model.ids import NodeId
from anabranch.node import activity

ALIVE, LOST = b".", b"!"
BUSY, HELPING = b"~", b"^"  # the node process is in an operator; a task of its executor is
BEATS_PER_TIMEOUT = 8
NONCE_BYTES = PROOF_BYTES = 32
ANSWER_S = 5.0
MAX_TEXT = 255


class Side(Enum):
    """Who proves something; without it, a proof could be sent back to where it came from."""

    NODE = b"node"
    DRIVER = b"driver"


@dataclass(frozen=True, slots=True)
class Pulse:
    """Where to send beats, how often, and the key by which node and driver know each other."""

    address: tuple[str, int]
    key: bytes = field(repr=False)
    interval_s: float

    def proof(self, of: Side, nonces: bytes, name: bytes) -> bytes:
        """`nonces`: the driver's and the node's."""
        return hmac.digest(self.key, of.value + nonces + name, "sha256")


class Heartbeat:
    """Beats until it is stopped. A driver that does not answer may be asleep: it is tried again for
    as long as this process lives, which is as long as its executor does."""

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
        while not self._stopped.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(self._pulse.address, timeout=ANSWER_S) as driver,
            ):
                greet(driver, self._pulse, self._node)
                self._beat_on(driver)
            self._stopped.wait(self._pulse.interval_s)

    def _beat_on(self, driver: socket.socket) -> None:
        while not self._stopped.wait(self._pulse.interval_s):
            if self._executor_pid is not None and any_stopped(self._executor_pid):
                continue
            driver.sendall(_sign())
            answer = driver.recv(1)
            if answer == LOST:
                os._exit(1)
            if not answer:
                return


def _sign() -> bytes:
    """Alive, and busy with what, if that can be read just now: the line may be half wiped."""
    doing = None
    with contextlib.suppress(ValueError):
        doing = activity.current()
    if doing is None:
        return ALIVE
    kind = BUSY if doing.pid == os.getpid() else HELPING
    seconds = time.monotonic() - doing.since_s
    text = f"{doing.what} for {seconds:.1f} s".encode()[:MAX_TEXT]
    return kind + bytes([len(text)]) + text


def greet(driver: socket.socket, pulse: Pulse, node: NodeId) -> None:
    """Make oneself known, and make sure that it is the driver; ConnectionError if it is not."""
    name = node.encode()
    nonces = _exactly(driver, NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
    proof = pulse.proof(Side.NODE, nonces, name)
    driver.sendall(nonces[NONCE_BYTES:] + proof + bytes([len(name)]) + name)
    answer = _exactly(driver, PROOF_BYTES)
    if not hmac.compare_digest(answer, pulse.proof(Side.DRIVER, nonces, name)):
        raise ConnectionError("this is not the driver")


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the driver hung up")
        data += more
    return data


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
