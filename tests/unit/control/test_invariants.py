"""Every invariant of the control state is checked after every event: each, broken by hand, is
seen, and so is a command out of its order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from plays import COUNT, FIRST, SECOND, THIRD, Play, apart, feed, lose, record

from anabranch.control.adjustment import AdjustmentState
from anabranch.control.comeback import ComebackState
from anabranch.control.invariants import RULES, check
from anabranch.control.rebuild import RebuildState
from anabranch.control.schedule import SliceState
from anabranch.control.settings import Past
from anabranch.driver.run import VALIDATE, validates
from anabranch.errors import InvariantError
from anabranch.model.commands import Command, ExposeSlice, FinishBatch, PollNodes, WriteSlice
from anabranch.model.costs import Costs
from anabranch.model.events import BatchArrived, Idled, NodesJoined, ScaleRequested
from anabranch.model.ids import PartitionId
from anabranch.model.slices import Cut


def running() -> Play:
    """Two slices have happened, the third is running."""
    play = Play()
    play.start()
    for batch in range(2):
        feed(play, batch)
    play.controller.handle(BatchArrived(2, 0))
    return play


def scaling() -> Play:
    """A change is being prepared."""
    play = Play()
    play.start()
    play.controller.handle(ScaleRequested("count", 3, 0))
    assert play.controller.adjustment.state is AdjustmentState.PREPARING
    return play


def rebuilding() -> Play:
    play = running()
    lose(play, SECOND, logged=1)
    return play


def waiting() -> Play:
    """Two nodes for queries that fill most of one each; the second is lost."""
    costs = {PartitionId("a", 0): 0.3, PartitionId("b", 0): 0.3, PartitionId("c", 0): 0.6}
    play = Play(Past(costs=Costs(costs, 1.0)), plan=apart())
    play.start()
    play.recovering(lose(play, SECOND))
    assert play.controller.comeback.state is ComebackState.WAITING
    return play


def owner_gone(play: Play) -> None:
    play.controller.ledgers.owners.leave([FIRST])


def key_group_without_a_partition(play: Play) -> None:
    groups = {"count": (0, 0, 1, 2)}
    play.controller.ledgers.owners.in_force = replace(play.placement, groups=groups)


def copy_beside_its_partition(play: Play) -> None:
    copies = {p: o.node for p, o in play.placement.owners.items()}
    play.controller.ledgers.owners.in_force = replace(play.placement, copies=copies)


def epoch_given_out_twice(play: Play) -> None:
    play.controller.ledgers.owners.epochs[COUNT[0]] += 1


def checkpoints_of_another_epoch(play: Play) -> None:
    play.controller.ledgers.checkpoints.epochs[COUNT[0]] += 1


def partition_ahead(play: Play) -> None:
    play.controller.frontier[COUNT[0]] += 1


def partition_behind(play: Play) -> None:
    play.controller.frontier[COUNT[0]] -= 1


def partition_without_a_frontier(play: Play) -> None:
    del play.controller.frontier[COUNT[0]]


def backups_unknown(play: Play) -> None:
    del play.controller.ledgers.backups.first_kept[COUNT[0]]


def loss_not_cleared(play: Play) -> None:
    play.controller.rebuild.lost = frozenset(COUNT)


def rebuild_forgotten(play: Play) -> None:
    play.controller.rebuild.running = None


def rebuild_for_another_placement(play: Play) -> None:
    plan = play.controller.rebuild.running
    assert plan is not None
    play.controller.rebuild.running = replace(plan, placement=replace(plan.placement, version=9))


def waiting_though_there_are_nodes(play: Play) -> None:
    play.controller.rebuild.state = RebuildState.AWAITING
    play.controller.rebuild.running = None


def slice_runs_on(play: Play) -> None:
    play.controller.schedule.state = SliceState.RUNNING
    plan = play.controller.schedule.slice
    assert plan is not None
    play.controller.schedule.slice = replace(plan, placement=play.placement.version)


def change_lost(play: Play) -> None:
    play.controller.adjustment.change = None


def change_of_an_older_placement(play: Play) -> None:
    play.controller.ledgers.owners.in_force = replace(play.placement, version=7)


def change_counts_on_a_lost_node(play: Play) -> None:
    change = play.controller.adjustment.change
    assert change is not None
    after = replace(change.placement, nodes=(*change.placement.nodes, THIRD))
    play.controller.adjustment.change = replace(change, placement=after)


def change_uses_an_epoch_again(play: Play) -> None:
    owners = play.controller.ledgers.owners
    new = PartitionId("count", 2)
    owners.epochs[new] = 5


def switching_without_a_rebuild(play: Play) -> None:
    play.controller.adjustment.change = None
    play.controller.adjustment.state = AdjustmentState.SWITCHING


def switch_before_it_is_sealed(play: Play) -> None:
    controller = play.controller
    change = controller.adjustment.change
    assert change is not None
    controller.ledgers.slices.records.append(record(1))
    controller.ledgers.owners.frontier = dict.fromkeys(COUNT, 2)
    controller.adjustment.state = AdjustmentState.SEALING
    controller.adjustment._switch(change)
    controller.ledgers.owners.frontier |= dict.fromkeys(change.moved, 1)


def layout_not_changed(play: Play) -> None:
    play.controller.ledgers.layouts.current = {"count": (0, 1, 1, 1)}


def slice_forgotten(play: Play) -> None:
    play.controller.schedule.slice = None


def slice_numbered_wrongly(play: Play) -> None:
    plan = play.controller.schedule.slice
    assert plan is not None
    play.controller.schedule.slice = replace(plan, number=7)


def slice_with_an_old_placement(play: Play) -> None:
    plan = play.controller.schedule.slice
    assert plan is not None
    play.controller.schedule.slice = replace(plan, placement=0)


def slice_left_out(play: Play) -> None:
    records = play.controller.ledgers.slices.records
    records[-1] = replace(records[-1], number=3)
    play.controller.schedule.slice = replace(play.controller.schedule.slice, number=4)  # type: ignore[type-var]
    play.controller.ledgers.owners.frontier = dict.fromkeys(COUNT, 4)


def slice_trimmed_too_early(play: Play) -> None:
    del play.controller.ledgers.slices.records[0]


def cut_of_the_future(play: Play) -> None:
    play.controller.ledgers.checkpoints.cuts = [Cut(9)]


def cuts_out_of_order(play: Play) -> None:
    play.controller.ledgers.checkpoints.cuts = [Cut(1), Cut(2)]


def sealed_before_it_happened(play: Play) -> None:
    play.controller.ledgers.checkpoints.sealed(3, play.placement, 0)


def below_a_waiting_chain_nobody_waits(play: Play) -> None:
    play.controller.ledgers.behind.first["a"] = 1


def comeback_forgotten(play: Play) -> None:
    play.controller.comeback.state = ComebackState.ABSENT


def waits_for_what_the_cut_has(play: Play) -> None:
    play.controller.ledgers.behind.first["c"] = 0


def slices_that_it_lacks_trimmed(play: Play) -> None:
    for batch in range(2):
        feed(play, batch)
    del play.controller.ledgers.slices.records[0]


OWNER = "every partition has an owner or is being rebuilt"
EPOCHS = "epochs are those given out last"
WHERE = "partitions are where the slices are"
LOST = "what is lost agrees with the rebuild"
CHANGE = "a change follows the placement in force"
SWITCH = "a switch is a rebuild and nothing else"
IN_HAND = "the slice in hand is the next one"
CUTS = "cuts are of slices that have happened"
CLOSED = "what waits is closed downstream"
KEPT = "what waiting chains need is kept"
BROKEN: list[tuple[Callable[[], Play], Callable[[Play], None], str]] = [
    (running, owner_gone, OWNER),
    (running, copy_beside_its_partition, OWNER),
    (running, key_group_without_a_partition, "every key group has a partition"),
    (running, epoch_given_out_twice, EPOCHS),
    (running, checkpoints_of_another_epoch, EPOCHS),
    (running, partition_ahead, WHERE),
    (running, partition_behind, WHERE),
    (running, partition_without_a_frontier, WHERE),
    (running, backups_unknown, "backups are known of every partition"),
    (running, loss_not_cleared, LOST),
    (rebuilding, rebuild_forgotten, LOST),
    (rebuilding, rebuild_for_another_placement, LOST),
    (rebuilding, waiting_though_there_are_nodes, LOST),
    (rebuilding, slice_runs_on, "no slice runs while partitions are rebuilt"),
    (waiting, below_a_waiting_chain_nobody_waits, CLOSED),
    (waiting, comeback_forgotten, CLOSED),
    (waiting, waits_for_what_the_cut_has, KEPT),
    (waiting, slices_that_it_lacks_trimmed, KEPT),
    (scaling, change_lost, CHANGE),
    (scaling, change_of_an_older_placement, CHANGE),
    (scaling, change_counts_on_a_lost_node, CHANGE),
    (scaling, change_uses_an_epoch_again, CHANGE),
    (running, switching_without_a_rebuild, SWITCH),
    (scaling, switch_before_it_is_sealed, SWITCH),
    (running, layout_not_changed, "the layout is the current one"),
    (running, slice_forgotten, IN_HAND),
    (running, slice_numbered_wrongly, IN_HAND),
    (running, slice_with_an_old_placement, IN_HAND),
    (running, slice_left_out, "slices are contiguous"),
    (running, slice_trimmed_too_early, "slices are contiguous"),
    (running, cut_of_the_future, CUTS),
    (running, cuts_out_of_order, CUTS),
    (running, sealed_before_it_happened, CUTS),
]


@pytest.mark.parametrize(("state", "damage", "rule"), BROKEN)
def test_what_breaks_a_rule_is_seen(
    state: Callable[[], Play], damage: Callable[[Play], None], rule: str
) -> None:
    play = state()
    check(play.controller, [])
    damage(play)
    with pytest.raises(InvariantError, match=f"^{rule}: "):
        check(play.controller, [])


def test_every_rule_was_broken() -> None:
    assert {rule for _, _, rule in BROKEN} == {r.__name__.replace("_", " ") for r in RULES}


def test_it_is_checked_after_an_event_and_told() -> None:
    play = running()
    loss_not_cleared(play)
    with pytest.raises(InvariantError, match=LOST) as e:
        play.controller.handle(Idled(0))
    assert e.value.fields["story"][0] == "rebuild:"


def test_it_is_checked_only_where_that_is_asked_for() -> None:
    play = running()
    play.controller._validate = False
    loss_not_cleared(play)
    assert play.controller.handle(Idled(0)) == []


def test_a_job_validates_itself_in_tests_and_where_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert validates()  # as all tests are
    monkeypatch.delenv(VALIDATE)
    assert not validates()


def test_commands_out_of_order_are_seen() -> None:
    play = Play()
    head, recover = play.controller.handle(NodesJoined(play.nodes, 0))
    write, expose = WriteSlice(record(1)), ExposeSlice(record(1), ())
    check(play.controller, [write, expose, FinishBatch(0), head, recover])
    wrong: list[tuple[list[Command], str]] = [
        ([expose, write], "slice 1 is shown before it is journalled"),
        ([recover], "placement 1 is used before it is journalled"),
        ([recover, head], "after RecoverPartitions, an answer has to come"),
        ([PollNodes(), PollNodes()], "after PollNodes, an answer has to come"),
    ]
    for commands, words in wrong:
        with pytest.raises(InvariantError, match=words):
            check(play.controller, commands)
