"""Given events, exactly these commands: starts, slices, checkpoints, stops, what ends a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plays import COUNT, NEVER, NODES, Play, kinds, record

from anabranch.control.controller import Phase
from anabranch.control.settings import Past
from anabranch.errors import InvariantError, OperatorError, StorageError
from anabranch.model.commands import (
    ExposeSlice,
    FailRun,
    FinishBatch,
    FinishRun,
    PollNodes,
    RecoverPartitions,
    RunSlice,
    TrimStorage,
    WriteHead,
    WriteSlice,
)
from anabranch.model.events import (
    BatchArrived,
    Idled,
    NodesJoined,
    NodesPolled,
    PartitionsRecovered,
    RestoreFailed,
    SliceRan,
    StopRequested,
)
from anabranch.model.ids import PartitionId
from anabranch.model.reports import CheckpointWritten, Failure, PartitionReport, Staged
from anabranch.model.slices import Cut, Feed, SlicePlan


def test_a_first_start_installs_everything_empty_and_waits_for_rows() -> None:
    play = Play()
    head, recover = play.controller.handle(NodesJoined(NODES, 0))
    placement = play.placement
    epochs = dict.fromkeys(placement.owners, 1)
    assert head == WriteHead(None, None, (), placement, epochs, placement.groups, {})
    assert isinstance(recover, RecoverPartitions)
    assert recover.plan.restored == set(placement.owners)
    assert (recover.plan.cut, recover.plan.slices, recover.plan.reads_log) == (0, (), False)
    assert set(recover.plan.files.values()) == {()}
    assert play.recovered(recover) == []
    assert play.controller.phase is Phase.RUNNING
    assert set(play.controller.frontier.values()) == {1}


def test_nothing_happens_before_a_node_is_there() -> None:
    play = Play()
    assert play.controller.handle(BatchArrived(0, 0)) == []
    assert play.controller.handle(NodesJoined((), 0)) == []
    head_and_recovery = play.controller.handle(NodesJoined(NODES, 0))
    (run,) = play.recovered(head_and_recovery[-1])
    assert isinstance(run, RunSlice)


def test_a_batch_runs_is_journalled_exposed_and_finished_in_this_order() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 40))
    assert run == RunSlice(SlicePlan(1, Feed.LIVE, 0, 0, None, 40, 1, False, 1), 0)
    staged = Staged("out", "w", 2, path="f")
    commands = play.ran(run, staged=(staged,))
    out = {"out": ["f"]}
    written = record(1, generation=1, processing_ms=40, staged=out, placement=1, chunks=[1])
    assert commands == [WriteSlice(written), ExposeSlice(written, (staged,)), FinishBatch(0)]


def test_a_large_batch_becomes_several_slices() -> None:
    play = Play(timed=True)
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    assert kinds(play.ran(run, chunks=3)) == ["WriteSlice", "ExposeSlice"]
    # Between two of them everybody has a turn; time does not move, their numbers are given.
    assert play.controller.handle(Idled(5)) == []
    (second,) = play.controller.handle(BatchArrived(0, 0))
    assert isinstance(second, RunSlice)
    assert second.plan.feed is Feed.LOG
    assert kinds(play.ran(second)) == ["WriteSlice", "ExposeSlice"]
    (third,) = play.controller.handle(BatchArrived(0, 0))
    assert isinstance(third, RunSlice)
    assert kinds(play.ran(third)) == ["WriteSlice", "ExposeSlice", "FinishBatch"]
    # Rows of one batch are in no order: no slice of it may be late to another.
    assert [p.watermark_us for p in (second.plan, third.plan)] == [None, None]
    (idle,) = play.controller.handle(Idled(10))
    assert isinstance(idle, RunSlice)
    assert idle.plan.watermark_us == 300


def test_a_batch_offered_again_is_finished_without_running() -> None:
    play = Play(Past(slices=(record(1, 4),), generation=1))
    assert play.start() == []
    assert play.controller.handle(BatchArrived(4, 0)) == [FinishBatch(4)]
    assert kinds(play.controller.handle(BatchArrived(5, 0))) == ["RunSlice"]


def test_a_restart_replays_the_slices_after_the_cut() -> None:
    files = {"count/0": ["a"], "count/1": ["b", "c"]}
    cut = Cut(2, files, {"count": [0, 0, 1, 1]})
    slices = (
        record(2),
        record(3, feed="log", generation=4),
        record(4, feed="none", rows={}, source_tasks=0),
    )
    past = Past(
        cut, None, slices, groups={"count": (0, 0, 1, 1)}, placement_version=7, generation=6
    )
    play = Play(past)
    assert play.start() == []
    plan = play.recovery
    assert {str(p): f for p, f in plan.files.items()} == {
        "count[0]": ("a",),
        "count[1]": ("b", "c"),
    }
    assert (plan.cut, plan.first, plan.next_slice, plan.reads_log) == (2, 3, 5, True)
    assert [(s.number, s.feed, s.generation) for s in plan.slices] == [
        (3, Feed.LOG, 4),
        (4, Feed.NONE, 1),
    ]
    assert {s.placement for s in plan.slices} == {8}
    assert (plan.shadows, plan.senders) == (frozenset(), frozenset())
    assert play.head.slices == slices
    (fifth,) = play.controller.handle(BatchArrived(9, 0))
    assert isinstance(fifth, RunSlice)
    assert (fifth.plan.number, fifth.plan.generation, fifth.plan.attempt) == (5, 6, 0)


def test_a_restart_in_the_middle_of_a_batch_goes_on_with_its_log() -> None:
    last = record(3, chunks_left=2, batch_end=False, generation=4, attempt=2)
    play = Play(Past(slices=(record(1), record(2), last), generation=5))
    assert play.start() == []
    assert play.controller.handle(Idled(NEVER)) == []
    (run,) = play.controller.handle(BatchArrived(0, 0))
    assert isinstance(run, RunSlice)
    assert (run.plan.number, run.plan.feed) == (4, Feed.LOG)
    # Of the driver that logged the batch, at its try.
    assert (run.plan.generation, run.plan.attempt) == (4, 2)


def test_a_replay_that_reads_fewer_rows_than_journalled_is_refused() -> None:
    play = Play(Past(slices=(record(1),), generation=1))
    recover = play.controller.handle(NodesJoined(NODES, 0))[-1]
    (fail,) = play.recovered(recover, replayed={(1, 0): {"s": 2}})
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, StorageError)
    assert "has 2 rows of source 's', the journal says 3" in fail.error.message


def test_another_declared_parallelism_takes_the_files_of_all_old_owners() -> None:
    cut = Cut(1, {f"count/{i}": [f"f{i}"] for i in range(4)}, {"count": [0, 1, 2, 3]})
    groups = {"count": (0, 1, 2, 3)}
    old = Past(cut=cut, slices=(record(1),), groups=groups, generation=1)
    kept = Play(old)
    kept.start()
    assert len(kept.recovery.files) == 4
    rescaled = Play(replace(old, rescaled=frozenset({"count"})))
    rescaled.start()
    assert {str(p): f for p, f in rescaled.recovery.files.items()} == {
        "count[0]": ("f0", "f1"),
        "count[1]": ("f2", "f3"),
    }


def test_a_torn_newest_checkpoint_is_skipped_at_a_start() -> None:
    groups = {"count": [0, 0, 1, 1]}
    newest, older = Cut(3, {"count/0": ["new"]}, groups), Cut(1, {"count/0": ["old"]}, groups)
    slices = tuple(record(n) for n in (2, 3, 4))
    play = Play(Past(cut=newest, previous=older, slices=slices, generation=1))
    play.controller.handle(NodesJoined(NODES, 0))
    torn = StorageError("torn")
    head, again = play.controller.handle(RestoreFailed(torn, 0))
    assert isinstance(head, WriteHead)
    assert (head.cut, head.previous, head.slices) == (older, None, slices)
    assert isinstance(again, RecoverPartitions)
    assert [s.number for s in again.plan.slices] == [2, 3, 4]
    assert ("old",) in again.plan.files.values()
    assert (
        again.plan.placement.owners[COUNT[0]].epoch == 2
    )  # whoever restored the torn one is fenced
    assert play.recovered(again) == []


def test_two_torn_checkpoints_end_the_run() -> None:
    newest = Cut(3, {"count/0": ["new"]}, {"count": [0, 0, 1, 1]})
    torn = StorageError("torn")
    hopeless = Play(Past(cut=newest, slices=(record(2), record(3)), generation=1))
    hopeless.controller.handle(NodesJoined(NODES, 0))
    assert hopeless.controller.handle(RestoreFailed(torn, 0)) == [FailRun(torn)]
    # With every slice still there, the beginning is a cut as well.
    slices = tuple(record(n) for n in (1, 2, 3))
    whole = Play(Past(cut=newest, slices=slices, generation=1))
    whole.controller.handle(NodesJoined(NODES, 0))
    again = whole.controller.handle(RestoreFailed(torn, 0))[-1]
    assert isinstance(again, RecoverPartitions)
    assert (again.plan.cut, [s.number for s in again.plan.slices]) == (0, [1, 2, 3])
    assert whole.controller.handle(RestoreFailed(torn, 0)) == [FailRun(torn)]


def test_a_checkpoint_completes_when_every_file_is_durable() -> None:
    play = Play(interval=10)
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    (run,) = play.controller.handle(BatchArrived(1, 60))
    assert isinstance(run, RunSlice)
    assert run.plan.seal
    assert "WriteHead" not in kinds(play.ran(run))
    assert play.controller.handle(Idled(70)) == [PollNodes()]
    play.written(2, only=NODES[:1])
    assert play.controller.handle(NodesPolled(play.reports(3), 75)) == []
    play.written(2)
    head, trim = play.controller.handle(NodesPolled(play.reports(3), 80))
    assert isinstance(head, WriteHead)
    assert head.cut is not None
    assert (head.cut.slice, head.previous) == (2, None)
    assert [r.number for r in head.slices] == [1, 2]
    assert head.cut.files == {"count/0": ["count[0]@2"], "count/1": ["count[1]@2"]}
    assert trim == TrimStorage(1, frozenset({"count[0]@2", "count[1]@2"}))
    # The same reports again change nothing.
    assert play.controller.handle(NodesPolled(play.reports(3), 81)) == []


def test_deltas_pile_up_and_storage_and_backups_go_back_to_the_older_cut() -> None:
    play = Play(interval=1)
    play.start()
    trims, backups = [], []
    for batch in range(5):
        (run,) = play.controller.handle(BatchArrived(batch, 1000 * (batch + 1)))
        assert isinstance(run, RunSlice)
        backups.append(run.trim)
        if run.plan.seal:
            play.written(run.plan.number, full=run.plan.number == 2)
        commands = play.ran(run)
        trims += [c for c in commands if isinstance(c, TrimStorage)]
    # Cuts are at slices 2, 3, 4, 5; the first slice only starts the clock.
    assert [t.log_below for t in trims] == [1, 3, 4, 5]
    assert backups == [0, 0, 0, 2, 3]
    assert trims[-1].keep_files == {f"count[{i}]@{n}" for i in (0, 1) for n in (2, 3, 4, 5)}


def test_late_repeated_and_foreign_checkpoint_reports_are_ignored() -> None:
    play = Play(interval=1)
    play.start()
    for batch in (0, 1):
        (run,) = play.controller.handle(BatchArrived(batch, 1000 * (batch + 1)))
        play.ran(run)
    for bad in (
        CheckpointWritten(COUNT[0], 2, 9, "epoch", True, 1),
        CheckpointWritten(PartitionId("other", 0), 2, 1, "foreign", True, 1),
    ):
        play.checkpoints[NODES[0]] = (bad,)
        assert play.controller.handle(NodesPolled(play.reports(3), 0)) == []
    play.written(2)
    late = CheckpointWritten(COUNT[0], 1, 1, "late", True, 1)
    play.checkpoints[NODES[0]] = (*play.checkpoints[NODES[0]], late)
    (head, _) = play.controller.handle(NodesPolled(play.reports(3), 0))
    assert isinstance(head, WriteHead)
    assert head.cut is not None
    assert head.cut.files["count/0"] == ["count[0]@2"]
    assert play.controller.handle(NodesPolled(play.reports(3), 0)) == []


def test_a_stop_seals_waits_for_the_files_and_ends() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    (seal,) = play.controller.handle(StopRequested(5))
    assert isinstance(seal, RunSlice)
    assert (seal.plan.feed, seal.plan.seal, seal.plan.number) == (Feed.NONE, True, 2)
    commands = play.ran(seal)
    assert kinds(commands) == ["WriteSlice", "ExposeSlice", "PollNodes"]
    assert play.controller.handle(NodesPolled(play.reports(3), 0)) == [PollNodes()]
    play.written(2)
    commands = play.controller.handle(NodesPolled(play.reports(3), 0))
    assert kinds(commands) == ["WriteHead", "TrimStorage", "FinishRun"]
    assert play.controller.phase is Phase.ENDED
    assert play.controller.handle(BatchArrived(1, 0)) == []


def test_a_stop_before_any_slice_just_ends() -> None:
    play = Play()
    play.start()
    assert play.controller.handle(StopRequested(0)) == [FinishRun()]


def test_a_stop_waits_for_the_slice_in_hand_and_not_for_its_batch() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    assert play.controller.handle(StopRequested(5)) == []
    (*_, seal) = play.ran(run, chunks=100)
    assert isinstance(seal, RunSlice)  # a slice has to seal, and the next number is given
    assert (seal.plan.feed, seal.plan.batch, seal.plan.seal) == (Feed.LOG, 0, True)
    play.written(2)
    assert kinds(play.ran(seal))[-3:] == ["WriteHead", "TrimStorage", "FinishRun"]
    newest = play.controller.newest
    assert newest is not None
    assert (newest.number, newest.chunks_left) == (2, 98)


def test_idle_time_closes_windows_once() -> None:
    play = Play(timed=True)
    play.start()
    assert play.controller.handle(Idled(0)) == []
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    (idle,) = play.controller.handle(Idled(10))
    assert isinstance(idle, RunSlice)
    assert (idle.plan.feed, idle.plan.watermark_us) == (Feed.NONE, 100)
    assert play.controller.handle(Idled(11)) == []  # it is running
    play.ran(idle)
    assert play.controller.handle(Idled(20)) == []


def test_an_idle_job_checkpoints_what_no_cut_covers() -> None:
    play = Play(interval=10)
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    assert play.controller.handle(Idled(9)) == []
    (seal,) = play.controller.handle(Idled(10))
    assert isinstance(seal, RunSlice)
    assert (seal.plan.feed, seal.plan.seal) == (Feed.NONE, True)


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (
            Failure("count[0]", "count", "boom", ""),
            OperatorError,
            "slice 1, operator 'count' (count[0]): boom",
        ),
        (Failure("count[0]", "checkpoint", "full", "", "storage"), StorageError, "full"),
    ],
)
def test_a_failure_ends_the_run_with_one_error(
    failure: Failure, error: type[Exception], words: str
) -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    (fail,) = play.ran(run, failures=(failure,))
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, error)
    assert words in fail.error.message
    assert play.controller.handle(BatchArrived(0, 0)) == []


def test_a_failure_in_a_replay_says_which_slices() -> None:
    play = Play(Past(slices=(record(1), record(2)), generation=1))
    recover = play.controller.handle(NodesJoined(NODES, 0))[-1]
    failure = Failure("count[0]", "count", "boom", "")
    (fail,) = play.recovered(recover, failures=(failure,))
    assert isinstance(fail, FailRun)
    assert "replay of slices 1 to 2, operator 'count' (count[0]): boom" in fail.error.message


def test_a_full_disk_between_slices_ends_the_waiting() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    (seal,) = play.controller.handle(StopRequested(0))
    assert kinds(play.ran(seal))[-1] == "PollNodes"
    full = (Failure("count[0]", "checkpoint", "disk full", "", "storage"),)
    polled = NodesPolled(play.reports(3, failures=full), 0)
    assert kinds(play.controller.handle(polled)) == ["FailRun"]


def test_reports_that_contradict_the_frontier_are_a_bug() -> None:
    play = Play()
    play.start()
    with pytest.raises(InvariantError, match="recovery was reported while none"):
        play.controller.handle(PartitionsRecovered((), 0))
    (run,) = play.controller.handle(BatchArrived(0, 0))
    with pytest.raises(InvariantError, match="slice 7 was reported"):
        play.controller.handle(SliceRan(7, 1, (), 0))
    with pytest.raises(InvariantError, match="reports next slice 5"):
        play.ran(run, partitions={COUNT[0]: PartitionReport(5, 1)})


def test_a_partition_or_a_source_task_that_says_nothing_is_a_bug() -> None:
    for changes, words in (
        ({"partitions": {}}, r"before slice 2 no report came from count\[0\]"),
        ({"partitions": {COUNT[0]: PartitionReport(2, 9)}}, r"no report came from count\[0\]"),
        ({"sources": ()}, "1 source tasks, 0 reported"),
    ):
        play = Play()
        play.start()
        (run,) = play.controller.handle(BatchArrived(0, 0))
        with pytest.raises(InvariantError, match=words):
            play.ran(run, **changes)


def test_an_epoch_is_never_used_again_by_a_partition_that_comes_back() -> None:
    gone = PartitionId("count", 3)
    play = Play(Past(epochs={gone: 9, COUNT[0]: 4}, generation=1), interval=1)
    play.start()
    assert play.head.epochs == {gone: 9, COUNT[0]: 5, PartitionId("count", 1): 1}
    commands: list[Any] = []
    for batch in (0, 1):
        (run,) = play.controller.handle(BatchArrived(batch, 1000 * (batch + 1)))
        if batch:
            play.written(2)
        commands = play.ran(run)
    (head,) = [c for c in commands if isinstance(c, WriteHead)]
    assert head.epochs == play.head.epochs


def test_another_generation_counts_placement_versions_and_slices_on() -> None:
    past = Past(slices=(record(1),), placement_version=7, generation=4, epochs={COUNT[0]: 2})
    play = Play(past)
    play.start()
    assert play.placement.version == 8
    (run,) = play.controller.handle(BatchArrived(5, 0))
    assert isinstance(run, RunSlice)
    assert (run.plan.placement, run.plan.number, run.plan.generation) == (8, 2, 4)
