"""Rules of what is known, and of what is told of it: each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from plays import COUNT, FIRST, NODES, SECOND, THIRD, Play, counting, feed, lose
from test_autoscaler import AHEAD_MS, CONFIG
from test_autoscaler import Job as ScaledJob
from test_comeback import Job, cuts, p, short
from test_remarks import batches_said
from test_rules_of_hosts import three_waves
from test_rules_of_rebuilds import A, B, begun, lose_owner, sealed
from tests.unit.node.local_run import FaultyCluster, LocalRun

import anabranch as ab
from anabranch.control import recovery
from anabranch.control.comeback import ComebackState
from anabranch.control.ledgers.behind import BehindLedger
from anabranch.control.ledgers.owners import OwnerLedger
from anabranch.control.policies.autoscaler import Autoscaler
from anabranch.control.policies.recovery_bound import FIXED_S
from anabranch.errors import InvariantError, OperatorError, StorageError
from anabranch.model.commands import (
    Command,
    FailRun,
    NoteBackups,
    PreparePartitions,
    RecoverPartitions,
    RunSlice,
)
from anabranch.model.events import (
    BatchArrived,
    NodesJoined,
    NodesLost,
    RestoreFailed,
    ScaleRequested,
    StopRequested,
)
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.ids import NodeId
from anabranch.model.placement import place
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.reports import Failure, NodeReport, PartitionReport
from anabranch.node.protocol.host import Answer
from anabranch.node.protocol.messages import RecoverRequest, WaveRequest
from anabranch.testing.local import Parcels


def compiled(reads: Mapping[str, str], sinks: Mapping[str, tuple[str, ...]]) -> Plan:
    """A source s, operators of one partition that read one other each, and sinks."""
    keyed = [
        Operator(name, Kind.KEYED, ((above,),), keys=(f"k_{name}",), parallelism=1)
        for name, above in reads.items()
    ]
    shown = [Operator(name, Kind.SINK, (above,)) for name, above in sinks.items()]
    return compile_plan(
        Graph.checked("t", [Operator("s", Kind.SOURCE), *keyed, *shown], key_groups=4)
    )


def run_of(commands: list[Command]) -> RunSlice:
    (run,) = commands
    assert isinstance(run, RunSlice)
    return run


# -- what is known of partitions -------------------------------------------------------------------


def test_a_timer_that_has_come_is_not_waited_for_any_more() -> None:
    placement = place(counting(), NODES, 1, {})
    owners = OwnerLedger({})
    owners.join(NODES, {})
    owners.use(placement, frozenset(COUNT), 1)
    due = []
    for number, due_ms in ((1, 500), (2, None)):
        seen = [
            NodeReport(o.node, "i", number, {q: PartitionReport(number + 1, 1, due_ms=due_ms)})
            for q, o in placement.owners.items()
        ]
        owners.advance(seen, number + 1, COUNT)
        due.append(owners.timer_is_due(500))
    assert due == [True, False]


def test_a_sink_is_as_far_as_the_chain_that_lacks_most() -> None:
    plan = compiled({"a": "s", "b": "s"}, {"out": ("a", "b")})
    assert BehindLedger(plan, {"a": 3, "b": 6}).shown("out", 9) == 2
    assert BehindLedger(plan, {"b": 6}).shown("out", 9) == 5
    assert BehindLedger(plan, {}).shown("out", 9) == 9


# -- rebuilds --------------------------------------------------------------------------------------


def test_what_is_being_rebuilt_from_a_cut_goes_on_while_others_are_lost() -> None:
    """a is, and lives, when b is lost as well: both begin with the same cut."""
    play = begun(interval=1)
    feed(play, 0)
    sealed(play, 1)
    feed(play, 2, 100)
    lose_owner(play, A)
    play.recovering(lose_owner(play, B))
    assert (play.recovery.cut, play.recovery.restored) == (2, {A, B})
    assert play.placement.owners[A].epoch == 2


def test_what_was_restored_from_a_cut_has_kept_nothing_of_the_slices_before_it() -> None:
    """b has to go back further than a did, which is not to be asked for what it never had."""
    play = begun(interval=1)
    feed(play, 0)
    sealed(play, 1)
    feed(play, 2, 100)
    sealed(play, 3)
    play.recovering(lose_owner(play, A))
    assert play.recovery.cut == 4
    feed(play, 4, 300)
    lose_owner(play, B)
    play.recovering(play.controller.handle(RestoreFailed(StorageError("torn"), 300)))
    assert (play.recovery.cut, play.recovery.restored) == (2, {B})
    assert (play.recovery.shadows, play.recovery.senders) == ({A}, set())


def test_a_recovery_takes_its_time_from_the_loss_on() -> None:
    """Four seconds, of which slices took none: it learns half of what is fixed from them."""
    play = Play(interval=10_000, recovery_bound_s=60.0)
    play.start()
    noted: list[Command] = []
    for batch in range(3):
        noted += feed(play, batch, 1_000 * batch)
    commands = play.controller.handle(NodesLost((SECOND,), "killed", None, 3_000))
    play.recovered(commands[-1], now_ms=7_000)
    noted += feed(play, 3, 8_000)
    predicted = [c.predicted_s[COUNT[1]] for c in noted if isinstance(c, NoteBackups)]
    assert predicted == pytest.approx([FIXED_S, (FIXED_S + 4) / 2])


def test_partitions_are_not_rebuilt_under_a_change_that_is_on_its_way() -> None:
    """A rebuild gives it up when it begins: one that does not is a bug, and is said."""
    play = Play()
    play.start()
    feed(play, 0)
    play.controller.handle(ScaleRequested("count", 3, 10))
    with pytest.raises(InvariantError, match="were rebuilt while a change was WANTED"):
        play.controller.adjustment.rebuilt()


# -- chains that come back -------------------------------------------------------------------------


def test_what_nobody_needs_again_need_not_be_kept() -> None:
    """b has lost nothing, and is at the slice that those above and below it begin with: all since
    the cut ran without it. It keeps its state, though it has kept no output."""
    plan = compiled({"a": "s", "b": "a", "c": "b", "d": "s"}, {"out_c": ("c",), "out_d": ("d",)})
    loads = {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.3}
    job = Job(4, plan=plan, loads=loads, interval=2000, backups=()).begin()
    cuts(job, 3)
    before = job.placement.owners[p("b")]
    job.loses("a", "c", "d")
    job.seconds(3)
    assert job.waiting == {"a", "b", "c"}
    job.happens(NodesJoined((NodeId("7"), NodeId("8"), NodeId("9")), job.now_ms))
    job.seconds(20)
    assert job.waiting == set()
    assert job.placement.owners[p("b")] == before


def test_a_part_that_fails_names_the_slice_that_it_was_to_reach() -> None:
    job = short()
    job.seconds(10)
    job.comes("3")
    assert job.controller.comeback.state is ComebackState.BESIDE
    assert job.beside is not None
    part, _ = job.beside
    last = part.plan.slices[-1].number
    failure = Failure("b[0]", "b", "its function raised ValueError: no", "")
    (fail,) = job.caught_up(part, job.now_ms, failures=(failure,))
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, OperatorError)
    assert fail.error.message.startswith(f"replay of slices 1 to {last}, operator 'b'")
    assert fail.error.fields["slice"] == last


# -- stops -----------------------------------------------------------------------------------------


def test_a_stop_that_a_rebuild_interrupts_begins_again_with_what_was_asked_for() -> None:
    """One that nothing interrupts waits for nothing new."""
    play = Play(interval=1)
    play.start()
    feed(play, 0)
    last = run_of(play.controller.handle(StopRequested(100)))
    assert last.plan.seal
    assert play.controller.handle(ScaleRequested("count", 3, 110)) == []
    again = run_of(play.recovering(lose(play, SECOND)))
    assert again.plan.number == last.plan.number
    play.written(again.plan.number)  # its files are there with it
    assert isinstance(play.ran(again)[-1], PreparePartitions)


def test_a_stop_that_chains_wait_for_begins_again_with_what_was_asked_for() -> None:
    """Those that were lost do not fit beside the others, but all come back for the stop."""
    job = Job(interval=2000).begin()
    cuts(job, 3)
    job.second()
    last = run_of(job.controller.handle(StopRequested(job.now_ms)))
    assert job.controller.handle(ScaleRequested("c", 2, job.now_ms)) == []
    commands = lose(job, job.node_of("b"))
    assert job.waiting == {"a", "b"}
    assert isinstance(commands[-1], RecoverPartitions)
    again = run_of(job.recovered(commands[-1], job.now_ms))
    assert job.waiting == set()
    assert again.plan.number == last.plan.number
    job.written(again.plan.number)
    assert isinstance(job.ran(again)[-1], PreparePartitions)


# -- a full disk -----------------------------------------------------------------------------------


def test_slices_do_not_wait_for_a_checkpoint_once_a_disk_has_room_again() -> None:
    play = Play()
    play.start()
    run = run_of(play.controller.handle(BatchArrived(0, 0)))
    play.ran(run, disk_full=True)
    run = run_of(play.controller.handle(BatchArrived(1, 10)))
    assert run.plan.seal
    play.ran(run)  # all nodes say that they have room
    run = run_of(play.controller.handle(BatchArrived(2, 20)))
    assert not run.plan.seal


def test_a_disk_is_full_until_its_node_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the end of a rebuild only those are heard that took part in its last part."""
    monkeypatch.setattr(recovery, "MAX_PART_SLICES", 1)
    play = Play(nodes=(*NODES, THIRD))
    play.start()
    feed(play, 0)
    play.ran(run_of(play.controller.handle(BatchArrived(1, 10))), disk_full=True)
    owner = play.placement.owners[COUNT[1]].node
    assert owner != FIRST == play.placement.nodes[0]
    commands = lose(play, owner)
    while commands:
        commands = play.recovered(commands[-1])
    assert play.recovery.part > 0
    assert FIRST not in play.recovery.nodes
    assert run_of(play.controller.handle(BatchArrived(2, 20))).plan.seal


# -- nodes -----------------------------------------------------------------------------------------


class Sending(FaultyCluster):
    """Notes on which edges each wave of a slice sent something to another node."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.sent: dict[int, set[int]] = {}  # by wave

    def call(self, request: WaveRequest | RecoverRequest, parcels: Parcels) -> Answer[pa.Table]:
        answer = super().call(request, parcels)
        if isinstance(request, WaveRequest):
            edges = {bundle.edge for parcel in answer[0] for bundle in parcel.bundles}
            self.sent.setdefault(request.depth, set()).update(edges)
        return answer


def test_a_wave_sends_what_its_own_chains_have_made(tmp_path: Path) -> None:
    """And nothing that an earlier one has sent already."""
    cluster = Sending(2)
    run = LocalRun(three_waves(ab.Memory()), tmp_path, cluster=cluster)
    for n in range(2):
        run.feed([{"s": [(k, n) for k in range(6)]}])
    run.stop()
    chains = run.controller.plan.node_chains
    assert cluster.sent == {c.depth: {e.id for e in c.outputs} for c in chains}
    assert [len(edges) for _, edges in sorted(cluster.sent.items())] == [1, 1, 0]


# -- what a job says and wants of itself -----------------------------------------------------------


def test_an_autoscaler_that_remembers_nothing_decides_by_what_it_sees() -> None:
    job = ScaledJob(nodes=8, cores={"a": 1.9, "b": 1.0}, fixed_s=0.1)
    job.scaler = Autoscaler(job.plan, CONFIG, 1_000)
    (made,) = job.run(5)
    assert made.parallelism == {"a": 4}
    assert made.at_ms > AHEAD_MS


def test_a_job_that_falls_behind_says_what_its_first_and_newest_batch_took() -> None:
    (said,) = batches_said([10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0])
    assert "a batch takes 15.0 s by now, 10.0 s a while ago, and should take 1 s." in said
