"""Given losses and nodes that come, who is restored, who waits, what is replayed and shown late."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from plays import FIRST, NODES, SECOND, THIRD, Play, apart, forked, kinds, lose, names

from anabranch.control.comeback import ComebackState
from anabranch.control.controller import Phase
from anabranch.control.policies.capacity import Return
from anabranch.control.settings import Past
from anabranch.control.tries import MAX_TRIES
from anabranch.errors import AdjustmentError, ClusterError, StorageError
from anabranch.model.commands import (
    AwaitCatchUp,
    AwaitNodes,
    CatchUp,
    Command,
    ExposeLate,
    FailRun,
    FinishRun,
    PollNodes,
    RecoverPartitions,
    ReleaseNodes,
    RunSlice,
)
from anabranch.model.costs import Costs
from anabranch.model.events import (
    BatchArrived,
    DrainRequested,
    Event,
    Idled,
    NodesJoined,
    NodesPolled,
    RestoreFailed,
    ScaleRequested,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.plan import Plan
from anabranch.model.recovery import Cause, RecoveryPlan

SECOND_MS = 1000
WORK_MS = 200  # a slice, or a part of a replay
TURNS = 10
LOADS = {"a": 0.25, "b": 0.25, "c": 0.55}


def p(chain: str, index: int = 0) -> PartitionId:
    return PartitionId(chain, index)


class Job(Play):
    """One row comes a second, and with each slice partitions keep their nodes as busy as they do.
    A healthy cluster answers until nothing is asked any more; what it did is written down."""

    def __init__(
        self,
        nodes: int = 2,
        past: Mapping[str, Any] | None = None,
        plan: Plan | None = None,
        loads: Mapping[str, float] = LOADS,
        **settings: Any,
    ) -> None:
        busy_s = {p(chain): load for chain, load in loads.items()}
        known = {"costs": Costs(busy_s, 1.0), **(past or {})}
        here = tuple(NodeId(str(n)) for n in range(1, nodes + 1))
        super().__init__(Past(**known), plan=plan or apart(), busy_s=busy_s, nodes=here, **settings)
        self.now_ms = self.offered_ms = 0
        self.batch = 0
        self.beside: tuple[CatchUp, int] | None = None  # and when it has ended
        self.plans: list[RecoveryPlan] = []
        self.slices: list[RunSlice] = []
        self.released: list[NodeId] = []
        self.late: list[tuple[int, frozenset[str]]] = []

    def begin(self) -> Job:
        self.done(self.controller.handle(NodesJoined(self.nodes, 0)))
        return self

    def done(self, commands: list[Command]) -> list[Command]:
        """Carried out; what there is to do after it, too. All commands, but those questions."""
        told: list[Command] = []
        while commands:
            told += commands[:-1]
            for part in (c for c in commands if isinstance(c, CatchUp)):
                self.plans.append(part.plan)
                self.beside = part, self.now_ms + round(SECOND_MS * self.takes_s(part.plan))
            match commands[-1]:
                case RecoverPartitions() as question:
                    self.plans.append(question.plan)
                    self.now_ms += WORK_MS
                    commands = self.recovered(question, self.now_ms)
                case RunSlice() as question:
                    self.slices.append(question)
                    self.now_ms += WORK_MS
                    commands = self.ran(question, rows=1, now_ms=self.now_ms)
                case AwaitCatchUp():
                    commands = self.part_ends()
                case _ as last:
                    told.append(last)
                    commands = []
        self.released += [n for c in told if isinstance(c, ReleaseNodes) for n in c.nodes]
        self.late += [(c.record.number, c.sinks) for c in told if isinstance(c, ExposeLate)]
        return told

    def takes_s(self, plan: RecoveryPlan) -> float:
        """As long as the node that has most to do."""
        mine = {n: set(plan.restored) & set(plan.placement.hosted_by(n)) for n in plan.nodes}
        count = {q: end - first for q in plan.restored for first, end in [plan.span(q.chain)]}
        each = (sum(count[q] * self.busy_s[q] for q in some) for some in mine.values())
        return max(each, default=0.0)

    def part_ends(self) -> list[Command]:
        assert self.beside is not None
        part, ended_ms = self.beside
        self.beside, self.now_ms = None, max(self.now_ms, ended_ms)
        return self.caught_up(part, self.now_ms)

    def happens(self, event: Event) -> list[Command]:
        return self.done(self.controller.handle(event))

    def second(self) -> RunSlice:
        """The next slice, and all that comes of it; parts beside it that end before it begins."""
        self.offered_ms += SECOND_MS
        while self.beside is not None and self.beside[1] <= self.offered_ms:
            self.done(self.part_ends())
        self.now_ms = max(self.now_ms, self.offered_ms)
        count, batch = len(self.slices), self.batch
        self.batch += 1
        for _ in range(TURNS):
            if len(self.slices) > count:
                break
            self.happens(BatchArrived(batch, self.now_ms))  # others may have had their turn
        return self.slices[count]

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.second()

    def node_of(self, chain: str) -> NodeId:
        return self.placement.owners[p(chain)].node

    def loses(self, *chains: str) -> list[Command]:
        """The nodes of these."""
        nodes = sorted({self.node_of(c) for c in chains})
        return self.done(lose(self, *nodes))

    def comes(self, node: str) -> list[Command]:
        return self.happens(NodesJoined((NodeId(node),), self.now_ms))

    def cut(self) -> list[Command]:
        """The files of the newest slice are durable."""
        number = self.controller.ledgers.newest_slice
        self.written(number)
        return self.happens(NodesPolled(self.reports(number + 1), self.now_ms))

    @property
    def waiting(self) -> set[str]:
        return set(self.controller.waiting)

    def restored(self, since: int = 0) -> list[tuple[set[str], list[int]]]:
        """Who, and which slices were replayed for them, of the recoveries from `since` on."""
        return [
            (names(plan.restored), [s.number for s in plan.slices])
            for plan in self.plans[since:]
            if plan.slices or not plan.restored
        ]


def both_lost(**settings: Any) -> Job:
    """Three nodes have one chain each, and room for one query is left: a is live without b."""
    job = Job(3, loads={"a": 0.2, "b": 0.35, "c": 0.5}, **settings).begin()
    job.seconds(3)
    assert len({job.node_of(c) for c in "abc"}) == 3
    return job


def short(**settings: Any) -> Job:
    """Two nodes; that of a and b is lost after three slices, and the other is full with c."""
    job = Job(**settings).begin()
    job.seconds(3)
    assert job.node_of("a") == job.node_of("b") == FIRST
    job.loses("b")
    assert job.waiting == {"a", "b"}
    return job


# -- who waits, and who comes back -----------------------------------------------------------------


def test_a_loss_that_leaves_enough_is_made_good_at_once() -> None:
    job = Job(3).begin()
    job.seconds(2)
    job.loses("b")
    assert (job.waiting, job.controller.comeback.state) == (set(), ComebackState.ABSENT)
    assert job.second().plan.paused == frozenset()


def test_queries_that_lost_nothing_go_on_and_the_others_wait() -> None:
    job = short()
    assert job.controller.phase is Phase.RUNNING
    assert job.restored(1) == [(set(), [])]  # the nodes hear of the placement
    job.seconds(2)
    assert [s.plan.paused for s in job.slices[-2:]] == [{"a", "b"}] * 2
    assert job.controller.frontier == {p("c"): 6}
    assert job.late == []


@pytest.mark.parametrize(("priority", "back", "waits"), [(5, "c", {"b"}), (1, "b", {"c"})])
def test_what_is_worth_most_comes_back(priority: int, back: str, waits: set[str]) -> None:
    """Of what is worth the same, that which takes least."""
    job = both_lost(plan=apart(priority))
    job.loses("b", "c")
    job.seconds(3)
    assert job.waiting == waits
    assert {name for some, _ in job.restored(1) for name in some} == {f"{back}[0]"}
    assert job.second().plan.paused == waits


def test_a_chain_that_lost_nothing_waits_for_the_one_above_it() -> None:
    """It lacks no slice, and so it has nothing to make up for."""
    job = Job(2, plan=forked(), loads={"a": 0.5, "b": 0.4, "c": 0.45}).begin()
    job.seconds(3)
    assert job.node_of("a") == job.node_of("c") != job.node_of("b")
    job.loses("a")
    assert job.waiting == {"a", "b", "c"}
    assert job.controller.frontier == {p("a"): 1, p("b"): 4}
    assert job.second().plan.paused == {"a", "b", "c"}
    job.seconds(60)
    assert job.waiting == {"c"}


def test_what_is_connected_with_an_operator_that_is_not_deterministic_goes_back_with_it() -> None:
    job = both_lost(plan=apart(odd=["b"]))
    before = {q: o.epoch for q, o in job.placement.owners.items()}
    job.loses("b")  # there is room for all
    after = {q: o.epoch for q, o in job.placement.owners.items()}
    assert {str(q) for q in after if after[q] > before[q]} == {"a[0]", "b[0]"}
    assert job.restored(1)[0] == ({"a[0]", "b[0]"}, [1, 2, 3])


def test_what_is_connected_with_it_waits_and_comes_back_with_it() -> None:
    job = both_lost(plan=apart(priority=5, odd=["b"]))
    job.loses("b", "c")
    job.seconds(8)
    assert job.waiting == {"a", "b"}  # a has lost nothing, and its rows are not to be used twice
    assert p("a") not in job.placement.owners
    job.comes("7")
    job.seconds(60)
    assert job.waiting == set()
    assert next(n for some, ns in job.restored(1) for n in ns if "a[0]" in some) == 1


def test_what_a_slice_takes_by_itself_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WORK_MS", 900)
    job = Job(3, loads={"a": 0.2, "b": 0.35, "c": 0.5}).begin()
    job.seconds(6)
    assert job.controller.ledgers.costs.fixed_s == pytest.approx(0.9 - 0.5 - 0.35)
    job.loses("b", "c")
    assert job.controller.comeback.choice is not None
    assert job.controller.comeback.choice.why.endswith(" of 0.75")


def test_a_node_that_joins_brings_back_what_waited() -> None:
    job = short()
    job.seconds(3)
    epochs = {q: o.epoch for q, o in job.placement.owners.items()}
    job.comes("3")
    job.seconds(15)  # it catches up at 0.4 of its time
    assert (job.waiting, job.controller.comeback.state) == (set(), ComebackState.ABSENT)
    assert {str(q): o.node for q, o in job.placement.owners.items()} == {
        "a[0]": THIRD,
        "b[0]": THIRD,
        "c[0]": SECOND,
    }
    assert job.placement.owners[p("c")].epoch == epochs[p("c")]  # nobody touches what runs
    assert len(set(job.controller.frontier.values())) == 1
    assert job.second().plan.paused == frozenset()


def test_what_was_missed_is_replayed_once_and_shown_late_in_order() -> None:
    job = short()
    job.seconds(3)
    begun = len(job.plans)
    job.comes("3")
    job.seconds(15)
    replayed = [n for _, some in job.restored(begun) for n in some]
    first = next(s.plan.number for s in reversed(job.slices) if s.plan.paused) + 1
    assert replayed == list(range(1, first))  # from the beginning, as nothing was in a cut
    # out_b had shown three slices; what it shows late is in order, and ends where it takes part.
    shown = [number for number, sinks in job.late if sinks == {"out_b"}]
    assert shown == sorted(set(shown))
    assert shown[-1] == first - 1
    assert min(shown) > 3
    assert {plan.late["b"] for plan in job.plans[begun:]} >= {4}


def test_slices_run_between_the_parts_of_a_long_replay() -> None:
    job = short()
    job.seconds(10)
    missed = len(job.slices)
    job.comes("3")
    assert job.controller.comeback.state is ComebackState.BESIDE
    run = job.second()
    assert (run.plan.number, run.plan.paused) == (missed + 1, {"a", "b"})
    assert (run.beside, run.busy) == (True, {THIRD})  # the slice does not wait for that node
    assert job.plans[-1].more
    job.seconds(40)
    assert job.waiting == set()
    assert all(len(plan.slices) < missed for plan in job.plans)


def test_what_has_nothing_to_do_with_it_is_not_planned_again() -> None:
    """A node without partitions comes and goes while chains wait."""
    job = Job(1, loads={"a": 0.9, "b": 0.9, "c": 0.6}).begin()
    job.seconds(2)
    assert job.waiting == {"a", "b"}
    before = job.placement
    job.comes("9")  # not enough
    assert lose(job, NodeId("9")) == []
    job.seconds(2)
    assert job.placement.owners == before.owners


def test_parts_say_who_backs_up_by_now() -> None:
    job = short(adaptive_backups=True)
    job.seconds(20)
    job.comes("3")
    job.seconds(2)
    assert job.controller.comeback.state is ComebackState.BESIDE
    assert job.plans[-1].backups == frozenset()
    job.comes("4")
    lose(job, NodeId("4"))  # the second: from now on all do
    job.seconds(8)
    assert job.plans[-1].part > 0
    assert job.plans[-1].backups is None


def long_lost() -> Job:
    """After thirty slices, none of them in a cut; b comes back on the node that a is live on."""
    job = Job(3, loads={"a": 0.3, "b": 0.35, "c": 0.4}).begin()
    job.seconds(30)
    job.loses("b", "c")
    assert job.node_of("b") == job.node_of("a")
    return job


def test_what_comes_back_slowly_begins_again_on_a_node_that_joins() -> None:
    job = long_lost()
    job.seconds(2)
    assert 1 < job.controller.frontier[p("b")] < 8
    begun = len(job.plans)
    job.comes("7")
    job.seconds(2)
    assert (job.node_of("b"), job.node_of("c")) == ("7", "7")
    first = next(numbers for some, numbers in job.restored(begun) if "b[0]" in some and numbers)
    assert first[0] == 1


def test_all_begin_again_where_one_that_joins_those_that_come_back_needs_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cuts are from before the layout changed, and others are between two parts."""
    job = long_lost()
    job.seconds(2)
    comeback = job.controller.comeback
    assert (comeback.state, comeback.coming) == (ComebackState.BESIDE, {"b"})
    monkeypatch.setattr(comeback._returning, "needs_older_layout", lambda chains: True)
    job.comes("7")
    job.seconds(2)
    assert (job.waiting, comeback.state) == (set(), ComebackState.ABSENT)
    assert job.plans[-1].restored == set(job.placement.owners)


def test_what_has_come_some_way_stays_where_it_is() -> None:
    job = long_lost()
    while job.controller.frontier[p("b")] < 0.3 * job.controller.ledgers.newest_slice:
        job.second()
    home = job.node_of("b")
    job.comes("7")
    job.seconds(3)
    assert (job.node_of("b"), job.node_of("c")) == (home, "7")
    job.seconds(120)
    assert job.waiting == set()


def test_nodes_that_are_to_spare_get_their_share_when_all_is_back() -> None:
    job = short()
    job.comes("3")
    for _ in range(20):
        job.second()
        if not job.waiting:
            break
        assert job.controller.adjustment.settled
        if job.batch == 6:
            job.comes("4")
    assert job.waiting == set()
    assert not job.controller.adjustment.settled


def test_another_parallelism_at_a_start_brings_all_back_at_once() -> None:
    job = Job(1, {"rescaled": frozenset({"c"})}).begin()
    assert job.waiting == set()


def test_blocking_waits_for_all_of_them() -> None:
    job = both_lost(recovery="blocking")
    job.loses("b", "c")
    assert job.waiting == {"b", "c"}
    job.seconds(2)
    assert job.waiting == {"b", "c"}  # each would fit, but not both
    job.comes("9")
    job.seconds(80)
    assert job.waiting == set()


def test_eager_brings_back_all_at_once() -> None:
    job = Job(recovery="eager").begin()
    job.seconds(3)
    job.loses("b")
    assert (job.waiting, job.controller.comeback.absent) == (set(), True)
    assert job.restored(1) == [({"a[0]", "b[0]"}, [1, 2, 3])]
    assert set(job.placement.owners) == {p("a"), p("b"), p("c")}


@pytest.mark.parametrize(
    "settings", [{"parallel_recovery": 2}, {"recovery_bound_s": 1.0}], ids=["divided", "bound"]
)
def test_where_chains_do_not_wait_for_each_other(settings: dict[str, Any]) -> None:
    job = Job(**settings).begin()
    job.seconds(3)
    job.loses("b")
    assert job.waiting == set()


# -- more losses -----------------------------------------------------------------------------------


def test_a_loss_during_a_replay_keeps_what_others_have() -> None:
    job = short()
    job.seconds(5)
    job.comes("3")
    job.seconds(5)  # a part is done
    at = job.controller.frontier[p("b")]
    had = {q: job.placement.owners[q] for q in (p("a"), p("b"))}
    assert 1 < at < job.controller.ledgers.newest_slice
    begun = len(job.plans)
    job.loses("c")
    assert {q: job.placement.owners[q] for q in had} == had
    assert "c" in job.waiting
    job.seconds(20)
    again = [n for restored, some in job.restored(begun) for n in some if "b[0]" in restored]
    assert again[0] == at  # it goes on, and does not begin again
    assert again == sorted(set(again))
    assert job.waiting == {"c"}
    job.comes("4")
    job.seconds(60)  # at 0.4 of its time
    assert job.waiting == set()


def test_what_is_lost_during_its_replay_begins_again() -> None:
    job = short()
    job.seconds(5)
    job.comes("3")
    epoch = job.placement.owners[p("b")].epoch
    job.loses("b")
    assert job.waiting == {"a", "b"}
    assert p("b") not in job.placement.owners
    begun = len(job.plans)
    job.comes("4")
    job.seconds(2)
    assert job.placement.owners[p("b")].epoch > epoch
    assert job.restored(begun)[0][1][0] == 1


def test_a_replay_that_lacks_something_is_tried_again() -> None:
    job = short()
    job.seconds(2)
    commands = job.controller.handle(NodesJoined((THIRD,), job.now_ms))
    epoch = job.placement.owners[p("b")].epoch
    again = job.recovered(commands[-1], incomplete={p("b"): "edge 0"})
    assert kinds(again) == ["WriteHead", "RecoverPartitions"]
    assert job.placement.owners[p("b")].epoch > epoch
    job.done(again)
    job.seconds(15)
    assert job.waiting == set()


def test_a_state_that_kills_every_node_it_meets_ends_the_run() -> None:
    job = short()
    commands: list[Command] = []
    for n in range(MAX_TRIES + 1):
        job.controller.handle(NodesJoined((NodeId(f"j{n}"),), job.now_ms))
        while not job.controller.comeback.replaying:
            job.now_ms += SECOND_MS
            commands = job.controller.handle(BatchArrived(job.batch, job.now_ms))
            if isinstance(commands[-1], RunSlice):
                job.batch += 1
                job.ran(commands[-1], rows=1, now_ms=job.now_ms + WORK_MS)
        commands = lose(job, job.node_of("b"))
        if isinstance(commands[-1], RecoverPartitions):  # of nothing: the nodes are told
            assert job.recovered(commands[-1], job.now_ms) == []
    (fail,) = commands
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, ClusterError)
    assert "was lost 10 times in a row" in fail.error.message


def test_a_process_that_has_forgotten_all_makes_all_that_it_had_wait() -> None:
    job = both_lost()
    job.loses("b", "c")
    job.seconds(3)
    assert job.waiting == {"c"}
    (live,) = job.placement.nodes
    job.incarnations[live] = "another"
    begun, run = len(job.plans), len(job.slices)
    again = job.second()  # it is found out with this one, which runs again
    assert job.slices[run].plan.number == again.plan.number
    # Now that takes least of what fits, from the beginning.
    assert job.restored(begun)[0][0] == {"c[0]"}
    assert job.restored(begun)[0][1][0] == 1
    assert job.waiting >= {"a", "b"}


def test_all_nodes_gone_and_back_one_by_one() -> None:
    job = Job().begin()
    job.seconds(3)
    assert lose(job, *NODES)[-1] == AwaitNodes()
    assert job.controller.phase is Phase.WAITING
    assert job.waiting == {"a", "b", "c"}
    assert job.happens(Idled(job.now_ms)) == []
    job.comes("3")
    job.seconds(8)
    assert job.controller.phase is Phase.RUNNING
    assert len(job.waiting) in (1, 2)  # one query fits
    job.comes("4")
    job.seconds(60)
    assert job.waiting == set()
    assert {n for n, _ in job.late} <= set(range(4, 30))


def test_all_nodes_gone_while_chains_wait() -> None:
    job = short()
    job.second()
    assert lose(job, SECOND)[-1] == AwaitNodes()
    assert job.controller.phase is Phase.WAITING
    job.comes("3")
    job.comes("4")
    job.seconds(12)
    assert (job.waiting, job.controller.phase) == (set(), Phase.RUNNING)


# -- checkpoints -----------------------------------------------------------------------------------


def cuts(job: Job, *numbers: int) -> None:
    """Slices, of which these are in a cut each."""
    while job.batch < max(numbers):
        assert job.second().plan.seal == (job.batch in numbers)
        if job.batch in numbers:
            assert kinds(job.cut())[:2] == ["WriteHead", "TrimStorage"]


def test_chains_begin_with_the_newest_cut_that_covers_them() -> None:
    job = Job(interval=2000).begin()
    cuts(job, 3, 5)
    job.loses("b")
    cuts(job, 7, 9)  # without a and b
    assert job.controller.cut is not None
    assert set(job.controller.cut.groups) == {"c"}
    begun = len(job.plans)
    job.comes("3")
    job.seconds(10)
    plans = job.plans[begun:]
    assert {plan.cut for plan in plans} == {5}
    assert plans[0].files[p("b")] == ("b[0]@5",)
    assert next(plan for plan in plans if plan.slices).slices[0].number == 6


def test_what_is_at_the_cut_keeps_its_state() -> None:
    """It lost nothing, and waits for the one above it: there is nothing to read for it."""
    job = Job(2, plan=forked(), loads={"a": 0.5, "b": 0.4, "c": 0.45}, interval=2000).begin()
    cuts(job, 3)
    before = job.placement.owners[p("b")]
    begun = len(job.plans)
    job.loses("a")
    assert job.controller.frontier[p("b")] == 4
    job.seconds(60)
    assert "b" not in job.waiting
    assert job.placement.owners[p("b")] == before
    assert job.plans[begun].cut == 3


def test_a_torn_checkpoint_goes_to_the_cut_before() -> None:
    job = Job(interval=2000).begin()
    cuts(job, 3, 5)
    job.second()
    job.loses("b")
    commands = job.controller.handle(NodesJoined((THIRD,), job.now_ms))
    assert isinstance(commands[-1], RecoverPartitions)
    assert commands[-1].plan.cut == 5
    begun = len(job.plans)
    job.happens(RestoreFailed(StorageError("torn"), job.now_ms))
    job.seconds(8)
    plans = job.plans[begun:]
    assert {plan.cut for plan in plans} == {3}
    assert [n for plan in plans for n in [s.number for s in plan.slices]][:2] == [4, 5]
    assert job.waiting == set()


def test_what_a_recovery_had_begun_from_a_torn_cut_begins_again_too() -> None:
    """Nothing was heard of it: its node may not have begun, and would with another cut."""
    job = Job(4, loads={"a": 0.2, "b": 0.35, "c": 0.6}, interval=2000).begin()
    cuts(job, 3)
    job.second()
    commands = lose(job, job.node_of("b"), job.node_of("c"))
    assert isinstance(commands[-1], RecoverPartitions)
    assert commands[-1].plan.restored == {p("b"), p("c")}
    begun = job.placement.owners[p("c")]
    commands = lose(job, job.node_of("b"))  # what is left is too little, and c is there
    assert isinstance(commands[-1], RecoverPartitions)
    assert commands[-1].plan.restored == {p("a"), p("b")}
    assert job.placement.owners[p("c")] == begun
    commands = job.controller.handle(RestoreFailed(StorageError("torn"), job.now_ms))
    assert isinstance(commands[-1], RecoverPartitions)
    assert commands[-1].plan.cut == 0
    assert p("c") not in job.placement.owners
    job.done(commands)
    job.comes("9")
    job.seconds(60)
    assert job.waiting == set()


def test_where_the_only_cut_that_covers_a_chain_is_torn_it_goes_to_the_beginning() -> None:
    """It is in no other, but that does not make it a new chain, whose state would be empty."""
    job = Job(interval=2000).begin()
    cuts(job, 3)
    job.loses("b")
    cuts(job, 5, 7)  # without a and b
    commands = job.controller.handle(NodesJoined((THIRD,), job.now_ms))
    assert isinstance(commands[-1], RecoverPartitions)
    assert commands[-1].plan.cut == 3
    begun = len(job.plans)
    job.happens(RestoreFailed(StorageError("torn"), job.now_ms))
    job.seconds(10)
    assert {plan.cut for plan in job.plans[begun:]} == {0}
    assert job.restored(begun)[0][1][0] == 1
    assert job.waiting == set()


def test_the_beginning_cannot_be_torn() -> None:
    job = short()
    job.controller.handle(NodesJoined((THIRD,), job.now_ms))
    error = StorageError("no such file")
    assert job.controller.handle(RestoreFailed(error, job.now_ms)) == [FailRun(error)]


# -- the user, meanwhile ---------------------------------------------------------------------------


def test_a_stop_while_chains_wait_brings_all_back() -> None:
    job = short()
    job.seconds(2)
    told = job.happens(StopRequested(job.now_ms))
    assert job.waiting == set()
    assert job.slices[-1].plan.seal
    assert job.slices[-1].plan.paused == frozenset()
    assert told[-1] == PollNodes()
    assert job.cut()[-1] == FinishRun()
    assert job.controller.cut is not None
    assert set(job.controller.cut.groups) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "request_", [ScaleRequested("c", 2, 0), DrainRequested(SECOND, 0)], ids=["scale", "drain"]
)
def test_nothing_is_moved_while_chains_wait(request_: Event) -> None:
    job = short()
    with pytest.raises(AdjustmentError, match=r"nothing can be moved while a, b wait .* add nodes"):
        job.controller.handle(request_)
    job.comes("3")
    job.seconds(10)
    assert job.waiting == set()
    job.controller.handle(request_)  # … and then it is


def test_a_drained_node_is_let_go_of_when_others_have_what_it_had() -> None:
    """Its drain was asked for before chains had to wait; they came back elsewhere."""
    job = Job(3).begin()
    job.seconds(2)
    drained = job.node_of("b")
    job.controller.handle(DrainRequested(drained, job.now_ms))
    job.loses("a")
    assert job.waiting == {"a", "b"}  # two nodes are there, and one of them does not count
    job.comes("7")
    job.seconds(4)
    assert job.waiting == set()
    assert {job.node_of("a"), job.node_of("b")} == {"7"}
    assert job.released == [drained]
    assert drained not in job.controller.nodes


def test_what_begins_again_because_of_others_does_not_begin_on_a_drained_node() -> None:
    job = Job(3).begin()
    nobody_moves = Return(frozenset(), {}, (), "")
    home, comeback = job.node_of("b"), job.controller.comeback
    assert comeback._home(p("b"), nobody_moves, job.placement) == home
    job.controller.wishes.drained.add(home)
    other = comeback._home(p("b"), nobody_moves, job.placement)
    assert other != home
    assert len(job.placement.hosted_by(other)) <= 1  # the emptiest


# -- another driver --------------------------------------------------------------------------------


def heir(job: Job, nodes: int) -> Job:
    """The next driver on what this one has journalled."""
    head = job.controller.ledgers.head()
    past = {
        "cut": head.cut,
        "previous": head.previous,
        "older": head.older,
        "slices": head.slices,
        "epochs": head.epochs,
        "groups": head.placement.groups,
        "placement_version": head.placement.version,
        "behind": head.behind,
        "costs": head.costs,
        "generation": 2,
    }
    other = Job(nodes, past)
    other.now_ms = other.offered_ms = job.now_ms
    other.batch = job.batch
    return other.begin()


def test_a_new_driver_goes_on_with_what_waits() -> None:
    before = short()
    before.seconds(3)
    job = heir(before, 1)
    job.seconds(8)
    assert len(job.waiting) in (1, 2)
    job.comes("9")
    job.seconds(40)
    assert job.waiting == set()
    shown = {sink: [n for n, sinks in job.late if sink in sinks] for sink in ("out_b", "out_c")}
    assert min(shown["out_b"]) > 3  # what was shown before is not shown again
    assert min(shown["out_c"]) > 6
    assert all(some == sorted(set(some)) for some in shown.values())


def test_a_new_driver_with_room_for_all_brings_all_back() -> None:
    before = short()
    before.seconds(3)
    job = heir(before, 2)
    job.seconds(10)
    assert job.waiting == set()
    assert job.plans[0].cause is Cause.START
    shown = [number for number, sinks in job.late if "out_b" in sinks]
    assert shown[-1] >= 6


def test_a_start_on_too_few_nodes_begins_with_what_fits() -> None:
    job = Job(1).begin()
    assert len(job.waiting) in (1, 2)
    assert job.plans[0].cause is Cause.START
    run = job.second()
    assert run.plan.paused == frozenset(job.waiting)
    job.comes("2")
    job.seconds(6)
    assert job.waiting == set()
