"""Given losses and checkpoints, who backs up: nobody until two nodes were lost since everything was
in a checkpoint, then all, until everything runs and is in one again."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from plays import FIRST, NODES, SECOND, THIRD, Play, apart, counting, diamond, kinds, lose

from anabranch.control.comeback import ComebackState
from anabranch.control.ledgers.backups import BackupLedger
from anabranch.control.policies.adaptive import ENOUGH_LOST, AdaptiveBackups
from anabranch.control.policies.recovery_bound import BackupChoice, RecoveryBound
from anabranch.control.settings import Past
from anabranch.driver.history import History
from anabranch.model.commands import Command, NoteBackups, RunSlice
from anabranch.model.costs import Costs
from anabranch.model.events import BatchArrived, NodesJoined, NodesPolled, StopRequested
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan

SPARE = tuple(NodeId(str(n)) for n in range(3, 9))
NOBODY: frozenset[PartitionId] = frozenset()
LOST = "2 nodes were lost since the newest checkpoint of everything"
WELL = "everything runs and is in a checkpoint"


def adaptive(plan: Plan | None = None, interval: int = 10, **settings: Any) -> Play:
    """Two nodes, and six that stand by."""
    settings = {"recovery": "eager", "adaptive_backups": True, **settings}
    play = Play(plan=plan or counting(), backups=(), interval=interval, **settings)
    play.start()
    play.controller.handle(NodesJoined(SPARE, 0))
    return play


def backing_up(play: Play, batch: int, now_ms: int = 0) -> frozenset[PartitionId] | None:
    """Who is told to, with a slice; it happens."""
    (run,) = play.controller.handle(BatchArrived(batch, now_ms))
    assert isinstance(run, RunSlice)
    play.ran(run)
    return run.backups


def owner(play: Play, chain: str, index: int = 0) -> NodeId:
    return play.placement.owners[PartitionId(chain, index)].node


def lost(play: Play, chain: str, index: int = 0) -> list[Command]:
    """What the loss of the node with this partition causes, without what rebuilds it."""
    commands = lose(play, owner(play, chain, index))
    assert kinds(commands[-2:]) == ["WriteHead", "RecoverPartitions"]
    assert play.recovering(commands[-2:]) == []
    return commands[:-2]


def in_a_cut(play: Play, number: int) -> list[Command]:
    """The files of the slice that was sealed are durable."""
    play.written(number)
    return play.controller.handle(NodesPolled(play.reports(number + 1), 0))


def begun(play: Play) -> NoteBackups:
    return NoteBackups(frozenset(play.placement.owners), {}, why=LOST)


# -- when it begins --------------------------------------------------------------------------------


def test_nobody_backs_up_until_a_second_node_is_lost() -> None:
    play = adaptive(interval=10**9)
    assert backing_up(play, 0) == NOBODY
    assert lost(play, "count") == []
    assert play.recovery.backups == NOBODY
    assert backing_up(play, 1) == NOBODY
    (noted,) = lost(play, "count", 1)
    assert noted == begun(play)
    assert play.recovery.backups is None  # what is rebuilt keeps what it replays
    assert backing_up(play, 2) is None
    assert lost(play, "count") == []  # they do already


def test_two_nodes_at_once() -> None:
    play = adaptive(interval=10**9)
    backing_up(play, 0)
    noted, head, recover = lose(play, *NODES)
    assert noted == begun(play)
    play.recovering([head, recover])
    assert play.recovery.backups is None


def test_a_checkpoint_between_two_losses_begins_the_count_anew() -> None:
    play = adaptive()
    backing_up(play, 0, 0)
    lost(play, "count")
    backing_up(play, 1, 10)  # sealed
    assert kinds(in_a_cut(play, 2)) == ["WriteHead", "TrimStorage"]
    assert lost(play, "count", 1) == []
    assert backing_up(play, 2, 11) == NOBODY
    (noted,) = lost(play, "count")
    assert noted == begun(play)


def test_a_node_process_that_has_forgotten_all_counts_as_a_lost_node() -> None:
    play = adaptive(interval=10**9)
    lost(play, "count")
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.incarnations[play.placement.nodes[0]] = "another"
    noted, head, recover = play.ran(run, partitions={})
    assert noted == begun(play)
    (again,) = play.recovering([head, recover])
    assert isinstance(again, RunSlice)
    assert again.backups is None


def test_nodes_that_the_job_does_not_have_do_not_count() -> None:
    """They were never there, or were let go of; or there was nothing to lose yet."""
    early = Play(backups=(), adaptive_backups=True)
    assert lose(early, FIRST, SECOND) == []
    early.start()
    assert lose(early, NodeId("nobody"), NodeId("no other")) == []
    assert backing_up(early, 0) == NOBODY


def test_spare_nodes_count() -> None:
    """Nodes that are lost together say that more may be, whatever they had."""
    play = adaptive(interval=10**9)
    (noted,) = lose(play, *SPARE[:2])
    assert noted == begun(play)
    assert backing_up(play, 0) is None


# -- what is taken for kept ------------------------------------------------------------------------


def test_nothing_from_before_they_began_is_taken_for_kept() -> None:
    """Where a replay begins before, others produce all of it once more."""
    play = adaptive(diamond(), interval=10**9)
    for batch in range(2):
        backing_up(play, batch)
    lose(play, *SPARE[:2])
    covers = play.controller.ledgers.backups.covers
    for partition in play.placement.owners:
        assert not covers(partition, 2, play.placement)
        assert covers(partition, 3, play.placement)
    backing_up(play, 2)
    lost(play, "d")
    assert play.recovery.senders == frozenset()  # it begins with slice 1
    assert play.recovery.shadows
    for partition in play.recovery.restored:  # … from where it keeps what it sends
        assert covers(partition, 1, play.placement)


def test_what_is_kept_since_a_checkpoint_is_sent() -> None:
    """Losses right after it: whoever begins there needs nobody to produce anything once more."""
    play = adaptive(diamond())
    backing_up(play, 0, 0)
    backing_up(play, 1, 10)  # sealed
    in_a_cut(play, 2)
    lose(play, *SPARE[:2])
    backing_up(play, 2, 11)
    backing_up(play, 3, 12)
    there, gone = play.placement.owners, owner(play, "d")
    healthy = {p for p, o in there.items() if o.node != gone}
    lost(play, "d")
    assert play.recovery.cut == 2
    assert play.recovery.shadows == frozenset()
    assert play.recovery.senders == {p for p in healthy if p.chain != "d"}


def test_what_had_been_kept_before_is_not_taken_for_kept_again() -> None:
    play = adaptive()
    backing_up(play, 0, 0)
    lose(play, *SPARE[:2])
    backing_up(play, 1, 10)  # sealed
    in_a_cut(play, 2)
    assert backing_up(play, 2, 11) == NOBODY
    (noted,) = lose(play, *SPARE[2:4])
    assert noted == begun(play)
    covers = play.controller.ledgers.backups.covers
    for partition in play.placement.owners:
        assert not covers(partition, 3, play.placement)
        assert covers(partition, 4, play.placement)


def test_a_loss_during_a_replay_keeps_what_is_kept_since_they_began() -> None:
    """Without backups, what had been replayed so far would have to be replayed again."""
    play = adaptive(diamond(), interval=10**9)
    backing_up(play, 0)
    lose(play, *NODES)  # all of it begins again, and keeps what it sends
    first = play.controller.rebuild.running
    assert first is not None
    assert first.restored == frozenset(play.placement.owners)
    gone = play.placement.nodes[-1]
    again = lose(play, gone)[-2:]
    assert play.recovering(again) == []
    fresh = {p for p, o in play.placement.owners.items() if o.epoch > 2}
    assert fresh
    assert fresh < play.recovery.restored


# -- when it ends ----------------------------------------------------------------------------------


def test_they_end_with_a_checkpoint_of_everything() -> None:
    play = adaptive()
    backing_up(play, 0, 0)
    lose(play, *SPARE[:2])
    assert backing_up(play, 1, 10) is None  # sealed
    head, trim, noted = in_a_cut(play, 2)
    assert kinds([head, trim]) == ["WriteHead", "TrimStorage"]
    assert noted == NoteBackups(NOBODY, {}, why=WELL)
    assert backing_up(play, 2, 11) == NOBODY
    assert lost(play, "count") == []
    assert play.recovery.backups == NOBODY


def test_a_checkpoint_that_chains_miss_ends_nothing() -> None:
    """Three nodes for queries that fill most of one each; two are lost, and c waits for one."""
    costs = {PartitionId("a", 0): 0.3, PartitionId("b", 0): 0.25, PartitionId("c", 0): 0.6}
    play = Play(
        Past(costs=Costs(costs, 1.0)),
        plan=apart(),
        busy_s=costs,
        backups=(),
        adaptive_backups=True,
        interval=2000,
        nodes=(*NODES, THIRD),
    )
    play.start()

    def second(batch: int) -> RunSlice:
        (run,) = play.controller.handle(BatchArrived(batch, 1000 * (batch + 1)))
        assert isinstance(run, RunSlice)
        play.ran(run, rows=1, now_ms=1000 * (batch + 1) + 900)
        return run

    assert second(0).backups == NOBODY
    all_of_it = begun(play)
    noted, head, recover = lose(play, *[n for n in play.placement.nodes if n != owner(play, "a")])
    assert noted == all_of_it
    play.recovering([head, recover])
    assert play.controller.waiting == {"c"}
    assert second(1).backups is None
    run = second(2)
    assert (run.plan.seal, run.plan.paused) == (True, {"c"})
    assert kinds(in_a_cut(play, 3)) == ["WriteHead", "TrimStorage"]
    assert second(3).backups is None  # c still waits
    assert play.controller.comeback.state is ComebackState.WAITING


def test_a_new_driver_begins_without() -> None:
    before = adaptive(interval=10**9)
    backing_up(before, 0)
    lose(before, *SPARE[:2])
    assert backing_up(before, 1) is None
    head = before.controller.ledgers.head()
    version = head.placement.version
    past = Past(slices=head.slices, epochs=head.epochs, placement_version=version, generation=2)
    play = Play(past, backups=(), adaptive_backups=True, recovery="eager")
    play.start()
    assert play.recovery.backups == NOBODY
    assert [s.number for s in play.recovery.slices] == [1, 2]
    assert backing_up(play, 2) == NOBODY


def test_a_stop_ends_nothing_and_needs_nothing() -> None:
    play = adaptive()
    backing_up(play, 0, 0)
    lose(play, *SPARE[:2])
    (run,) = play.controller.handle(StopRequested(5))
    assert isinstance(run, RunSlice)
    assert (run.plan.seal, run.backups) == (True, None)
    play.ran(run)
    play.written(2)
    commands = play.controller.handle(NodesPolled(play.reports(3), 0))
    assert kinds(commands) == ["WriteHead", "TrimStorage", "NoteBackups", "FinishRun"]


# -- the count, and what is said -------------------------------------------------------------------


def test_it_counts() -> None:
    backups = AdaptiveBackups()
    assert ENOUGH_LOST == 2
    assert not backups.nodes_lost(1)
    assert not backups.all_in_a_cut()
    assert not backups.nodes_lost(1)
    assert backups.nodes_lost(1)
    assert backups.on
    assert not backups.nodes_lost(5)
    assert backups.all_in_a_cut()
    assert not backups.on
    assert backups.nodes_lost(2)


def test_the_user_is_told(caplog: pytest.LogCaptureFixture) -> None:
    history = object.__new__(History)
    history.predicted = None
    with caplog.at_level(logging.INFO, "anabranch"):
        history.backups_chosen(NoteBackups(frozenset({PartitionId("count", 0)}), {}, why=LOST))
        history.backups_chosen(NoteBackups(NOBODY, {}, why=WELL))
    assert caplog.messages == [
        f"all operators keep their output from now on: {LOST}",
        f"only sources keep their output from now on: {WELL}",
    ]
    assert history.predicted is None


# -- copies ----------------------------------------------------------------------------------------


class Chosen(RecoveryBound):
    """First nobody, then everybody."""

    def __init__(self) -> None:
        self.choice = None

    def observe(self, *_: Any) -> None:
        pass

    def plan(self, placement: Placement) -> BackupChoice | None:
        chosen = NOBODY if self.choice is None else frozenset(placement.owners)
        self.choice = BackupChoice(chosen, {})
        return self.choice


@pytest.mark.parametrize("bound", [None, Chosen()], ids=["losses", "bound"])
def test_a_copy_that_takes_over_has_kept_no_more_than_its_partition(bound: Chosen | None) -> None:
    play = adaptive()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    assert isinstance(run, RunSlice)
    placement, plan = play.placement, replace(run.plan, number=4)
    ledger = BackupLedger(frozenset(), bound, AdaptiveBackups())
    ledger.begin(placement.owners, 1)
    ledger.copied(placement.owners, 1)
    if bound is None:
        ledger.nodes_lost(2, placement, 5)
    else:
        for _ in range(2):
            ledger.choose((), plan, placement, 0, 0)
    ledger.promoted(placement.owners)
    assert not any(ledger.covers(p, 4, placement) for p in placement.owners)
    assert all(ledger.covers(p, 5, placement) for p in placement.owners)
