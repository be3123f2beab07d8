"""Ends every process of an embedded cluster, also when its owner was killed.

Every process of a cluster carries the cluster's directory in its environment, and so does all it
starts: workers, executors, Python workers, node processes. Membership is read from there, so
nothing can be missed by dying in the wrong order; a process of another user is no member, though
root could read its environment. (PR_SET_PDEATHSIG was rejected: it fires when the *thread* that
started the child ends, and executors are not our children.)

Run as a script by path: standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

MEMBER_VARIABLE = "ANABRANCH_CLUSTER"
WORKER_VARIABLE = "ANABRANCH_WORKER"
KILL_DEADLINE_S = 10.0


def environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it is gone or not ours to read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def members(directory: str) -> list[int]:
    """Pids of all living processes of the cluster in `directory`, in ascending order."""
    pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208
    return [p for p in pids if environment(p).get(MEMBER_VARIABLE) == directory and _is_ours(p)]


def _is_ours(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    users = next(line for line in status.splitlines() if line.startswith("Uid:")).split()
    return int(users[2]) == os.geteuid()  # real, effective, saved, of files


def end(directory: str) -> None:
    """Kill every member until none is left, then remove the directory."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    while (pids := members(directory)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
    shutil.rmtree(directory, ignore_errors=True)


def watch(owner: int, directory: str) -> None:
    """Wait for the end of `owner`, however it comes, then end its cluster."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        pass
    else:
        select.select([owner_fd], [], [])
    end(directory)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
