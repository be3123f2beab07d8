"""Rules of whole runs that only few of them ever need: each by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from plays import COUNT, NODES, SECOND, Play, counting, feed, lose
from test_autoscaler import Job as ScaledJob
from test_comeback import Job, p
from test_recovery_bound import INTERVAL_S, line, reports
from test_recovery_bound import run as observed
from test_rules_of_hosts import three_waves
from test_rules_of_rebuilds import scaled, sealed
from tests.unit.node.local_run import FaultyCluster, LocalRun

import anabranch as ab
from anabranch.control import recovery
from anabranch.control.comeback import ComebackState
from anabranch.control.ledgers.backups import BackupLedger
from anabranch.control.ledgers.owners import OwnerLedger
from anabranch.control.pace import Pace
from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.capacity import choose
from anabranch.control.policies.load import Measurement
from anabranch.control.policies.recovery_bound import FIXED_S, PLAN_EVERY, RecoveryBound
from anabranch.control.policies.strategies import STRATEGIES
from anabranch.errors import InvariantError, OperatorError
from anabranch.model.commands import FailRun, RunSlice
from anabranch.model.events import BatchArrived, NodesJoined, NodesPolled, StopRequested
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import place
from anabranch.model.plan import Query
from anabranch.model.reports import Failure, NodeReport, PartitionReport, Staged
from anabranch.model.slices import Feed, SlicePlan, Writes
from anabranch.node.protocol.host import Answer, Host
from anabranch.node.protocol.messages import (
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    WaveRequest,
)
from anabranch.planning.recovery.placing import SLACK
from anabranch.sim.payload import SimProcess
from anabranch.testing.local import Parcels

SIX = tuple(NodeId(str(n)) for n in range(1, 7))  # each has one partition of `line()`


# -- backups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "cpu_s"),
    [("o0", {"o0": 0.15, "o1": 0.1, "o2": 0.05}), ("o1", {"o0": 0.05, "o1": 0.1, "o2": 0.15})],
)
def test_who_backs_up_goes_on_where_others_would_do_as_well(
    chosen: str, cpu_s: dict[str, float]
) -> None:
    """At first only one of them would; when all take as long, it is o0 or o1."""
    placement = place(line(), SIX, 1, {})
    bound = RecoveryBound(line(), FIXED_S + 2.1, INTERVAL_S)
    found = []
    for loads in (cpu_s, {}):
        observed(bound, placement, loads, PLAN_EVERY)
        choice = bound.plan(placement)
        assert choice is not None
        found.append({q.chain for q in choice.backups})
    assert found == [{chosen}, {chosen}]


def test_output_is_kept_from_the_slice_on_that_follows_the_choice() -> None:
    """That of the slice which led to it is gone."""
    placement = place(line(), SIX, 1, {})
    ledger = BackupLedger(None, RecoveryBound(line(), FIXED_S + 2.1, INTERVAL_S))
    ledger.begin(placement.owners, 1)
    notes = []
    for number in range(1, 3 * PLAN_EVERY):
        cpu_s = dict.fromkeys(("o0", "o1", "o2"), 0.01 if number < PLAN_EVERY else 0.1)
        plan, began_ms = SlicePlan(number, Feed.LIVE, number, 1, None, 0, 1, False), 1_000 * number
        note = ledger.choose(reports(placement, cpu_s), plan, placement, began_ms, began_ms)
        notes += [(number, note.backups)] if note is not None else []
    (_, nobody), *_, (number, some) = notes
    assert (nobody, len(some)) == (frozenset(), 2)
    assert all(ledger.covers(q, number + 1, placement) for q in some)
    assert not any(ledger.covers(q, number, placement) for q in some)


def test_a_recovery_is_learnt_from_by_the_slices_that_it_replayed() -> None:
    """Three since the cut, each of which takes a second; the rest took one and a half."""
    play = Play(interval=1)
    play.start()
    feed(play, 0)
    sealed(play, 1)
    for batch in (2, 3, 4):
        feed(play, batch, 300)
    play.recovering(lose(play, SECOND))
    assert [s.number for s in play.recovery.slices] == [3, 4, 5]

    placement = place(counting(), NODES, 1, {})
    ledger = BackupLedger(None, RecoveryBound(counting(), 60.0, INTERVAL_S))
    ledger.begin(COUNT, 1)
    seen = reports(placement, {"count": 1.0})
    predicted = []
    for number in range(1, 2 * PLAN_EVERY):
        plan, began_ms = SlicePlan(number, Feed.LIVE, number, 1, None, 0, 1, False), 1_000 * number
        if number == PLAN_EVERY:
            ledger.recovered(play.recovery, 4_500, seen)
        note = ledger.choose(seen, plan, placement, began_ms, began_ms)
        predicted += [note.predicted_s[COUNT[1]]] if note is not None else []
    assert play.recovery.restored == {COUNT[1]}
    assert predicted == pytest.approx([10 + FIXED_S, 10 + (FIXED_S + 1.5) / 2])


# -- what is told ----------------------------------------------------------------------------------


def test_what_happens_again_and_again_is_told_with_the_time_of_the_last() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    (run,) = play.controller.handle(StopRequested(100))
    play.ran(run)
    for now_ms in (110, 250):  # its checkpoint takes a while
        play.controller.handle(NodesPolled(play.reports(3), now_ms))
    assert play.controller.story.told()[-1].startswith("250 ms NodesPolled")


def test_a_replay_that_fails_names_the_slice_that_it_was_to_reach() -> None:
    play = Play()
    play.start()
    for batch in range(3):
        feed(play, batch)
    commands = lose(play, SECOND)
    failure = Failure("count[1]", "count", "its function raised ValueError: no", "")
    (fail,) = play.recovered(commands[-1], failures=(failure,))
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, OperatorError)
    assert fail.error.message.startswith("replay of slices 1 to 3, operator 'count'")
    assert fail.error.fields["slice"] == 3


# -- the autoscaler --------------------------------------------------------------------------------


def decided(config: Autoscale, measurement: Measurement) -> list[str]:
    """Of a job of one partition per chain on two nodes, that goes on like this."""
    job = ScaledJob((1, 1), 2, config)
    for _ in range(20):
        job.step(measurement)
    return [made.what for made in job.said]


def idle(each: float) -> Measurement:
    """Nodes that are that busy."""
    nodes = dict.fromkeys((NodeId("0"), NodeId("1")), each)
    return Measurement(5.0, 5, 0.1, 1_000.0, {}, nodes)


def test_a_node_is_drained_where_nodes_do_less_than_the_lower_limit() -> None:
    config = Autoscale(upper=0.75, lower=0.25, drain_after="20s", max_nodes=2)
    assert decided(config, idle(0.249)) == ["drain node 0"]
    assert decided(config, idle(0.25)) == []


def test_a_node_is_drained_where_those_that_stay_are_no_busier_than_is_aimed_at() -> None:
    config = Autoscale(upper=1.0, lower=0.5, drain_after="20s", max_nodes=2)
    assert config.target == 0.75
    assert decided(config, idle(0.375)) == ["drain node 0"]
    assert decided(config, idle(0.376)) == []


def test_slices_that_take_their_interval_are_not_late() -> None:
    busy = {PartitionId("a", 0): 0.5, PartitionId("b", 0): 0.4}
    nodes = {NodeId("0"): 0.5, NodeId("1"): 0.5}
    config = Autoscale()
    late = Measurement(5.0, 5, 1.001, 1_000.0, busy, nodes)
    assert decided(config, late)[0] == "a from 1 to 2 partitions"
    assert decided(config, replace(late, batch_s=1.0)) == []


# -- chains that wait ------------------------------------------------------------------------------


@pytest.mark.parametrize("backups", [None, ()])
def test_who_may_have_come_further_goes_on_only_if_it_can_repeat_that(
    backups: tuple[str, ...] | None,
) -> None:
    """a is replaying what nobody has heard of yet, when b is lost again, which reads its output."""
    job = Job(3, loads=dict.fromkeys("abc", 0.6), backups=backups).begin()
    job.seconds(6)
    job.loses("a", "b")
    job.happens(NodesJoined(SIX[3:], job.now_ms))
    assert job.controller.comeback.state is ComebackState.BESIDE
    assert job.plans[-1].restored == {p("a"), p("b")}
    assert job.node_of("a") != job.node_of("b")
    before = job.placement.owners[p("a")]
    job.loses("b")
    assert (job.placement.owners[p("a")] == before) is (backups is None)
    job.seconds(40)
    assert job.waiting == set()


def test_a_timer_of_a_chain_that_waits_is_not_waited_for() -> None:
    """Nor is one of a partition that nobody has any more."""
    placement = place(counting(), NODES, 1, {})
    owners = OwnerLedger({})
    owners.join(NODES, {})
    owners.use(placement, frozenset(COUNT), 1)
    seen = [
        NodeReport(placement.owners[q].node, "i", 1, {q: PartitionReport(2, 1, due_ms=due_ms)})
        for q, due_ms in zip(COUNT, (500, 900), strict=True)
    ]
    owners.advance(seen, 2, COUNT)
    assert [owners.timer_is_due(ms) for ms in (499, 500, 900)] == [False, True, True]
    assert not owners.timer_is_due(900, paused={"count"})
    left = {q: o for q, o in placement.owners.items() if q == COUNT[1]}
    owners.use(replace(placement, version=2, owners=left), frozenset(), 1)
    assert [owners.timer_is_due(ms) for ms in (500, 900)] == [False, True]


def test_what_was_back_and_waits_again_makes_progress_from_where_it_begins() -> None:
    pace = Pace(1_000)
    assert pace.came_to({"a": 9})
    assert not pace.came_to({"a": 7})  # it began again, and has been there
    pace.back({"a"})
    assert pace.came_to({"a": 7})


def test_what_is_too_much_by_an_error_of_rounding_fits() -> None:
    queries = [Query("q", 1, frozenset("a"))]
    for load, fits in ((1.0 + SLACK, True), (1.0 + 3 * SLACK, False)):
        back = choose(queries, frozenset("a"), {}, [p("a")], {p("a"): load}, [SIX[0]])
        assert back.why.startswith("all 1 query fit") is fits


# -- other systems ---------------------------------------------------------------------------------


def test_checkpoints_as_spark_streaming_makes_them() -> None:
    """They are whole and a part of the slice, and nothing else is kept."""
    play = Play(interval=1, strategy=STRATEGIES["SC"])
    play.start()
    feed(play, 0)
    (run,) = play.controller.handle(BatchArrived(1, 100))
    assert isinstance(run, RunSlice)
    assert (run.plan.seal, run.plan.waits, run.plan.writes) == (True, True, Writes.WHOLE)
    assert run.backups == frozenset()


def test_a_loss_takes_all_back_as_with_spark_streaming() -> None:
    play = Play(strategy=STRATEGIES["SC"])
    play.start()
    feed(play, 0)
    play.recovering(lose(play, SECOND))
    assert play.recovery.restored == set(COUNT)


def test_a_loss_after_a_scaling_undoes_it_as_with_spark_streaming() -> None:
    play = scaled(strategy=STRATEGIES["SC"])
    play.recovering(lose(play, SECOND))
    assert play.recovery.cut == 2
    assert len(play.placement.partitions("count")) == 2


# -- nodes -----------------------------------------------------------------------------------------


class Hearing(FaultyCluster):
    """Notes what comes of the last wave of each slice and recovery."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.staged: list[tuple[Staged, ...]] = []  # of slices
        self.kept: list[set[int]] = []  # after parts of recoveries: slices of which there is output

    def call(self, request: WaveRequest | RecoverRequest, parcels: Parcels) -> Answer[pa.Table]:
        answer, report = super().call(request, parcels)
        if report is not None and isinstance(request, WaveRequest):
            self.staged.append(report.staged)
        elif report is not None:
            partitions = self.hosts[request.node].partitions.values()
            self.kept.append({n for x in partitions for n in x.outputs})
        return answer, report


def begun(root: Path, slices: int, **options: Any) -> tuple[LocalRun, Hearing]:
    """On one node, without checkpoints."""
    cluster = Hearing(1)
    run = LocalRun(
        three_waves(ab.Memory()), root, cluster=cluster, checkpoint_interval="300h", **options
    )
    for n in range(slices):
        run.feed([{"s": [(k, n) for k in range(6)]}])
    return run, cluster


def test_rows_that_are_not_late_do_not_say_of_which_slice_they_are(tmp_path: Path) -> None:
    _, cluster = begun(tmp_path, 2)
    assert len(cluster.staged) == 2
    for staged in cluster.staged:
        assert {(s.sink, s.slice) for s in staged} == {("out", None)}


def test_what_a_part_of_a_replay_has_made_is_dropped_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it backs up: a long replay needs no more memory than a short one."""
    monkeypatch.setattr(recovery, "MAX_PART_SLICES", 2)
    run, cluster = begun(tmp_path, 6, backups="sources")
    cluster.kept.clear()
    cluster.replace(*cluster.nodes)
    run.feed([{"s": [(1, 1)]}])
    assert cluster.kept == [{1, 2}, {3, 4}, {5, 6}]


def host_of(root: Path) -> tuple[Host[Any], RecoverRequest]:
    """One that has begun, and what it was told: all partitions are its own."""
    run, cluster = begun(root, 1)
    (node,) = cluster.nodes
    job = cluster.hosts[node]._job
    told = next(request for request, _ in cluster._past if isinstance(request, RecoverRequest))
    run.stop()
    process = SimProcess("i", lambda process, work: work(), lambda: False, 1_000_000)
    host: Host[Any] = Host(process, lambda spec: job)
    host.recover(told, [])
    return host, told


def test_a_driver_that_was_replaced_is_refused(tmp_path: Path) -> None:
    host, told = host_of(tmp_path)
    newest = told.generation + 1
    host.recover(replace(told, driver="another", generation=newest), [])
    assert host.poll(PollRequest(told.job, newest, told.node)).node == told.node
    before = host.placement
    with pytest.raises(InvariantError, match="a driver of generation 1 spoke to a node owned by"):
        host.poll(PollRequest(told.job, told.generation, told.node))
    with pytest.raises(InvariantError, match="a driver of generation 1 spoke to a node owned by"):
        host.recover(replace(told, driver="a third"), [])
    assert host.placement is before


def test_what_was_loaded_ahead_for_a_change_that_is_given_up_is_dropped(tmp_path: Path) -> None:
    """Another placement came before it: a change that follows loads from newer files."""
    host, told = host_of(tmp_path)
    ahead = host.prepare(PrepareRequest(told.job, b"", told.generation, told.node, told.plan))
    assert set(ahead.prepared) == told.plan.restored
    placement = replace(told.plan.placement, version=told.plan.placement.version + 1)
    plan = replace(told.plan, placement=placement, restored=frozenset())
    host.recover(replace(told, plan=plan), [])
    assert host.poll(PollRequest(told.job, told.generation, told.node)).prepared == ()
