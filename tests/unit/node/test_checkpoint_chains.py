"""The files of a partition: few, whole, and none where nothing changes."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_run import LocalRun
from test_local_runs import Comparison

import anabranch as ab
from anabranch.model.ids import NodeId
from anabranch.node.protocol import partition as partition_module
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.writing import CheckpointWriter
from anabranch.testing import Idle, LocalJob
from oracle import Dataflow, Step

STEPS = (Step("s", "source"), Step("sum", "sum", ("s",), 2), Step("o", "sink", ("sum",)))
KEYS = 100


def all_keys(value: int) -> list[dict[str, list[tuple[int | None, int]]]]:
    return [{"s": [(k, value) for k in range(KEYS)]}]


def start(comparison: Comparison, root: Path, nodes: int) -> LocalRun:
    """Every slice seals, unless a cut is in flight."""
    run = LocalRun(comparison.topology(), root, nodes)
    run.controller.ledgers.checkpoints._interval_ms = 0  # from the first slice on
    return run


def files(run: LocalRun) -> dict[str, list[str]]:
    """Of the newest cut, per partition."""
    cut = run.controller.cut
    assert cut is not None
    return {p: list(f) for p, f in cut.files.items()}


def test_a_partition_that_does_not_change_writes_no_files(tmp_path: Path) -> None:
    comparison = Comparison(Dataflow(STEPS))
    run = start(comparison, tmp_path, nodes=2)
    comparison.feed(run, all_keys(1))
    run.await_cut()
    first, cuts = files(run), set[int]()
    for n in range(12):
        comparison.feed(run, [{"s": [(7, n)]}])
        run.await_cut()
        assert run.controller.cut is not None
        cuts.add(run.controller.cut.slice)
    assert len(cuts) == 12
    now = files(run)
    (idle,) = [p for p in first if now[p] == first[p]]
    assert len(now[idle]) == 1
    assert len(list((tmp_path / "checkpoints" / idle).iterdir())) == 1
    run.kill()
    comparison.feed(LocalRun(comparison.topology(), tmp_path), all_keys(2))


def test_a_large_state_that_hardly_changes_has_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "FULL_AFTER_DELTAS", 3)
    comparison = Comparison(Dataflow(STEPS))
    run = start(comparison, tmp_path, nodes=1)
    comparison.feed(run, all_keys(1))
    run.await_cut()
    most = 0
    for n in range(10):
        comparison.feed(run, [{"s": [(7, n)]}])
        run.await_cut()
        most = max(most, *(len(f) for f in files(run).values()))
    assert most == 4  # a full one and three deltas
    run.kill()
    comparison.feed(LocalRun(comparison.topology(), tmp_path), all_keys(2))


def test_windows_that_closed_without_a_row_are_a_change(tmp_path: Path) -> None:
    topology = ab.Topology("windows")
    source = topology.source("s", lambda spark: None, time="t")
    source.key_by("k").window(ab.tumbling("10s"), time="t").aggregate("n", n=ab.count()).to(
        "o", ab.Memory()
    )
    time = pa.field("t", pa.timestamp("us", tz="UTC"))
    job = LocalJob(topology, tmp_path, {"s": pa.schema([("k", pa.int64()), time])}, nodes=1)

    def at(seconds: int) -> list[dict[str, Any]]:
        return [{"k": 1, "t": dt.datetime.fromtimestamp(seconds, dt.UTC)}]

    job.step({"s": at(5)})
    (host,) = job.cluster.hosts.values()
    (partition, *_) = (p for p in host.partitions.values() if p.state.rows)
    assert partition.seal()[0]
    assert partition.seal() == (False, None)
    job.step({"s": at(1000)})
    assert partition.seal()[1]  # a row
    assert partition.seal() == (False, None)
    job.step(Idle(1))  # the watermark comes with a slice of its own, which closes the first window
    assert partition.seal()[1]
    assert partition.seal() == (False, None)
    job.close()


class HeldBack:
    """A disk that writes nothing until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._waiting: list[tuple[CheckpointWriter, tuple[Any, Any]]] = []
        self.holds = True
        real = CheckpointWriter.submit

        def submit(writer: CheckpointWriter, *sealed: Any) -> None:
            if self.holds:
                self._waiting.append((writer, sealed))
            else:
                real(writer, *sealed)

        monkeypatch.setattr(CheckpointWriter, "submit", submit)

    def sealed_by(self, host: Host[Any]) -> int:
        return sum(writer is host._writer for writer, _ in self._waiting)

    def write(self) -> None:
        self.holds = False
        for writer, sealed in self._waiting:
            writer.write(*sealed)


@pytest.mark.parametrize("given_up", [1, 3, 5, 7])
def test_a_full_file_of_a_cut_given_up_that_nobody_heard_of_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: int
) -> None:
    few: list[dict[str, list[tuple[int | None, int]]]] = [{"s": [(k, k) for k in range(4)]}]
    disk = HeldBack(monkeypatch)
    comparison = Comparison(Dataflow(STEPS))
    run = start(comparison, tmp_path, nodes=2)
    comparison.feed(run, all_keys(1))
    for _ in range(given_up):
        run.cluster.replace(NodeId("1"))  # its files will never come
        comparison.feed(run, few)
        comparison.feed(run, few)  # seals
    assert disk.sealed_by(run.cluster.hosts[NodeId("0")]) == given_up + 1
    disk.write()
    for _ in range(3):
        comparison.feed(run, few)
        run.await_cut()
    assert run.controller.cut is not None
    run.kill()
    comparison.feed(LocalRun(comparison.topology(), tmp_path), all_keys(3))


def test_a_half_written_file_of_a_killed_node_goes_when_its_slice_is_past(tmp_path: Path) -> None:
    comparison = Comparison(Dataflow(STEPS))
    run = start(comparison, tmp_path, nodes=2)
    comparison.feed(run, all_keys(1))
    run.await_cut()
    there = tmp_path / "checkpoints" / "sum" / "0"
    past, ahead = there / ".000000000001-1.ckpt.a.tmp", there / ".000000000099-1.ckpt.b.tmp"
    for path in (past, ahead):
        path.touch()
    for n in range(2, 5):
        comparison.feed(run, all_keys(n))
        run.await_cut()
    assert not past.exists()
    assert ahead.exists()
