"""Rules of when something is due, near, ahead or over: each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from plays import NODES, apart, counting, feed, kinds, record
from test_autoscaler import Job as ScaledJob
from test_comeback import Job, short
from test_invariants import scaling
from test_rules_of_ledgers import compiled
from test_rules_of_rebuilds import A, B, C, begun, lose_owner
from test_rules_of_runs import host_of
from tests.unit.node.local_run import FaultyCluster, LocalRun

import anabranch as ab
from anabranch.control.adjustment import AdjustmentState
from anabranch.control.invariants import check
from anabranch.control.ledgers import Ledgers
from anabranch.control.ledgers.layouts import LayoutLedger
from anabranch.control.ledgers.watermark import OperatorClocks, WatermarkTracker
from anabranch.control.policies import capacity
from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.load import Measurement
from anabranch.control.policies.strategies import Strategy
from anabranch.control.portion import Limits, Work
from anabranch.control.returning import Returning
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.tries import MAX_TRIES
from anabranch.control.wishes import Wishes
from anabranch.errors import ClusterError, InvariantError
from anabranch.model.commands import FailRun
from anabranch.model.events import BatchArrived, NodesJoined
from anabranch.model.graph import Hold
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, place
from anabranch.model.plan import Query
from anabranch.model.progress import Promise
from anabranch.model.slices import Cut
from anabranch.node.protocol.host import Answer
from anabranch.node.protocol.messages import RecoverRequest, WaveRequest
from anabranch.planning.recovery.order import RecoveryOrder, plan_progressive
from anabranch.planning.recovery.queries import RecoveryProblem
from anabranch.testing.local import Parcels

# -- watermarks ------------------------------------------------------------------------------------


def quiet(for_ms: int) -> WatermarkTracker:
    """Of two sources, b has brought nothing for that long; it may for 100 ms."""
    tracker = WatermarkTracker({"a": 0, "b": 0}, {"b": 100})
    tracker.look({"a": 1, "b": 1}, 0, anew=True)
    tracker.observe({"a": 50, "b": 10}, True)
    tracker.look({"a": 1}, for_ms, anew=True)
    tracker.observe({"a": 60}, True)
    return tracker


def test_a_source_is_idle_once_its_time_out_has_passed() -> None:
    assert quiet(99).watermark_us == 10
    assert quiet(100).watermark_us == 60


def test_nobody_looks_again_for_a_source_that_is_idle_already() -> None:
    """Not even in another run, which begins with what is known of it."""
    assert quiet(99).look_is_due(100)
    assert not quiet(100).look_is_due(1_000)
    later = WatermarkTracker({"a": 0, "b": 0}, {"b": 100})
    later.resume(60, {"b": 99})
    assert later.look_is_due(0)  # its clock starts again
    later.resume(60, {"b": 100})
    assert not later.look_is_due(0)


def test_the_time_of_an_operator_does_not_go_back_when_one_comes_between() -> None:
    """An update of the job puts a new operator above it, which has had no time yet."""
    sources, after_new = (Promise(),), (Promise("new", Hold(5)),)
    clocks = OperatorClocks({"new": sources, "old": after_new})
    before = record(7, watermark_us=100, watermarks={"old": 80})
    assert clocks.next(100, before) == {"new": 100, "old": 80}
    then = record(8, watermark_us=100, watermarks={"new": 100, "old": 80})
    assert clocks.next(120, then) == {"new": 120, "old": 96}


# -- partitions that are rebuilt -------------------------------------------------------------------


def test_a_placement_changes_after_the_newest_slice_and_no_other() -> None:
    play = scaling()
    adjustment, rebuild = play.controller.adjustment, play.controller.rebuild
    assert adjustment.change is not None
    adjustment.state = AdjustmentState.SEALING
    adjustment._switch(adjustment.change)
    check(play.controller, [])
    assert rebuild.running is not None
    rebuild.running = replace(rebuild.running, cut=3)
    with pytest.raises(InvariantError, match="the placement changes after slice 0, at cut 3"):
        check(play.controller, [])


@pytest.mark.parametrize("behind_scaling", [False, True])
def test_who_is_being_rebuilt_goes_on_where_nothing_was_scaled(behind_scaling: bool) -> None:
    """There is nothing to look behind."""
    play = begun(strategy=Strategy(behind_scaling=behind_scaling))
    feed(play, 0)
    lose_owner(play, A)
    play.recovering(lose_owner(play, B))
    assert play.recovery.restored == {A, B}
    assert play.placement.owners[A].epoch == 2


# -- layouts ---------------------------------------------------------------------------------------

WHOLE, TWO, FOUR = (0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)


def divided() -> LayoutLedger:
    """By a recovery: c is."""
    ledger = LayoutLedger(apart(), {})
    ledger.placed({"a": WHOLE, "b": WHOLE, "c": WHOLE})
    ledger.divide({"a": WHOLE, "b": WHOLE, "c": TWO})
    return ledger


def test_a_restart_does_not_divide_what_a_recovery_did() -> None:
    """Though another chain was scaled in the meantime."""
    ledger, placement = divided(), place(apart(), NODES, 1, {})
    ledger.adjust({"a": WHOLE, "b": FOUR, "c": TWO}, 5)
    assert ledger.journalled([], placement)[0] == {"a": WHOLE, "b": FOUR, "c": WHOLE}


def test_what_was_put_together_may_be_scaled_like_any_other() -> None:
    ledger, placement = divided(), place(apart(), NODES, 1, {})
    ledger.adjust({"a": WHOLE, "b": WHOLE, "c": WHOLE}, 5)
    assert ledger.divided == {}
    ledger.adjust({"a": WHOLE, "b": WHOLE, "c": FOUR}, 9)
    assert ledger.journalled([], placement)[0] == {"a": WHOLE, "b": WHOLE, "c": FOUR}


# -- chains that wait ------------------------------------------------------------------------------


def test_a_slice_that_lacks_input_while_chains_wait_runs_again_but_not_for_ever() -> None:
    job = short()
    commands = job.controller.handle(BatchArrived(job.batch, job.now_ms))
    for _ in range(MAX_TRIES):
        assert kinds(commands) == ["RunSlice"]
        commands = job.ran(commands[0], incomplete={C: "edge 2"})
    assert kinds(commands) == ["RunSlice"]
    (fail,) = job.ran(commands[0], incomplete={C: "edge 2"})
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, ClusterError)
    assert "c[0] lacked input 10 times (edge 2)" in fail.error.message


def test_what_is_near_takes_part_in_slices_though_what_is_below_is_far() -> None:
    """It has kept what that needs."""
    job = Job(3, loads={"a": 0.1, "b": 0.9, "c": 0.6}).begin()
    job.seconds(3)
    job.loses("a", "b")
    assert job.waiting == {"a", "b"}
    job.happens(NodesJoined((NodeId("7"), NodeId("8")), job.now_ms))
    job.seconds(10)
    assert job.waiting == {"b"}


def test_slices_wait_in_the_end_for_what_cannot_catch_up_beside_them() -> None:
    """Nothing has a part in them: there is one chain, which takes more than all the time."""
    plan = compiled({"a": "s"}, {"out": ("a",)})
    job = Job(1, plan=plan, loads={"a": 1.2}).begin()
    job.seconds(12)
    job.loses("a")
    job.comes("7")
    job.seconds(60)
    assert job.waiting == {"a"}
    job.seconds(60)
    assert job.waiting == set()


def test_chains_need_an_older_layout_if_one_of_them_begins_before_it_changed() -> None:
    """It did after slice 4. The newest cut is of c only; a and b waited."""
    now, then = {"a": WHOLE, "b": WHOLE, "c": WHOLE}, {"a": TWO, "b": WHOLE, "c": WHOLE}
    newest = Cut(6, {}, {"c": list(WHOLE)})
    older = Cut(2, {}, {chain: list(groups) for chain, groups in then.items()})
    ran = tuple(record(n, placement=1 if n <= 4 else 2) for n in range(3, 8))
    past = Past(newest, older, ran, groups=now, layouts={1: then}, behind={"a": 5, "b": 5})
    plan, config = apart(), ControlConfig()
    ledgers = Ledgers.of(plan, config, past)
    ledgers.layouts.placed(now)
    returning = Returning(plan, config, ledgers)
    assert not returning.needs_older_layout({"c"})
    assert returning.needs_older_layout({"a", "b"})
    assert returning.needs_older_layout({"a", "c"})


def test_chains_that_are_not_as_far_as_each_other_go_on_side_by_side() -> None:
    """Unless they have to go through all slices together."""
    node = NODES[0]
    work = Work(
        order=("a", "b"),
        above={"a": (), "b": ()},
        nodes={"a": {node}, "b": {node}},
        row_s={"a": {node: 0.1}, "b": {node: 0.1}},
        depth={"a": 1, "b": 1},
        rows=dict.fromkeys(range(1, 101), 1),
        end=101,
    )
    starts, limits = {"a": 1, "b": 50}, Limits({}, 1.0)
    assert work.portion(starts, limits) == {"a": 6, "b": 55}
    assert work.portion(starts, limits, together=True) == {"a": 11, "b": 50}


@pytest.mark.parametrize(("waiting", "densely"), [(50, True), (51, False)])
def test_beyond_fifty_queries_nobody_tries_them_by_density(
    waiting: int, densely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes too long."""
    asked: list[int] = []

    def plan(problem: RecoveryProblem, room: float) -> RecoveryOrder:
        asked.append(len(problem.queries))
        return plan_progressive(problem, room)

    monkeypatch.setattr(capacity, "plan_best_density", plan)
    queries = [Query(f"q{i}", 1, frozenset({f"c{i}"})) for i in range(waiting)]
    loads = {PartitionId(f"c{i}", 0): 0.1 for i in range(waiting)}
    down = frozenset(x.chain for x in loads)
    back = capacity.choose(queries, down, {}, list(loads), loads, [NodeId("1")])
    assert len(back.queries) == 8
    assert bool(asked) is densely


# -- what is wanted of a job, and by it ------------------------------------------------------------


def test_nobody_has_a_copy_unless_that_is_asked_for() -> None:
    placement = place(counting(), NODES, 1, {})
    assert Wishes(counting()).change(placement, NODES, {}, {}) is None
    assert Wishes(counting(), copies=True).change(placement, NODES, {}, {}) is not None


def kinds_said(upper: float, still: float) -> list[str]:
    """Of a chain whose one partition used a whole core; of two, the busier uses `still` so much."""
    job = ScaledJob((1, 1), 2, Autoscale(upper=upper, cool_down="20s", down_after="10m"))
    busy = {PartitionId("a", 0): 1.0, PartitionId("b", 0): 0.5}
    before = Measurement(5.0, 5, 0.5, 1_000.0, busy, dict.fromkeys(job.names, 0.5))
    while not job.said:
        job.step(before)
    after = replace(before, cpu=busy | {PartitionId("a", 0): still, PartitionId("a", 1): 0.0})
    for _ in range(10):
        job.step(after)
    return [made.kind for made in job.said]


@pytest.mark.parametrize(
    ("upper", "still", "said"),
    [
        (0.75, 0.9, ["up", "back"]),  # nine tenths of what it used before
        (0.75, 0.89, ["up"]),
        (0.9, 0.91, ["up", "back"]),
        (0.9, 0.9, ["up"]),  # it is at the limit, not above it
    ],
)
def test_a_change_has_not_helped_where_the_busiest_partition_is_as_busy(
    upper: float, still: float, said: Sequence[str]
) -> None:
    assert kinds_said(upper, still) == said


# -- nodes -----------------------------------------------------------------------------------------


def test_a_copy_that_takes_over_says_that_it_is_there(tmp_path: Path) -> None:
    host, told = host_of(tmp_path)
    mine = PartitionId("sum", 0)
    owners, other = dict(told.plan.placement.owners), NodeId("9")
    copied = replace(
        told.plan.placement,
        version=2,
        owners=owners | {mine: Ownership(other, 1)},
        nodes=(told.node, other),
        copies={mine: told.node},
    )
    first = replace(told.plan, placement=copied, restored=frozenset(), copied=frozenset({mine}))
    host.recover(replace(told, plan=first), [])
    promoted = replace(
        copied, version=3, owners=owners | {mine: Ownership(told.node, 2)}, copies={}
    )
    then = replace(told.plan, placement=promoted, restored=frozenset(), promoted=frozenset({mine}))
    _, report = host.recover(replace(told, plan=then, last=True), [])
    assert report is not None
    assert report.partitions[mine].epoch == 2


class Replaying(FaultyCluster):
    """Notes by which edges the first wave of a recovery gets anything."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.edges: set[int] = set()

    def call(self, request: WaveRequest | RecoverRequest, parcels: Parcels) -> Answer[pa.Table]:
        if isinstance(request, RecoverRequest) and request.depth == 1:
            self.edges |= {bundle.edge for parcel in parcels for bundle in parcel.bundles}
        return super().call(request, parcels)


def test_a_replay_sends_the_log_to_nobody_but_those_that_are_rebuilt(tmp_path: Path) -> None:
    """Two chains read the source, each on a node of its own; that of b is lost."""
    topology = ab.Topology("two", key_groups=4)
    rows = topology.source("s", lambda spark: None)
    for name, key in (("a", "k"), ("b", "v")):
        counts = rows.key_by(key).aggregate(name, n=ab.count(), parallelism=1)
        counts.to(f"out_{name}", ab.Memory())
    cluster = Replaying(2)
    run = LocalRun(topology, tmp_path, cluster=cluster, checkpoint_interval="300h")
    run.feed([{"s": [(k, k) for k in range(6)]}])
    assert run.controller.placement is not None
    cluster.replace(run.controller.placement.owners[B].node)
    run.feed([{"s": [(1, 1)]}])
    run.stop()
    assert cluster.recovered[-1].restored == {B}
    assert cluster.edges == {e.id for e in run.controller.plan.by_name["b"].inputs}
