"""A node shows that it lives as soon as it is warm, and falls silent with its executor."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from local_run import LocalRun
from test_local_runs import Comparison, _simple

from anabranch.driver.heartbeats import Heartbeats
from anabranch.model.ids import NodeId
from anabranch.node.process.surroundings import new_host
from anabranch.node.protocol.messages import WarmRequest

NODE = NodeId("7")


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def executor() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def heartbeats() -> Iterator[Heartbeats]:
    listener = Heartbeats("127.0.0.1", timeout_s=0.5)
    yield listener
    listener.close()


def test_a_warm_node_whose_executor_is_stopped_is_silent_before_it_got_any_work(
    tmp_path: Path, executor: int, heartbeats: Heartbeats
) -> None:
    run = LocalRun(Comparison(_simple()).topology(), tmp_path / "job")
    host = new_host(tmp_path / "spill", executor)
    try:
        host.warm(WarmRequest("job", run.run.caller.spec, NODE, heartbeats.pulse))
        first = host._process._heartbeat
        host.warm(WarmRequest("job", run.run.caller.spec, NODE, heartbeats.pulse))
        assert host._process._heartbeat is first
        assert eventually(lambda: heartbeats._liveness.knows(NODE))
        os.kill(executor, signal.SIGSTOP)
        assert eventually(lambda: NODE in heartbeats.silent())
    finally:
        host.close()
        host.join()
        run.kill()
