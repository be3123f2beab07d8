"""The node process: one per Spark executor, started by its first task, dying with the executor.

State lives here because Spark's Python workers come and go: idle ones end after a minute, a
cancelled job kills them, an exception replaces them. This process watches the executor's JVM
through a pidfd and outlives all of that, but not the executor.

    python -m anabranch.node.server SOCKET EXECUTOR_PID
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, cast

from anabranch.errors import AnabranchError, InvariantError
from anabranch.node import activity, wire
from anabranch.node.client import remove_files
from anabranch.node.host import Host
from anabranch.node.messages import (
    ForgetRequest,
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    WarmRequest,
    WaveRequest,
)

MAX_CONNECTIONS = 64


class Hosts(dict[str, Host]):
    """The hosts of this process by job, made when they are first asked for."""

    def __init__(self, spill: Path, executor_pid: int) -> None:
        super().__init__()
        self._spill, self._executor_pid = spill, executor_pid

    def __missing__(self, job: str) -> Host:
        host = self[job] = Host(self._spill, self._executor_pid)
        return host


def serve(path: Path, executor_pid: int) -> None:
    """Accept tasks, one request at a time, until the executor is gone."""
    watch = os.pidfd_open(executor_pid)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(MAX_CONNECTIONS)
    spill = path.with_suffix(".spill")
    shutil.rmtree(spill, ignore_errors=True)  # of a process before this one that was killed
    hosts = Hosts(spill, executor_pid)
    activity.keep_slate(path)
    gc.freeze()  # imports are forever: keep them out of every collection
    with selectors.DefaultSelector() as selector:
        selector.register(watch, selectors.EVENT_READ, "executor")
        selector.register(listener, selectors.EVENT_READ, "listener")
        while True:
            for key, _ in selector.select():
                if key.data == "executor":
                    remove_files(path)
                    os._exit(0)  # at once: the writer thread must not outlive the executor
                if key.data == "listener":
                    connection, _ = listener.accept()
                    if wire.peer_user(connection) == os.geteuid():
                        selector.register(connection, selectors.EVENT_READ, "task")
                    else:  # before a byte of it is read: what comes is unpickled
                        connection.close()
                else:
                    task = cast("socket.socket", key.fileobj)
                    if not _answer(task, hosts):
                        selector.unregister(task)
                        task.close()


def _answer(connection: socket.socket, hosts: Hosts) -> bool:
    """Serve one request; False when the task has gone."""
    try:
        request, buffers = wire.receive(connection)
    except (EOFError, OSError, pickle.UnpicklingError):
        return False
    outgoing: list[Any] = []
    try:
        value, outgoing = _dispatch(hosts, request, buffers)
    except AnabranchError as e:
        value = e
    except Exception as e:
        value = InvariantError(f"the node process failed: {e!r}\n{traceback.format_exc()}")
    try:
        wire.send(connection, value, outgoing)
    except OSError:
        return False  # a cancelled task: what was applied is kept, a repeat will find it
    return True


def _dispatch(hosts: Hosts, request: Any, buffers: list[memoryview]) -> tuple[Any, list[Any]]:
    """Every job of the Spark application has a host of its own."""
    if isinstance(request, ForgetRequest):
        forgotten = hosts.pop(request.job, None)
        if forgotten is not None:
            forgotten.close()
        return None, []
    host = hosts[request.job]
    if isinstance(request, WarmRequest):
        host.warm(request)
        return None, []
    if isinstance(request, WaveRequest | RecoverRequest):
        if isinstance(request, WaveRequest):
            blobs, report = host.wave(request, buffers)
        else:
            blobs, report = host.recover(request, buffers)
        shape = [len(b) for b in blobs]
        return (shape, report), [part for b in blobs for part in b]
    if isinstance(request, PrepareRequest):
        return host.prepare(request), []
    if isinstance(request, PollRequest):
        return host.poll(request), []
    raise InvariantError(f"unknown request {type(request).__name__}")


def main() -> None:
    # A terminal's Ctrl-C goes to the whole foreground group; the driver decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
