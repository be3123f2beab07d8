"""A running job, asked and changed through its endpoint by the commands of the command line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli.main import app
from anabranch.control.policies.load import Measurement
from anabranch.driver import endpoint as endpoints
from anabranch.driver.endpoint import ENDPOINT, MAX_CALLERS, Endpoint, ask
from anabranch.driver.status import status
from anabranch.errors import AdjustmentError
from anabranch.model.events import DrainRequested, Idled, ScaleRequested
from anabranch.model.ids import NodeId
from anabranch.model.scaling import Decision
from anabranch.testing import LocalJob
from strangers import NOBODY, as_root, said, stranger


def topology() -> ab.Topology:
    made = ab.Topology("asked", key_groups=16)
    rows = made.source("rows", None)
    rows.key_by("k").aggregate("sum", total=ab.sum("v")).to("sums", ab.Memory())
    return made


class Running:
    """A job in this process that takes requests as the driver does; `go_on` lets them happen."""

    def __init__(self, root: Path, nodes: int = 2) -> None:
        schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
        self.job = LocalJob(topology(), root, {"rows": schema}, nodes)
        for n in range(3):
            self.job.step({"rows": [{"k": f"k{i}", "v": n} for i in range(5)]})
        self.added = 0
        self.hasty = False  # what is asked for is done soon after
        self.lock = threading.Lock()

    def status(self) -> ab.JobStatus:
        with self.lock:
            plan = topology().plan()
            return status(plan, self.job.controller, self.job.history, 1_000, {}, 4_000)

    def scale(self, operator: str, parallelism: int) -> None:
        self._request(ScaleRequested(operator, parallelism, 3_000))

    def drain(self, node: str) -> None:
        self._request(DrainRequested(NodeId(node), 3_000))

    def add_nodes(self, count: int) -> None:
        self.added += count

    def _request(self, event: Any) -> None:
        self._handle(event)
        if self.hasty:
            threading.Timer(0.1, self.go_on).start()

    def go_on(self) -> None:
        now_ms = 3_000
        while self.job.controller.adjusting:
            now_ms += 1
            self._handle(Idled(now_ms))

    def _handle(self, event: Any) -> None:
        with self.lock:
            self.job.run.take(event)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    endpoint = Endpoint(tmp_path, running)
    yield running
    endpoint.close()
    assert not (tmp_path / ENDPOINT).exists()


def command(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr.removeprefix("error: ").strip()


def test_status(running: Running, tmp_path: Path) -> None:
    running.job.history.decisions.append(Decision(1, "up", "sum from 1 to 2", "of the test"))
    text = command("status", tmp_path)
    assert "asked · running · slice 3 · 5 rows/s · took" in text
    assert "of 1.0 s" in text
    assert "autoscaler: sum from 1 to 2, because of the test" in text
    found = json.loads(command("status", tmp_path, "--json"))
    (chain,) = found["operators"]
    assert (chain["operators"], chain["partitions"], chain["state_rows"]) == (["sum", "sums"], 2, 5)
    assert chain["cpu"] is None  # not measured yet
    assert [n["partitions"] for n in found["nodes"]] == [1, 1]
    assert found["nodes"] == json.loads(command("nodes", tmp_path, "--json"))
    assert "draining" not in command("nodes", tmp_path)


def test_scaling_waits_until_it_is_done(running: Running, tmp_path: Path) -> None:
    assert command("scale", tmp_path, "sum", "4", "--no-wait") == (
        "accepted: sum at parallelism 4\n"
    )
    assert running.status().adjusting
    running.hasty = True
    text = command("scale", tmp_path, "sum", "4")
    assert text.startswith("done: sum at parallelism 4\n")
    assert "adjusted after slice" in text
    assert "sum from 2 to 4 partitions" in text
    assert running.status().operators[0].partitions == 4


def test_nodes_are_added_and_drained(running: Running, tmp_path: Path) -> None:
    assert "asked the cluster for 3 more" in command("nodes", tmp_path, "add", "3")
    assert running.added == 3
    accepted = command("nodes", tmp_path, "drain", "1", "--no-wait")
    assert accepted == "accepted: node 1 drained and released\n"
    assert "draining" in command("nodes", tmp_path)
    running.hasty = True
    assert command("nodes", tmp_path, "drain", "1").startswith("done: node 1 drained")
    assert [n.node for n in running.status().nodes] == ["2"]


def test_refusals(running: Running, tmp_path: Path) -> None:
    at = tmp_path
    assert refused("scale", at, "sum", "17") == (
        "'sum' cannot run at parallelism 17: the topology has 16 key groups, and a partition needs "
        "at least one"
    )
    assert "cannot run at parallelism 0; give at least 1" in refused("scale", at, "sum", "0")
    assert "there is no operator 'summ'; operators" in refused("scale", at, "summ", "2")
    assert "there is no node '9'; the job has 1, 2" in refused("nodes", at, "drain", "9")
    assert "'none' nodes cannot be added; give a number" in refused("nodes", at, "add", "none")
    assert "anabranch nodes JOB, … JOB add N, or … JOB drain" in refused("nodes", at, "remove")
    running.scale("sum", 3)
    assert refused("scale", at, "sum", "5") == (
        "'sum' is being scaled to 3 already; wait until that is done"
    )
    running.go_on()
    busy = Measurement(5.0, 5, 0.4, 5, {}, {NodeId("1"): 0.55, NodeId("2"): 0.45})
    running.job.controller.load.measured.append(busy)
    assert refused("nodes", at, "drain", "1") == (
        "node '1' cannot be drained: those that stay (1) would be busy at 100% of their CPU, and "
        "80% is the limit; add one first"
    )
    running.job.controller.load.measured.clear()
    running.drain("1")
    assert "node '2' cannot be drained: no other node is left" in refused("nodes", at, "drain", "2")


def test_nobody_answers(tmp_path: Path) -> None:
    assert refused("status", tmp_path / "nowhere").startswith("no job is running on ")
    Running(tmp_path)
    endpoint = Endpoint(tmp_path, Running(tmp_path / "other"))
    stale = (tmp_path / ENDPOINT).read_text()
    endpoint.close()
    (tmp_path / ENDPOINT).write_text(stale)  # as a killed driver leaves it
    for arguments in (["status", tmp_path], ["scale", tmp_path, "sum", "2"]):
        sentence = refused(*arguments)
        assert sentence.startswith(f"no job is running on {tmp_path} any more; the last one ran on")
    (tmp_path / ENDPOINT).write_text("{}")
    assert "is damaged; start the job again" in refused("status", tmp_path)


def test_the_key_is_needed_and_private(running: Running, tmp_path: Path) -> None:
    path = tmp_path / ENDPOINT
    assert path.stat().st_mode & 0o777 == 0o600
    where = json.loads(path.read_text())
    path.write_text(json.dumps({**where, "key": "00" * 32}))
    sentence = refused("scale", tmp_path, "sum", "4")
    assert "does not accept the key in" in sentence
    assert running.status().operators[0].partitions == 2
    path.write_text(json.dumps(where))
    assert command("status", tmp_path)


def test_callers_that_misbehave_hinder_nobody(running: Running, tmp_path: Path) -> None:
    where = json.loads((tmp_path / ENDPOINT).read_text())
    name, key = f"\0{where['socket']}", bytes.fromhex(where["key"])
    with Client(name, family="AF_UNIX"):  # says nothing
        with Client(name, family="AF_UNIX", authkey=key) as caller:
            caller.send_bytes(b"no json")
            assert json.loads(caller.recv_bytes()) == {"refused": "the request is not JSON"}
        with pytest.raises(AdjustmentError, match=r"does not understand .*dance"):
            ask(tmp_path, {"do": "dance"})
        with pytest.raises(AdjustmentError, match="does not understand"):
            ask(tmp_path, {"do": "scale", "operator": "sum", "parallelism": "many"})
        assert ask(tmp_path, {"do": "status"})["slice"] == 3


# Connects as often as argument 2 says, keeps what is not hung up, and waits.
CROWD = """
crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(int(sys.argv[2]))]
for sock in crowd:
    sock.connect("\\0" + sys.argv[1])
print(sum(sock.recv(1) != b"" for sock in crowd), flush=True)
sys.stdin.read()
"""


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@as_root
def test_another_user_takes_no_files_and_no_threads_of_the_job(
    running: Running, tmp_path: Path
) -> None:
    """Everybody can connect to a socket in the kernel's namespace; they do not get a byte."""
    name = json.loads((tmp_path / ENDPOINT).read_text())["socket"]
    files, threads = open_files(), threading.active_count()
    with stranger(CROWD, name, "200") as crowd:
        assert said(crowd) == b"0"
        assert open_files() <= files + 2  # the pipes to them
        assert threading.active_count() <= threads
        assert ask(tmp_path, {"do": "status"})["slice"] == 3
        crowd.kill()


def silent_callers(root: Path, count: int, until: contextlib.ExitStack) -> list[socket.socket]:
    name = json.loads((root / ENDPOINT).read_text())["socket"]
    callers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(count)]
    for caller in callers:
        until.enter_context(caller).connect(f"\0{name}")
    return callers


def test_silent_callers_are_few(running: Running, tmp_path: Path) -> None:
    with contextlib.ExitStack() as until:
        callers = silent_callers(tmp_path, 2 * MAX_CALLERS, until)
        for caller in callers[:MAX_CALLERS]:
            assert caller.recv(1)  # let in, and asked for the key
        assert select.select(callers[MAX_CALLERS:], [], [], 0.1) == ([], [], [])
    assert ask(tmp_path, {"do": "status"})["slice"] == 3


def test_silent_callers_have_to_leave(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "GREET_S", 0.05)
    with contextlib.ExitStack() as until:
        silent_callers(tmp_path, 2 * MAX_CALLERS, until)
        assert ask(tmp_path, {"do": "status"})["slice"] == 3


@as_root
def test_a_job_of_another_user_than_the_files_owner_is_not_asked(
    running: Running, tmp_path: Path
) -> None:
    """Somebody took the name of a socket whose job was killed."""
    os.chown(tmp_path / ENDPOINT, NOBODY, NOBODY)
    with pytest.raises(AdjustmentError, match=r"no job is running on .* any more"):
        ask(tmp_path, {"do": "status"})


def test_a_driver_that_was_replaced_leaves_its_successors_endpoint(tmp_path: Path) -> None:
    """It has lost its lock, and ends when the other one has begun."""
    replaced = Endpoint(tmp_path, Running(tmp_path / "a"))
    successor = Endpoint(tmp_path, Running(tmp_path / "b"))
    replaced.close()
    assert ask(tmp_path, {"do": "status"})["slice"] == 3
    successor.close()
    assert not (tmp_path / ENDPOINT).exists()
