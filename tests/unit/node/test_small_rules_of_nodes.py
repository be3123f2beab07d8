"""Rules of nodes that only few runs ever need: each by itself, on a host that carries numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from local_run import LocalRun
from test_local_runs import Comparison, _simple

from anabranch.errors import InvariantError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement
from anabranch.model.recovery import RecoveryPlan
from anabranch.node.protocol.carried import ChainError
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import RecoverRequest, WarmRequest
from anabranch.node.protocol.preparation import Preparations
from anabranch.node.protocol.restoring import kept_of
from anabranch.sim.payload import SimProcess

A = NodeId("0")


class Process(SimProcess):
    """Remembers what its host is told to be part of."""

    def __init__(self) -> None:
        super().__init__("i", lambda process, work: work(), lambda: False, 1_000_000)
        self.belongs_to: list[tuple[Any, NodeId]] = []

    def belong_to(self, pulse: object | None, node: NodeId) -> None:
        self.belongs_to.append((pulse, node))


@dataclass
class Loaded:
    """A job as it was sent."""

    spec: bytes
    rehearsed: int = 0

    def rehearse(self) -> None:
        self.rehearsed += 1


def test_a_node_that_is_warm_is_ready_and_shows_that_it_lives() -> None:
    process, loaded = Process(), list[Loaded]()

    def load(spec: bytes) -> Loaded:
        loaded.append(Loaded(spec))
        return loaded[-1]

    host: Host[Any] = Host(process, load)
    for _ in range(2):
        host.warm(WarmRequest("job", b"spec", A, "pulse"))
    assert [(one.spec, one.rehearsed) for one in loaded] == [(b"spec", 2)]
    assert process.belongs_to == [("pulse", A)] * 2


def recovery(tmp_path: Path) -> tuple[LocalRun, RecoverRequest]:
    """The start of a run, as its first node was told of it."""
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), tmp_path, nodes=1)
    comparison.feed(run, [{"s": [(k, k) for k in range(6)]}])
    return run, next(w for w, _ in run.cluster._past if isinstance(w, RecoverRequest))


def test_each_driver_gets_the_heartbeats_of_its_nodes(tmp_path: Path) -> None:
    run, request = recovery(tmp_path)
    job, process = run.cluster.hosts[A]._job, Process()
    host: Host[Any] = Host(process, lambda spec: job)
    host.recover(replace(request, pulse="first"), [])
    again = replace(request, plan=replace(request.plan, part=1), pulse="first")
    host.recover(again, [])
    assert process.belongs_to == [("first", A)]
    host.recover(replace(request, driver="another", generation=9, pulse="second"), [])
    assert process.belongs_to == [("first", A), ("second", A)]


def test_a_part_of_a_replay_says_who_backs_up(tmp_path: Path) -> None:
    """Slices may leave out a node that has nothing else to do, and so not tell it."""
    run, request = recovery(tmp_path)
    job = run.cluster.hosts[A]._job
    host: Host[Any] = Host(Process(), lambda spec: job)
    host.recover(request, [])
    assert all(p.backs_up for p in host.partitions.values())
    (one, *_) = host.partitions
    part = replace(request.plan, part=1, backups=frozenset({one}))
    host.recover(replace(request, plan=part), [])
    assert [p for p, x in host.partitions.items() if x.backs_up] == [one]


def test_a_node_that_does_not_know_the_job_is_told_of_it(tmp_path: Path) -> None:
    _, request = recovery(tmp_path)
    host: Host[Any] = Host(Process(), lambda spec: None)
    with pytest.raises(InvariantError, match="a job it does not know"):
        host.recover(replace(request, spec=None), [])


def test_what_was_loaded_ahead_is_of_one_owner(tmp_path: Path) -> None:
    """Another one's would be a partition that somebody else has as well."""
    run, request = recovery(tmp_path)
    job = run.cluster.hosts[A]._job
    assert job is not None
    later: list[Callable[[], None]] = []
    ahead: Preparations[Any] = Preparations(later.append)
    (mine,) = [p for p in request.plan.placement.owners if p.index == 0]
    assert mine == PartitionId(mine.chain, 0)
    ahead.begin(job, request.plan, {mine: 5})
    for work in later:
        work()
    assert ahead.ready() == (mine,)
    with pytest.raises(KeyError):
        ahead.take(mine, 6, request.plan)
    ahead.begin(job, request.plan, {mine: 5})
    later.pop()()
    assert ahead.take(mine, 5, request.plan)[1] == set()


def test_a_failure_names_the_record_only_where_there_is_one() -> None:
    raised = ValueError("no")
    said = ChainError("op", raised, None).failure("a[0]").message
    assert said == "its function raised ValueError: no"
    said = ChainError("op", raised, "{'k': 1}").failure("a[0]").message
    assert said.endswith("; the first record that fails is {'k': 1}")


def test_a_copy_that_a_late_call_has_left_does_not_stand_for_the_one_that_is_made() -> None:
    """It has the epoch of its owner, whose state was another one then."""
    here, there = PartitionId("k", 0), PartitionId("k", 1)
    owners = {here: Ownership(A, 1), there: Ownership(NodeId("1"), 1)}
    copies = {here: NodeId("1"), there: A}
    placement = Placement(4, {"k": (0, 1)}, owners, (A, NodeId("1")), copies)
    none = frozenset[PartitionId]()
    plan = RecoveryPlan(placement, 5, {}, none, none, none, (), None, False)
    mine: dict[PartitionId, Any] = {here: Epoch(1), there: Epoch(1)}
    assert kept_of(mine, plan, A, same_driver=True) == mine
    made = replace(plan, copied=frozenset({here, there}))
    assert kept_of(mine, made, A, same_driver=True) == {here: mine[here]}  # its own is no copy


@dataclass
class Epoch:
    """All that is looked at of a partition."""

    epoch: int
