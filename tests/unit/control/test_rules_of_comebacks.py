"""Rules of what comes back that only few runs ever need: each by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from plays import Play, feed, forked, lose
from test_comeback import SECOND_MS, Job, cuts, long_lost, p

from anabranch.control.comeback import ComebackState
from anabranch.control.policies.capacity import choose
from anabranch.errors import StorageError
from anabranch.model.commands import RecoverPartitions
from anabranch.model.events import NodesJoined, NodesPolled, RestoreFailed, StopRequested
from anabranch.model.ids import NodeId
from anabranch.model.plan import Query

LOADS = {"a": 0.25, "b": 0.25, "c": 0.55}
NEW = SEVENTH, EIGHTH, NINTH = NodeId("7"), NodeId("8"), NodeId("9")


def all_lost(since: int, loads: Mapping[str, float] = LOADS) -> Job:
    """No node is left. The newest cut that covers a and b is that of slice 5; that of c is of slice
    9, and as many slices have run `since`."""
    job = Job(loads=loads, interval=2000).begin()
    cuts(job, 3, 5)
    job.loses("b")
    cuts(job, 7, 9)
    job.seconds(since)
    assert job.waiting == {"a", "b"}
    job.loses("c")
    assert job.controller.nodes == ()
    return job


# -- who begins, and from where --------------------------------------------------------------------


def test_those_with_an_older_cut_begin_right_after_those_with_the_newest() -> None:
    """They were chosen together: none waits until another one is back."""
    job = all_lost(since=10)
    begun = len(job.plans)
    job.happens(NodesJoined(NEW, job.now_ms))
    assert [plan.cut for plan in job.plans[begun:] if plan.part == 0] == [9, 5]
    assert job.controller.comeback.coming == job.waiting == {"a", "b", "c"}


def test_what_is_beyond_a_torn_cut_keeps_its_state() -> None:
    """It comes back beside those that were to begin there, from a newer one."""
    job = all_lost(since=10)
    commands = job.controller.handle(NodesJoined(NEW, job.now_ms))
    commands = job.recovered(commands[-1], job.now_ms)
    assert isinstance(commands[-1], RecoverPartitions)
    assert commands[-1].plan.cut == 5
    assert commands[-1].plan.restored == {p("a"), p("b"), p("c")}
    before = job.placement.owners[p("c")]
    job.done(job.controller.handle(RestoreFailed(StorageError("torn"), job.now_ms)))
    assert job.placement.owners[p("c")] == before
    assert job.plans[-1].cut == 3
    assert {c: first for c, (first, _) in job.plans[-1].spans.items()} == {"a": 4, "b": 4, "c": 10}


def test_what_has_come_a_quarter_of_the_way_stays_where_it_is() -> None:
    """Though another node would be quicker, if it began again there."""
    job = Job(3, loads={"a": 0.3, "b": 0.35, "c": 0.4}).begin()
    job.seconds(22)
    job.loses("b", "c")
    job.seconds(2)
    home = job.node_of("b")
    job.comes(SEVENTH)
    job.done(job.part_ends())
    assert (job.controller.frontier[p("b")], job.controller.ledgers.newest_slice) == (6, 24)
    assert (job.node_of("b"), job.node_of("c")) == (home, SEVENTH)


# -- how much of it, and who waits for that --------------------------------------------------------


def test_a_node_of_its_own_gets_long_parts_though_little_is_left_for_another() -> None:
    """b is nearly there, on a node that has a part in slices; that is no measure for c."""
    job = long_lost()
    while job.controller.frontier[p("b")] < job.controller.ledgers.newest_slice - 4:
        job.second()
    begun = len(job.plans)
    job.comes(SEVENTH)
    job.seconds(3)
    part = next(plan for plan in job.plans[begun:] if plan.slices)
    assert set(part.spans) == {"b", "c"}
    first, end = part.spans["c"]
    assert (end - first) * 0.4 > 3  # seconds, that is intervals: four are the limit


def test_what_little_a_part_beside_slices_leaves_is_waited_for() -> None:
    """By the next slice, though it had to wait for two parts before that one."""
    job = all_lost(since=4, loads={"a": 0.35, "b": 0.05, "c": 0.75})
    begun = len(job.plans)
    job.happens(NodesJoined((SEVENTH, EIGHTH), job.now_ms))
    assert [plan.part for plan in job.plans[begun:]] == [0, 0, 1]
    assert job.controller.comeback.state is ComebackState.BESIDE
    assert job.beside is not None
    job.offered_ms = job.beside[1] - SECOND_MS  # rows come when it ends
    assert job.second().plan.paused == frozenset()


def test_what_has_nothing_to_make_up_for_comes_back_with_a_stop() -> None:
    """b waited for a, and there was no slice meanwhile. Slices wait for all, so nothing is left to
    do beside them."""
    job = Job(2, plan=forked(), loads={"a": 0.5, "b": 0.4, "c": 0.45}).begin()
    job.seconds(3)
    assert job.node_of("a") == job.node_of("c") != job.node_of("b")
    commands = lose(job, job.node_of("a"))
    assert job.controller.handle(StopRequested(job.now_ms)) == []
    for _ in range(5):
        if not isinstance(commands[-1], RecoverPartitions):
            break
        assert "b" in job.waiting
        commands = job.recovered(commands[-1], job.now_ms)
    assert job.waiting == set()


def test_all_that_fits_is_placed_so_that_no_node_has_more_than_there_is() -> None:
    """They are full then: where each goes to the node with most room, the last one does not fit."""
    sizes = {"v": 0.6, "w": 0.4, "x": 0.4, "y": 0.3, "z": 0.3}
    loads = {p(chain): size for chain, size in sizes.items()}
    down = frozenset(sizes)
    back = choose([Query("q", 1, down)], down, {}, list(loads), loads, [SEVENTH, EIGHTH])
    assert back.chains == down
    filled = Counter[NodeId]()
    for partition, node in back.homes.items():
        filled[node] += round(10 * loads[partition])
    assert filled == {SEVENTH: 10, EIGHTH: 10}


# -- what is told ----------------------------------------------------------------------------------


def test_a_story_says_how_often_the_same_has_happened_in_a_row() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    (run,) = play.controller.handle(StopRequested(100))
    play.ran(run)
    for n in range(1, 5):  # its checkpoint takes a while
        play.controller.handle(NodesPolled(play.reports(3), 100 + n))
    assert play.controller.story.told()[-1] == "104 ms NodesPolled ×4 => PollNodes"
