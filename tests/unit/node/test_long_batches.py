"""A batch that has piled up is cut into slices by what rows cost, so that nodes which join, losses
and stops need not wait for the end of it. What rows cost is made up here."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_run import FaultyCluster, LocalRun

import anabranch as ab
from anabranch.control.schedule import LONG_S
from anabranch.driver.progress import Progress
from anabranch.model.ids import NodeId
from anabranch.model.reports import NodeReport
from anabranch.node.protocol.source_task import MAX_PIECES, rows_per_slice

ROW_S = 0.01
PARTITIONS = 4
LARGE = 20_000  # rows: on two nodes 100 s, if keys are even


class Timed(FaultyCluster):
    """Its nodes say that every row has kept them busy."""

    row_s = ROW_S

    def told(self, report: NodeReport) -> NodeReport:
        seen = report.partitions.items()
        costs = {p: replace(x, busy_s=self.row_s * x.rows_in) for p, x in seen}
        return replace(report, partitions=costs)


class Job:
    """Counts of 16 keys; rows are not combined, so that each has its cost."""

    def __init__(self, root: Path, nodes: int, **options: Any) -> None:
        topology = ab.Topology("t", key_groups=16, parallelism=PARTITIONS)
        counts = topology.source("s", None).key_by("k")
        counts = counts.aggregate("count", n=ab.count(), precombine=False)
        self.sink = ab.Memory()
        counts.to("out", self.sink)
        self.fed = 0
        self.timed = Timed(nodes)
        self.run = LocalRun(topology, root, cluster=self.timed, **options)
        self.seen: list[Progress] = []
        self.run.run.steps.on_progress.append(self.seen.append)

    def feed(self, rows: int) -> None:
        self.run.feed([{"s": [(n * 31 % 16, n) for n in range(self.fed, self.fed + rows)]}])
        self.fed += rows

    def check(self) -> None:
        shown = pa.concat_tables([t for k in sorted(self.sink.slices) for t in self.sink.slices[k]])
        found = {row["k"]: row["n"] for row in shown.to_pylist()}
        assert found == Counter(n * 31 % 16 for n in range(self.fed))


def test_small_batches_stay_whole(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=2)
    for _ in range(4):
        job.feed(300)  # 1.5 s on two nodes
    assert len(job.seen) == 4
    job.run.stop()
    job.check()


def test_a_large_one_is_cut_by_what_its_rows_cost(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=2)
    job.feed(300)
    job.feed(LARGE)
    large = job.seen[1:]
    rows_in_time = LONG_S / ROW_S * 2  # on two nodes
    assert max(p.rows_in for p in large) <= 1.3 * rows_in_time  # keys are not quite even
    assert len(large) <= 2 * LARGE / rows_in_time
    job.run.stop()
    job.check()


def test_a_node_that_joins_in_the_middle_of_it_has_its_share_before_its_end(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, nodes=1)
    job.feed(300)
    left: list[int] = []  # slices of the batch, once the node had its share

    def join(progress: Progress) -> None:
        if progress.slice == 3:
            job.run.cluster.join(1)
            job.run.run.nodes_joined((NodeId("1"),))

    def look(progress: Progress) -> None:
        placement, newest = job.run.controller.placement, job.run.controller.newest
        assert placement is not None
        assert newest is not None
        if len(placement.hosted_by(NodeId("1"))) == PARTITIONS // 2:
            left.append(newest.chunks_left)
        elif progress.slice > 3:
            time.sleep(0.05)  # state is loaded ahead by a thread, which gives way to slices

    job.run.run.steps.on_progress += [join, look]
    job.feed(LARGE)
    assert len(job.seen) > 10
    assert left[0] > 0
    job.run.stop()
    job.check()


def test_a_stall_does_not_make_the_burst_after_it_thousands_of_slices(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=2)
    job.timed.row_s = 30.0  # every row of the first slice, say
    job.feed(2)
    job.feed(LARGE)
    assert len(job.seen) == 1 + MAX_PIECES
    job.run.stop()
    job.check()


@pytest.mark.parametrize(
    ("longest", "shares", "asked", "in_time", "limit"),
    [
        (0, 1, None, None, 1),
        (1_000, 1, None, None, 1_000),
        (1_000, 2, 500, None, 250),
        (1_000, 2, None, 500, 250),
        (1_000, 1, 100, 500, 100),
        (1_000, 1, 500, 100, 100),
        (1_000, 1, None, 1, 10),  # not more than MAX_PIECES
        (1_000, 1, 1, None, 1),  # but where it is asked for
        (1_000, 4, 2, None, 1),
        (50, 1, None, 1_000, 50),
    ],
)
def test_rows_per_slice(
    longest: int, shares: int, asked: int | None, in_time: int | None, limit: int
) -> None:
    assert rows_per_slice(longest, shares, asked, in_time) == limit


def test_what_was_learnt_holds_for_the_nodes_that_are_left(tmp_path: Path) -> None:
    job = Job(tmp_path, nodes=4)
    job.feed(300)
    job.run.cluster.kill(*job.run.cluster.nodes[1:])
    job.feed(LARGE)
    slices = [p for p in job.seen if p.slice > 1]
    # The batch was cut for four nodes, and read again for one.
    assert max(p.rows_in for p in slices) <= 1.3 * LONG_S / ROW_S
    job.run.stop()
    job.check()
