"""Restarts after damage: what can be repaired is, what cannot is told, nothing is guessed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from local_run import FaultyCluster, LocalRun
from test_local_runs import Comparison, _simple

import anabranch as ab
from anabranch.errors import ConfigError, StorageError, TopologyError
from anabranch.model.ids import NodeId
from oracle import Dataflow, Step


def batch(n: int) -> list[dict[str, list[tuple[int | None, int]]]]:
    return [{"s": [(k, n + k) for k in range(6)]}, {"s": [(None, n)]}]


def fed(comparison: Comparison, root: Path, batches: int, interval: str = "1ms") -> None:
    run = LocalRun(comparison.topology(), root, checkpoint_interval=interval)
    for n in range(batches):
        comparison.feed(run, batch(n))
        run.await_cut()
    run.stop()
    run = LocalRun(comparison.topology(), root, checkpoint_interval="300h")
    comparison.feed(run, batch(50))
    run.kill()


def newest_checkpoints(root: Path) -> list[Path]:
    files = sorted((root / "checkpoints").glob("*/*/*.ckpt"), key=lambda p: p.name)
    newest = files[-1].name.partition("-")[0]
    return [f for f in files if f.name.startswith(newest)]


@pytest.mark.parametrize("damage", ["torn", "gone"])
def test_a_damaged_newest_checkpoint_is_skipped(tmp_path: Path, damage: str) -> None:
    comparison = Comparison(_simple())
    fed(comparison, tmp_path, batches=5)
    victim = newest_checkpoints(tmp_path)[0]
    if damage == "torn":
        victim.write_bytes(victim.read_bytes()[:-3])
    else:
        victim.unlink()
    run = LocalRun(comparison.topology(), tmp_path)
    comparison.feed(run, batch(7))
    run.stop()
    comparison.feed(LocalRun(comparison.topology(), tmp_path), batch(8))


def test_the_only_checkpoint_damaged_means_replay_from_the_beginning(tmp_path: Path) -> None:
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), tmp_path, checkpoint_interval="300h")
    comparison.feed(run, batch(0))
    comparison.feed(run, batch(1))
    run.stop()
    for file in newest_checkpoints(tmp_path):
        file.unlink()
    comparison.feed(LocalRun(comparison.topology(), tmp_path), batch(2))


def test_all_checkpoints_damaged_is_told(tmp_path: Path) -> None:
    comparison = Comparison(_simple())
    fed(comparison, tmp_path, batches=5)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(StorageError):
        LocalRun(comparison.topology(), tmp_path)


def test_a_missing_source_log_is_told(tmp_path: Path) -> None:
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), tmp_path, checkpoint_interval="300h")
    comparison.feed(run, batch(0))
    run.kill()
    next((tmp_path / "source-log").glob("*/00000.log")).unlink()
    with pytest.raises(StorageError, match=r"the source log .*/00000.log of slice 1 is missing"):
        LocalRun(comparison.topology(), tmp_path)


def test_a_missing_source_log_of_a_later_slice_of_a_batch_is_told(tmp_path: Path) -> None:
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), tmp_path, max_rows_per_slice=4)
    long, short = [(n, n) for n in range(7)], [(1, 1)]

    def lose(step: str, tasks: int) -> None:
        if (step, tasks) == ("source", 2):  # both have logged all slices of the batch
            for log in (tmp_path / "source-log").glob("000000000003-*/00000.log"):
                log.unlink()

    run.cluster.before = lose
    with pytest.raises(StorageError, match=r"the source log .*/00000.log of slice 3 is missing"):
        run.feed([{"s": long}, {"s": short}])
    newest = run.controller.newest
    assert newest is not None
    assert (newest.number, list(newest.chunks)) == (2, [3, 0])
    run.kill()
    # The same after a restart in the middle of the batch.
    with pytest.raises(StorageError, match=r"the source log .*/00000.log of slice 3 is missing"):
        LocalRun(comparison.topology(), tmp_path).feed([], number=0)


def test_an_operator_named_source_shares_a_sink_with_source_tasks(tmp_path: Path) -> None:
    steps = (
        Step("s", "source"),
        Step("source", "sum", ("s",), 1),
        Step("o", "sink", ("source", "s")),
    )
    comparison = Comparison(Dataflow(steps))
    run = LocalRun(comparison.topology(), tmp_path, nodes=1)
    comparison.feed(run, batch(3))


def test_a_moved_directory_goes_on(tmp_path: Path) -> None:
    comparison = Comparison(_simple())
    fed(comparison, tmp_path / "old", batches=3)
    (tmp_path / "old").rename(tmp_path / "new")
    comparison.feed(LocalRun(comparison.topology(), tmp_path / "new"), batch(9))


def parquet(root: Path) -> ab.Topology:
    topology = ab.Topology("t")
    topology.source("s", None).to("o", ab.Parquet(str(root / "out")))
    return topology


def test_a_new_directory_over_old_output_is_refused(tmp_path: Path) -> None:
    run = LocalRun(parquet(tmp_path), tmp_path / "a")
    run.feed(batch(0))
    run.kill()
    with pytest.raises(ConfigError, match="belongs to another job"):
        LocalRun(parquet(tmp_path), tmp_path / "b")
    LocalRun(parquet(tmp_path), tmp_path / "a").feed(batch(1))


@pytest.mark.parametrize("path", ["./out", "link", "link/../out"])
def test_two_sinks_in_one_directory_are_refused(tmp_path: Path, path: str) -> None:
    topology = parquet(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    ab.Stream(topology, ("s",)).to("p", ab.Parquet(f"{tmp_path}/{path}"))
    with pytest.raises(TopologyError, match="'o' and 'p' write to the same directory"):
        LocalRun(topology, tmp_path / "ck")


def test_rows_are_never_late_to_their_own_batch(tmp_path: Path) -> None:
    """Two source tasks with different times, cut into slices: every row counts."""
    import datetime as dt

    import local_run
    import pyarrow as pa

    schema = pa.schema([("k", pa.int64()), ("v", pa.timestamp("us", "UTC"))])
    sink = ab.Memory()
    topology = ab.Topology("late")
    windows = topology.source("s", None, time="v").key_by("k").window(ab.tumbling("1s"), time="v")
    windows.aggregate("count", n=ab.count()).to("o", sink)
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

    def rows(first: int, count: int) -> list[tuple[int, dt.datetime]]:
        return [(1, start + dt.timedelta(seconds=first + i)) for i in range(count)]

    def table(given: list[tuple[int, dt.datetime]]) -> pa.Table:
        return pa.table({"k": [r[0] for r in given], "v": [r[1] for r in given]}, schema)

    original, local_run.table = local_run.table, table  # type: ignore[assignment]
    try:
        run = LocalRun(topology, tmp_path, max_rows_per_slice=4, schemas={"s": schema})
        run.feed([{"s": rows(0, 10)}, {"s": rows(100, 10)}])  # type: ignore[list-item]
        run.feed([{"s": rows(200, 1)}])  # type: ignore[list-item]
        run.stop()
    finally:
        local_run.table = original
    assert sum(sink.rows().column("n").to_pylist()) == 20
    assert sum(p.late_rows for p in run.history.progress) == 0


def test_hosts_of_two_jobs_do_not_mix(tmp_path: Path) -> None:
    """Each job has hosts of its own, also with equal names, slices and generations."""
    first, second = Comparison(_simple()), Comparison(_simple())
    one = LocalRun(first.topology(), tmp_path / "a", cluster=FaultyCluster(2))
    two = LocalRun(second.topology(), tmp_path / "b", cluster=FaultyCluster(2))
    for n in range(3):
        first.feed(one, batch(n))
        second.feed(two, batch(10 * n))


def test_a_node_process_starts_and_ends_one_writer_per_job(tmp_path: Path) -> None:
    """Requests must not start threads, and a forgotten job must not leave one behind."""
    import threading

    from anabranch.node.process.server import Hosts, _dispatch
    from anabranch.node.protocol.messages import ForgetRequest, PollRequest

    hosts = Hosts(tmp_path, os.getpid())
    before = set(threading.enumerate())
    for _ in range(5):
        _dispatch(hosts, PollRequest("job", 1, NodeId("0")), [])
    assert set(threading.enumerate()) == before
    for _ in range(3):
        hosts["job"]._process.write_later(lambda: None)
    (writer,) = set(threading.enumerate()) - before
    _dispatch(hosts, ForgetRequest("job"), [])
    writer.join(5)
    assert not writer.is_alive()
    assert hosts == {}
