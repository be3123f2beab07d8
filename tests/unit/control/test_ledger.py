"""What the record of a slice says."""

from __future__ import annotations

from anabranch.control.ledger import SliceLedger
from anabranch.model.ids import NodeId
from anabranch.model.reports import NodeReport, Staged
from anabranch.model.slices import Feed, SlicePlan


def test_rows_for_a_sink_come_in_the_order_of_tasks_and_partitions_not_of_their_names() -> None:
    writers = [f"{kind}-{n}" for kind in ("part-a-b", "part-count", "source") for n in range(12)]
    staged = tuple(Staged("out", w, 1, path=w) for w in ("lone", *reversed(writers)))
    report = NodeReport(NodeId("n"), "", 1, {}, staged=staged)
    plan = SlicePlan(1, Feed.NONE, None, 0, None, 0, 1, seal=False)
    record, ordered = SliceLedger({}, ()).commit(plan, 0, [report], 0)
    assert record.staged == {"out": ["lone", *writers]}
    assert [s.writer for s in ordered] == record.staged["out"]
