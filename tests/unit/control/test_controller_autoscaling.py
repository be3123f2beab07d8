"""The controller under its autoscaler: decisions become wishes, and survive a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plays import FIRST, NEVER, NODES, THIRD, Play, counting

from anabranch.control.controller import Controller
from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.settings import ControlConfig, Past
from anabranch.errors import AdjustmentError
from anabranch.model.commands import (
    Command,
    NoteDecision,
    ReleaseNodes,
    RequestNodes,
    RunSlice,
    WriteSlice,
)
from anabranch.model.events import BatchArrived, DrainRequested, Idled, ScaleRequested, SliceRan
from anabranch.model.reports import PartitionReport, SourceReport

EAGER = Autoscale(cool_down="1ms", down_after="2s", interval="1s")


class Busy(Play):
    """A cluster whose partitions use so much of a core; a slice begins every second."""

    def __init__(self, config: Autoscale | None = EAGER, past: Past | None = None) -> None:
        super().__init__(past, plan=counting(), nodes=(*NODES, THIRD))
        self.config = ControlConfig(NEVER, autoscale=config)
        self.controller = Controller(counting(), self.config, past or Past(), validate=True)
        self.now_ms = 0
        self.busy, self.used_s = 0.5, 0.0
        self.start()

    def slice(self) -> list[Command]:
        """One slice; what follows it."""
        self.now_ms += 1_000
        newest = self.controller.newest
        batch = newest.number if newest is not None else 0
        (run,) = self.controller.handle(BatchArrived(batch, self.now_ms))
        assert isinstance(run, RunSlice)
        self.used_s += self.busy
        source = SourceReport(0, 1, {"s": 3}, {"s": 1}, 0, 0.0)
        reports = [
            replace(
                r,
                partitions={
                    p: PartitionReport(run.plan.number + 1, x.epoch, cpu_s=self.busy)
                    for p, x in r.partitions.items()
                },
                cpu_s=self.used_s,
                sources=(source,) if not i else (),
            )
            for i, r in enumerate(self.reports(run.plan.number + 1))
        ]
        ran = SliceRan(run.plan.number, 1, tuple(reports), self.now_ms + 300)
        return self.controller.handle(ran)


def noted(commands: list[Command]) -> list[NoteDecision]:
    return [c for c in commands if isinstance(c, NoteDecision)]


def until_noted(play: Busy) -> list[Command]:
    for _ in range(8):
        commands = play.slice()
        if noted(commands):
            return commands
    raise AssertionError("nothing was decided")


def test_a_decision_becomes_a_change_of_the_placement() -> None:
    play = Busy()
    for _ in range(6):
        assert not noted(play.slice())
    play.busy = 0.9
    commands = until_noted(play)
    (note,) = noted(commands)
    assert note.decision.parallelism == {"count": 3}  # on three nodes; four would be better
    assert note.memory["decisions"][-1]["what"] == "count from 2 to 3 partitions"
    assert play.controller.adjusting
    assert not any(isinstance(c, RequestNodes) for c in commands)


def test_a_node_that_has_nothing_is_let_go_of_at_once() -> None:
    config = replace(EAGER, drain_after="2s", min_parallelism=2, max_nodes=4)
    play = Busy(config)  # two partitions on three nodes
    play.busy = 0.01
    commands = until_noted(play)
    (note,) = noted(commands)
    assert note.decision.drain == THIRD
    assert commands[-1] == ReleaseNodes((THIRD,))


def test_a_dry_run_changes_nothing() -> None:
    play = Busy(replace(EAGER, dry_run=True))
    play.busy = 0.9
    commands = until_noted(play)
    assert noted(commands)[0].decision.dry_run
    assert not play.controller.adjusting


def test_nodes_are_requested() -> None:
    play = Busy(replace(EAGER, max_nodes=4))
    play.busy = 0.9
    assert RequestNodes(1) in until_noted(play)


def test_a_quiet_job_is_measured_too() -> None:
    play = Busy()
    play.busy = 0.01
    for _ in range(2):
        play.slice()
    said = []
    for _ in range(5):
        play.now_ms += 1_000
        said += noted(play.controller.handle(Idled(play.now_ms)))
    assert said[0].decision.parallelism == {"count": 1}


def test_what_it_learnt_comes_back_with_the_journal() -> None:
    hold = {"holds": {"up count": [NEVER, 1]}, "decisions": []}
    play = Busy(past=Past(autoscaler=hold), config=Autoscale(cool_down="1s", interval="1s"))
    play.busy = 0.9
    for _ in range(10):
        assert not [n for n in noted(play.slice()) if n.decision.parallelism]


def test_scaling_by_hand_and_by_itself_share_one_way() -> None:
    """No decision is made while a change that somebody asked for is on its way."""
    play = Busy()
    for _ in range(3):
        play.slice()
    play.busy = 0.9
    play.controller.handle(ScaleRequested("count", 4, play.now_ms))
    assert play.controller.adjusting
    assert not any(noted(play.slice()) for _ in range(5))


def test_a_drain_that_leaves_too_little_room_is_refused() -> None:
    play = Busy(config=None)
    play.busy = 0.9
    for _ in range(8):
        play.slice()
    measured = play.controller.load.measured[-1]
    assert measured.nodes[FIRST] == pytest.approx(0.9)
    sentence = r"those that stay \(2\) would be busy at 90% of their CPU, and 80% is the limit"
    with pytest.raises(AdjustmentError, match=sentence):
        play.controller.handle(DrainRequested(FIRST, play.now_ms))
    play.busy = 0.3
    for _ in range(6):
        play.slice()
    play.controller.handle(DrainRequested(FIRST, play.now_ms))
    assert play.controller.adjusting


def test_a_refused_decision_does_not_take_the_slice_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AdjustmentError("no")

    play = Busy()
    for _ in range(6):
        play.slice()
    play.busy = 0.9
    monkeypatch.setattr(play.controller.wishes, "scale", refuse)
    commands = until_noted(play)
    assert any(isinstance(c, WriteSlice) for c in commands)
    assert not play.controller.adjusting
