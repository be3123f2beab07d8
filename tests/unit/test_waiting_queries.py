"""What people are told of queries that wait for nodes and come back: status, log, progress."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli.main import app
from anabranch.driver.cluster import Ran, RecoveryJob
from anabranch.driver.endpoint import Endpoint
from anabranch.model.reports import NodeReport
from anabranch.testing import LocalJob

BUSY_S = {"a": 0.3, "b": 0.3, "c": 0.6}  # of a slice of ROWS, one second each
ROWS = [{"a": i, "b": i % 3, "c": i % 2} for i in range(10)]
SCHEMA = pa.schema([(name, pa.int64()) for name in BUSY_S])
START = datetime.fromtimestamp(14, UTC)  # of a second run, by the clock of the first
SHOWN_MS = 100  # after its job has begun, a slice is shown


def topology(chains: str = "abc") -> ab.Topology:
    """A chain for each letter, of one partition, and a sink of rows as they come."""
    made = ab.Topology("t", key_groups=4, parallelism=1)
    rows = made.source("s", None)
    rows.to("raw", ab.Memory())
    for name in chains:
        priority = 2 if name == "b" else 1
        counts = rows.key_by(name).aggregate(name, n=ab.count())
        counts.to(f"out_{name}", ab.Memory(), priority=priority)
    return made


class Short:
    """A job whose partitions cost what BUSY_S says, on two nodes; of chains a and c and of chain b.
    Its clock goes on by a second per slice, and by SHOWN_MS per job."""

    def __init__(self, root: Path) -> None:
        self.job = LocalJob(topology(), root, {"s": SCHEMA}, 2, checkpoint_interval="1h")
        self.job.cluster.told = told  # type: ignore[method-assign]
        self.job.cluster.before = self._passes
        self.carry_out = self.job.cluster.begin
        self.job.cluster.begin = self._begin  # type: ignore[method-assign]
        self.beside: list[tuple[Future[Ran], Ran]] = []

    def _begin(self, job: RecoveryJob) -> Future[Ran]:
        """Parts beside slices end when the slice beside them has ended."""
        future: Future[Ran] = Future()
        self.beside.append((future, self.carry_out(job).result()))
        return future

    def _passes(self, step: str, depth: int) -> None:
        self.job.now_ms += SHOWN_MS if step == "end" else 0

    def feed(self, slices: int = 1) -> None:
        for _ in range(slices):
            self.job.step({"s": ROWS})
            ended, self.beside = self.beside, []
            for future, ran in ended:
                future.set_result(ran)

    def lose(self) -> None:
        """The node of chain b."""
        placement = self.job.controller.placement
        assert placement is not None
        (node,) = (o.node for p, o in placement.owners.items() if p.chain == "b")
        self.job.cluster.kill(node)

    def join(self) -> None:
        self.job.cluster.join(1)
        self.job.run.nodes_joined(self.job.cluster.nodes)

    @property
    def status(self) -> ab.JobStatus:
        return self.job.run.status()

    @property
    def queries(self) -> dict[str, ab.QueryStatus]:
        return {q.sink: q for q in self.status.queries}


def told(report: NodeReport) -> NodeReport:
    seen = {p: replace(x, busy_s=BUSY_S[p.chain]) for p, x in report.partitions.items()}
    return replace(report, partitions=seen)


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Short]:
    made = Short(tmp_path)
    yield made
    made.job.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of queries, since the last time."""
    found = [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.module == "queries"]
    caplog.clear()
    return found


def test_a_healthy_job(short: Short) -> None:
    assert short.status.capacity is None
    assert short.queries["out_b"] == ab.QueryStatus("out_b", 2)
    short.feed(4)
    assert short.queries["out_b"].relative_latency is None  # of four, none is usual
    short.feed(4)
    assert short.status.queries == tuple(
        ab.QueryStatus(sink, priority, relative_latency=1.0)
        for sink, priority in (("raw", 1), ("out_a", 1), ("out_b", 2), ("out_c", 1))
    )
    capacity = short.status.capacity
    assert capacity is not None
    assert capacity.demand == pytest.approx(1.2 / 1.1)  # a slice takes a second and SHOWN_MS
    assert capacity.capacity == pytest.approx(2, abs=0.1)  # but for source tasks
    assert short.status.partial_plan is None
    assert short.job.history.progress[-1].waiting == ()


def test_a_query_waits(short: Short, caplog: pytest.LogCaptureFixture) -> None:
    short.feed(8)
    short.lose()
    with caplog.at_level(logging.INFO, logger="anabranch"):
        short.feed(25)
    (line,) = said(caplog)
    assert line.startswith("WARNING query out_b waits: 3 of 4 queries fit on 1 node: 0.8")
    assert "; next is out_b, which lacks 0.27 of a node" in line
    assert short.status.partial_plan is not None
    assert short.status.partial_plan.startswith("3 of 4 queries fit on 1 node")
    query = short.queries["out_b"]
    assert (query.state, query.slices_behind, query.estimate_s) == ("waiting", 25, None)
    # The first of them began as the loss was met, and one job more was run; then came 24 others.
    assert query.seconds_behind == pytest.approx(24 * 1.1 + 0.2)
    assert query.relative_latency == 1.0  # of what it has shown
    short.job.now_ms += 2_000
    assert short.queries["out_b"].seconds_behind == query.seconds_behind + 2
    others = [q for q in short.status.queries if q.sink != "out_b"]
    assert {(q.state, q.slices_behind, q.seconds_behind) for q in others} == {("live", 0, 0.0)}
    assert {p.waiting for p in list(short.job.history.progress)[8:]} == {("out_b",)}
    assert short.status.capacity is not None
    assert short.status.capacity.capacity < 1 < short.status.capacity.demand
    assert len(short.job.history.recoveries) == 1  # the start: nothing has come back yet


def test_a_query_comes_back(short: Short, caplog: pytest.LogCaptureFixture) -> None:
    short.feed(8)
    short.lose()
    short.feed(30)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="anabranch"):
        short.join()
        short.feed()
        (line,) = said(caplog)
        assert line.startswith("INFO query out_b comes back now: all 4 queries fit on 2 nodes: 1.")
        query = short.queries["out_b"]
        assert query.state == "catching up"
        assert query.estimate_s is not None
        assert 0 < query.slices_behind < 30
        assert query.relative_latency is not None
        assert query.relative_latency > 50  # the newest that it has shown is long past
        short.job.now_ms += 1_000  # and nothing has come back meanwhile
        later = short.queries["out_b"].estimate_s
        assert later is not None
        assert later > query.estimate_s
        short.feed(6)
        (line,) = said(caplog)
    assert line.startswith("INFO query out_b is live again, after 36.9 s")
    assert short.queries["out_b"].state == "live"
    assert short.status.partial_plan is None
    # One for all parts, and it says what it was of.
    (recovery,) = short.job.history.recoveries[1:]
    assert str(recovery).startswith("recovered 1 partition of node ")
    assert recovery.total_s > 30
    short.feed()
    assert short.queries["out_b"].relative_latency == 1.0
    assert short.job.history.progress[-1].waiting == ()


def test_a_query_that_still_waits_when_the_driver_is_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything waits at its start, and comes back as far as there is room for it."""
    first = Short(tmp_path)
    first.feed(8)
    first.lose()
    first.feed(5)
    first.job.run.close()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="anabranch"):
        job = LocalJob(topology(), tmp_path, {"s": SCHEMA}, 1, start=START)
        job.cluster.told = told  # type: ignore[method-assign]
        job.step({"s": ROWS})
        lines, states = said(caplog), {q.sink: q.state for q in job.run.status().queries}
    warning, plan, *live = lines
    assert warning.startswith("WARNING queries out_a, out_b, out_c wait: 3 of 4 queries fit on 1")
    assert plan.startswith("INFO queries out_a, out_b come back now; next is out_c, which lacks 0.")
    # What it lacks has been there since the run before.
    assert live == [
        "INFO query out_a is live again, after 0.0 s",
        "INFO query out_b is live again, after 4.2 s",
    ]
    assert states == {"raw": "live", "out_a": "live", "out_b": "live", "out_c": "waiting"}
    job.close()
    first.job.close()


def test_status_shows_it(short: Short, tmp_path: Path) -> None:
    short.feed(8)
    endpoint = Endpoint(tmp_path, short.job.run)
    runner = CliRunner()

    def shown(*options: str) -> str:
        result = runner.invoke(app, ["status", str(tmp_path), *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    try:
        healthy = shown()
        assert "needed: 1.09 nodes; there are " in healthy
        assert "behind" not in healthy  # nobody is
        short.lose()
        short.feed(4)
        text, found = shown(), json.loads(shown("--json"))
    finally:
        endpoint.close()
    lines = [line.split() for line in text.splitlines()]
    assert ["query", "priority", "state", "behind", "live", "in"] in lines
    assert ["raw", "1", "live"] in lines
    (waiting,) = (line for line in lines if line[:1] == ["out_b"])
    assert waiting[:3] == ["out_b", "2", "waiting"]
    assert short.status.partial_plan is not None
    assert short.status.partial_plan in text.splitlines()
    query = next(q for q in found["queries"] if q["sink"] == "out_b")
    assert (query["state"], query["slices_behind"], query["estimate_s"]) == ("waiting", 4, None)
    assert found["capacity"]["demand"] > found["capacity"]["capacity"]
    assert found["partial_plan"] == short.status.partial_plan
