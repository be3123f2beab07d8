"""Where a rebuild begins, who begins again in it, what follows it, and what it was said to take."""

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
    apart,
    counting,
    feed,
    lose,
    names,
    record,
)

from anabranch.control.ledgers.backups import BackupLedger
from anabranch.control.ledgers.layouts import LayoutLedger
from anabranch.control.policies.load import Load
from anabranch.control.policies.recovery_bound import FIXED_S, PLAN_EVERY, RecoveryBound
from anabranch.control.policies.strategies import Strategy
from anabranch.control.settings import Past
from anabranch.control.wishes import Wishes
from anabranch.model.commands import Command, NoteBackups
from anabranch.model.events import NodesPolled, PartitionsPrepared, ScaleRequested
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, copied, place
from anabranch.model.reports import NodeReport, PartitionReport
from anabranch.model.slices import Cut, Feed, SlicePlan

FOUR = (*NODES, THIRD, NodeId("4"))
A, B, C = (PartitionId(chain, 0) for chain in "abc")


def begun(past: Past | None = None, **settings: Any) -> Play:
    """s → a → b and s → c, each chain on a node of its own, and a node to spare."""
    play = Play(past, plan=apart(), nodes=FOUR, **settings)
    play.start()
    assert len({o.node for o in play.placement.owners.values()}) == 3
    return play


def lose_owner(play: Play, partition: PartitionId) -> list[Command]:
    return lose(play, play.placement.owners[partition].node)


def sealed(play: Play, batch: int) -> None:
    """A slice seals, and its cut is complete."""
    feed(play, batch, 100 * batch)
    play.written(batch + 1)
    play.controller.handle(NodesPolled(play.reports(batch + 2), 100 * batch))
    assert play.controller.cut is not None
    assert play.controller.cut.slice == batch + 1


# -- where it begins -------------------------------------------------------------------------------


def test_what_a_checkpoint_has_begins_with_it_whatever_else_it_lacks() -> None:
    """The third chain waited when it was taken, and has come back since."""
    files = {"a/0": ["a@4"], "b/0": ["b@4"]}
    groups = {"a": [0] * 4, "b": [0] * 4}
    newest, older = Cut(4, files, groups), Cut(2, {}, {**groups, "c": [0] * 4})
    slices = tuple(record(n) for n in range(3, 6))
    play = begun(Past(cut=newest, previous=older, slices=slices))
    assert play.recovery.cut == 2  # a start needs all of them together
    play.recovering(lose_owner(play, A))
    assert play.recovery.restored == {A}
    assert play.recovery.cut == 4
    assert [s.number for s in play.recovery.slices] == [5]


def scaled(**settings: Any) -> Play:
    """From two partitions to three after the third slice, by the cut of that; the one before it is
    of the second slice."""
    play = Play(interval=1, **settings)
    play.start()
    feed(play, 0)
    sealed(play, 1)
    sealed(play, 2)
    play.controller.handle(ScaleRequested("count", 3, 210))
    change = play.controller.adjustment.change
    assert change is not None
    ready = tuple(
        replace(r, prepared=tuple(p for n, p in change.loaded if n == r.node))
        for r in play.reports(4)
    )
    play.recovering(play.controller.handle(PartitionsPrepared(ready, 220)))
    assert play.recovery.cut == 3
    assert len(play.placement.partitions("count")) == 3
    return play


@pytest.mark.parametrize(("behind_scaling", "cut"), [(True, 2), (False, 3)])
def test_systems_that_look_behind_a_scaling_begin_with_the_checkpoint_before_it(
    behind_scaling: bool, cut: int
) -> None:
    play = scaled(strategy=Strategy(behind_scaling=behind_scaling))
    play.recovering(lose(play, SECOND))
    assert play.recovery.cut == cut


def test_they_look_no_further_once_there_is_a_checkpoint_after_it() -> None:
    play = scaled(strategy=Strategy(behind_scaling=True))
    sealed(play, 3)
    play.recovering(lose(play, SECOND))
    assert play.recovery.cut == 4


def test_after_a_reset_slices_are_replayed_under_one_layout_whatever_they_ran_under() -> None:
    other = {"b": (0,) * 4, "c": (0,) * 4}
    one, two = {**other, "a": (0, 0, 0, 0)}, {**other, "a": (0, 0, 1, 1)}
    ledger = LayoutLedger(apart(), {1: two})
    ledger.placed(one)
    records = [record(1), record(2)]
    assert ledger.stage(records) == (records, two, True)
    ledger.reset(one)
    assert ledger.stage(records) == (records, one, False)


# -- who begins again ------------------------------------------------------------------------------


@pytest.mark.parametrize(("backups", "epoch"), [(None, 2), ((), 3)])
def test_who_is_being_rebuilt_goes_on_only_if_it_keeps_what_others_need_again(
    backups: tuple[str, ...] | None, epoch: int
) -> None:
    """a is, and lives, when b is lost as well, which reads its output."""
    play = begun(backups=backups)
    feed(play, 0)
    lose_owner(play, A)
    play.recovering(lose_owner(play, B))
    assert play.recovery.restored == {A, B}
    assert play.placement.owners[A].epoch == epoch


def test_who_is_being_rebuilt_and_feeds_nobody_goes_on() -> None:
    play = begun(backups=())
    feed(play, 0)
    lose_owner(play, B)
    play.recovering(lose_owner(play, A))
    assert play.recovery.restored == {A, B}
    assert play.placement.owners[B].epoch == 2


def test_only_what_feeds_nobody_is_rebuilt_in_several_parts() -> None:
    play = begun(parallel_recovery=2)
    feed(play, 0)
    play.recovering(lose_owner(play, A))
    assert names(play.recovery.restored) == {"a[0]"}
    play.recovering(lose_owner(play, C))
    assert names(play.recovery.restored) == {"c[0]", "c[1]"}


# -- what follows it -------------------------------------------------------------------------------


def test_what_was_divided_is_made_as_many_again_as_it_was() -> None:
    play = Play(interval=1, nodes=FOUR, parallel_recovery=2)
    play.start()
    feed(play, 0)
    play.recovering(lose(play, SECOND))
    assert len(play.placement.partitions("count")) == 3
    sealed(play, 1)
    change = play.controller.adjustment.change
    assert change is not None
    assert change.what == "count from 3 to 2 partitions"


def test_what_has_the_parallelism_it_is_asked_for_is_not_scaled() -> None:
    placement, wishes = place(counting(), NODES, 1, {}), Wishes(counting())
    wishes.scale("count", 2, placement)
    assert not wishes.wanted
    wishes.drain(SECOND, NODES, Load(5_000))
    change = wishes.change(placement, NODES, {}, {})
    assert change is not None
    assert change.what == "node 2 drained"


def test_nobody_waits_for_a_scaling_that_changes_nothing() -> None:
    placement, wishes = place(counting(), NODES, 1, {}), Wishes(counting())
    wishes.scale("count", 2, placement)
    wishes.scale("count", 3, placement)
    change = wishes.change(placement, NODES, {}, {})
    assert change is not None
    assert change.what == "count from 2 to 3 partitions"


@pytest.mark.parametrize("copies", [False, True])
def test_partitions_stay_where_they_are_while_nobody_wants_anything(copies: bool) -> None:
    """Uneven as they are: all on one node, their copies, if there are any, on the other."""
    placement = place(counting(4), NODES, 1, {})
    here = {p: Ownership(FIRST, 1) for p in placement.owners}
    placement = replace(placement, owners=here)
    placement = copied(placement, NODES) if copies else placement
    wishes = Wishes(counting(4), copies=copies)
    assert wishes.change(placement, NODES, {}, {}) is None
    wishes.spread()
    assert wishes.change(placement, NODES, {}, {}) is not None


# -- what it was said to take ----------------------------------------------------------------------


def test_a_recovery_teaches_what_was_neither_its_work_nor_its_job() -> None:
    """The slower node works for 1 s in a slice, of which ten are run again at worst; beside that,
    its job takes 0.5 s."""
    placement = place(counting(), NODES, 1, {})
    bound = RecoveryBound(counting(), 60.0, 10.0)
    seen = [
        NodeReport(placement.owners[p].node, "i", 1, {p: PartitionReport(2, 1, cpu_s=cpu_s)})
        for p, cpu_s in zip(COUNT, (1.0, 0.6), strict=True)
    ]
    for i in range(3):
        bound.observe(seen, 1_000 * (i + 1), 1.5)
    choice = bound.plan(placement)
    assert choice is not None
    assert choice.predicted_s[COUNT[0]] == pytest.approx(10.5 + FIXED_S)
    bound.recovered(4.5, frozenset(COUNT), 3, seen)
    choice = bound.plan(replace(placement, version=2))
    assert choice is not None
    rest_s = 4.5 - 3 * 1.0 - 0.5
    assert choice.predicted_s[COUNT[0]] == pytest.approx(10.5 + (FIXED_S + rest_s) / 2)


def test_a_prediction_goes_by_how_long_slices_took() -> None:
    """Each for 400 ms of its second, of which the nodes worked for 100 ms."""
    placement = place(counting(), NODES, 1, {})
    ledger = BackupLedger(None, RecoveryBound(counting(), 60.0, 10.0))
    ledger.begin(COUNT, 1)
    seen = [
        NodeReport(o.node, "i", 1, {p: PartitionReport(2, o.epoch, cpu_s=0.1)})
        for p, o in placement.owners.items()
    ]
    chosen: list[NoteBackups] = []
    for number in range(1, PLAN_EVERY + 1):
        plan = SlicePlan(number, Feed.LIVE, number, 1, None, 0, 1, False)
        began_ms = 1_000 * number
        note = ledger.choose(seen, plan, placement, began_ms, began_ms + 400)
        chosen += [note] if note is not None else []
    (note,) = chosen
    assert note.predicted_s[COUNT[0]] == pytest.approx(10 * 0.1 + 0.3 + FIXED_S)
