"""The lines that are told of queries, from the moves of a controller; what has not been shown yet
does not count as shown."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from plays import FIRST, NODES, SECOND, THIRD, Play, apart, feed, lose

from anabranch.control.settings import Past
from anabranch.driver.clock import Clock
from anabranch.driver.queries import NAMED, Queries, QueryStatus, _saying
from anabranch.model.commands import CatchUp, Command, ExposeLate, RecoverPartitions
from anabranch.model.costs import Costs
from anabranch.model.events import Event, Idled, NodesJoined, StopRequested
from anabranch.model.ids import NodeId, PartitionId


def _nothing(*observed: object, **named: object) -> None: ...


class Told:
    """A play whose commands are told as a driver tells them, but for late slices: those are shown
    when it is said. A second is a second."""

    def __init__(self, load: float, nodes: tuple[NodeId, ...] = (FIRST, SECOND)) -> None:
        costs = {PartitionId(c, 0): load for c in "abc"}
        self.play = Play(Past(costs=Costs(costs, 1.0)), plan=apart(), nodes=nodes)
        # What is known stays: the plays' slices take no time.
        self.play.controller.ledgers.costs.observe = _nothing  # type: ignore[method-assign, assignment]
        self.now_ms = 0
        self.late: list[ExposeLate] = []
        clock = Clock(lambda: self.now_ms * 1_000_000, lambda: self.now_ms)
        self.queries = Queries(apart(), self.play.controller, clock)
        handle = self.play.controller.handle

        def handled(event: Event, wall_ms: int | None = None) -> list[Command]:
            commands = handle(event, wall_ms)
            self.queries.handled(commands, self.now_ms)
            for command in commands:
                if isinstance(command, ExposeLate):
                    self.late.append(command)
                else:
                    self.queries.done(command)
            return commands

        self.play.controller.handle = handled  # type: ignore[method-assign]
        self.play.start()

    @property
    def states(self) -> dict[str, str]:
        return {q.sink: q.state for q in self.queries.statuses}

    def show(self) -> None:
        for command in self.late:
            self.queries.done(command)
        self.late = []


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="anabranch")
    return caplog


def said(lines: pytest.LogCaptureFixture) -> list[str]:
    found = [f"{r.levelname} {r.getMessage()}" for r in lines.records]
    lines.clear()
    return found


def of_three() -> Told:
    """A node for each chain; those of a and b are lost."""
    told = Told(0.8, (*NODES, THIRD))
    feed(told.play, 0)
    home = {p.chain: o.node for p, o in told.play.placement.owners.items()}
    told.play.recovering(lose(told.play, home["a"], home["b"]))
    return told


def test_nodes_that_are_not_enough_are_told_once(lines: pytest.LogCaptureFixture) -> None:
    told = of_three()
    why = "1 of 2 queries fit on 1 node: 0.80 of 0.80; next is out_b, which lacks 1.60 of a node"
    assert said(lines) == [f"WARNING query out_b waits: {why}"]
    for batch in range(1, 25):  # what would come back is asked again and again
        feed(told.play, batch, batch * 1_000)
    assert said(lines) == []
    assert told.queries.partial_plan == why
    told.play.controller.handle(NodesJoined((NodeId("4"),), 25_000))
    for batch in range(25, 40):
        feed(told.play, batch, batch * 1_000)
    (line,) = said(lines)
    assert line.startswith("INFO no query comes back yet: 1 of 2 queries fit on 2 nodes: 0.80 of ")
    assert line.endswith("; next is out_b, which lacks 0.80 of a node")
    assert told.queries.capacity is not None
    assert told.queries.capacity.demand == pytest.approx(2.4)
    assert told.states == {"out_b": "waiting", "out_c": "live"}


def test_no_node_is_left(lines: pytest.LogCaptureFixture) -> None:
    told = of_three()
    lines.clear()
    lose(told.play, *told.play.placement.nodes)
    assert told.states == {"out_b": "waiting", "out_c": "waiting"}
    assert said(lines) == ["WARNING query out_c waits: there is no node"]
    assert told.queries.partial_plan == "there is no node"
    told.play.recovering(told.play.controller.handle(NodesJoined((NodeId("4"),), 0)))
    (line,) = said(lines)[:1]
    assert line.startswith("INFO query out_c comes back now: 1 of 2 queries fit on 1 node: 0.80 ")
    assert line.endswith("; next is out_b, which lacks 1.60 of a node")


def test_it_is_live_when_all_has_been_shown(lines: pytest.LogCaptureFixture) -> None:
    told = of_three()
    for batch in range(1, 4):
        feed(told.play, batch, batch)
    lines.clear()
    handle = told.play.controller.handle
    commands = handle(NodesJoined((NodeId("4"), NodeId("5")), 10)) or handle(Idled(10))
    assert told.states["out_b"] == "catching up"
    while commands and isinstance(commands[-1], RecoverPartitions | CatchUp):
        part = commands[-1]
        beside = isinstance(part, CatchUp)
        commands = told.play.caught_up(part) if beside else told.play.recovered(part)
    assert not told.play.controller.waiting
    assert told.late
    (line,) = said(lines)
    assert line.startswith("INFO query out_b comes back now: all 2 queries fit on 3 nodes: 2.40 of")
    late = next(q for q in told.queries.statuses if q.sink == "out_b")
    assert replace(late, seconds_behind=0.0) == QueryStatus("out_b", 1, "catching up", 3)
    told.now_ms += 2_500
    told.show()
    assert told.states["out_b"] == "live"
    (line,) = said(lines)
    assert line.startswith("INFO query out_b is live again, after 2.")
    assert told.queries.partial_plan is None


def test_the_end_of_a_job_brings_all_back(lines: pytest.LogCaptureFixture) -> None:
    told = of_three()
    feed(told.play, 1, 1_000)
    lines.clear()
    told.play.controller.handle(StopRequested(2_000))
    assert said(lines) == ["INFO query out_b comes back now: the job ends"]


def test_a_line_names_only_some_of_many() -> None:
    many = [f"q{n}" for n in range(NAMED + 2)]
    assert _saying(many, "waits", "wait").endswith("q7 and 2 others wait")
    assert _saying(many[:NAMED], "waits", "wait").endswith("q6, q7 wait")
