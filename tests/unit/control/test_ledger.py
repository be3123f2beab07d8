"""What ledgers know."""

from __future__ import annotations

from anabranch.control.ledgers.checkpoints import CheckpointLedger
from anabranch.control.ledgers.slices import SliceLedger
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement
from anabranch.model.reports import CheckpointWritten, NodeReport, Staged
from anabranch.model.slices import Feed, SlicePlan


def test_rows_for_a_sink_come_in_the_order_of_tasks_and_partitions_not_of_their_names() -> None:
    writers = [f"{kind}-{n}" for kind in ("part-a-b", "part-count", "source") for n in range(12)]
    staged = tuple(Staged("out", w, 1, path=w) for w in ("lone", *reversed(writers)))
    report = NodeReport(NodeId("n"), "", 1, {}, staged=staged)
    plan = SlicePlan(1, Feed.NONE, None, 0, None, 0, 1, seal=False)
    record, ordered = SliceLedger({}, ()).commit(plan, 0, [report], 0)
    assert record.staged == {"out": ["lone", *writers]}
    assert [s.writer for s in ordered] == record.staged["out"]


def test_a_cut_in_flight_is_given_up_with_one_that_cannot_be_read() -> None:
    """What cannot be read may be the first of its files: nobody must build upon it again."""
    a, b = PartitionId("count", 0), PartitionId("count", 1)
    owners = {a: Ownership(NodeId("1"), 1), b: Ownership(NodeId("2"), 1)}
    placement = Placement(1, {"count": (0, 1)}, owners, (NodeId("1"), NodeId("2")))
    ledger = CheckpointLedger(10, None, None)
    ledger.installed([a, b], placement)
    for number in (2, 5):
        ledger.sealed(number, placement, 0)
        ledger.written(
            [CheckpointWritten(a, number, 1, f"a{number}", number == 2, 1, 0 if number == 2 else 2)]
        )
        if number == 2:
            ledger.written([CheckpointWritten(b, 2, 1, "b2", True, 1)])
    assert ledger.in_flight
    ledger.fall_back()  # a2 cannot be read
    assert not ledger.in_flight
    assert ledger.written([CheckpointWritten(b, 5, 1, "b5", False, 1, 2)]) is None
    assert ledger.cut is None
