"""Active replication: a copy of every partition applies what it does, and takes its place."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_elasticity import feed, told, topology
from tests.unit.test_parallel_recovery import SCHEMA, lose

from anabranch.control.policies.strategies import Strategy
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement, copied, even_groups, promote, reassign
from anabranch.node.arrow.packets import Route, cut
from anabranch.testing import Drain, Idle, Join, LocalJob, Restart, Scale, Step, play


def started(root: Path, nodes: int = 3) -> LocalJob:
    return LocalJob(topology(), root, SCHEMA, nodes=nodes, strategy=Strategy(copies=True))


def copies(job: LocalJob) -> dict[PartitionId, NodeId]:
    assert job.controller.placement is not None
    return dict(job.controller.placement.copies)


def until_copied(job: LocalJob) -> list[dict[str, pl.DataFrame]]:
    shown = []
    for _ in range(20_000):  # state is loaded ahead in the background, as fast as it may
        placement = job.controller.placement
        assert placement is not None
        if placement.copies.keys() == placement.owners.keys():
            return shown
        shown.append(job.step(Idle()))
    raise AssertionError("no copies were made")


def same(outputs: list[dict[str, pl.DataFrame]], steps: list[Step]) -> None:
    still = play(topology(), steps)
    for sink in ("sums", "tops", "firsts"):
        assert told(outputs, sink) == told(still, sink)


def test_copies_take_over_without_a_replay_and_are_made_anew(tmp_path: Path) -> None:
    job = started(tmp_path)
    steps: list[Step] = [feed(n) for n in range(12)]
    outputs = [job.step(s) for s in steps[:3]]
    outputs += until_copied(job)
    outputs += [job.step(s) for s in steps[3:6]]
    lose(job, "sum")
    outputs.append(job.step(steps[6]))
    recovery = job.history.recoveries[-1]
    assert PartitionId("sum", 0) in recovery.promoted
    assert not recovery.partitions, "nothing is restored"
    assert "took over" in str(recovery)
    outputs += until_copied(job)
    outputs.append(job.step(steps[7]))
    lose(job, "by_n")
    outputs += [job.step(s) for s in steps[8:10]]
    assert PartitionId("by_n", 0) in job.history.recoveries[-1].promoted
    # The last node has no other for copies; its partitions are all that is left.
    outputs += [job.step(Idle()), *(job.step(s) for s in steps[10:])]
    same(outputs, steps)


@pytest.mark.parametrize("change", [Scale("sum", 4), Scale("once", 1), Join(), Drain(), Restart()])
def test_copies_follow_the_placement(tmp_path: Path, change: Step) -> None:
    job = started(tmp_path, nodes=4)
    steps: list[Step] = [feed(n) for n in range(9)]
    outputs = [*(job.step(s) for s in steps[:2]), *until_copied(job), job.step(steps[2])]
    outputs.append(job.step(change))
    outputs += [job.step(steps[3]), *until_copied(job), job.step(steps[4])]
    placement = job.controller.placement
    assert placement is not None
    assert all(placement.owners[p].node != n for p, n in placement.copies.items())
    lose(job, "sum")
    outputs += [job.step(s) for s in steps[5:]]
    assert PartitionId("sum", 0) in job.history.recoveries[-1].promoted
    same(outputs, steps)


def test_a_partition_and_its_copy_lost_together_are_restored(tmp_path: Path) -> None:
    job = started(tmp_path)
    steps: list[Step] = [feed(n) for n in range(8)]
    outputs = [*(job.step(s) for s in steps[:2]), *until_copied(job), job.step(steps[2])]
    first = PartitionId("sum", 0)
    placement = job.controller.placement
    assert placement is not None
    for victim in (placement.owners[first].node, placement.copies[first]):
        job.cluster.kill(victim)
    outputs += [job.step(s) for s in steps[3:]]
    assert any(first in r.partitions for r in job.history.recoveries[1:])
    same(outputs, steps)


def test_a_copy_that_had_applied_the_slice_repeats_it(tmp_path: Path) -> None:
    """The node dies after the last wave, before anybody hears of it."""
    job = started(tmp_path)
    steps: list[Step] = [feed(n) for n in range(8)]
    outputs = [*(job.step(s) for s in steps[:2]), *until_copied(job), job.step(steps[2])]

    def dies(step: str, depth: int) -> None:
        if step == "end":
            job.cluster.before = lambda step, depth: None
            lose(job, "sum")

    job.cluster.before = dies
    outputs += [job.step(s) for s in steps[3:]]
    assert PartitionId("sum", 0) in job.history.recoveries[1].promoted
    same(outputs, steps)


NODES = [NodeId(n) for n in "abcd"]


@given(st.integers(1, 8), st.integers(2, 4), st.sets(st.sampled_from(NODES)))
def test_copied_placements(parallelism: int, nodes: int, dead: set[NodeId]) -> None:
    """Copies are elsewhere and even; those that live are promoted, the others restored."""
    homes = NODES[:nodes]
    owners = {PartitionId("c", i): Ownership(homes[i % nodes], 5) for i in range(parallelism)}
    groups = {"c": even_groups(16, parallelism)}
    placement = copied(Placement(1, groups, owners, tuple(homes)), homes)
    assert placement.copies.keys() == owners.keys()
    assert all(owners[p].node != n for p, n in placement.copies.items())
    loads = Counter([*placement.copies.values(), *(o.node for o in owners.values())])
    assert max(loads.values()) - min(loads[n] for n in homes) <= 2
    left = [n for n in homes if n not in dead]
    lost = {p for p, o in owners.items() if o.node in dead}
    if not left:
        return
    after, promoted = promote(placement, lost, left)
    assert promoted == {p for p in lost if placement.copies[p] in left}
    after = reassign(after, lost - promoted, left)
    for partition, owner in after.owners.items():
        assert owner.node in left
        assert owner.epoch == 5 + (partition in lost)
        if partition in promoted:
            assert owner.node == placement.copies[partition]
            assert partition not in after.copies


@given(st.lists(st.integers(0, 50)), st.integers(1, 5))
def test_packets_reach_both(keys: list[int], parallelism: int) -> None:
    """Cut for partitions and copies: each gets the same rows, in the same order."""
    table = pa.table({"k": pa.array(keys, pa.int64()), "i": pa.array(range(len(keys)), pa.int64())})
    groups = np.asarray(even_groups(8, parallelism), dtype=np.uint16)
    homes = np.asarray([p % 3 for p in range(parallelism)], dtype=np.uint16)
    elsewhere = {p: (p + 1) % 3 for p in range(parallelism) if p != 2}
    cuts = cut(table, Route(("k",), 8, 3, groups, homes, elsewhere))

    def rows(node: int, partition: int) -> list[dict[str, int]]:
        packets = cuts[node]
        mine = packets.of(partition) if packets is not None else None
        return mine.to_pylist() if mine is not None else []

    found = 0
    for partition in range(parallelism):
        mine = rows(int(homes[partition]), partition)
        found += len(mine)
        if partition in elsewhere:
            assert rows(elsewhere[partition], partition) == mine
    assert found == len(keys)
