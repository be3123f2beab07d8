"""The node process: one per Spark executor, started by its first task, dying with the executor.

State lives here because Spark's Python workers come and go: idle ones end after a minute, a
cancelled job kills them, an exception replaces them. This process watches the executor's JVM
through a pidfd and outlives all of that, but not the executor.

    python -m anabranch.node.process.server SOCKET EXECUTOR_PID

Where Spark's daemon imports us, the process is forked from it instead and has nothing to import.
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

import pyarrow as pa

from anabranch.errors import AnabranchError, InvariantError
from anabranch.node import activity
from anabranch.node.arrow.packets import decode_blob, encode_blob
from anabranch.node.process import client, wire
from anabranch.node.process.surroundings import new_host
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import (
    ForgetRequest,
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    WarmRequest,
    WaveRequest,
)

MAX_CONNECTIONS = 64


class Hosts(dict[str, Host[pa.Table]]):
    """The hosts of this process by job, made when they are first asked for."""

    def __init__(self, spill: Path, executor_pid: int) -> None:
        super().__init__()
        self._spill, self._executor_pid = spill, executor_pid

    def __missing__(self, job: str) -> Host[pa.Table]:
        host = self[job] = new_host(self._spill, self._executor_pid)
        return host


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(MAX_CONNECTIONS)
    return listener


def serve(listener: socket.socket, path: Path, executor_pid: int) -> None:
    """Accept tasks, one request at a time, until the executor is gone."""
    # A terminal's Ctrl-C goes to the whole foreground group; the driver decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch = os.pidfd_open(executor_pid)
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
                    client.remove_files(path)
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
    if isinstance(request, client.Hello):
        sys.path += [p for p in request.path if p not in sys.path]
        return None, []
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
        parcels = [decode_blob(b) for b in buffers]
        if isinstance(request, WaveRequest):
            sent, report = host.wave(request, parcels)
        else:
            sent, report = host.recover(request, parcels)
        blobs = [encode_blob(p) for p in sent]
        shape = [len(b) for b in blobs]
        return (shape, report), [part for b in blobs for part in b]
    if isinstance(request, PrepareRequest):
        return host.prepare(request), []
    if isinstance(request, PollRequest):
        return host.poll(request), []
    raise InvariantError(f"unknown request {type(request).__name__}")


def fork() -> None:
    """Have a child of this process, which must have no threads yet, be the node process of the
    executor above. Only where there is one: a driver's JVM runs Python tasks, too."""
    executor_pid = client.executor_pid()
    command = (Path("/proc") / str(executor_pid) / "cmdline").read_bytes()
    if b"ExecutorBackend" not in command:
        return
    path = client.socket_path(executor_pid)
    with client.starting(path) as vacant:
        if not vacant:
            return  # a daemon before this one has forked it
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        # Whatever goes wrong from here on stays here: tasks start another process if none listens.
        try:
            os.setsid()  # whatever ends this daemon and its workers leaves the node alone
            if os.fork():
                os._exit(0)
            log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for stream, target in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(target, stream)
            (Path("/proc") / "self/comm").write_text("anabranch-node")
            listener = listen(path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    serve(listener, path, executor_pid)


def main() -> None:
    path = Path(sys.argv[1])
    serve(listen(path), path, int(sys.argv[2]))


if __name__ == "__main__":
    main()
