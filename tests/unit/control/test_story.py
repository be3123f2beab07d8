"""A broken invariant tells what happened; a machine makes no move that its table does not have."""

from __future__ import annotations

import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest
from plays import Play, feed, lose
from tests.unit.test_elasticity import feed as rows
from tests.unit.test_elasticity import topology
from tests.unit.test_parallel_recovery import SCHEMA

from anabranch.control import adjustment, rebuild, schedule
from anabranch.control.adjustment import AdjustmentState
from anabranch.control.rebuild import RebuildState
from anabranch.control.schedule import SliceState
from anabranch.control.story import KEPT
from anabranch.driver.effects import Effects
from anabranch.errors import AdjustmentError, InvariantError
from anabranch.model.events import (
    BatchArrived,
    Idled,
    NodesPolled,
    PartitionsRecovered,
    ScaleRequested,
    SliceRan,
)
from anabranch.testing import LocalJob, Scale


def test_a_broken_invariant_carries_the_story_of_its_entity_first() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    lose(play, play.nodes[0])
    with pytest.raises(InvariantError, match="slice 1 was reported while None was running") as e:
        play.controller.handle(SliceRan(1, 1, (), 9))
    about, *story = e.value.fields["story"]
    assert about == "slice 1:"
    first, rest = story[: story.index("all else:")], story[story.index("all else:") + 1 :]
    assert "BatchArrived 0: slice FREE → RUNNING (slice 1) => RunSlice slice 1 (live)" in first[0]
    assert "NodesLost 1: rebuild WHOLE → REPLAYING (nodes lost) => WriteHead" in first[2]
    assert "count[0]" in first[2]
    assert rest[-1] == "0 ms PartitionsRecovered: rebuild REPLAYING → WHOLE"
    told = str(e.value)
    assert told.startswith("slice 1 was reported while None was running\n  what happened:")
    assert "RunSlice slice 1 (live)" in told
    assert str(pickle.loads(pickle.dumps(e.value))) == told
    assert e.value.message == "slice 1 was reported while None was running"


def test_the_story_of_a_machine_comes_first() -> None:
    play = Play()
    play.start()
    with pytest.raises(InvariantError) as e:
        play.controller.handle(PartitionsRecovered((), 5))
    assert e.value.fields["story"][0] == "rebuild:"
    assert "rebuild AWAITING → REPLAYING (start)" in e.value.fields["story"][1]


def test_a_story_has_an_end_and_waits_are_one_line() -> None:
    play = Play(interval=0)
    play.start()
    feed(play, 0, 5)
    for _ in range(500):
        play.controller.handle(NodesPolled(play.reports(2), 7))
        play.controller.handle(Idled(7))
    assert len(play.controller.story.told()) < 10  # nothing came of them, or always the same
    for batch in range(1, KEPT):
        play.written(batch)
        feed(play, batch, 10 * batch)
    assert len(play.controller.story.told()) == KEPT


def test_a_refusal_is_told_and_changes_nothing() -> None:
    play = Play()
    play.start()
    with pytest.raises(AdjustmentError, match="no operator 'sum'"):
        play.controller.handle(ScaleRequested("sum", 3, 5))
    assert play.controller.story.told()[-1] == "5 ms ScaleRequested sum 3 => refused"
    assert play.controller.adjustment.settled


def test_the_four_steps_of_a_scaling_are_states(tmp_path: Path) -> None:
    job = LocalJob(topology(), tmp_path, SCHEMA, nodes=2)
    for n in range(4):
        job.step(rows(n))
    job.step(Scale("sum", 5))
    story = "\n".join(job.controller.story.told())
    moves = re.findall(r"adjustment (\w+) → (\w+)", story)
    states = ["SETTLED", "WANTED", "PREPARING", "SEALING", "SWITCHING", "SETTLED"]
    assert moves == list(pairwise(states))
    assert "SEALING → SWITCHING (sum from 2 to 5 partitions); rebuild WHOLE → REPLAYING" in story


def test_an_illegal_move_is_a_broken_invariant() -> None:
    play = Play()
    play.start()
    controller = play.controller
    with pytest.raises(InvariantError, match="adjustment cannot go from SETTLED to SWITCHING"):
        controller.adjustment._to(AdjustmentState.SWITCHING)
    with pytest.raises(InvariantError, match="rebuild cannot go from WHOLE to SEALING"):
        controller.rebuild._to(RebuildState.SEALING)
    with pytest.raises(InvariantError, match="slice cannot go from FREE to CUT_SHORT"):
        controller.schedule._to(SliceState.CUT_SHORT)
    assert controller.adjustment.settled
    assert controller.rebuild.whole


@pytest.mark.parametrize(
    ("table", "states"),
    [
        (adjustment.LEGAL, AdjustmentState),
        (rebuild.LEGAL, RebuildState),
        (schedule.LEGAL, SliceState),
    ],
)
def test_every_state_is_in_its_table_and_can_be_reached(table: dict, states: type) -> None:  # type: ignore[type-arg]
    assert set(table) == set(states)  # type: ignore[arg-type]
    first = next(iter(table))
    reached, todo = {first}, [first]
    while todo:
        for state in table[todo.pop()] - reached:
            reached.add(state)
            todo.append(state)
    assert reached == set(table)


def test_a_bug_elsewhere_is_told_with_the_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LocalJob(topology(), tmp_path, SCHEMA, nodes=2)
    job.step(rows(0))
    monkeypatch.setattr(Effects, "_run_slice", lambda self, command: [][0])
    with pytest.raises(InvariantError, match=r"the driver failed \(RunSlice\): IndexError") as e:
        job.step(rows(1))
    assert "BatchArrived 1: slice FREE → RUNNING (slice 2)" in str(e.value)


def test_whoever_has_ended_tells_nothing_more() -> None:
    play = Play()
    play.start()
    play.controller.schedule.end()
    before = play.controller.story.told()
    assert play.controller.handle(BatchArrived(0, 0)) == []
    assert play.controller.story.told() == before
