"""What a slice and a recovery ask of a cluster: given a plan, exactly these requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.driver.cluster import Caller, NodesLostError
from anabranch.model.commands import RunSlice
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement, even_groups
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.protocol.messages import (
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    ReplayRequest,
    SourceRequest,
    WaveRequest,
)

A, B = NodeId("a"), NodeId("b")
P, Q = PartitionId("sum", 0), PartitionId("sum", 1)
PLACEMENT = Placement(
    7, {P: Ownership(A, 1), Q: Ownership(B, 1)}, {"sum": even_groups(4, 2)}, (A, B)
)
CALLER = Caller("/job", b"spec", 3, "driver", 2, ("in",), "schema", "pulse")
SLICE = SlicePlan(5, Feed.LIVE, 9, 0, None, 0, 7, seal=False)
PLAN = RecoveryPlan(
    placement=PLACEMENT,
    cut=2,
    files={},
    restored=frozenset({P}),
    shadows=frozenset(),
    senders=frozenset(),
    slices=(replace(SLICE, number=3, source_tasks=1), replace(SLICE, number=4, source_tasks=4)),
    backups=None,
    reads_log=True,
)


@pytest.mark.parametrize(
    ("feed", "logged", "tasks"), [(Feed.LIVE, 0, 3), (Feed.LOG, 5, 5), (Feed.NONE, 0, 0)]
)
def test_a_slice(feed: Feed, logged: int, tasks: int) -> None:
    plan = replace(SLICE, feed=feed, source_tasks=logged)
    job = CALLER.slice(RunSlice(plan, 1, frozenset({P}), rows="rows"), PLACEMENT, 4)
    assert (job.nodes, job.rows, job.plan) == ((A, B), "rows", plan)
    stages = job.stages(live_tasks=3)
    assert (stages.nodes, stages.tasks) == ((A, B), tasks)
    assert stages.source == SourceRequest(3, (A, B), PLACEMENT, plan, tasks, ("in",), "schema")
    assert stages.waves == tuple(
        tuple(
            WaveRequest("/job", 3, n, (A, B), plan, tasks, depth, last, 4, 1, frozenset({P}))
            for n in (A, B)
        )
        for depth, last in ((1, False), (2, True))
    )


@pytest.mark.parametrize(
    ("slices", "reads_log", "tasks"),
    [(PLAN.slices, True, 2), (PLAN.slices[:1], True, 1), (PLAN.slices, False, 0), ((), True, 0)],
)
def test_a_recovery(slices: tuple[SlicePlan, ...], reads_log: bool, tasks: int) -> None:
    """As many replay tasks as nodes, or as logs; the job itself goes with the first wave."""
    plan = replace(PLAN, slices=slices, reads_log=reads_log)
    stages = CALLER.recovery(plan).stages()
    assert (stages.nodes, stages.tasks) == ((A, B), tasks)
    assert stages.source == ReplayRequest(3, (A, B), plan, tasks)
    assert stages.waves == tuple(
        tuple(
            RecoverRequest("/job", spec, "driver", "pulse", 3, n, (A, B), plan, depth, last)
            for n in (A, B)
        )
        for depth, last, spec in ((1, False, b"spec"), (2, True, None))
    )


def test_what_nodes_are_asked_between_slices() -> None:
    assert CALLER.poll((B,)) == [PollRequest("/job", 3, B)]
    assert CALLER.preparation(PLAN) == [PrepareRequest("/job", b"spec", 3, n, PLAN) for n in (A, B)]


def test_a_loss_names_its_nodes() -> None:
    error = NodesLostError([A, B], "gone", 2)
    assert (str(error), error.nodes, error.source_tasks) == ("a, b: gone", (A, B), 2)
