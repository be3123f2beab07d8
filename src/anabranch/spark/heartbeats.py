"""Where nodes send their heartbeats: a small listener in the driver, off the data path."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time

from anabranch.model.ids import NodeId
from anabranch.node.heartbeat import ALIVE, BEATS_PER_TIMEOUT, LOST, Pulse

MAX_HELLO = 1024
# A node process that ended is started again by the next task on its executor: time to do so.
RESTART_S = 15.0


class Heartbeats:
    """Knows when each node was last heard of, and tells the lost ones that they are."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: dict[NodeId, float] = {}
        self._lost: set[NodeId] = set()
        self._listener = socket.create_server((host, 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self.pulse = Pulse(
            (host, self._listener.getsockname()[1]),
            secrets.token_hex(16),
            timeout_s / BEATS_PER_TIMEOUT,
        )
        self._closed = False
        threading.Thread(target=self._serve, name="anabranch-beats", daemon=True).start()

    def silent(self) -> dict[NodeId, float]:
        """Nodes that were heard of once and then not for too long, and for how long."""
        now = time.monotonic()
        return {n: now - t for n, t in self._seen.items() if now - t > self._timeout_s}

    def declare_lost(self, node: NodeId) -> None:
        """From now on this node is told to end itself."""
        self._lost.add(node)
        self._seen.pop(node, None)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname(), timeout=1).close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if self._closed:
                    self._end()
                    return
                if key.data is None:
                    connection, _ = self._listener.accept()
                    connection.settimeout(1.0)
                    self._selector.register(connection, selectors.EVENT_READ, "")
                else:
                    self._hear(key.fileobj, key.data)  # type: ignore[arg-type]

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _hear(self, connection: socket.socket, node: str) -> None:
        try:
            data = connection.recv(MAX_HELLO)
            if not data:
                if node in self._seen:
                    self._seen[NodeId(node)] = time.monotonic() + RESTART_S
                raise ConnectionError
            if not node:
                node = self._greet(data)
                self._selector.modify(connection, selectors.EVENT_READ, node)
            elif node in self._lost:
                connection.sendall(LOST)
                raise ConnectionError
            else:
                connection.sendall(ALIVE * len(data))
            if node not in self._lost:
                self._seen[NodeId(node)] = time.monotonic()
        except (OSError, ValueError, KeyError):
            self._selector.unregister(connection)
            connection.close()

    def _greet(self, hello: bytes) -> str:
        said = json.loads(hello.partition(b"\n")[0])
        if not hmac.compare_digest(str(said["token"]), self.pulse.token):
            raise ValueError("not one of our nodes")
        return str(said["node"])
