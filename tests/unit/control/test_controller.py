"""Given events, exactly these commands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.control.controller import ControlConfig, Controller, Past, Phase
from anabranch.errors import ClusterError, InvariantError, OperatorError, StorageError
from anabranch.model.commands import (
    Command,
    ExposeSlice,
    FailRun,
    FinishBatch,
    FinishRun,
    InstallPartitions,
    PollNodes,
    RunSlice,
    TrimStorage,
    WriteCut,
    WriteSlice,
)
from anabranch.model.events import (
    BatchArrived,
    Idled,
    NodesJoined,
    NodesPolled,
    PartitionsInstalled,
    RestoreFailed,
    SliceRan,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.reports import (
    CheckpointWritten,
    Failure,
    NodeReport,
    PartitionReport,
    SourceReport,
    Staged,
)
from anabranch.model.slices import Cut, Feed, SlicePlan, SliceRecord
from anabranch.model.topology import Kind, Operator, Topology

NODES = (NodeId("1"), NodeId("2"))
NEVER = 10**12


def plan(parallelism: int = 2) -> Plan:
    count = Operator("count", Kind.KEYED, (("s",),), keys=("k",), parallelism=parallelism)
    operators = [Operator("s", Kind.SOURCE), count, Operator("out", Kind.SINK, (("count",),))]
    return compile_plan(Topology.checked("t", operators, key_groups=4))


class Play:
    """A controller and the answers that a healthy cluster gives to it."""

    def __init__(
        self, past: Past | None = None, interval: int = NEVER, timed: bool = False
    ) -> None:
        delays = {"s": 0} if timed else {}
        self.controller = Controller(plan(), ControlConfig(interval, delays), past or Past())
        self.checkpoints: dict[NodeId, tuple[CheckpointWritten, ...]] = {}

    def start(self) -> list[Command]:
        (install,) = self.controller.handle(NodesJoined(NODES, 0))
        assert isinstance(install, InstallPartitions)
        self.install = install
        return self.controller.handle(PartitionsInstalled(install.mapping.version, 0))

    def reports(self, number: int, **changes: Any) -> tuple[NodeReport, ...]:
        mapping = self.controller.mapping
        assert mapping is not None
        made = []
        for node in NODES:
            hosted = {p: PartitionReport(number + 1, e) for p, e in mapping.hosted_by(node).items()}
            report = NodeReport(
                node, f"i{node}", number, hosted, checkpoints=self.checkpoints.get(node, ())
            )
            made.append(replace(report, **changes) if node == NODES[0] else report)
        return tuple(made)

    def ran(self, run: Command, rows: int = 3, chunks: int = 1, **changes: Any) -> list[Command]:
        assert isinstance(run, RunSlice)
        number, tasks = run.plan.number, 0
        if run.plan.feed is not Feed.NONE:
            tasks = 1
            sources = (SourceReport(0, chunks, {"s": rows}, rows, {"s": 100 * number}, 0, 0.0),)
            changes = {"sources": sources, **changes}
        reports = self.reports(number, **changes)
        return self.controller.handle(SliceRan(number, tasks, reports, 50 * number))

    def written(self, number: int, full: bool = True) -> None:
        """Every node's checkpoint files of a slice became durable."""
        mapping = self.controller.mapping
        assert mapping is not None
        for node in NODES:
            self.checkpoints[node] = tuple(
                CheckpointWritten(p, number, e, f"{p}@{number}", full, 1)
                for p, e in mapping.hosted_by(node).items()
            )


def kinds(commands: list[Command]) -> list[str]:
    return [type(c).__name__ for c in commands]


def record(number: int, batch: int | None = None, **changes: Any) -> SliceRecord:
    base = SliceRecord(
        number, "live", number - 1 if batch is None else batch, True, 1, 0, None, 7, 1, 1,
        rows={"s": 3},
    )  # fmt: skip
    return replace(base, **changes)


def test_a_first_start_waits_for_rows() -> None:
    play = Play()
    assert play.start() == []
    assert play.install.next_slice == 1
    assert set(play.install.restore.values()) == {()}
    assert play.controller.phase is Phase.RUNNING


def test_a_batch_runs_is_journalled_exposed_and_finished_in_this_order() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 40))
    assert run == RunSlice(SlicePlan(1, Feed.LIVE, 0, 0, None, 40, 1, False, False, 1))
    staged = Staged("out", "w", 2, path="f")
    commands = play.ran(run, staged=(staged,))
    written = record(1, generation=1, processing_ms=40, staged={"out": ["f"]}, mapping=1)
    assert commands == [WriteSlice(written), ExposeSlice(written, (staged,)), FinishBatch(0)]


def test_a_large_batch_becomes_several_slices() -> None:
    play = Play(timed=True)
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    first = play.ran(run, chunks=3)
    assert kinds(first) == ["WriteSlice", "ExposeSlice", "RunSlice"]
    second = play.ran(first[-1])
    assert isinstance(first[-1], RunSlice)
    assert first[-1].plan.feed is Feed.LOG
    assert kinds(second) == ["WriteSlice", "ExposeSlice", "RunSlice"]
    third = play.ran(second[-1])
    assert kinds(third) == ["WriteSlice", "ExposeSlice", "FinishBatch"]
    assert isinstance(second[-1], RunSlice)
    # Rows of one batch are in no order: no slice of it may be late to another.
    assert [p.watermark_us for p in (first[-1].plan, second[-1].plan)] == [None, None]
    assert play.controller.watermark_us == 300


def test_a_batch_offered_again_is_finished_without_running() -> None:
    play = Play(Past(slices=(record(1, 4),), generation=1))
    (run,) = play.start()
    assert play.ran(run) == []
    assert play.controller.handle(BatchArrived(4, 0)) == [FinishBatch(4)]
    assert kinds(play.controller.handle(BatchArrived(5, 0))) == ["RunSlice"]


def test_a_restart_replays_the_slices_after_the_cut_and_stages_nothing() -> None:
    files = {"count/0": ["a"], "count/1": ["b", "c"]}
    cut = Cut(2, files, {"count": [0, 0, 1, 1]})
    slices = (record(2), record(3, feed="log", generation=4), record(4, feed="none", rows={}))
    play = Play(Past(cut=cut, slices=slices, groups={"count": (0, 0, 1, 1)}, generation=5))
    (third,) = play.start()
    assert play.install.next_slice == 3
    assert {str(p): f for p, f in play.install.restore.items()} == {
        "count[0]": ("a",),
        "count[1]": ("b", "c"),
    }
    assert isinstance(third, RunSlice)
    assert (third.plan.number, third.plan.feed, third.plan.generation) == (3, Feed.LOG, 4)
    assert third.plan.replay
    (fourth,) = play.ran(third)
    assert isinstance(fourth, RunSlice)
    assert (fourth.plan.number, fourth.plan.feed) == (4, Feed.NONE)
    assert play.ran(fourth) == []
    (fifth,) = play.controller.handle(BatchArrived(9, 0))
    assert isinstance(fifth, RunSlice)
    assert (fifth.plan.number, fifth.plan.generation) == (5, 6)


def test_a_restart_in_the_middle_of_a_batch_goes_on_with_its_log() -> None:
    last = record(3, chunks_left=2, batch_end=False, generation=4)
    play = Play(Past(slices=(record(1), record(2), last), generation=5))
    command = play.start()[0]
    for _ in range(3):
        (command,) = play.ran(command)
    assert isinstance(command, RunSlice)
    assert (command.plan.number, command.plan.feed, command.plan.replay) == (4, Feed.LOG, False)
    assert command.plan.generation == 4  # of the driver that logged the batch


def test_a_replay_that_reads_fewer_rows_than_journalled_is_refused() -> None:
    play = Play(Past(slices=(record(1),), generation=1))
    (run,) = play.start()
    (fail,) = play.ran(run, rows=2)
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, StorageError)
    assert "has 2 rows of source 's', the journal says 3" in fail.error.message


def test_another_declared_parallelism_takes_the_files_of_all_old_owners() -> None:
    cut = Cut(1, {f"count/{i}": [f"f{i}"] for i in range(4)}, {"count": [0, 1, 2, 3]})
    groups = {"count": (0, 1, 2, 3)}
    old = Past(cut=cut, slices=(record(1),), groups=groups, generation=1)
    kept = Play(old)
    kept.start()
    assert len(kept.install.restore) == 4
    rescaled = Play(replace(old, rescaled=frozenset({"count"})))
    rescaled.start()
    assert {str(p): f for p, f in rescaled.install.restore.items()} == {
        "count[0]": ("f0", "f1"),
        "count[1]": ("f2", "f3"),
    }


def test_a_torn_newest_checkpoint_is_skipped() -> None:
    groups = {"count": [0, 0, 1, 1]}
    newest, older = Cut(3, {"count/0": ["new"]}, groups), Cut(1, {"count/0": ["old"]}, groups)
    slices = tuple(record(n) for n in (2, 3, 4))
    play = Play(Past(cut=newest, previous=older, slices=slices, generation=1))
    play.controller.handle(NodesJoined(NODES, 0))
    torn = StorageError("torn")
    (again,) = play.controller.handle(RestoreFailed(torn, 0))
    assert isinstance(again, InstallPartitions)
    assert again.next_slice == 2
    assert ("old",) in again.restore.values()
    (run,) = play.controller.handle(PartitionsInstalled(again.mapping.version, 0))
    numbers = []
    while isinstance(run, RunSlice):
        numbers.append(run.plan.number)
        run = next(iter(play.ran(run)), None)  # type: ignore[assignment]
    assert numbers == [2, 3, 4]
    # Both torn: begin at the beginning only if it was never trimmed; else give up.
    hopeless = Play(Past(cut=newest, slices=slices, generation=1))
    hopeless.controller.handle(NodesJoined(NODES, 0))
    assert hopeless.controller.handle(RestoreFailed(torn, 0)) == [FailRun(torn)]


def test_a_checkpoint_completes_when_every_file_is_durable() -> None:
    play = Play(interval=10)
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    (run,) = play.controller.handle(BatchArrived(1, 60))
    assert isinstance(run, RunSlice)
    assert run.plan.seal
    assert "WriteCut" not in kinds(play.ran(run))
    assert play.controller.handle(Idled(70)) == [PollNodes()]
    play.written(2)
    commands = play.controller.handle(NodesPolled(play.reports(2), 80))
    cut, trim = commands
    assert isinstance(cut, WriteCut)
    assert (cut.cut.slice, [r.number for r in cut.carried]) == (2, [1, 2])
    assert cut.cut.files == {"count/0": ["count[0]@2"], "count/1": ["count[1]@2"]}
    assert trim == TrimStorage(1, frozenset({"count[0]@2", "count[1]@2"}))
    # The same reports again change nothing.
    assert play.controller.handle(NodesPolled(play.reports(2), 81)) == []


def test_deltas_pile_up_and_two_cuts_are_kept() -> None:
    play = Play(interval=1)
    play.start()
    trims = []
    for batch in range(4):
        (run,) = play.controller.handle(BatchArrived(batch, 1000 * (batch + 1)))
        assert isinstance(run, RunSlice)
        if run.plan.seal:
            play.written(run.plan.number, full=run.plan.number == 2)
        commands = play.ran(run)
        trims += [c for c in commands if isinstance(c, TrimStorage)]
    assert [t.log_below for t in trims] == [1, 3, 4]
    assert trims[-1].keep_files == {f"count[{i}]@{n}" for i in (0, 1) for n in (2, 3, 4)}


def test_late_repeated_and_foreign_checkpoint_reports_are_ignored() -> None:
    play = Play(interval=1)
    play.start()
    for batch in (0, 1):
        (run,) = play.controller.handle(BatchArrived(batch, 1000 * (batch + 1)))
        play.ran(run)
    for bad in (
        CheckpointWritten(PartitionId("count", 0), 1, 1, "late", True, 1),
        CheckpointWritten(PartitionId("count", 0), 2, 9, "epoch", True, 1),
        CheckpointWritten(PartitionId("other", 0), 2, 1, "foreign", True, 1),
    ):
        play.checkpoints[NODES[0]] = (bad,)
        assert play.controller.handle(NodesPolled(play.reports(2), 0)) == []
    play.written(2)
    (cut, _) = play.controller.handle(NodesPolled(play.reports(2), 0))
    assert isinstance(cut, WriteCut)
    assert cut.cut.files["count/0"] == ["count[0]@2"]


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
    assert play.controller.handle(NodesPolled(play.reports(2), 0)) == [PollNodes()]
    play.written(2)
    commands = play.controller.handle(NodesPolled(play.reports(2), 0))
    assert kinds(commands) == ["WriteCut", "TrimStorage", "FinishRun"]
    assert play.controller.phase is Phase.ENDED
    assert play.controller.handle(BatchArrived(1, 0)) == []


def test_a_stop_before_any_slice_just_ends() -> None:
    play = Play()
    play.start()
    assert play.controller.handle(StopRequested(0)) == [FinishRun()]


def test_idle_time_closes_windows_once() -> None:
    play = Play(timed=True)
    play.start()
    assert play.controller.handle(Idled(0)) == []
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    (idle,) = play.controller.handle(Idled(10))
    assert isinstance(idle, RunSlice)
    assert (idle.plan.feed, idle.plan.watermark_us) == (Feed.NONE, 100)
    play.ran(idle)
    assert play.controller.handle(Idled(20)) == []


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"failures": (Failure("count[0]", "count", "boom", ""),)},
            OperatorError,
            "slice 1, operator 'count' (count[0]): boom",
        ),
        (
            {"failures": (Failure("count[0]", "checkpoint", "full", "", "storage"),)},
            StorageError,
            "full",
        ),
        ({"not_hosted": (PartitionId("count", 0),)}, ClusterError, "lost with its node process"),
        ({"incomplete": {PartitionId("count", 0): "x"}}, ClusterError, "lacked input (x)"),
        ({"incarnation": "another"}, ClusterError, "the process of node 1 was lost"),
        ({"node": NodeId(""), "partitions": {}}, ClusterError, "the process of node 1 was lost"),
    ],
)
def test_what_went_wrong_ends_the_run_with_one_error(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    play = Play()
    play.start()
    play.controller._incarnations = {n: f"i{n}" for n in NODES}
    (run,) = play.controller.handle(BatchArrived(0, 0))
    (fail,) = play.ran(run, **changes)
    assert isinstance(fail, FailRun)
    assert isinstance(fail.error, error)
    assert words in fail.error.message
    assert play.controller.handle(BatchArrived(0, 0)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"failures": (Failure("count[0]", "checkpoint", "disk full", "", "storage"),)},
        {"incarnation": "another"},
    ],
)
def test_what_goes_wrong_between_slices_ends_the_waiting(changes: dict[str, Any]) -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    play.ran(run)
    (seal,) = play.controller.handle(StopRequested(0))
    assert kinds(play.ran(seal))[-1] == "PollNodes"
    assert kinds(play.controller.handle(NodesPolled(play.reports(2, **changes), 0))) == ["FailRun"]


def test_reports_that_contradict_the_frontier_are_a_bug() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    with pytest.raises(InvariantError, match="slice 7 was reported"):
        play.controller.handle(SliceRan(7, 1, (), 0))
    with pytest.raises(InvariantError, match="reports next slice 5"):
        play.ran(run, partitions={PartitionId("count", 0): PartitionReport(5, 1)})
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    with pytest.raises(InvariantError, match="1 source tasks, 0 reported"):
        play.ran(run, sources=())


def test_an_epoch_is_never_used_again_by_a_partition_that_comes_back() -> None:
    gone = PartitionId("count", 3)
    play = Play(Past(epochs={gone: 9, PartitionId("count", 0): 4}, generation=1), interval=1)
    play.start()
    for batch in (0, 1):
        (run,) = play.controller.handle(BatchArrived(batch, 1000 * (batch + 1)))
        if batch:
            play.written(2)
        commands = play.ran(run)
    (cut,) = [c for c in commands if isinstance(c, WriteCut)]
    assert cut.epochs[gone] == 9
    assert cut.epochs[PartitionId("count", 0)] == 5
