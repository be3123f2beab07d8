"""What a recovery restores, from which cut, and who gives it its input again."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from plays import (
    COUNT,
    FIRST,
    NODES,
    SECOND,
    THIRD,
    Play,
    counting,
    diamond,
    feed,
    lose,
    names,
    owners,
    record,
)

from anabranch.control import recovery
from anabranch.control.settings import Past
from anabranch.errors import StorageError
from anabranch.model.commands import FailRun, RecoverPartitions, RunSlice, WriteHead
from anabranch.model.events import BatchArrived, NodesJoined, RestoreFailed
from anabranch.model.ids import PartitionId
from anabranch.model.placement import Ownership, Placement
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.slices import Cut

# -- a torn checkpoint in a recovery --------------------------------------------------------------


def two_cuts(plan: Plan, backups: Collection[str] | None = None) -> Play:
    """Cuts at slices 2 and 4, slices up to 5, three nodes."""
    play = Play(plan=plan, backups=backups, interval=20, nodes=(*NODES, THIRD))
    play.start()
    for batch, now_ms in enumerate((0, 20, 21, 40, 41)):
        (run,) = play.controller.handle(BatchArrived(batch, now_ms))
        assert isinstance(run, RunSlice)
        if run.plan.seal:
            play.checkpoints = {}
            play.written(run.plan.number)
        play.ran(run)
    assert play.controller.cut is not None
    assert play.controller.cut.slice == 4
    return play


def test_a_torn_checkpoint_in_a_recovery_falls_back_and_replays_more() -> None:
    play = two_cuts(counting(3))
    first = lose(play, SECOND)[-1]
    assert isinstance(first, RecoverPartitions)
    assert (first.plan.cut, [s.number for s in first.plan.slices]) == (4, [5])
    again = play.controller.handle(RestoreFailed(StorageError("torn"), 0))
    assert play.recovering(again) == []
    plan = play.recovery
    assert (plan.cut, [s.number for s in plan.slices]) == (2, [3, 4, 5])
    assert plan.files == {COUNT[1]: ("count[1]@2",)}
    assert plan.placement.owners[COUNT[1]].epoch == 3
    assert play.head.cut is not None
    assert (play.head.cut.slice, play.head.previous) == (2, None)
    # Both torn: everything before slice 3 is gone for good.
    lose(play, FIRST)
    torn = StorageError("torn")
    assert play.controller.handle(RestoreFailed(torn, 0)) == [FailRun(torn)]


def test_backups_that_begin_after_a_restored_partitions_cut_are_not_asked_for() -> None:
    """Two failures one after the other (paper 000): what was restored from the newest cut has no
    output before it, and its upstream may have trimmed; the older cut needs a shadow of it."""
    play = two_cuts(diamond())
    home = {str(p): o.node for p, o in play.placement.owners.items()}
    assert home["b[0]"] != home["d[0]"]
    assert play.recovering(lose(play, home["b[0]"])) == []
    assert play.recovery.cut == 4
    restored = play.recovery.restored
    assert PartitionId("b", 0) in restored
    victim = play.placement.owners[PartitionId("d", 0)].node
    lose(play, victim)
    play.recovering(play.controller.handle(RestoreFailed(StorageError("torn"), 0)))
    plan = play.recovery
    assert plan.cut == 2
    still = restored - plan.restored
    assert still
    assert not still & plan.senders
    needed = {p for p in still if p.chain in ("b", "c")}
    assert needed <= plan.shadows


def test_a_healthy_partition_whose_checkpoint_is_torn_begins_a_new_chain() -> None:
    """Its shadow could not be restored: deltas on top of the torn file would be of no use."""
    play = two_cuts(diamond(), backups=[])
    lost = lose(play, play.placement.owners[PartitionId("d", 0)].node)[-1]
    assert isinstance(lost, RecoverPartitions)
    shadows = lost.plan.shadows
    assert shadows
    play.recovering(play.controller.handle(RestoreFailed(StorageError("torn"), 0)))
    assert play.recovery.restored == lost.plan.restored | shadows
    # The next cut is made of full files of theirs, and of deltas of nobody else's torn one.
    (run,) = play.controller.handle(BatchArrived(9, 100))
    assert isinstance(run, RunSlice)
    assert run.plan.seal
    play.checkpoints = {}
    play.written(6, full=True)
    (head,) = [c for c in play.ran(run) if isinstance(c, WriteHead)]
    assert head.cut is not None
    for partition in shadows:
        key = f"{partition.chain}/{partition.index}"
        assert head.cut.files[key] == [f"{partition}@6"]


# -- who sends, who is shadowed -------------------------------------------------------------------


def lost_of(play: Play, *lost: str) -> RecoveryPlan:
    """What is planned when exactly these are lost: they are moved to a node of their own first."""
    placement = play.placement
    away = {
        p: Ownership(THIRD if str(p) in lost else FIRST, o.epoch)
        for p, o in placement.owners.items()
    }
    play.controller.ledgers.owners.in_force = Placement(
        placement.version, placement.groups, away, (FIRST, THIRD)
    )
    recover = lose(play, THIRD)[-1]
    assert isinstance(recover, RecoverPartitions)
    assert names(recover.plan.restored) == set(lost)
    return recover.plan


ALL = None


@pytest.mark.parametrize(
    ("backups", "lost", "senders", "shadows", "reads_log"),
    [
        (ALL, ["d[0]"], "b[0] b[1] c[0] c[1]", "", False),
        (["b", "c"], ["d[0]"], "b[0] b[1] c[0] c[1]", "", False),
        (["a"], ["d[0]"], "a[0] a[1]", "b[0] b[1] c[0] c[1]", True),
        (["b"], ["d[0]"], "b[0] b[1]", "c[0] c[1]", True),
        (["c"], ["d[0]"], "c[0] c[1]", "a[0] a[1] b[0] b[1]", True),
        ([], ["d[1]"], "", "a[0] a[1] b[0] b[1] c[0] c[1]", True),
        (ALL, ["a[0]"], "", "", True),
        (ALL, ["a[0]", "d[0]"], "b[0] b[1] c[0] c[1]", "", True),
        (ALL, ["b[0]", "d[0]"], "a[0] a[1] b[1] c[0] c[1]", "", False),
        (["a"], ["b[0]"], "a[0] a[1]", "", False),
        (["a", "c"], ["b[0]", "d[1]"], "a[0] a[1] c[0] c[1]", "b[1]", False),
        ([], ["a[0]", "b[0]", "b[1]"], "", "a[1]", True),
    ],
)
def test_senders_and_shadows(
    backups: list[str] | None, lost: list[str], senders: str, shadows: str, reads_log: bool
) -> None:
    play = Play(plan=diamond(), backups=backups)
    play.start()
    feed(play, 0)
    plan = lost_of(play, *lost)
    assert (names(plan.senders), names(plan.shadows)) == (
        set(senders.split()),
        set(shadows.split()),
    )
    assert plan.reads_log is reads_log
    assert set(plan.files) == plan.restored | plan.shadows


def test_without_a_slice_to_replay_nobody_sends_and_nobody_is_shadowed() -> None:
    play = Play(plan=diamond(), backups=[])
    play.start()
    plan = lost_of(play, "d[0]")
    assert (plan.senders, plan.shadows, plan.reads_log) == (frozenset(), frozenset(), False)


def test_what_cannot_be_produced_twice_goes_back_to_the_cut_together() -> None:
    play = Play(plan=counting(deterministic=False))
    play.start()
    feed(play, 0)
    commands = lose(play, SECOND)
    assert play.recovering(commands) == []
    assert play.recovery.restored == set(COUNT)
    assert (play.recovery.senders, play.recovery.shadows) == (frozenset(), frozenset())
    assert owners(play.placement) == {"count[0]": ("1", 2), "count[1]": ("1", 2)}


# -- long replays ---------------------------------------------------------------------------------


def test_a_long_replay_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_PART_SLICES", 2)
    play = Play(Past(slices=tuple(record(n) for n in range(1, 6)), generation=1))
    recover = play.controller.handle(NodesJoined(NODES, 0))[-1]
    parts = []
    while isinstance(recover, RecoverPartitions):
        parts.append((recover.plan.part, [s.number for s in recover.plan.slices]))
        assert play.controller.handle(BatchArrived(9, 0)) == []
        recover = play.recovered(recover)[-1]
        assert set(play.controller.frontier.values()) == {play.recovery.next_slice}
    assert parts == [(0, [1, 2]), (1, [3, 4]), (2, [5])]
    assert isinstance(recover, RunSlice)
    assert recover.plan.number == 6


def test_parts_are_bounded_by_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_PART_ROWS", 7)  # a slice has 3
    slices = (*(record(n) for n in range(1, 4)), record(4, rows={"s": 100}), record(5))
    parts = [[r.number for r in part] for part in recovery.in_parts(slices)]
    assert parts == [[1, 2], [3], [4], [5]]
    assert list(recovery.in_parts(())) == [()]


def test_a_loss_between_two_parts_keeps_what_others_have_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "MAX_PART_SLICES", 2)
    play = Play(Past(slices=tuple(record(n) for n in range(1, 4)), generation=1))
    first = play.controller.handle(NodesJoined(NODES, 0))[-1]
    (second,) = play.recovered(first)
    assert isinstance(second, RecoverPartitions)
    assert second.plan.part == 1
    _, again = lose(play, SECOND)
    assert isinstance(again, RecoverPartitions)
    assert (again.plan.part, again.plan.first) == (0, 1)
    assert again.plan.restored == set(COUNT)
    assert owners(again.plan.placement) == {"count[0]": ("1", 1), "count[1]": ("1", 2)}
    assert play.controller.frontier == {COUNT[0]: 3, COUNT[1]: 1}


def test_a_lost_partition_of_an_old_cut_is_read_with_its_files() -> None:
    files = {"count/0": ["a"], "count/1": ["b", "c"]}
    cut = Cut(2, files, {"count": [0, 0, 1, 1]})
    play = Play(Past(cut=cut, slices=(record(2),), generation=1))
    play.start()
    feed(play, 5)
    recover = lose(play, SECOND)[-1]
    assert isinstance(recover, RecoverPartitions)
    assert recover.plan.files == {COUNT[1]: ("b", "c")}
    assert [s.number for s in recover.plan.slices] == [3]
