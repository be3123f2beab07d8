"""Who may talk to a node process: tasks of its own user, and nobody else; nor is a task talked into
talking to another user's process. Both sides unpickle, so a stranger's byte would be a stranger's
code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import StorageError
from anabranch.node.process import client, wire
from anabranch.node.protocol.messages import ForgetRequest
from strangers import NOBODY, as_root, said, stranger


class Payload:
    """Its pickle makes a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


# Argument 1 is the socket, 2 what to send.
LISTENS = """
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.bind(sys.argv[1])
sock.listen()
print("ready", flush=True)
while True:
    sock.accept()[0].sendall(bytes.fromhex(sys.argv[2]))
"""
CONNECTS = """
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect(sys.argv[1])
try:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    got = sock.recv(1)
except OSError:
    got = b""
print("answered" if got else "hung up", flush=True)
"""


def pickled(mark: Path) -> str:
    """A whole message of the wire, in hexadecimal."""
    here, there = socket.socketpair()
    with here, there:
        wire.send(here, Payload(mark))
        return there.recv(65_536).hex()


@pytest.fixture
def temporary(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The machine's directory of temporary files: everybody's, and sticky; a short name, as the
    name of a socket must be."""
    tmp_path_factory.getbasetemp()  # which is made once, and not in here
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield directory


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """The socket of a node process."""
    executor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = tmp_path / "n" / f"{executor.pid}-1.sock"
    path.parent.mkdir(mode=0o700)
    command = [sys.executable, "-m", "anabranch.node.process.server", str(path), str(executor.pid)]
    with path.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    # The file is there a moment before somebody listens.
    while (ready := client._try_connect(path)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ready is not None
    ready.close()
    yield path
    executor.kill()
    executor.wait()
    process.wait(timeout=60)


def test_the_directory_of_sockets_is_for_its_user_alone(temporary: Path) -> None:
    path = client.socket_path(os.getpid())
    assert path.parent == temporary / f"anabranch-{os.geteuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert client.socket_path(os.getpid()) == path  # it is there now, and ours


def made_by_another(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    os.chown(directory, NOBODY, NOBODY)


def linked(directory: Path) -> None:
    target = directory.with_name("elsewhere")
    target.mkdir(mode=0o700)
    directory.symlink_to(target)


def dangling(directory: Path) -> None:
    directory.symlink_to(directory.with_name("nowhere"))


def opened(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o777)


def a_file(directory: Path) -> None:
    directory.touch()


@pytest.mark.parametrize(
    ("planted", "problem"),
    [
        pytest.param(made_by_another, f"belongs to user {NOBODY}", marks=as_root),
        (linked, "is not a directory"),
        (dangling, "is not a directory"),
        (opened, r"is open to others \(mode 777\)"),
        (a_file, "is not a directory"),
    ],
)
def test_a_directory_of_sockets_that_somebody_planted_is_refused(
    temporary: Path, planted: Any, problem: str
) -> None:
    directory = temporary / f"anabranch-{os.geteuid()}"
    planted(directory)
    before = sorted(temporary.rglob("*"))
    with pytest.raises(StorageError, match=f"{problem}, but .* remove it on .*, or point TMPDIR"):
        client.socket_path(os.getpid())
    assert sorted(temporary.rglob("*")) == before


@as_root
def test_a_socket_of_another_user_is_not_talked_to(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens where the task looks, as if the directory had been its own once."""
    monkeypatch.setattr(client, "executor_pid", os.getpid)
    path, mark = client.socket_path(os.getpid()), tmp_path / "mark"
    os.chown(path.parent, NOBODY, NOBODY)
    attacker = stranger(LISTENS, path.name, pickled(mark), cwd=path.parent)
    assert said(attacker) == b"ready"
    os.chown(path.parent, 0, 0)
    try:
        with pytest.raises(StorageError, match=f"user {NOBODY} listens on .* remove"):
            client.call(ForgetRequest("job"))
    finally:
        attacker.kill()
        attacker.wait()
    assert not mark.exists()


@as_root
def test_a_task_of_another_user_is_not_listened_to(node: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    honest = client._try_connect(node)
    assert honest is not None
    node.parent.chmod(0o777)  # not even an open door is enough
    node.chmod(0o777)
    with stranger(CONNECTS, node.name, pickled(mark), cwd=node.parent) as attacker:
        assert said(attacker) == b"hung up"
    assert not mark.exists()
    with honest:
        for _ in range(2):
            wire.send(honest, ForgetRequest("job"))
            assert wire.receive(honest) == (None, [])


def test_jobs_of_one_user_share_a_node_process(node: Path) -> None:
    first, second = client._try_connect(node), client._try_connect(node)
    assert first is not None
    assert second is not None
    with first, second:
        for task, job in ((first, "a"), (second, "b"), (first, "a")):
            wire.send(task, ForgetRequest(job))
            assert wire.receive(task) == (None, [])
