"""Most machines of a cluster die at once: the queries that fit on what is left go on or come back,
the others follow as machines come back, and every sink shows what it must."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
from jobs import final_values, read_output, stream, wait_for, write_rows

import anabranch as ab
from anabranch.model.ids import PartitionId
from anabranch.spark.embedded import EmbeddedCluster

KEYS = 80
ROWS_PER_S = 80
ROW_S = {"a": 0.003, "b": 0.007, "c": 0.007, "d": 0.005}  # 1.76 nodes of four
NODES = 4
WHOLE = "d"  # of one partition, on the machine that is left


class Waits(ab.SliceFunction):
    """Sums by key; a row takes a while, as with a call to a service."""

    state = {"total": pl.Int64}  # noqa: RUF012
    output = {"total": pl.Int64}  # noqa: RUF012

    def __init__(self, row_s: float) -> None:
        self.row_s = row_s

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        time.sleep(self.row_s * given.rows.height)
        sums = given.rows.group_by("k", maintain_order=True).agg(pl.col("v").sum())
        known = sums.join(given.state, on="k", maintain_order="left")
        new = known.select("k", total=pl.col("total").fill_null(0) + pl.col("v"))
        return ab.SliceResult(output=new, state=new)


class Feed:
    """A file every quarter of a second, until it is stopped."""

    def __init__(self, directory: Path) -> None:
        self.frames: list[pl.DataFrame] = []
        self._directory = directory
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._write()

    def _write(self) -> None:
        rows = ROWS_PER_S // 4
        v = pl.int_range(len(self.frames) * rows, (len(self.frames) + 1) * rows, eager=True)
        self.frames.append(pl.DataFrame({"k": v % KEYS, "v": v}))
        write_rows(self._directory, len(self.frames), self.frames[-1])

    def _run(self) -> None:
        while not self._stopped.wait(0.25):
            self._write()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


@contextmanager
def feeding(directory: Path) -> Iterator[Feed]:
    feed = Feed(directory)
    try:
        yield feed
    finally:
        feed.stop()


def kill_machines(cluster: EmbeddedCluster, names: list[str]) -> None:
    """Workers first: nothing takes the place of their executors."""
    executors = cluster.executors()
    for name in names:
        cluster.kill(cluster.workers[name])
    for pid, worker in executors.values():
        if worker in names:
            cluster.kill(pid)


def node_of(job: ab.Job, chain: str) -> str:
    placement = job._run.controller.placement
    assert placement is not None
    return placement.owners[PartitionId(chain, 0)].node


def test_queries_come_back_as_machines_do(tmp_path: Path) -> None:
    with EmbeddedCluster(nodes=1) as cluster, feeding(tmp_path / "in") as feed:
        for _ in range(NODES - 1):
            cluster.add_node()
        topology = ab.Topology("disaster")
        source = topology.source("numbers", stream(tmp_path / "in", "k long, v long", files=100))
        for priority, (name, row_s) in enumerate(ROW_S.items(), 1):
            keyed = source.select(f"s_{name}", "k", "v").key_by("k")
            parallelism = 1 if name == WHOLE else NODES
            keyed.process(name, Waits(row_s), parallelism=parallelism).to(
                f"out_{name}", ab.Parquet(str(tmp_path / f"out_{name}")), priority=priority
            )
        job = topology.start(
            cluster.session("disaster"),
            checkpoint=tmp_path / "ck",
            slice="500ms",
            checkpoint_interval="3s",
        )
        seen: list[frozenset[str]] = []  # queries that waited for rows, slice by slice

        def look(progress: ab.Progress) -> None:
            seen.append(frozenset(progress.waiting))

        job.on_progress(look)
        feed.start()
        wait_for(lambda: len(seen) > 20)
        spared = cluster.executors()[node_of(job, WHOLE)][1]
        kill_machines(cluster, sorted({*cluster.workers} - {spared}))
        wait_for(lambda: any(seen))
        for left in range(NODES - 1, 0, -1):
            cluster.add_node()
            wait_for(lambda n=left: len(job.nodes) > NODES - n)  # type: ignore[misc]
            time.sleep(4)
        wait_for(lambda: all(q.state == "live" for q in job.status().queries))
        feed.stop()
        rows = sum(f.height for f in feed.frames)
        wait_for(lambda: sum(p.rows_in for p in job.recent_progress) == rows)
        job.stop()
        assert job.exception is None
    expected = {
        k: {"total": total}
        for k, total in pl.concat(feed.frames).group_by("k").agg(pl.col("v").sum()).rows()
    }
    for name in ROW_S:
        assert final_values(read_output(tmp_path / f"out_{name}")) == expected
    waited = {name: sum(f"out_{name}" in slices for slices in seen) for name in ROW_S}
    assert waited[WHOLE] == 0, f"it lost nothing: {waited}"
    assert waited["a"] < min(waited["b"], waited["c"]), f"there was room for it: {waited}"
