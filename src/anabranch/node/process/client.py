"""How a Spark task reaches the node process of its executor, starting it if it is not there.

Task and node process unpickle what the other sends, so each first makes sure that the other runs as
its own user, by what the kernel says of the connection. The files are in a directory that only this
user can look into; one that somebody else made under its name is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import AnabranchError, ClusterError, StorageError
from anabranch.node.activity import SLATE
from anabranch.node.process import wire

START_TIMEOUT_S = 60.0
MAX_SOCKET_PATH = 100  # Linux takes 108 bytes
KEPT_LOG_S = 24 * 3600.0  # how long a log that says something outlives its node
_OWN_FILE = re.compile(r"(\d+)-(\d+)\.(sock|lock|log|spill|slate)")
_connections: dict[Path, socket.socket] = {}


@dataclass(frozen=True)
class Hello:
    """A worker's first words: where it finds modules. What was shipped to the executor (with
    Spark's `addPyFile`, say) may have come after the node process."""

    path: tuple[str, ...]


def call(request: Any, buffers: list[Any] | None = None) -> tuple[Any, list[memoryview]]:
    """Send one request to this executor's node process and wait for the answer."""
    path = socket_path(executor_pid())
    for attempt in (1, 2):
        try:
            sock = _connect(path)
            wire.send(sock, request, buffers or [])
            value, answer = wire.receive(sock)
        except (OSError, EOFError) as e:
            if path in _connections:
                _connections.pop(path).close()
            if attempt == 2:
                raise ClusterError(f"the node process behind {path} went away: {e}") from e
            continue
        if isinstance(value, AnabranchError):
            raise value
        return value, answer
    raise AssertionError("unreachable")


def executor_pid() -> int:
    """The JVM this Python worker works for: the nearest ancestor that is a Java process."""
    pid = os.getpid()
    while pid > 1:
        pid = parent(pid)
        if (Path("/proc") / str(pid) / "comm").read_text().strip() == "java":
            return pid
    raise ClusterError("this task does not run below a Spark executor")


def parent(pid: int) -> int:
    line = (Path("/proc") / str(pid) / "stat").read_text()
    return int(line.rpartition(")")[2].split()[1])


def socket_path(pid: int) -> Path:
    """One socket per executor process; the start time tells apart two with the same pid."""
    name = Path(f"anabranch-{os.geteuid()}") / f"{pid}-{_start_time(pid)}.sock"
    path = Path(tempfile.gettempdir()) / name
    if len(str(path)) > MAX_SOCKET_PATH:
        path = Path("/tmp") / name
    _own(path.parent)
    return path


def _own(directory: Path) -> None:
    """Make the directory, or make sure that it is ours and nobody else gets into it."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    problem = None
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a directory"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}"
    elif found.st_mode & 0o077:
        problem = f"is open to others (mode {stat.S_IMODE(found.st_mode):o})"
    if problem is not None:
        raise StorageError(
            f"{directory} {problem}, but sockets of node processes are only for user "
            f"{os.geteuid()}: remove it on {socket.gethostname()}, or point TMPDIR of the "
            "executors elsewhere",
            path=str(directory),
        )


def _start_time(pid: int) -> str:
    line = (Path("/proc") / str(pid) / "stat").read_text()
    return line.rpartition(")")[2].split()[19]


def _connect(path: Path) -> socket.socket:
    if path in _connections:
        return _connections[path]
    with starting(path) as vacant:
        if vacant:
            _start(path)
        sock = _wait(path)
    _connections[path] = sock
    wire.send(sock, Hello(tuple(sys.path)))
    wire.receive(sock)
    return sock


@contextlib.contextmanager
def starting(path: Path) -> Iterator[bool]:
    """One at a time: is there no node process yet? Then the caller starts it inside, and a child
    that it forks there has its share in the lock."""
    with path.with_suffix(".lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        sock = _try_connect(path)
        if sock is not None:
            sock.close()
        else:
            path.unlink(missing_ok=True)
            sweep(path.parent)
        yield sock is None


def node_process(executor_pid: int) -> int:
    """The node process of an executor."""
    path = socket_path(executor_pid)
    sock = _try_connect(path)
    if sock is None:
        raise ClusterError(f"executor {executor_pid} has no node process")
    with sock:
        return wire.peer_process(sock)


def _try_connect(path: Path) -> socket.socket | None:
    """A connection to a process of this user; None if nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    if (other := wire.peer_user(sock)) != os.geteuid():
        sock.close()
        raise StorageError(
            f"user {other} listens on {path} instead of the node process of user {os.geteuid()}: "
            f"remove {path.parent} on {socket.gethostname()}",
            path=str(path),
        )
    return sock


def _start(path: Path) -> None:
    """A process of its own session, so that whatever kills this worker leaves it alone."""
    # One thread each for Polars and Arrow: a node has one core; more would only contend.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "POLARS_MAX_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    log = path.with_suffix(".log").open("wb")
    subprocess.Popen(
        [sys.executable, "-m", "anabranch.node.process.server", str(path), str(executor_pid())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    log.close()


def _wait(path: Path) -> socket.socket:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        sock = _try_connect(path)
        if sock is not None:
            return sock
        time.sleep(0.01)
    log = path.with_suffix(".log")
    detail = log.read_text()[-2000:] if log.exists() else ""
    raise ClusterError(f"the node process did not start within {START_TIMEOUT_S:.0f} s: {detail}")


def remove_files(path: Path, log_too: bool = False) -> None:
    """Remove what a node process keeps beside its socket; a log only if it is empty, or `log_too`.

    Only once the executor is gone: the lock must not be taken from under tasks that wait for it.
    """
    log = path.with_suffix(".log")
    with contextlib.suppress(OSError):
        if log_too or not log.stat().st_size:
            log.unlink()
    path.unlink(missing_ok=True)
    path.with_suffix(".lock").unlink(missing_ok=True)
    path.with_suffix(SLATE).unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(".spill"), ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove what is left of nodes that ended without removing it, because they were killed."""
    newest: dict[Path, float] = {}
    for file in directory.iterdir():
        if _OWN_FILE.fullmatch(file.name):
            with contextlib.suppress(OSError):  # another starter may sweep, too
                path, changed = file.with_suffix(".sock"), file.stat().st_mtime
                newest[path] = max(changed, newest.get(path, changed))
    for path, changed in newest.items():
        age = time.time() - changed
        # Processes of another container are not seen here: one that is young or answers is alive.
        if age > START_TIMEOUT_S and not _executor_runs(path) and not _answers(path):
            remove_files(path, log_too=age > KEPT_LOG_S)


def _executor_runs(path: Path) -> bool:
    pid, _, started = path.stem.partition("-")
    try:
        return _start_time(int(pid)) == started
    except OSError:
        return False


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        return sock.connect_ex(str(path)) == 0
