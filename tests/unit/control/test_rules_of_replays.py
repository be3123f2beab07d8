"""Rules of who replays what, and of what a node then does, that only few runs ever need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import test_comeback
from plays import FIRST, NODES, SECOND, apart, record
from test_comeback import Job, short

from anabranch.control.ledgers.watermark import OperatorClocks, WatermarkTracker
from anabranch.control.settings import ControlConfig
from anabranch.model.events import PartitionsPrepared, ScaleRequested
from anabranch.model.graph import Hold
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement, place
from anabranch.model.progress import Promise
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.protocol.exchange import Bundle, Exchange, Inbox
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import RecoverRequest, WaveRequest
from anabranch.node.protocol.preparation import Preparations
from anabranch.node.protocol.source_task import rows_per_slice
from anabranch.sim.payload import SimJob, SimProcess
from anabranch.sim.store import SimStore
from anabranch.sim.workload import Workload

A, B, C = (PartitionId(chain, 0) for chain in "abc")
WAVES = max(chain.depth for chain in apart().node_chains)


# -- chains that come back -------------------------------------------------------------------------


def test_the_journal_says_how_keys_were_divided_when_chains_had_come_back() -> None:
    """Their slices are replayed so, whatever a scaling made of it later."""
    job = short()
    job.comes("3")
    job.seconds(15)
    assert job.waiting == set()
    came_back = job.placement
    job.second()
    job.happens(ScaleRequested("a", 2, job.now_ms))
    job.cut()
    change = job.controller.adjustment.change
    assert change is not None
    loaded = {n: tuple(q for m, q in change.loaded if m == n) for n in job.controller.nodes}
    seen = job.reports(job.controller.ledgers.slices.next_slice)
    ready = tuple(replace(r, prepared=loaded[r.node]) for r in seen)
    job.happens(PartitionsPrepared(ready, job.now_ms))
    job.second()
    job.cut()
    assert len(job.placement.partitions("a")) == 2
    head = job.controller.ledgers.head()
    assert came_back.version in {s.placement for s in head.slices}
    assert head.layouts[came_back.version] == came_back.groups


def test_slices_wait_in_the_end_for_what_stays_two_of_them_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts beside slices bring it no nearer, as these take most of the time."""
    monkeypatch.setattr(test_comeback, "WORK_MS", 800)
    job = Job(3, loads={"a": 0.4, "b": 0.35, "c": 0.4}).begin()
    job.seconds(3)
    job.loses("b", "c")
    job.seconds(6)
    job.comes("7")
    job.seconds(20)
    assert "c" not in job.waiting


# -- watermarks ------------------------------------------------------------------------------------


def test_who_reads_what_time_made_another_emit_goes_by_what_that_one_promised() -> None:
    """It is held back from the watermark of the slice before; where a source is read as well, the
    less of the two counts."""
    before = record(1, watermark_us=300)
    held = Promise("a", Hold(reach_us=100))
    clocks = OperatorClocks({"b": (held,), "c": (held, Promise())})
    assert clocks.next(900, before) == {"b": 201, "c": 201}
    assert clocks.next(150, before) == {"b": 201, "c": 150}


def test_a_slice_without_rows_is_run_to_find_a_source_idle_only_once_it_may_be() -> None:
    ledger = WatermarkTracker({"s": 0}, {"s": 100})
    assert ledger.look_is_due(1_000)  # its clock has not begun
    ledger.look({"s": 1}, 1_000, anew=True)
    assert [ledger.look_is_due(ms) for ms in (1_000, 1_099, 1_100)] == [False, False, True]


# -- nodes -----------------------------------------------------------------------------------------


def planned(number: int, **changes: Any) -> SlicePlan:
    """A slice without rows."""
    return replace(SlicePlan(number, Feed.NONE, None, 0, None, 0, 1, False), **changes)


def carried() -> SimJob:
    """s → a → b and s → c, one partition each."""
    return SimJob(Workload(0, apart(), ControlConfig(), (), None), SimStore(), {})


def recovery(
    placement: Placement, restored: Collection[PartitionId], **changes: Any
) -> RecoveryPlan:
    plan = RecoveryPlan(
        placement=placement,
        cut=0,
        files={},
        restored=frozenset(restored),
        shadows=frozenset(),
        senders=frozenset(),
        slices=(),
        backups=None,
        reads_log=False,
    )
    return replace(plan, **changes)


class Node:
    """The only one of a job, unless a placement says otherwise; it carries numbers."""

    def __init__(self, name: NodeId = FIRST) -> None:
        self.name = name
        self.loaded: list[bytes] = []
        process = SimProcess("i", lambda process, work: work(), lambda: False, 1_000_000)
        self.host: Host[Any] = Host(process, self._load)

    def _load(self, spec: bytes) -> SimJob:
        self.loaded.append(spec)
        return carried()

    def recovers(
        self, plan: RecoveryPlan, driver: str = "one", spec: bytes | None = b"job"
    ) -> NodeReport:
        """All waves."""
        for depth in range(1, WAVES + 1):
            request = RecoverRequest(
                job="job",
                spec=spec,
                driver=driver,
                pulse=None,
                generation=1,
                node=self.name,
                nodes=plan.placement.nodes,
                plan=plan,
                depth=depth,
                last=depth == WAVES,
            )
            _, report = self.host.recover(request, [])
        assert report is not None
        return report

    def runs(self, plan: SlicePlan) -> NodeReport:
        """All waves."""
        for depth in range(1, WAVES + 1):
            request = WaveRequest(
                job="job",
                generation=1,
                node=self.name,
                nodes=(self.name,),
                plan=plan,
                source_tasks=0,
                depth=depth,
                last=depth == WAVES,
                confirmed=plan.number - 1,
                trim=0,
                backups=None,
            )
            _, report = self.host.wave(request, [])
        assert report is not None
        return report

    @property
    def at(self) -> Mapping[PartitionId, int]:
        """The next slice of each partition."""
        return {q: x.next_slice for q, x in self.host.partitions.items()}


def alone(*anew: PartitionId, version: int = 1) -> Placement:
    """All on one node, of which these have an owner anew."""
    placement = place(apart(), (FIRST,), version, {})
    owners = {
        q: Ownership(o.node, version if q in anew else 1) for q, o in placement.owners.items()
    }
    return replace(placement, owners=owners)


def test_a_partition_that_waits_neither_runs_nor_seals() -> None:
    node = Node()
    node.recovers(recovery(alone(), (A, B, C)))
    report = node.runs(planned(1, seal=True, paused=frozenset("c")))
    assert node.at == {A: 2, B: 2, C: 1}
    assert report.partitions.keys() == {A, B}
    assert not report.incomplete
    assert {file.partition for file in report.checkpoints} == {A, B}


def test_a_chain_replays_no_further_than_it_is_told_while_another_one_does() -> None:
    slices = (planned(1), planned(2))
    spans = {"a": (1, 2), "c": (1, 3)}
    node = Node()
    report = node.recovers(recovery(alone(), (A, C), slices=slices, spans=spans))
    assert not report.incomplete
    assert node.at == {A: 2, C: 3}


def test_who_came_further_in_an_earlier_replay_goes_on_from_there() -> None:
    """Nobody needs its output of the slices before, and it has not kept it."""
    node = Node()
    node.recovers(recovery(alone(), (A, B, C), cut=2))
    slices = tuple(planned(number) for number in (1, 2, 3))
    report = node.recovers(recovery(alone(version=2), (A,), slices=slices))
    assert not report.incomplete
    assert node.at[A] == 4


def test_who_sends_what_it_kept_need_not_have_kept_what_nobody_asks_for() -> None:
    node = Node()
    node.recovers(recovery(alone(), (A, B, C), cut=2))
    node.runs(planned(3))
    slices, spans = (planned(2), planned(3)), {"b": (3, 4), "c": (2, 4)}
    again = alone(B, C, version=2)
    sent = {"cut": 2, "slices": slices, "spans": spans, "senders": frozenset({A})}
    report = node.recovers(recovery(again, (B, C), **sent))
    assert not report.incomplete
    assert node.at[B] == 4


def test_a_copy_that_is_not_there_is_missed_by_a_recovery() -> None:
    """Its partition lives elsewhere, and nobody restores either of them."""
    placement = replace(alone(), nodes=NODES, copies={A: SECOND})
    report = Node(SECOND).recovers(recovery(placement, ()))
    assert report.not_hosted == (A,)


def test_a_driver_brings_its_job_and_need_not_do_so_again() -> None:
    """That of the one before may have been another."""
    node = Node()
    node.recovers(recovery(alone(), (A, B, C)), spec=b"one")
    node.recovers(recovery(alone(version=2), ()), spec=None)
    assert (node.loaded, node.at) == ([b"one"], {A: 1, B: 1, C: 1})
    node.recovers(recovery(alone(), (A, B, C)), driver="two", spec=b"another")
    assert node.loaded == [b"one", b"another"]


def test_packets_of_a_slice_that_is_past_are_not_kept() -> None:
    (edge,) = apart().by_name["c"].inputs
    exchange, inbox = Exchange(carried(), 1, FIRST, alone()), Inbox[Any]()
    inbox.floor = 2
    for number in (1, 2):
        exchange.deliver(Bundle(edge.id, number, 0, 1, None), inbox)
    assert inbox.slices() == [2]


def test_state_that_is_not_wanted_any_more_is_not_loaded() -> None:
    restored: list[PartitionId] = []
    later: list[Callable[[], None]] = []

    class State:
        def __init__(self, partition: PartitionId) -> None:
            self._partition = partition

        def restore(self, files: object, owned: object, gently: bool = False) -> None:
            restored.append(self._partition)

    class Loading:
        def new_state(self, partition: PartitionId) -> State:
            return State(partition)

    ahead: Preparations[Any] = Preparations(later.append)
    job: Any = Loading()
    plan = recovery(alone(), (A, B))
    ahead.begin(job, plan, {A: 1, B: 1})
    ahead.begin(job, plan, {B: 1})  # another change, before anything was loaded
    for work in later:
        work()
    assert restored == [B]
    assert ahead.ready() == (B,)


def test_all_tasks_and_sources_together_leave_a_slice_the_rows_that_were_asked_for() -> None:
    assert rows_per_slice(100, 4, asked=20, in_time=None) == 5
    assert rows_per_slice(100, 4, asked=2, in_time=None) == 1
    assert rows_per_slice(3, 4, asked=20, in_time=None) == 3
