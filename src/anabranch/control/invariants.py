"""What holds after every event, whatever happened: the validating mode of a run.

Each rule is a function that yields a sentence for everything that breaks it. They look at the
whole state and cost time, so they are checked in tests, in `anabranch.testing` and in the
simulator, and in production only where ANABRANCH_VALIDATE=1 asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from anabranch.control.adjustment import AdjustmentState
from anabranch.control.rebuild import RebuildState
from anabranch.control.schedule import SliceState
from anabranch.errors import InvariantError
from anabranch.model.commands import (
    AwaitCatchUp,
    AwaitNodes,
    Command,
    ExposeLate,
    ExposeSlice,
    PollNodes,
    PreparePartitions,
    RecoverPartitions,
    RunSlice,
    WriteHead,
    WriteLate,
    WriteSlice,
)
from anabranch.model.ids import PartitionId

if TYPE_CHECKING:
    from anabranch.control.controller import Controller

# Each is answered by an event; what comes after it would be carried out before that is heard.
QUESTIONS = (
    *(RunSlice, RecoverPartitions, PreparePartitions, PollNodes),
    *(AwaitNodes, AwaitCatchUp),
)


def check(run: Controller, commands: Sequence[Command]) -> None:
    """InvariantError for the first rule that is broken by what an event has led to."""
    for problem in commands_come_in_order(commands):
        raise InvariantError(f"commands come in order: {problem}")
    if run.schedule.state is SliceState.ENDED:
        return  # in whatever state it was
    for rule in RULES:
        for problem in rule(run):
            name = rule.__name__.replace("_", " ")
            raise InvariantError(f"{name}: {problem}", machine=RULES[rule])


def commands_come_in_order(commands: Sequence[Command]) -> Iterator[str]:
    """A question comes last and alone; what is used or shown was journalled before."""
    kinds = [type(c) for c in commands]
    asked = [k for k in kinds if k in QUESTIONS]
    if asked and (len(asked) > 1 or asked[0] is not kinds[-1]):
        yield f"after {asked[0].__name__}, an answer has to come"
    for at, command in enumerate(commands):
        match command:
            case ExposeSlice() if WriteSlice not in kinds[:at]:
                yield f"slice {command.record.number} is shown before it is journalled"
            case ExposeLate() if kinds[at - 1] is not WriteLate or not at:
                yield f"late rows of slice {command.record.number} are shown before a line says so"
            case RecoverPartitions() if command.plan.part == 0 and WriteHead not in kinds[:at]:
                yield f"placement {command.plan.placement.version} is used before it is journalled"
            case _:
                pass


# -- partitions --------------------------------------------------------------------------------


def every_partition_has_an_owner_or_is_being_rebuilt(run: Controller) -> Iterator[str]:
    owners = run.ledgers.owners
    if owners.in_force is None:
        return
    lost = run.rebuild.lost | run.rebuild.promoted
    waiting = run.rebuild.state is RebuildState.AWAITING or run.comeback.awaiting
    if run.comeback.awaiting:
        lost |= owners.placement.owners.keys()
    for partition, owner in owners.placement.owners.items():
        if owner.node not in owners.nodes and not (waiting and partition in lost):
            yield f"{partition} is owned by node {owner.node}, which is not there"
    for partition, node in owners.placement.copies.items():
        if partition not in owners.placement.owners:
            yield f"there is a copy of {partition}, which is not there"
        elif node == owners.placement.owners[partition].node:
            yield f"{partition} and its copy are both on node {node}"


def every_key_group_has_a_partition(run: Controller) -> Iterator[str]:
    placement = run.placement
    if placement is None:
        return
    routed = {PartitionId(c, index) for c, groups in placement.groups.items() for index in groups}
    without = {p for p in routed - placement.owners.keys() if p.chain in run.waiting}
    for partition in sorted((routed ^ placement.owners.keys()) - without):
        yield f"{partition} has {'no owner' if partition in routed else 'no key group'}"


def epochs_are_those_given_out_last(run: Controller) -> Iterator[str]:
    owners, written = run.ledgers.owners, run.ledgers.checkpoints.epochs
    for partition, owner in owners.placement.owners.items() if owners.in_force else ():
        if not owner.epoch == owners.epochs.get(partition) == written.get(partition):
            yield (
                f"{partition} has epoch {owner.epoch}, {owners.epochs.get(partition)} was given "
                f"out, checkpoints are taken of {written.get(partition)}"
            )


def partitions_are_where_the_slices_are(run: Controller) -> Iterator[str]:
    """What is not being rebuilt has applied every slice that has happened, and no other; between
    two stages of a rebuild, every slice of the first."""
    frontier, upto = run.frontier, run.ledgers.slices.next_slice
    placement, stage_end = run.placement, run.rebuild.stage_end
    reached = upto if stage_end is None else stage_end + 1
    if placement is None:
        return
    if frontier.keys() != placement.owners.keys():
        yield f"frontiers of {sorted(map(str, frontier))}, owners of {len(placement.owners)}"
    for partition, at in frontier.items():
        rebuilt = partition in run.rebuild.lost or partition.chain in run.waiting
        if at > upto or (at != reached and not rebuilt):
            yield f"{partition} is at slice {at}, the next one is {reached}"


def backups_are_known_of_every_partition(run: Controller) -> Iterator[str]:
    for partition in run.placement.owners if run.placement else ():
        if partition not in run.ledgers.backups.first_kept:
            yield f"since when {partition} keeps its output is not known"


# -- the rebuild -------------------------------------------------------------------------------


def what_is_lost_agrees_with_the_rebuild(run: Controller) -> Iterator[str]:
    rebuild = run.rebuild
    missing = rebuild.lost | rebuild.promoted
    if rebuild.whole and missing:
        yield f"everything is whole, and {', '.join(map(str, sorted(missing)))} lost"
    if (rebuild.state is RebuildState.REPLAYING) != (rebuild.running is not None):
        yield f"it is {rebuild.state.name}, and a recovery runs: {rebuild.running is not None}"
    if not rebuild.whole and not run.comeback.absent:
        yield f"it is {rebuild.state.name}, and chains wait: {', '.join(sorted(run.waiting))}"
    if rebuild.state is RebuildState.AWAITING and run.nodes:
        yield f"it waits for a node, and there is {', '.join(run.nodes)}"
    if rebuild.running is not None and rebuild.running.placement != run.placement:
        yield "it rebuilds for another placement than the one in force"


def no_slice_runs_while_partitions_are_rebuilt(run: Controller) -> Iterator[str]:
    if run.schedule.state is not SliceState.RUNNING:
        return
    if not run.rebuild.whole:
        yield f"the slice is RUNNING, the rebuild {run.rebuild.state.name}"
    if run.comeback.replaying:
        yield "the slice is RUNNING, and so is a part of what comes back"


# -- chains that wait --------------------------------------------------------------------------


def what_waits_is_closed_downstream(run: Controller) -> Iterator[str]:
    plan, waiting = run.plan, run.waiting
    for chain in sorted(plan.below(waiting) - waiting):
        yield f"{chain} takes part in slices, and a chain above it waits"
    if run.rebuild.whole and run.comeback.absent != (not waiting):
        yield f"{', '.join(sorted(waiting)) or 'no chain'} waits, it is {run.comeback.state.name}"
    in_hand = run.schedule.slice if run.schedule.state is SliceState.RUNNING else None
    if in_hand is not None and in_hand.paused != waiting:
        yield f"slice {in_hand.number} runs without {sorted(in_hand.paused)}"


def what_waiting_chains_need_is_kept(run: Controller) -> Iterator[str]:
    checkpoints, slices = run.ledgers.checkpoints, run.ledgers.slices
    for chain, first in run.ledgers.behind.first.items():
        cut = checkpoints.covering(chain)
        since = cut.slice if cut else 0
        if since >= first:
            yield f"{chain} lacks slice {first}, and the cut it begins with is that of {since}"
        if not slices.reaches(since):
            yield f"{chain} begins after slice {since}, and slices are known from later on"
        if cut is not None and not run.plan.above[chain] <= cut.groups.keys():
            yield f"{chain} begins with the cut of {since}, which lacks a chain above it"


# -- the adjustment ----------------------------------------------------------------------------


def a_change_follows_the_placement_in_force(run: Controller) -> Iterator[str]:
    state, change, placement = run.adjustment.state, run.adjustment.change, run.placement
    under_way = state not in (AdjustmentState.SETTLED, AdjustmentState.SWITCHING)
    if under_way != (change is not None):
        yield f"it is {state.name}, and there is {'a' if change else 'no'} change"
    if change is None or placement is None:
        return
    if change.placement.version != placement.version + 1:
        yield f"placement {change.placement.version} is to follow {placement.version}"
    gone = set(change.placement.nodes) - set(run.nodes)
    if gone:
        yield f"it counts on node {', '.join(sorted(gone))}, which is not there"
    for partition in change.moved:
        if change.placement.owners[partition].epoch <= run.ledgers.owners.epochs.get(partition, 0):
            yield f"{partition} would get an epoch that was given out before"


def a_switch_is_a_rebuild_and_nothing_else(run: Controller) -> Iterator[str]:
    switching = run.adjustment.state is AdjustmentState.SWITCHING
    plan = run.rebuild.running
    if switching != (plan is not None and plan.adjusts):
        yield f"it is {run.adjustment.state.name}, the rebuild for {plan and plan.cause.value}"
    if switching and plan is not None:
        if plan.slices:
            yield f"{len(plan.slices)} slices are replayed at a switch"
        if plan.cut != run.ledgers.newest_slice:
            yield f"the placement changes after slice {run.ledgers.newest_slice}, at cut {plan.cut}"


def the_layout_is_the_current_one(run: Controller) -> Iterator[str]:
    placement = run.placement
    if (
        placement is not None
        and run.rebuild.whole
        and placement.groups != run.ledgers.layouts.current
    ):
        yield "slices run under another layout than the current one"


# -- slices and checkpoints --------------------------------------------------------------------


def the_slice_in_hand_is_the_next_one(run: Controller) -> Iterator[str]:
    schedule, plan = run.schedule, run.schedule.slice
    in_hand = schedule.state in (SliceState.RUNNING, SliceState.CUT_SHORT)
    if in_hand != (plan is not None):
        yield f"it is {schedule.state.name}, and there is {plan and plan.number}"
    if plan is None:
        return
    if plan.number != run.ledgers.slices.next_slice:
        yield f"it is {plan.number}, the next one is {run.ledgers.slices.next_slice}"
    version = run.placement.version if run.placement else 0
    if schedule.state is SliceState.RUNNING and plan.placement != version:
        yield f"it runs with placement {plan.placement}, in force is {version}"


def slices_are_contiguous(run: Controller) -> Iterator[str]:
    slices = run.ledgers.slices
    for before, after in pairwise(slices.records):
        if after.number != before.number + 1:
            yield f"{after.number} comes after {before.number}"
    cuts = run.ledgers.checkpoints.cuts
    older = cuts[-1].slice if cuts else 0
    if not slices.reaches(older):
        yield f"those after {older} begin with {slices.records[0].number}"


def cuts_are_of_slices_that_have_happened(run: Controller) -> Iterator[str]:
    checkpoints = run.ledgers.checkpoints
    cuts = [c.slice for c in reversed(checkpoints.cuts)]
    cuts += [] if checkpoints.sealed_slice is None else [checkpoints.sealed_slice]
    for older, newer in pairwise(cuts):
        if newer <= older:
            yield f"cut {newer} comes after cut {older}"
    if cuts and cuts[-1] > run.ledgers.newest_slice:
        yield f"cut {cuts[-1]} is newer than slice {run.ledgers.newest_slice}"


# Each with the machine whose story comes first.
RULES: dict[Callable[[Controller], Iterator[str]], str] = {
    every_partition_has_an_owner_or_is_being_rebuilt: "rebuild",
    every_key_group_has_a_partition: "rebuild",
    epochs_are_those_given_out_last: "rebuild",
    partitions_are_where_the_slices_are: "slice",
    backups_are_known_of_every_partition: "rebuild",
    what_is_lost_agrees_with_the_rebuild: "rebuild",
    no_slice_runs_while_partitions_are_rebuilt: "slice",
    what_waits_is_closed_downstream: "comeback",
    what_waiting_chains_need_is_kept: "comeback",
    a_change_follows_the_placement_in_force: "adjustment",
    a_switch_is_a_rebuild_and_nothing_else: "adjustment",
    the_layout_is_the_current_one: "adjustment",
    the_slice_in_hand_is_the_next_one: "slice",
    slices_are_contiguous: "slice",
    cuts_are_of_slices_that_have_happened: "slice",
}
