"""A lost partition is rebuilt as several, which the next checkpoint makes one again."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_elasticity import feed, groups_of, told, topology

import anabranch as ab
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement, even_groups, reassign, split
from anabranch.testing import Idle, LocalJob, Restart, Scale, Step, play

SCHEMA = {"rows": pa.schema([("k", pa.string()), ("v", pa.int64())])}


def started(root: Path, ways: int = 3) -> LocalJob:
    return LocalJob(topology(), root, SCHEMA, nodes=4, parallel_recovery=ways)


def partitions(job: LocalJob, chain: str) -> list[PartitionId]:
    assert job.controller.placement is not None
    return job.controller.placement.partitions(chain)


def lose(job: LocalJob, chain: str) -> NodeId:
    """The node that has the chain's first partition dies; the next step meets it."""
    placement = job.controller.placement
    assert placement is not None
    victim = placement.owners[PartitionId(chain, 0)].node
    job.cluster.kill(victim)
    return victim


def until_one(job: LocalJob) -> list[dict[str, pl.DataFrame]]:
    shown = []
    for _ in range(20_000):  # state is loaded ahead in the background
        if not job.controller.ledgers.layouts.divided:
            break
        shown.append(job.step(Idle()))
    return shown


@pytest.mark.parametrize("chain", ["by_n", "once"])
def test_a_lost_partition_is_divided_and_made_one_again(tmp_path: Path, chain: str) -> None:
    job = started(tmp_path)
    steps: list[Step] = [feed(n) for n in range(9)]
    outputs = [job.step(s) for s in steps[:5]]
    before = len(partitions(job, chain))
    lose(job, chain)
    outputs.append(job.step(steps[5]))
    assert len(partitions(job, chain)) > before
    assert len(partitions(job, "sum")) == 2, "by_n sees the order of its rows"
    owners = job.controller.placement.owners  # type: ignore[union-attr]
    divided = [owners[p].node for p in job.history.recoveries[-1].partitions if p.chain == chain]
    assert len(set(divided)) == len(divided) > 1
    outputs += [job.step(s) for s in steps[6:]]
    outputs += until_one(job)
    assert len(partitions(job, chain)) == before
    assert any(f"{chain} from" in a.what for a in job.history.adjustments)
    still = play(topology(), steps)
    for sink in ("sums", "tops", "firsts"):
        assert told(outputs, sink) == told(still, sink)


def test_a_restart_does_not_keep_the_division(tmp_path: Path) -> None:
    job = started(tmp_path)
    steps: list[Step] = [feed(n) for n in range(8)]
    outputs = [job.step(s) for s in steps[:4]]
    lose(job, "once")
    outputs.append(job.step(steps[4]))
    assert len(partitions(job, "once")) > 2
    outputs += [job.step(Restart()), *(job.step(s) for s in steps[5:])]
    assert len(partitions(job, "once")) == 2
    assert told(outputs, "firsts") == told(play(topology(), steps), "firsts")


def test_whoever_scales_meanwhile_gets_it(tmp_path: Path) -> None:
    job = started(tmp_path)
    steps: list[Step] = [feed(n) for n in range(8)]
    outputs = [job.step(s) for s in steps[:4]]
    lose(job, "once")
    outputs.append(job.step(steps[4]))
    assert job.controller.ledgers.layouts.divided
    outputs += [job.step(Scale("once", 5)), *(job.step(s) for s in steps[5:])]
    assert len(partitions(job, "once")) == 5
    assert not job.controller.ledgers.layouts.divided
    assert told(outputs, "firsts") == told(play(topology(), steps), "firsts")


NODES = [NodeId(n) for n in "abcd"]


@given(st.integers(1, 8), st.sets(st.integers(0, 7), min_size=1), st.integers(1, 5))
def test_split_placements(parallelism: int, lost: set[int], ways: int) -> None:
    """Nobody else is touched, every key group has an owner that lives, and none is there twice."""
    groups = {"c": even_groups(16, parallelism)}
    owners = {PartitionId("c", i): Ownership(NODES[i % 4], 7) for i in range(parallelism)}
    placement = Placement(1, groups, owners, tuple(NODES))
    gone = {PartitionId("c", i) for i in lost if i < parallelism}
    made = split(placement, gone, ways, {})
    new = made.owners.keys() - owners.keys()
    after = reassign(made, gone | new, NODES[:3])
    assert set(after.groups["c"]) == set(range(len(after.owners)))
    for partition in owners.keys() - gone:
        assert after.owners[partition] == owners[partition]
        assert groups_of(after, partition) == groups_of(placement, partition)
    expected = sum(min(ways, len(groups_of(placement, p))) - 1 for p in gone)
    assert len(new) == expected
    assert all(after.owners[p].node in NODES[:3] for p in gone | new)


def test_refused() -> None:
    with pytest.raises(ab.AnabranchError, match="parallel_recovery is 0; give at least 1"):
        topology().start(None, checkpoint="nowhere", parallel_recovery=0)  # type: ignore[arg-type]
