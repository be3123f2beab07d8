"""Messages between a Spark task and the node process on the same machine.

A message is a pickled value and a list of buffers. Small buffers follow inline; if they are large
together, they travel in one anonymous memory file whose descriptor is passed over the Unix
socket, and the receiver maps it: no copy through the kernel.

The sender of a pickle runs code in the receiver: `receive` is for connections whose other end is
known to run as the same user (`peer_user`).
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

# Below this, a write and a read are cheaper than creating and mapping a file.
MEMFD_THRESHOLD_BYTES = 256 * 1024
_PREFIX = struct.Struct("!QQ?")  # header bytes, body bytes, body in a memory file


_CREDENTIALS = struct.Struct("iII")  # process, user, group


def peer_user(sock: socket.socket) -> int:
    """Who made the other end of a Unix socket, as the kernel noted it then."""
    return _peer(sock)[1]


def peer_process(sock: socket.socket) -> int:
    return _peer(sock)[0]


def _peer(sock: socket.socket) -> tuple[int, ...]:
    noted = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(noted)


def send(sock: socket.socket, value: Any, buffers: Sequence[Any] = ()) -> None:
    """Send one message."""
    views = [memoryview(b).cast("B") for b in buffers]
    sizes = [len(v) for v in views]
    header = pickle.dumps((value, sizes), protocol=pickle.HIGHEST_PROTOCOL)
    body = sum(sizes)
    mapped = body >= MEMFD_THRESHOLD_BYTES
    prefix = _PREFIX.pack(len(header), body, mapped)
    if not mapped:
        sock.sendall(b"".join([prefix, header, *views]))
        return
    fd = os.memfd_create("anabranch")
    try:
        for view in views:
            done = 0
            while done < len(view):
                done += os.write(fd, view[done:])
        socket.send_fds(sock, [prefix], [fd])
    finally:
        os.close(fd)
    sock.sendall(header)


def receive(sock: socket.socket) -> tuple[Any, list[memoryview]]:
    """Receive one message; the buffers stay valid as long as they are referenced."""
    prefix, fds, _, _ = socket.recv_fds(sock, _PREFIX.size, 1)
    if not prefix:
        raise EOFError("the other side closed the connection")
    prefix += _exactly(sock, _PREFIX.size - len(prefix))
    length, size, mapped = _PREFIX.unpack(prefix)
    header = _exactly(sock, length)
    if mapped:
        with os.fdopen(fds[0], "rb") as file:
            body = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
    else:
        body = memoryview(_exactly(sock, size))
    value, sizes = pickle.loads(header)
    views: list[memoryview] = []
    start = 0
    for n in sizes:
        views.append(body[start : start + n])
        start += n
    return value, views


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        n = sock.recv_into(view[done:])
        if n == 0:
            raise EOFError("the other side closed the connection")
        done += n
    return bytes(data)
