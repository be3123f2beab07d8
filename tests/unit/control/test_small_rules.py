"""Rules that only few runs ever need: each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plays import COUNT, NODES, Play, apart, counting, feed, kinds, record

from anabranch.control.adjustment import AdjustmentState
from anabranch.control.ledgers.checkpoints import CheckpointLedger
from anabranch.control.ledgers.slices import SliceLedger
from anabranch.control.ledgers.watermark import WatermarkTracker
from anabranch.control.pace import IN_VAIN, MOST_WAITED_FOR, NEARLY, SHARED, Pace
from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.load import Load
from anabranch.control.policies.recovery_bound import PLAN_EVERY, RecoveryBound
from anabranch.control.portion import FIRST_PART, MAX_PART_SLICES, Limits, Work
from anabranch.control.remarks import BATCHES, CHECKPOINTS, Remarks, Seen, _slower
from anabranch.control.settings import Past
from anabranch.control.wishes import Wishes
from anabranch.model.commands import FinishRun, PollNodes, RunSlice
from anabranch.model.events import (
    BatchArrived,
    NodesPolled,
    PartitionsPrepared,
    ScaleRequested,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import copied, place
from anabranch.model.reports import CheckpointWritten, NodeReport, PartitionReport, SourceReport
from anabranch.model.slices import Cut, Feed, SlicePlan


def test_time_rests_before_the_first_slice() -> None:
    play = Play(timed=True)
    play.start()
    assert play.controller.ledgers.slices.time_will_rest
    assert not play.controller.ledgers.slices.time_has_moved


def test_time_does_not_go_back_with_an_event_that_has_waited() -> None:
    """Its bringer's clock read less; the wall clock is wrong by days, so the other one counts."""
    behind = Past(slices=(record(1, processing_ms=10**9),))
    play = Play(past=behind)
    play.start()
    times = []
    for batch, now_ms in enumerate((10_000, 30_000, 12_000), 1):
        run = play.controller.handle(BatchArrived(batch, now_ms), 5)[-1]
        assert isinstance(run, RunSlice)
        times.append(run.plan.processing_ms)
        play.ran(run, rows=1, now_ms=now_ms)
    assert times == [10**9, 10**9 + 10_000, 10**9 + 10_000]


def test_a_start_from_before_the_layout_changed_leaves_aside_a_cut_of_some() -> None:
    """The cut of slice 6 has one chain; the others begin with that of slice 2, under the layout of
    that time, and so do all: the next cut is that of slice 4, and no older one than the newest."""
    whole, two = (0, 0, 0, 0), (0, 0, 1, 1)
    now, then = {"a": whole, "b": whole, "c": whole}, {"a": two, "b": whole, "c": whole}
    past = Past(
        cut=Cut(6, {}, {"c": list(whole)}),
        previous=Cut(2, {}, {c: list(g) for c, g in then.items()}),
        slices=tuple(record(n, placement=1 if n <= 4 else 2) for n in range(3, 8)),
        groups=now,
        layouts={1: then},
        behind={"a": 5, "b": 5},
        placement_version=2,
    )
    play = Play(past, plan=apart())
    play.start()
    assert play.recovery.cut == 2
    assert play.recovery.next_slice == 5
    assert play.controller.cut is not None
    assert play.controller.cut.slice == 2


# -- the recovery bound ----------------------------------------------------------------------------


def test_a_restore_that_took_no_time_says_nothing() -> None:
    plan = counting()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, 5.0, 10.0)
    large = {COUNT[0]: PartitionReport(2, 1, state_bytes=1_000_000_000)}
    before = bound._restore_bytes_per_s
    report = NodeReport(NODES[0], "i", 1, large, restore_s=0.0)
    bound.recovered(1.0, frozenset(COUNT), 1, [report])
    assert bound._restore_bytes_per_s == before
    assert placement.version == 1


def test_a_large_restore_says_how_fast_files_are_read() -> None:
    bound = RecoveryBound(counting(), 5.0, 10.0)
    large = {COUNT[0]: PartitionReport(2, 1, state_bytes=1_000_000_000)}
    before = bound._restore_bytes_per_s
    bound.recovered(1.0, frozenset(COUNT), 1, [NodeReport(NODES[0], "i", 1, large, restore_s=4.0)])
    assert bound._restore_bytes_per_s == pytest.approx((before + 250_000_000) / 2)


def test_the_first_placement_is_planned_at_once_and_then_again_and_again() -> None:
    plan = counting()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, 5.0, 10.0)
    seen = [
        NodeReport(n, "i", 1, {p: PartitionReport(2, e, cpu_s=0.1, out_bytes=1_000)})
        for n in placement.nodes
        for p, e in placement.hosted_by(n).items()
    ]
    planned = []
    for i in range(2 * PLAN_EVERY + 2):
        bound.observe(seen, 1_000 * (i + 1))
        if bound.plan(placement) is not None:
            planned.append(i)
    # An interval needs two slices; from then on, every so often.
    assert planned == [1, 1 + PLAN_EVERY, 1 + 2 * PLAN_EVERY]


# -- wishes ----------------------------------------------------------------------------------------


def test_only_copies_that_are_not_there_are_made_and_it_is_said() -> None:
    plan = counting()
    placement = place(plan, NODES, 1, {})
    change = Wishes(plan, copies=True).change(placement, NODES, {}, {})
    assert change is not None
    assert change.copied == set(COUNT)
    assert change.what == "copies of 2 partitions made"
    one = {COUNT[0]: copied(placement, NODES, {}).copies[COUNT[0]]}
    change = Wishes(plan, copies=True).change(replace(placement, copies=one), NODES, {}, {})
    assert change is not None
    assert change.copied == {COUNT[1]}
    assert change.what == "copies of 1 partitions made"


# -- an adjustment, a stop, a full disk ------------------------------------------------------------


def test_a_node_whose_disk_is_full_is_waited_for() -> None:
    play = Play(interval=1)
    play.start()
    feed(play, 0)
    (run,) = play.controller.handle(BatchArrived(1, 100))
    assert isinstance(run, RunSlice)
    assert run.plan.seal
    assert play.ran(run, disk_full=True)[-1] == PollNodes()
    assert play.controller.handle(BatchArrived(2, 150)) == [PollNodes()]
    play.written(2)
    after = play.controller.handle(NodesPolled(play.reports(3), 160))
    assert "RunSlice" in kinds(after)


def test_a_stop_that_has_begun_waits_for_nothing_new() -> None:
    play = Play(interval=1)
    play.start()
    feed(play, 0)
    (run,) = play.controller.handle(StopRequested(100))  # the slice that seals
    assert isinstance(run, RunSlice)
    assert run.plan.seal
    play.ran(run)
    play.controller.handle(ScaleRequested("count", 3, 110))
    play.written(2)
    after = play.controller.handle(NodesPolled(play.reports(3), 120))
    assert FinishRun() in after


def test_a_change_that_waits_for_its_checkpoint_begins_again_when_that_is_given_up() -> None:
    """A file that came between was never heard of: full ones will take the place of what the nodes
    have loaded ahead."""
    play = Play(interval=1)
    play.start()
    feed(play, 0)
    play.written(1)
    feed(play, 1, now_ms=10)
    adjustment = play.controller.adjustment
    play.controller.handle(ScaleRequested("count", 3, 20))
    play.checkpoints.clear()
    play.written(2)
    play.controller.handle(NodesPolled(play.reports(3), 30))
    assert adjustment.change is not None
    loaded = {n: tuple(q for m, q in adjustment.change.loaded if m == n) for n in NODES}
    ready = tuple(replace(r, prepared=loaded[r.node]) for r in play.reports(4))
    feed(play, 2, now_ms=35)
    play.controller.handle(PartitionsPrepared(ready, 40))
    assert adjustment.state is AdjustmentState.SEALING
    (run,) = play.controller.handle(BatchArrived(3, 45))
    assert isinstance(run, RunSlice)
    assert run.plan.seal
    lacks = CheckpointWritten(COUNT[0], 4, play.placement.owners[COUNT[0]].epoch, "f", False, 1, 1)
    play.ran(run, checkpoints=(lacks,))
    assert adjustment.state is not AdjustmentState.SEALING


# -- chains that come back -------------------------------------------------------------------------


def test_parts_that_get_further_take_no_more_than_they_did() -> None:
    pace = Pace(1_000)
    for left in range(100, 0, -1):
        pace.left(left)
    assert pace.shared_s == SHARED
    for _ in range(IN_VAIN + 1):
        pace.left(1)
    assert pace.shared_s == 2 * SHARED


def test_slices_wait_for_one_that_is_made_up_for_and_for_two_if_need_be() -> None:
    pace = Pace(1_000)
    for _ in range(NEARLY):
        assert pace.waited_for == 1
        pace.nearly(True)
    assert pace.waited_for == MOST_WAITED_FOR == 2
    pace.nearly(False)
    assert pace.waited_for == 1


def replayed(row_s: float, part_s: float) -> int:
    """How far a chain gets that lacks slices from the first on."""
    node = NODES[0]
    work = Work(
        order=("a",),
        above={"a": ()},
        nodes={"a": {node}},
        row_s={"a": {node: row_s}},
        depth={"a": 1},
        rows=dict.fromkeys(range(1, 101), 10),
        end=101,
    )
    return work.portion({"a": 1}, Limits({}, part_s))["a"] - 1


def test_a_part_has_as_many_slices_as_there_is_time_for() -> None:
    assert replayed(0.1, 2.5) == 2
    assert replayed(0.1, 0.5) == 1  # else it would come to nothing
    assert replayed(0.0, 2.5) == FIRST_PART == 8  # that is all there is known
    assert replayed(0.001, 100.0) == MAX_PART_SLICES


# -- load ------------------------------------------------------------------------------------------


def test_the_sources_of_one_node_are_all_its_own() -> None:
    load = Load(5_000)
    only, a0 = NodeId("1"), PartitionId("a", 0)
    for number in range(1, 7):
        plan = SlicePlan(number, Feed.LIVE, number, 1, None, 1_000 * number, 1, False)
        source = SourceReport(0, 1, {"s": 100}, {}, 0, 0.1)
        report = NodeReport(
            only, "i", number, {a0: PartitionReport(number + 1, 1, cpu_s=0.2)},
            sources=(source,), cpu_s=0.3 * number,
        )  # fmt: skip
        load.observe(plan, [report], plan.processing_ms, plan.processing_ms + 400)
    assert load.measure(6_400)
    assert load.measured[-1].nodes == pytest.approx({only: 0.4})


def test_as_many_partitions_at_least_as_at_most() -> None:
    assert Autoscale(min_parallelism=3, max_parallelism=3).max_parallelism == 3


# -- checkpoints, remarks --------------------------------------------------------------------------


def test_whole_is_what_has_a_full_file_of_every_partition() -> None:
    ledger = CheckpointLedger(1_000, None, None)
    placement = place(counting(), NODES, 1, {})
    ledger.installed(COUNT, placement)
    ledger.sealed(1, placement, 0)
    first, second = (
        CheckpointWritten(p, 1, placement.owners[p].epoch, f"{p}@1", True, 1, 0) for p in COUNT
    )
    ledger.written([first])
    assert not ledger.whole
    ledger.written([second])
    assert ledger.whole


@pytest.mark.parametrize(
    ("took", "slower"),
    [
        ((2.0, 3.0, 4.0), True),
        ((2.0, 4.0, 3.0), False),  # it has come down again
        ((3.0, 2.5, 4.5), False),  # it had come down before
    ],
)
def test_slower_and_slower_is_in_every_third(took: tuple[float, ...], slower: bool) -> None:
    third = BATCHES // 3 + 1
    assert _slower([t for t in took for _ in range(third)], 1.0) is slower


def test_what_grows_is_said_in_the_order_of_names() -> None:
    names = [f"count_{i}" for i in range(20)]
    remarks = Remarks(endless=frozenset(names))
    said: list[str] = []
    for number in range(1, 10 * CHECKPOINTS):
        sizes = dict.fromkeys(names, 100 * number)
        said += remarks.observe(Seen(0, 0, 0.1, number, {}, state_rows=sizes))
    assert [text.split("'")[1] for text in said] == sorted(names)


# -- watermarks --------------------------------------------------------------------------------


def test_a_source_is_quiet_only_for_as_long_as_it_was_asked() -> None:
    ledger = WatermarkTracker({"s": 0}, {"s": 100})
    ledger.look({"s": 0}, 900, anew=True)
    assert ledger.quiet_ms == {"s": 0}  # its clock starts now
    ledger.look({"s": 1}, 1_000, anew=True)
    ledger.look({"s": 0}, 1_060, anew=True)
    assert ledger.quiet_ms == {"s": 60}
    ledger.look({"s": 0}, 1_500, anew=False)  # from the log: nobody was asked
    assert ledger.quiet_ms == {"s": 60}
    ledger.look({"s": 0}, 1_100, anew=True)
    assert ledger.quiet_ms == {"s": 100}
    ledger.look({"s": 2}, 1_200, anew=True)
    assert ledger.quiet_ms == {"s": 0}


def test_a_driver_goes_on_from_the_time_that_the_one_before_had_come_to() -> None:
    past = [record(1, watermark_us=500, quiet_ms={"s": 70})]
    ledger = SliceLedger({"s": 0}, past, {"s": 100})
    assert ledger.watermark_us == 500
    ledger._watermark.look({"s": 0}, 1_000, anew=True)
    assert ledger._watermark.quiet_ms == {"s": 70}
