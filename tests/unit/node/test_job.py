"""A job as its user holds it: what it says of itself, on hosts of this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from local_run import LocalRun

import anabranch as ab
from anabranch.api.job import inside
from anabranch.model.ids import NodeId


def started(root: Path, nodes: int = 2) -> tuple[LocalRun, ab.Job]:
    topology = ab.Topology("sums", key_groups=4, parallelism=2)
    sums = topology.source("s", None).key_by("k").aggregate("sum", total=ab.sum("v"))
    sums.to("out", ab.Memory())
    run = LocalRun(topology, root, nodes, slice="5s")
    return run, ab.Job(run.reading)


def test_status(tmp_path: Path) -> None:
    run, job = started(tmp_path)
    assert job.status().phase == "starting"
    run.feed([{"s": [(k, k) for k in range(6)]}])
    newest, found = job.last_progress, job.status()
    assert newest is not None
    (chain,) = found.operators
    assert chain == ab.OperatorStatus(("sum", "out"), 2, 6, newest.state_bytes, None)
    assert [(n.node, n.partitions, n.draining, n.cpu) for n in found.nodes] == [
        ("0", 1, False, None),
        ("1", 1, False, None),
    ]
    assert replace(found, operators=(), nodes=(), rows_per_s=0.0) == ab.JobStatus(
        "sums",
        "running",
        slice=1,
        slice_s=newest.seconds,
        interval_s=5.0,
        queries=(ab.QueryStatus("out", 1),),
    )
    assert found.rows_per_s > 0
    run.stop()
    assert job.status().phase == "ended"
    assert not job.is_active


def test_nodes_and_what_happened_to_them(tmp_path: Path) -> None:
    run, job = started(tmp_path, nodes=3)
    run.feed([{"s": [(1, 1)]}])
    assert sorted(job.nodes.values()) == ["", "", "spare"]
    victim = next(node for node, role in job.nodes.items() if not role)
    run.cluster.kill(NodeId(victim))
    run.feed([{"s": [(1, 1)]}])
    assert victim not in job.nodes
    assert victim not in [n.node for n in job.status().nodes]
    (told,) = job.status().recoveries
    assert told == str(job.recoveries[-1])
    assert f"of node {victim} (killed)" in told
    job.add_nodes(2)
    assert len(job.nodes) == 4
    with pytest.raises(ab.AdjustmentError, match="0 nodes cannot be added"):
        job.add_nodes(0)
    run.stop()


def test_a_loss_where_nothing_lives_is_no_recovery(tmp_path: Path) -> None:
    """It must not be taken for the reason of the next one."""
    run, job = started(tmp_path, nodes=3)
    run.feed([{"s": [(1, 1)]}])
    (spare,) = (node for node, role in job.nodes.items() if role == "spare")
    run.cluster.kill(NodeId(spare))
    inside(job).run.nodes_lost((NodeId(spare),), "killed")
    assert len(job.recoveries) == 1  # the start
    run.cluster.replace(NodeId("0"))
    run.feed([{"s": [(1, 1)]}])
    assert job.recoveries[-1].nodes == ()
    run.stop()


class Watched(ab.Memory):
    """A sink that knows whether it was let go of."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def watched(root: Path, kind: pa.DataType, nodes: int = 2) -> tuple[Watched, type | None]:
    """Start the job of `started` with keys of a kind; its sink, and how it was refused."""
    topology, sink = ab.Topology("sums", key_groups=4, parallelism=2), Watched()
    topology.source("s", None).key_by("k").aggregate("sum", total=ab.sum("v")).to("out", sink)
    schema = pa.schema([("k", kind), ("v", pa.int64())])
    try:
        LocalRun(topology, root, nodes, schemas={"s": schema}).stop()
    except ab.AnabranchError as e:
        return sink, type(e)
    return sink, None


def test_a_run_that_is_refused_lets_go_of_everything(tmp_path: Path) -> None:
    """The directory is its own by then, and the sinks have been looked at."""
    run, _ = started(tmp_path)
    run.feed([{"s": [(1, 1)]}])
    run.stop()
    for kind, nodes, refused in (
        (pa.string(), 2, ab.CheckpointMismatchError),
        (pa.int64(), 0, ab.ClusterError),
        (pa.int64(), 2, None),  # nobody holds the lock
    ):
        sink, how = watched(tmp_path, kind, nodes)
        assert (how, sink.closed) == (refused, 1)
