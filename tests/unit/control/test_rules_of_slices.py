"""Rules of slices, and of what decides about them, that few runs ever need: each by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plays import NODES, SECOND, Play, apart, feed, lose, record
from test_autoscaler import CONFIG
from test_autoscaler import Job as ScaledJob
from test_comeback import p
from test_rules_of_runs import begun

from anabranch.control.policies.capacity import choose, is_short
from anabranch.control.policies.shortage import FULL
from anabranch.control.portion import FIRST_PART
from anabranch.control.settings import Past
from anabranch.errors import InvariantError
from anabranch.model.commands import Command, RunSlice, WriteHead
from anabranch.model.events import BatchArrived, Idled, ScaleRequested, SliceRan
from anabranch.model.graph import Graph, Hold, Kind, Operator
from anabranch.model.plan import Plan, Query, compile_plan
from anabranch.model.recovery import Cause
from anabranch.model.slices import Feed
from anabranch.node.protocol.carried import Sealed
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import PollRequest, RecoverRequest
from anabranch.planning.recovery.placing import SLACK
from anabranch.sim.payload import SimProcess

# -- slices that carry no rows ---------------------------------------------------------------------


def without_rows(commands: list[Command]) -> RunSlice:
    """The slice that begins with them: no task reads for it, and there is no log of it."""
    run = commands[-1]
    assert isinstance(run, RunSlice)
    assert (run.plan.feed, run.plan.batch, run.plan.source_tasks) == (Feed.NONE, None, 0)
    return run


def windows_of_windows() -> Plan:
    """s → a → b → out; what a emits when time passes, b is to wait for."""

    def keyed(name: str, reads: str) -> Operator:
        keys, holds = (f"k_{name}",), ((None, Hold(0)),)
        return Operator(name, Kind.KEYED, ((reads,),), keys=keys, time="t", holds=holds)

    operators = [Operator("s", Kind.SOURCE), keyed("a", "s"), keyed("b", "a")]
    sink = Operator("out", Kind.SINK, (("b",),))
    return compile_plan(Graph.checked("t", [*operators, sink], key_groups=4))


def test_nothing_is_read_for_slices_that_bring_time_to_one_operator_after_the_other() -> None:
    play = Play(plan=windows_of_windows(), timed=True)
    play.start()
    feed(play, 0)
    first = without_rows(play.controller.handle(Idled(10)))
    assert (first.plan.watermark_us, first.plan.watermarks) == (100, {"b": None})
    second = without_rows(play.ran(first))
    assert second.plan.watermarks == {"b": 101}
    assert not any(isinstance(c, RunSlice) for c in play.ran(second))


def test_nothing_is_read_for_a_slice_that_seals_what_a_change_of_the_placement_needs() -> None:
    play = Play()
    play.start()
    feed(play, 0)
    assert play.controller.handle(ScaleRequested("count", 3, 10)) == []
    assert without_rows(play.controller.handle(Idled(20))).plan.seal


def test_nothing_is_read_for_a_slice_that_seals_what_no_cut_has() -> None:
    play = Play(interval=10)
    play.start()
    feed(play, 0)
    assert without_rows(play.controller.handle(Idled(10))).plan.seal


# -- slices that were cut short --------------------------------------------------------------------


def test_a_slice_that_was_cut_short_cannot_be_reported() -> None:
    """Whatever is said of it: it runs again after the rebuild."""
    play = Play()
    play.start()
    feed(play, 0)
    (run,) = play.controller.handle(BatchArrived(1, 0))
    assert isinstance(run, RunSlice)
    lose(play, SECOND)
    with pytest.raises(InvariantError, match="slice 2 was reported while"):
        play.controller.handle(SliceRan(2, 0, play.reports(3), 0))


# -- partitions that are rebuilt -------------------------------------------------------------------


def test_when_everything_goes_back_nodes_are_told_of_a_newer_placement() -> None:
    """They do nothing by one that is older than theirs."""
    play = Play()
    play.start()
    feed(play, 0)
    before = play.placement
    head, _ = play.controller.rebuild.everything(Cause.CHECKPOINT_TORN)
    assert isinstance(head, WriteHead)
    assert head.placement.version > before.version


@pytest.mark.parametrize(("lacked", "more"), [(FIRST_PART, False), (FIRST_PART + 1, True)])
def test_what_one_part_can_make_up_for_comes_back_at_once(lacked: int, more: bool) -> None:
    """How long it will take is not known yet."""
    slices = tuple(record(n) for n in range(1, lacked + 1))
    play = Play(Past(slices=slices, behind={"c": 1}), plan=apart())
    play.start()
    assert play.recovery.restored == {p("a"), p("b"), p("c")}
    assert play.recovery.more is more


# -- nodes that are too few ------------------------------------------------------------------------


def test_of_a_plan_that_fits_in_sum_only_comes_back_what_fits_on_nodes() -> None:
    """Three of them: together the nodes have room for these, but each for one only."""
    chains = "vwxyz"
    queries = [Query(f"out_{c}", 1, frozenset(c)) for c in chains]
    loads = {p(c): 0.5 for c in chains}
    back = choose(queries, frozenset(chains), {}, list(loads), loads, NODES, planner="dp")
    assert len(back.queries) == 2
    assert sorted(back.homes.values()) == sorted(NODES)


def test_nodes_are_not_short_by_an_error_of_rounding() -> None:
    assert not is_short({p("a"): FULL + SLACK}, NODES[:1])
    assert is_short({p("a"): FULL + 3 * SLACK}, NODES[:1])


# -- the autoscaler --------------------------------------------------------------------------------


def test_what_slices_would_take_with_fewer_partitions_goes_by_the_slowest_of_them() -> None:
    job = ScaledJob((4, 2), nodes=8, fixed_s=0.1, cores={"a": 0.6, "b": 1.0})
    for batch_s in (0.1, 0.69, 0.1):
        assert job.step(replace(job.measurement(), batch_s=batch_s)) is None
    assert job.run(2) == []  # not with that one among them
    (made,) = job.run(1)
    assert made.parallelism == {"a": 2}
    assert "slices, at most 0.10 s, would take" in made.why


def test_a_limit_that_keeps_one_of_the_chains_small_is_named() -> None:
    """The other was declared with as many partitions as there are nodes."""
    config = replace(CONFIG, max_parallelism=3)
    job = ScaledJob((3, 4), 4, config, cores={"a": 2.9, "b": 3.9}, fixed_s=0.1)
    (made,) = job.run(10)
    assert (made.kind, made.parallelism) == ("none", {})
    assert made.why.endswith("max_parallelism is 3")


# -- nodes -----------------------------------------------------------------------------------------


def test_a_driver_is_told_of_its_own_files_only(tmp_path: Path) -> None:
    _, cluster = begun(tmp_path, 1)
    (node,) = cluster.nodes
    job = cluster.hosts[node]._job
    assert job is not None
    told = next(request for request, _ in cluster._past if isinstance(request, RecoverRequest))
    process = SimProcess("i", lambda process, work: work(), lambda: False, 1_000_000)
    host: Host[Any] = Host(process, lambda spec: job)
    host.recover(told, [])
    (one, *_) = host.partitions
    host._writer.write(job, Sealed(told.generation, one, 1, 1, True, 0, None))
    files = host.poll(PollRequest(told.job, told.generation, node)).checkpoints
    assert [(f.partition, f.slice) for f in files] == [(one, 1)]
    newest = told.generation + 1
    host.recover(replace(told, driver="another", generation=newest), [])
    assert host.poll(PollRequest(told.job, newest, node)).checkpoints == ()
