"""Files beside a node's socket: gone with the executor, or swept by who starts the next node."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from anabranch.node.priority import NICER, give_way
from anabranch.node.process.client import (
    KEPT_LOG_S,
    START_TIMEOUT_S,
    _start_time,
    _try_connect,
    socket_path,
    sweep,
)

SUFFIXES = (".sock", ".lock", ".log", ".spill")


def files(directory: Path, name: str, age_s: float = 2 * START_TIMEOUT_S, log: str = "") -> Path:
    """What a killed node process leaves."""
    path = directory / f"{name}.sock"
    path.touch()
    path.with_suffix(".lock").touch()
    path.with_suffix(".log").write_text(log)
    path.with_suffix(".spill").mkdir()
    (path.with_suffix(".spill") / "x.arrow").touch()
    then = time.time() - age_s
    for suffix in SUFFIXES:
        os.utime(path.with_suffix(suffix), (then, then))
    return path


def left(path: Path) -> set[str]:
    return {s for s in SUFFIXES if path.with_suffix(s).exists()}


def test_what_is_swept_and_what_is_not(tmp_path: Path) -> None:
    mine = _start_time(os.getpid())
    dead = files(tmp_path, "999999999-1")
    reused = files(tmp_path, f"{os.getpid()}-1")  # the number of another process now
    alive = files(tmp_path, f"{os.getpid()}-{mine}")
    young = files(tmp_path, "999999998-1", age_s=1)
    told = files(tmp_path, "999999997-1", log="Traceback")
    old = files(tmp_path, "999999996-1", age_s=2 * KEPT_LOG_S, log="Traceback")
    foreign = tmp_path / "notes.log"
    foreign.touch()
    sweep(tmp_path)
    assert left(dead) == left(reused) == left(old) == set()
    assert left(alive) == left(young) == set(SUFFIXES)
    assert left(told) == {".log"}
    assert foreign.exists()


def test_a_node_that_answers_is_never_swept(tmp_path: Path) -> None:
    """Its executor may be in another container, where its number says nothing."""
    import socket

    path = tmp_path / "999999999-1.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        then = time.time() - 2 * START_TIMEOUT_S
        os.utime(path, (then, then))
        sweep(tmp_path)
        assert path.exists()
    sweep(tmp_path)
    assert not path.exists()


def test_a_node_process_ends_with_its_executor_and_leaves_nothing(tmp_path: Path) -> None:
    executor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = tmp_path / socket_path(executor.pid).name
    path.with_suffix(".lock").touch()
    path.with_suffix(".spill").mkdir()
    (path.with_suffix(".spill") / "of-the-one-before.arrow").touch()
    with path.with_suffix(".log").open("wb") as log:
        command = [
            sys.executable,
            "-m",
            "anabranch.node.process.server",
            str(path),
            str(executor.pid),
        ]
        node = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while (sock := _try_connect(path)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sock is not None, path.with_suffix(".log").read_text()
        sock.close()
        while path.with_suffix(".spill").exists() and time.monotonic() < deadline:
            time.sleep(0.02)  # it listens before it has tidied up
        assert not path.with_suffix(".spill").exists()
        executor.kill()
        executor.wait()
        assert node.wait(timeout=60) == 0
    finally:
        node.kill()
        executor.kill()
    assert list(tmp_path.iterdir()) == []


def test_background_threads_give_way() -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []

    def work() -> None:
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, mine + NICER)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
