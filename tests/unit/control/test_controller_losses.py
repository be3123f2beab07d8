"""Given a loss, exactly these commands: what is restored where, from what, and what runs again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plays import (
    COUNT,
    FIRST,
    NODES,
    SECOND,
    THIRD,
    Play,
    counting,
    feed,
    filtering,
    kinds,
    lose,
    names,
    owners,
)

from anabranch.control.controller import Phase
from anabranch.control.tries import MAX_TRIES
from anabranch.errors import ClusterError
from anabranch.model.commands import (
    AwaitNodes,
    FailRun,
    PollNodes,
    RunSlice,
    TrimStorage,
    WriteHead,
)
from anabranch.model.events import (
    BatchArrived,
    Idled,
    NodesJoined,
    NodesPolled,
    PartitionsRecovered,
    SliceRan,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.reports import CheckpointWritten
from anabranch.model.slices import Feed, Writes


def written(partition: PartitionId, slice_no: int, epoch: int, full: bool) -> CheckpointWritten:
    """A file; one that is not full begins with the slice before."""
    path = f"{partition}@{slice_no}"
    return CheckpointWritten(partition, slice_no, epoch, path, full, 1, slice_no - 1)


# -- where it hits --------------------------------------------------------------------------------


def test_a_loss_while_idle_restores_what_was_there_and_nothing_else() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    assert owners(play.placement) == {"count[0]": ("1", 1), "count[1]": ("2", 1)}
    commands = lose(play, SECOND)
    assert kinds(commands) == ["WriteHead", "RecoverPartitions"]
    assert owners(play.placement) == {"count[0]": ("1", 1), "count[1]": ("1", 2)}
    assert (play.placement.version, play.placement.nodes) == (2, (FIRST,))
    assert play.controller.frontier == {COUNT[0]: 2, COUNT[1]: 1}
    assert play.recovering(commands) == []
    assert play.head.epochs == {COUNT[0]: 1, COUNT[1]: 2}
    assert play.recovery.restored == {COUNT[1]}
    assert [s.number for s in play.recovery.slices] == [1]
    assert play.controller.frontier == {COUNT[0]: 2, COUNT[1]: 2}


def test_a_spare_node_may_go_unnoticed_and_takes_over_what_is_lost() -> None:
    play = Play()
    play.start()
    assert play.controller.handle(NodesJoined((THIRD, NodeId("4")), 0)) == []
    assert lose(play, NodeId("4")) == []
    lose(play, SECOND)
    assert owners(play.placement) == {"count[0]": ("1", 1), "count[1]": ("3", 2)}


def test_a_slice_whose_rows_are_all_logged_runs_again_from_the_log() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 40))
    assert isinstance(run, RunSlice)
    (again,) = play.recovering(lose(play, SECOND, logged=1))
    assert isinstance(again, RunSlice)
    assert (again.plan.feed, again.plan.source_tasks, again.plan.attempt) == (Feed.LOG, 1, 0)
    assert (again.plan.number, again.plan.batch, again.plan.placement) == (1, 0, 2)
    assert again.plan.processing_ms == run.plan.processing_ms == 40  # an input of the slice
    assert kinds(play.ran(again)) == ["WriteSlice", "ExposeSlice", "FinishBatch"]


def test_a_slice_whose_rows_are_not_all_logged_reads_its_batch_into_another_log() -> None:
    play = Play(nodes=(*NODES, THIRD))
    play.start()
    play.controller.handle(BatchArrived(0, 40))
    (again,) = play.recovering(lose(play, SECOND))
    assert isinstance(again, RunSlice)
    assert (again.plan.feed, again.plan.attempt, again.plan.placement) == (Feed.LIVE, 1, 2)
    (third,) = play.recovering(lose(play, FIRST))
    assert isinstance(third, RunSlice)
    assert (third.plan.feed, third.plan.attempt, third.plan.placement) == (Feed.LIVE, 2, 3)
    (written, *_) = play.ran(third)
    assert written.record.attempt == 2  # type: ignore[union-attr]


def test_every_reading_of_a_batch_has_a_log_of_its_own() -> None:
    """A source task of an earlier one that nobody waits for must not find its way into it."""
    play = Play(nodes=(*NODES, THIRD))
    play.start()
    logs = []
    for batch in range(3):
        (run,) = play.controller.handle(BatchArrived(batch, 0))
        if batch == 1:
            (run,) = play.recovering(lose(play, play.placement.nodes[-1]))
        assert isinstance(run, RunSlice)
        logs.append((run.plan.generation, run.plan.attempt))
        play.ran(run, chunks=2)
        (rest,) = play.controller.handle(BatchArrived(batch, 0))
        assert isinstance(rest, RunSlice)  # of the batch: it is in the same log
        assert (rest.plan.generation, rest.plan.attempt) == logs[-1]
        play.ran(rest)
    assert logs == [(1, 0), (1, 2), (1, 3)]


def test_a_replaced_process_without_partitions_hears_of_the_job_again() -> None:
    play = Play(plan=filtering())
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.incarnations[FIRST] = "another"
    (again,) = play.recovering(play.ran(run))
    assert play.recovery.restored == frozenset()
    assert isinstance(again, RunSlice)
    assert again.plan.placement == 2
    assert kinds(play.ran(again)) == ["WriteSlice", "ExposeSlice", "FinishBatch"]


@pytest.mark.parametrize("chunks", [2, 1])
def test_a_slice_without_a_live_batch_runs_again_as_it_was(chunks: int) -> None:
    """A further slice of a batch, fed from the log; a slice without rows."""
    play = Play(timed=True)
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run, chunks=chunks)
    (second,) = play.controller.handle(BatchArrived(0, 30) if chunks == 2 else Idled(30))
    assert isinstance(second, RunSlice)
    (again,) = play.recovering(lose(play, SECOND))
    assert isinstance(again, RunSlice)
    assert again.plan.feed is (Feed.LOG if chunks == 2 else Feed.NONE)
    assert again.plan.placement == 2
    for name in ("number", "batch", "source_tasks", "attempt", "watermark_us", "processing_ms"):
        assert getattr(again.plan, name) == getattr(second.plan, name)


def test_a_batch_that_comes_during_a_recovery_waits_for_its_end() -> None:
    play = Play()
    play.start()
    commands = lose(play, SECOND)
    assert play.controller.handle(BatchArrived(0, 0)) == []
    assert play.controller.handle(Idled(0)) == []
    (run,) = play.recovering(commands)
    assert isinstance(run, RunSlice)


def test_a_loss_during_a_recovery_joins_it() -> None:
    play = Play(nodes=(*NODES, THIRD, NodeId("4")), plan=counting(4))
    play.start()
    feed(play, 0)
    lose(play, SECOND)
    assert play.placement.owners[COUNT[1]].node == FIRST
    commands = lose(play, FIRST)
    assert play.recovering(commands) == []
    # count[1] was on its way to the first node; whatever got there is fenced by its epoch.
    assert names(play.recovery.restored) == {"count[0]", "count[1]"}
    assert {p: e for p, (_, e) in owners(play.placement).items()} == {
        "count[0]": 2,
        "count[1]": 3,
        "count[2]": 1,
        "count[3]": 1,
    }
    assert {n for n, _ in owners(play.placement).values()} == {"3", "4"}
    assert play.controller.phase is Phase.RUNNING


def test_all_nodes_lost_waits_for_one_and_goes_on() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    play.controller.handle(BatchArrived(1, 0))
    assert lose(play, *NODES, logged=1) == [AwaitNodes()]
    assert play.controller.phase is Phase.WAITING
    assert play.controller.handle(Idled(0)) == []
    commands = play.controller.handle(NodesJoined((THIRD,), 0))
    (again,) = play.recovering(commands)
    assert owners(play.placement) == {"count[0]": ("3", 2), "count[1]": ("3", 2)}
    assert [s.number for s in play.recovery.slices] == [1]
    assert isinstance(again, RunSlice)
    assert (again.plan.number, again.plan.feed) == (2, Feed.LOG)


def test_all_nodes_lost_one_after_the_other_during_the_recovery() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    lose(play, FIRST)
    assert lose(play, SECOND) == [AwaitNodes()]
    commands = play.controller.handle(NodesJoined((THIRD,), 0))
    assert play.recovering(commands) == []
    assert owners(play.placement) == {"count[0]": ("3", 3), "count[1]": ("3", 2)}


def test_nodes_lost_before_any_was_used() -> None:
    play = Play()
    assert lose(play, FIRST) == []
    assert kinds(play.controller.handle(NodesJoined((SECOND,), 0))) == [
        "WriteHead",
        "RecoverPartitions",
    ]


def test_a_loss_while_stopping_is_recovered_and_the_stop_goes_on() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    (seal,) = play.controller.handle(StopRequested(5))
    (again,) = play.recovering(lose(play, SECOND))
    assert isinstance(again, RunSlice)
    assert isinstance(seal, RunSlice)
    assert (again.plan.number, again.plan.seal) == (seal.plan.number, True)
    assert play.ran(again)[-1] == PollNodes()
    play.written(2)
    commands = play.controller.handle(NodesPolled(play.reports(3), 0))
    assert kinds(commands) == ["WriteHead", "TrimStorage", "FinishRun"]


def test_a_loss_while_a_stop_waits_for_files_seals_once_more() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    (seal,) = play.controller.handle(StopRequested(5))
    play.ran(seal)
    (again,) = play.recovering(lose(play, SECOND))
    assert isinstance(again, RunSlice)
    assert (again.plan.number, again.plan.feed, again.plan.seal) == (3, Feed.NONE, True)


# -- a node process that is another one -----------------------------------------------------------


def test_a_replaced_node_process_is_used_again_but_has_lost_its_partitions() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.incarnations[FIRST] = "another"
    (again,) = play.recovering(play.ran(run, partitions={}))
    assert play.recovery.restored == {COUNT[0]}
    assert owners(play.placement) == {"count[0]": ("1", 2), "count[1]": ("2", 1)}
    assert isinstance(again, RunSlice)
    assert (again.plan.feed, again.plan.source_tasks) == (Feed.LOG, 1)
    assert kinds(play.ran(again)) == ["WriteSlice", "ExposeSlice", "FinishBatch"]


def test_a_batch_is_read_again_if_a_source_task_failed_whose_node_was_replaced() -> None:
    """Its failure was lost with the node process that had been told, and it has logged nothing."""
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.incarnations[FIRST] = "another"
    reports = play.reports(2, partitions={})
    (again,) = play.recovering(play.controller.handle(SliceRan(1, 1, reports, 50, logged=False)))
    assert isinstance(run, RunSlice)
    assert isinstance(again, RunSlice)
    assert again.plan.feed is Feed.LIVE
    assert again.plan.attempt != run.plan.attempt


def test_a_node_process_replaced_during_a_recovery_or_between_slices() -> None:
    play = Play(interval=1)
    play.start()
    feed(play, 0, 1000)
    lost = lose(play, SECOND)
    play.incarnations[FIRST] = "another"
    commands = play.recovered(lost[-1])
    assert play.recovering(commands) == []
    assert play.recovery.restored == set(COUNT)  # what it had, and what it was to get
    feed(play, 1, 2000)  # sealed
    assert play.controller.handle(Idled(2001)) == [PollNodes()]
    play.incarnations[FIRST] = "a third one"
    commands = play.controller.handle(NodesPolled(play.reports(3, partitions={}), 0))
    assert kinds(play.recovering(commands)) == []
    assert play.recovery.restored == set(COUNT)


def test_a_process_that_does_not_know_its_node_is_a_new_one() -> None:
    """It was replaced after the first wave of the recovery that would have told it."""
    play = Play()
    recover = play.controller.handle(NodesJoined(NODES, 0))[-1]
    commands = play.recovered(recover, node=NodeId(""), partitions={})
    assert play.recovering(commands) == []
    assert owners(play.placement) == {"count[0]": ("1", 2), "count[1]": ("2", 1)}


# -- checkpoints in flight ------------------------------------------------------------------------


def sealed(interval: int = 10) -> Play:
    """Slice 2 is sealed, none of its files is known to be durable."""
    play = Play(interval=interval)
    play.start()
    feed(play, 0, 0)
    feed(play, 1, 10)
    assert play.controller.handle(Idled(11)) == [PollNodes()]
    return play


def test_a_cut_that_waits_for_a_lost_partition_is_given_up_and_taken_again_at_once() -> None:
    play = sealed()
    play.recovering(lose(play, SECOND))
    play.written(2)  # by the survivor; nobody will ever write the other file
    assert play.controller.handle(NodesPolled(play.reports(3), 0)) == []
    (run,) = play.controller.handle(BatchArrived(2, 12))
    assert isinstance(run, RunSlice)
    assert run.plan.seal


def test_the_delta_of_a_cut_that_was_given_up_stays_in_the_chain() -> None:
    play = sealed()
    play.written(2, only=(FIRST,))
    play.recovering(lose(play, SECOND))
    (run,) = play.controller.handle(BatchArrived(2, 12))
    assert kinds(play.ran(run)) == ["WriteSlice", "ExposeSlice", "FinishBatch"]
    play.checkpoints[FIRST] = (
        written(COUNT[0], 2, 1, full=True),
        written(COUNT[0], 3, 1, full=False),
        written(COUNT[1], 3, 2, full=True),
    )
    head, trim = play.controller.handle(NodesPolled(play.reports(4), 0))
    assert isinstance(head, WriteHead)
    assert head.cut is not None
    assert head.cut.files == {"count/0": ["count[0]@2", "count[0]@3"], "count/1": ["count[1]@3"]}
    assert trim == TrimStorage(1, frozenset({"count[0]@2", "count[0]@3", "count[1]@3"}))


def test_a_cut_that_has_the_lost_partitions_file_completes() -> None:
    play = sealed()
    play.written(2, only=(SECOND,))
    assert play.controller.handle(NodesPolled(play.reports(3), 0)) == []
    play.recovering(lose(play, SECOND))
    assert play.recovery.cut == 0  # the cut did not exist yet
    play.written(2, only=(FIRST,))
    play.checkpoints[FIRST] = (written(COUNT[0], 2, 1, full=True),)
    head, _ = play.controller.handle(NodesPolled(play.reports(3), 0))
    assert isinstance(head, WriteHead)
    assert head.cut is not None
    assert head.cut.files == {"count/0": ["count[0]@2"], "count/1": ["count[1]@2"]}
    # The restored partition begins a chain of its own.
    (run,) = play.controller.handle(BatchArrived(2, 50))
    play.ran(run)
    play.checkpoints[FIRST] = (
        written(COUNT[0], 3, 1, full=False),
        written(COUNT[1], 3, 2, full=True),
    )
    head, _ = play.controller.handle(NodesPolled(play.reports(4), 0))
    assert isinstance(head, WriteHead)
    assert head.cut is not None
    assert head.cut.files == {"count/0": ["count[0]@2", "count[0]@3"], "count/1": ["count[1]@3"]}


def test_a_file_sealed_by_a_slice_that_was_cut_short_counts_when_it_runs_again() -> None:
    play = Play(interval=10)
    play.start()
    feed(play, 0, 0)
    (run,) = play.controller.handle(BatchArrived(1, 10))
    assert isinstance(run, RunSlice)
    assert run.plan.seal
    # The first node had sealed and written; its file is reported with the recovery, once.
    commands = lose(play, SECOND, logged=1)
    play.checkpoints[FIRST] = (written(COUNT[0], 2, 1, full=True),)
    (again,) = play.recovering(commands)
    play.checkpoints[FIRST] = (written(COUNT[1], 2, 2, full=True),)
    commands = play.ran(again)
    (head,) = [c for c in commands if isinstance(c, WriteHead)]
    assert head.cut is not None
    assert head.cut.files == {"count/0": ["count[0]@2"], "count/1": ["count[1]@2"]}


# -- tries ----------------------------------------------------------------------------------------


def test_a_state_that_kills_every_node_it_meets_ends_the_run() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    play.controller.handle(BatchArrived(1, 0))
    nodes = [NodeId(str(n)) for n in range(10, 10 + MAX_TRIES + 1)]
    play.controller.handle(NodesJoined(tuple(nodes), 0))
    commands = lose(play, SECOND)
    for _ in range(MAX_TRIES - 1):
        assert kinds(commands) == ["WriteHead", "RecoverPartitions"]
        victim = play.placement.owners[COUNT[1]].node
        commands = lose(play, victim)
    assert kinds(commands) == ["WriteHead", "RecoverPartitions"]
    (fail,) = lose(play, play.placement.owners[COUNT[1]].node)
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, ClusterError)
    assert "count[1] was lost 10 times in a row" in fail.error.message


def test_a_slice_in_between_counts_tries_anew() -> None:
    play = Play()
    play.start()
    for n in range(MAX_TRIES + 3):
        joined = NodeId(f"j{n}")
        play.controller.handle(NodesJoined((joined,), 0))
        assert play.recovering(lose(play, play.placement.owners[COUNT[1]].node)) == []
        feed(play, n)


@pytest.mark.parametrize(
    ("changes", "why", "runs"),
    [
        ({"incomplete": {COUNT[0]: "edge 0"}}, "edge 0", MAX_TRIES),
        ({"not_hosted": COUNT[:1]}, "it is not there", MAX_TRIES),
    ],
)
def test_a_slice_that_lacks_input_runs_again_from_the_log_a_few_times(
    changes: dict[str, Any], why: str, runs: int
) -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    for _ in range(runs):
        commands = play.ran(run, **changes)
        if "not_hosted" in changes:
            commands = play.recovering(commands)
            assert play.recovery.restored == {COUNT[0]}
        (run,) = commands
        assert isinstance(run, RunSlice)
        assert (run.plan.feed, run.plan.source_tasks, run.plan.number) == (Feed.LOG, 1, 1)
    (fail,) = play.ran(run, **changes)
    assert isinstance(fail, FailRun)
    assert f"slice 1: count[0] lacked input 10 times ({why})" in fail.error.message


def test_a_recovery_that_lacks_input_is_tried_again() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    recover = lose(play, SECOND)[-1]
    again = play.recovered(recover, incomplete={COUNT[1]: "edge 0"})
    assert play.recovering(again) == []
    assert play.recovery.placement.owners[COUNT[1]].epoch == 3
    assert play.controller.phase is Phase.RUNNING


@pytest.mark.parametrize("heard", [(), (1,)], ids=["nothing", "the old owner"])
def test_a_recovery_that_leaves_a_partition_unspoken_of_is_tried_again(
    heard: tuple[int, ...],
) -> None:
    """The new owner must speak for itself, also before its log is found to be short of rows."""
    play = Play()
    play.start()
    feed(play, 0)
    lose(play, SECOND)
    (only,) = play.reports(2)
    said = {p: replace(only.partitions[p], epoch=e) for p in COUNT for e in heard}
    event = PartitionsRecovered((replace(only, partitions=said, replayed={}),), 0)
    assert play.recovering(play.controller.handle(event)) == []
    assert owners(play.placement) == {"count[0]": ("1", 1), "count[1]": ("1", 3)}


def test_a_delta_whose_beginning_was_never_heard_of_does_not_count() -> None:
    play = sealed()
    delta = written(COUNT[0], 2, 1, full=False)  # after slice 1, of which nothing was heard
    play.checkpoints[FIRST] = (delta,)
    play.checkpoints[SECOND] = (written(COUNT[1], 2, 1, full=True),)
    assert play.controller.handle(NodesPolled(play.reports(3), 0)) == []  # the cut is given up
    (run,) = play.controller.handle(BatchArrived(2, 12))
    assert isinstance(run, RunSlice)
    assert (run.plan.seal, run.plan.writes) == (True, Writes.WHOLE)
    play.ran(run)
    # The same again while its file is written: the cut goes on to wait.
    assert play.controller.handle(NodesPolled(play.reports(4), 0)) == []
    play.checkpoints[FIRST] = (delta, written(COUNT[0], 3, 1, full=True))
    play.checkpoints[SECOND] = (written(COUNT[1], 3, 1, full=True),)
    head, _ = play.controller.handle(NodesPolled(play.reports(4), 0))
    assert isinstance(head, WriteHead)
    assert head.cut is not None
    assert head.cut.files == {"count/0": ["count[0]@3"], "count/1": ["count[1]@3"]}
    (run,) = play.controller.handle(BatchArrived(3, 50))
    assert isinstance(run, RunSlice)
    assert (run.plan.seal, run.plan.writes) == (True, Writes.FOLDED)


def test_a_partition_without_changes_has_its_files_in_the_next_cut() -> None:
    play = sealed()
    play.written(2)
    play.controller.handle(NodesPolled(play.reports(3), 0))
    (run,) = play.controller.handle(BatchArrived(2, 50))
    play.ran(run)
    play.checkpoints[FIRST] = (CheckpointWritten(COUNT[0], 3, 1, None, False, 0, 2),)
    play.checkpoints[SECOND] = (written(COUNT[1], 3, 1, full=False),)
    head, _ = play.controller.handle(NodesPolled(play.reports(4), 0))
    assert isinstance(head, WriteHead)
    assert head.cut is not None
    assert head.cut.files == {"count/0": ["count[0]@2"], "count/1": ["count[1]@2", "count[1]@3"]}
