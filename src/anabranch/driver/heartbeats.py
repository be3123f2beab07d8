"""Where nodes send their heartbeats: a small listener in the driver, off the data path.

Its port is open to all who reach the driver's address. The invariants: nothing of a caller is
looked at but for a fixed number of bytes until it has proved to be a node (how, is said in
node/process/heartbeat.py); the unknown callers are few, and leave soon; and whatever one of them
sends, the others are heard. A thread that ended here would make every node look silent.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import cast

from anabranch.control.policies.liveness import Liveness
from anabranch.model.ids import NodeId
from anabranch.node.process.heartbeat import (
    ALIVE,
    BEATS_PER_TIMEOUT,
    BUSY,
    HELPING,
    LOST,
    NONCE_BYTES,
    PROOF_BYTES,
    Pulse,
    Side,
)

log = logging.getLogger("anabranch")
MAX_BEATS = 1024  # at once, of a node whose driver did not listen for a while
# A node process that ended is started again by the next task on its executor: time to do so.
RESTART_S = 15.0
MAX_UNKNOWN = 128  # callers that have not proved anything yet; one more, and the oldest has to go
GREET_S = 5.0  # for doing so
RETRY_S = 0.05  # after a refused accept: the process has no file descriptors left, say
_HEAD = NONCE_BYTES + PROOF_BYTES + 1


@dataclass(eq=False)
class Caller:
    """The driver's side of a greeting. It asks for no more bytes than a greeting has."""

    pulse: Pulse
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    node: NodeId | None = None  # once it has proved to be one
    _said: bytes = b""

    @property
    def wanted(self) -> int:
        """How many more bytes its greeting has, as far as that is known."""
        name = self._said[_HEAD - 1] if len(self._said) >= _HEAD else 0
        return _HEAD + name - len(self._said)

    def hear(self, data: bytes) -> bytes | None:
        """The answer, when the greeting is complete; ConnectionError if the proof is wrong."""
        self._said += data
        if len(self._said) < _HEAD or self.wanted:
            return None
        nonces = self.nonce + self._said[:NONCE_BYTES]
        proof, name = self._said[NONCE_BYTES : _HEAD - 1], self._said[_HEAD:]
        if not hmac.compare_digest(proof, self.pulse.proof(Side.NODE, nonces, name)):
            raise ConnectionError("not one of our nodes")
        self.node, self._said = NodeId(name.decode()), b""
        return self.pulse.proof(Side.DRIVER, nonces, name)

    def beats(self, data: bytes) -> list[Beat]:
        """What it said once it was known."""
        self._said += data
        found = []
        while self._said:
            kind = self._said[:1]
            if kind not in (ALIVE, BUSY, HELPING):
                raise ConnectionError("a beat that is none")
            size = 1 if kind == ALIVE else 2 + int.from_bytes(self._said[1:2])
            if len(self._said) < size:
                break
            found.append(Beat(kind == BUSY, self._said[2:size].decode(errors="replace")))
            self._said = self._said[size:]
        return found


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; `doing` is empty for a node that is in no operator. In one, it is the node
    process `itself`, or a task of its executor."""

    itself: bool
    doing: str


class Heartbeats:
    """Knows when each node was last heard of, and tells the lost ones that they are."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._liveness = Liveness(timeout_s)
        self._lost: set[NodeId] = set()
        self.newest: dict[NodeId, Beat] = {}
        self._listener = socket.create_server((host, 0), backlog=MAX_UNKNOWN)
        self._listener.setblocking(False)
        self._waker, woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        self._unknown: dict[socket.socket, float] = {}  # until when; the oldest first
        self._known: dict[NodeId, socket.socket] = {}
        self.pulse = Pulse(
            (host, self._listener.getsockname()[1]),
            secrets.token_bytes(32),
            timeout_s / BEATS_PER_TIMEOUT,
        )
        self._closed = False
        threading.Thread(target=self._serve, name="anabranch-beats", daemon=True).start()

    def silent(self) -> dict[NodeId, float]:
        """Nodes that were heard of once and then not for too long, and for how long. To be asked
        at short intervals: silence counts only while somebody listens (control/liveness.py)."""
        late = self._liveness.look(time.monotonic())
        return {n: s for n, s in late.items() if n not in self._lost}

    @property
    def listened_s(self) -> float:
        """For so long somebody has listened: time as it counts for nodes."""
        return self._liveness.listened_s

    def await_end(self, node: NodeId, seconds: float) -> bool:
        """Wait until a node that was declared lost has heard of it, and hung up."""
        deadline = time.monotonic() + seconds
        while node in self._known and time.monotonic() < deadline:
            time.sleep(RETRY_S)
        return node not in self._known

    def declare_lost(self, node: NodeId) -> None:
        """From now on this node is told to end itself."""
        self._lost.add(node)
        self._liveness.forget(node)

    def close(self) -> None:
        self._closed = True
        self._waker.close()

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, Caller):
                    self._listen_to(cast("socket.socket", key.fileobj), key.data)
            now = time.monotonic()
            for late in [c for c, until in self._unknown.items() if until <= now]:
                self._hang_up(late)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _patience(self) -> float | None:
        """Until the next of the unknown callers has had its time."""
        until = next(iter(self._unknown.values()), None)
        return None if until is None else max(0.0, until - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(RETRY_S)
            return
        if len(self._unknown) >= MAX_UNKNOWN:
            self._hang_up(next(iter(self._unknown)))
        connection.setblocking(False)
        caller = Caller(self.pulse)
        self._unknown[connection] = time.monotonic() + GREET_S
        self._selector.register(connection, selectors.EVENT_READ, caller)
        try:
            connection.sendall(caller.nonce)
        except OSError:
            self._hang_up(connection)

    def _listen_to(self, connection: socket.socket, caller: Caller) -> None:
        if connection.fileno() < 0:
            return  # it had to go for another one a moment ago
        try:
            if caller.node is None:
                self._greet(connection, caller)
            else:
                self._hear(connection, caller, caller.node)
        except (OSError, ValueError):
            self._hang_up(connection)
        except Exception as e:  # a mistake of ours must not silence the other nodes
            log.warning("a caller of the heartbeat port was turned away: %r", e)
            self._hang_up(connection)

    def _greet(self, connection: socket.socket, caller: Caller) -> None:
        data = connection.recv(caller.wanted)
        if not data:
            raise ConnectionError
        answer = caller.hear(data)
        if answer is None or caller.node is None:
            return
        connection.sendall(answer)
        del self._unknown[connection]
        before = self._known.pop(caller.node, None)
        if before is not None:  # left over from a link that was cut: nobody will close it
            self._hang_up(before)
        self._known[caller.node] = connection
        self._is_alive(caller.node)

    def _hear(self, connection: socket.socket, caller: Caller, node: NodeId) -> None:
        data = connection.recv(MAX_BEATS)
        if not data:
            if self._liveness.knows(node):
                self._liveness.heard(node, RESTART_S)
            raise ConnectionError
        if node in self._lost:
            connection.sendall(LOST)
            raise ConnectionError
        for beat in caller.beats(data):
            self.newest[node] = beat
            connection.sendall(ALIVE)
        self._is_alive(node)

    def _is_alive(self, node: NodeId) -> None:
        if node not in self._lost:
            self._liveness.heard(node)

    def _hang_up(self, connection: socket.socket) -> None:
        self._unknown.pop(connection, None)
        self._known = {n: c for n, c in self._known.items() if c is not connection}
        self._selector.unregister(connection)
        connection.close()
