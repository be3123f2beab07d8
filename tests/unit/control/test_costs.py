"""What partitions cost: measured, kept when the placement changes, and what is done with it."""

from __future__ import annotations

import pytest
from tests.unit.control.plays import Play

from anabranch.control.ledgers.costs import CostLedger
from anabranch.control.schedule import LONG_S
from anabranch.control.settings import Past
from anabranch.model.commands import RunSlice
from anabranch.model.costs import Costs
from anabranch.model.events import BatchArrived
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Ownership, Placement, even_groups, place, reassign
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.reports import NodeReport, PartitionReport, SourceReport

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def line(first: int = 2, second: int = 2) -> Plan:
    return compile_plan(
        Graph.checked(
            "line",
            [
                Operator("s", Kind.SOURCE),
                Operator("x", Kind.KEYED, (("s",),), keys=("k",), parallelism=first),
                Operator("y", Kind.KEYED, (("x",),), keys=("v",), parallelism=second),
                Operator("out", Kind.SINK, (("y",),)),
            ],
            key_groups=8,
        )
    )


def x(index: int) -> PartitionId:
    return PartitionId("x", index)


def y(index: int) -> PartitionId:
    return PartitionId("y", index)


def slice_of(
    placement: Placement,
    rows: int,
    busy_s: dict[PartitionId, float],
    waiting: str = "",
    left_out: PartitionId | None = None,
    cpu_s: float = 0.0,
) -> list[NodeReport]:
    """Of this number of rows; partitions that are not named are free; a chain may wait."""
    source = SourceReport(0, 1, {"s": rows}, {}, 0, cpu_s)
    return [
        NodeReport(
            node,
            "1",
            1,
            {
                p: PartitionReport(1 if p.chain == waiting else 2, 1, busy_s=busy_s.get(p, 0.0))
                for p in placement.hosted_by(node)
                if p != left_out
            },
            sources=(source,) if node == placement.nodes[0] else (),
        )
        for node in placement.nodes
    ]


def test_nothing_is_known_before_the_first_rows() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A, B], 1, {})
    assert ledger.of(placement) == {}
    assert ledger.slice_s(placement, 100) is None
    ledger.observe(placement, slice_of(placement, 0, {x(0): 0.1}), 0)
    assert ledger.slice_s(placement, 100) is None


def test_waves_come_one_after_the_other_each_as_long_as_its_fullest_node() -> None:
    plan = line()
    ledger = CostLedger(plan)
    placement = Placement(
        1,
        {"x": even_groups(8, 2), "y": even_groups(8, 2)},
        {p: Ownership(n, 1) for p, n in ((x(0), A), (x(1), B), (y(0), A), (y(1), A))},
        (A, B),
    )
    busy_s = {x(0): 0.1, x(1): 0.4, y(0): 0.2, y(1): 0.3}
    for _ in range(3):
        ledger.observe(placement, slice_of(placement, 1000, busy_s), 0)
    assert ledger.slice_s(placement, 1000) == pytest.approx(0.4 + 0.2 + 0.3)
    assert ledger.slice_s(placement, 500) == pytest.approx(0.45)
    assert ledger.row_s(placement, {"x"}) == pytest.approx(0.0004)
    assert ledger.row_s(placement, {"y"}) == pytest.approx(0.0005)
    assert ledger.row_s(placement, {"x", "y"}) == pytest.approx(0.0009)
    assert CostLedger(plan).row_s(placement, {"x"}) == 0.0
    one = reassign(placement, [x(1)], [A])
    assert ledger.slice_s(one, 1000) == pytest.approx(1.0)  # all on one node


def test_the_newest_slices_count_most() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    for cost in (1.0, *[3.0] * 30):
        ledger.observe(placement, slice_of(placement, 100, {x(0): cost}), 0)
    assert ledger.slice_s(placement, 100) == pytest.approx(3.0, rel=0.05)


def test_costs_go_with_key_groups() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    busy_s = {x(0): 0.4, x(1): 0.8, y(0): 0.5, y(1): 0.5}
    ledger.observe(placement, slice_of(placement, 1000, busy_s), 0)
    four = place(plan, [A], 2, {}, {"x": even_groups(8, 4), "y": even_groups(8, 2)})
    assert ledger.of(four) == pytest.approx(
        {x(0): 0.2, x(1): 0.2, x(2): 0.4, x(3): 0.4, y(0): 0.5, y(1): 0.5}
    )
    one = place(plan, [A], 3, {}, {"x": even_groups(8, 1), "y": even_groups(8, 2)})
    assert ledger.of(one)[x(0)] == pytest.approx(1.2)
    assert x(1) not in ledger.of(one)


def test_what_waits_keeps_what_it_has_cost() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    busy_s = {x(0): 0.4, x(1): 0.4, y(0): 1.0, y(1): 3.0}
    for _ in range(3):
        ledger.observe(placement, slice_of(placement, 1000, busy_s), 0)
    for _ in range(50):
        fewer = slice_of(placement, 10, {x(0): 0.008, x(1): 0.008}, "y", left_out=y(1))
        ledger.observe(placement, fewer, 0)
    row_s = {x(0): 0.0004, x(1): 0.0004, y(0): 0.001, y(1): 0.003}
    assert ledger.costs(placement).row_s != pytest.approx(row_s)  # x is dearer by now
    assert {p: s for p, s in ledger.costs(placement).row_s.items() if p.chain == "y"} == (
        pytest.approx({y(0): 0.001, y(1): 0.003})
    )
    assert ledger.slice_s(placement, 1000, waiting={"y"}) == pytest.approx(1.6, rel=0.1)
    assert ledger.slice_s(placement, 1000) == pytest.approx(1.6 + 4.0, rel=0.1)


def test_what_waits_keeps_its_cost_under_another_layout() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    ledger.observe(placement, slice_of(placement, 1000, {y(0): 1.0, y(1): 3.0}), 0)
    ledger.observe(placement, slice_of(placement, 1000, {y(1): 3.0}, waiting="y"), 0)
    one = place(plan, [A], 3, {}, {"x": even_groups(8, 2), "y": even_groups(8, 1)})
    assert ledger.costs(one).row_s[y(0)] == pytest.approx(0.004)
    assert y(1) not in ledger.costs(one).row_s


def test_partitions_without_an_owner_are_known_too() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    ledger.observe(placement, slice_of(placement, 1000, {y(0): 1.0, y(1): 3.0}), 0)
    left = {p: o for p, o in placement.owners.items() if p.chain == "x"}
    after = Placement(2, placement.groups, left, (A,))
    assert ledger.costs(after).row_s == {x(0): 0.0, x(1): 0.0, y(0): 0.001, y(1): 0.003}
    assert ledger.of(after) == {}


def test_how_many_rows_come() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    assert (ledger.rows_per_s, ledger.source_share(2)) == (0.0, 0.0)
    ledger.observe(placement, slice_of(placement, 9_999, {x(0): 1.0}, cpu_s=9.0), 5_000)
    assert ledger.rows_per_s == 0.0  # nobody knows in which time the first ones came
    for began_ms in (7_000, 9_000):
        ledger.observe(placement, slice_of(placement, 1000, {x(0): 1.0}, cpu_s=0.5), began_ms)
    assert ledger.rows_per_s == pytest.approx(500)
    assert ledger.source_share(2) == pytest.approx(0.125)
    assert ledger.source_share(0) == 0.0
    ledger.observe(placement, slice_of(placement, 1000, {x(0): 1.0}), 3_609_000)  # after a pause
    assert ledger.rows_per_s == pytest.approx(500)
    for i in range(40):
        ledger.observe(placement, slice_of(placement, 100, {x(0): 0.1}), 3_610_000 + 1000 * i)
    assert ledger.rows_per_s == pytest.approx(100, rel=0.05)
    assert ledger.costs(placement).load(x(0)) == pytest.approx(0.1, rel=0.1)


def test_a_long_interval_has_long_pauses() -> None:
    plan = line()
    placement = place(plan, [A], 1, {})
    for interval_ms, known in ((1_000, 0.0), (5_000, 25.0)):
        ledger = CostLedger(plan, interval_ms=interval_ms)
        for began_ms in (0, 40_000):
            ledger.observe(placement, slice_of(placement, 1000, {}), began_ms)
        assert ledger.rows_per_s == known


def test_the_next_run_knows_what_this_one_does() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A, B], 1, {})
    for began_ms in (0, 1000, 2000):
        costs = {x(0): 0.4, x(1): 0.1, y(0): 0.2}
        ledger.observe(placement, slice_of(placement, 1000, costs), began_ms)
    known = ledger.costs(placement)
    after = CostLedger(plan, known, layout=placement.groups)
    assert after.costs(placement).row_s == pytest.approx(known.row_s)
    assert after.rows_per_s == known.rows_per_s == pytest.approx(1000)
    assert after.slice_s(placement, 500) == pytest.approx(ledger.slice_s(placement, 500))
    assert after.of(placement)[x(0)] == pytest.approx(4 * after.of(placement)[x(1)])
    wider = place(plan, [A, B], 2, {}, {"x": even_groups(8, 4), "y": even_groups(8, 2)})
    again = CostLedger(plan, known, layout=placement.groups)
    assert again.costs(wider).row_s[x(0)] == pytest.approx(0.0002)
    other = CostLedger(line(), Costs({PartitionId("gone", 0): 1.0}), layout={"gone": (0,) * 8})
    assert other.costs(placement) == Costs()


def test_the_head_has_the_costs_and_the_first_batch_of_the_next_run_is_cut() -> None:
    play = Play()
    play.start()
    (run,) = play.controller.handle(BatchArrived(0, 0))
    assert isinstance(run, RunSlice)
    assert run.plan.max_rows is None
    busy = {
        node: {
            p: PartitionReport(2, e, busy_s=0.01) for p, e in play.placement.hosted_by(node).items()
        }
        for node in play.nodes
    }
    play.ran(run, rows=10, partitions=busy[play.nodes[0]])
    costs = play.controller.ledgers.head().costs
    (partition,) = busy[play.nodes[0]]
    assert costs.row_s[partition] == pytest.approx(0.001)
    second = Play(Past(costs=costs, groups=play.placement.groups))
    second.start()
    (run,) = second.controller.handle(BatchArrived(0, 0))
    assert isinstance(run, RunSlice)
    assert run.plan.max_rows == pytest.approx(LONG_S / 0.001, abs=1)


def test_lost_partitions_go_where_they_cost_least() -> None:
    plan = line(first=6, second=1)
    placement = place(plan, [A, B, C], 1, {})
    lost = [p for p, o in placement.owners.items() if o.node == C]
    costs = dict.fromkeys(placement.owners, 1.0)
    here = next(p for p, o in placement.owners.items() if o.node == A and p.chain == "x")
    costs[here] = 40.0
    after = reassign(placement, lost, [A, B], costs=costs)
    assert {after.owners[p].node for p in lost if p.chain == "x"} == {B}
    by_count = reassign(placement, lost, [A, B])
    assert {by_count.owners[p].node for p in lost if p.chain == "x"} == {A, B}


def test_what_is_nearly_the_same_is_placed_by_number() -> None:
    plan = line(first=8, second=1)
    placement = place(plan, [A, B, C], 1, {})
    lost = [p for p, o in placement.owners.items() if o.node == C]
    noisy = {p: 1.0 + 0.05 * (i % 3) for i, p in enumerate(placement.owners)}
    after = reassign(placement, lost, [A, B], costs=noisy)
    assert after.owners == reassign(placement, lost, [A, B]).owners


def test_a_chain_is_spread_over_nodes_before_hosts() -> None:
    """One machine with one node and one with three: each node gets as much."""
    plan = line(first=4, second=4)
    nodes = [A, B, C, NodeId("d")]
    placement = place(plan, nodes, 1, {}, hosts={A: "h1", B: "h2", C: "h2", NodeId("d"): "h2"})
    for chain in ("x", "y"):
        assert {placement.owners[p].node for p in placement.partitions(chain)} == set(nodes)


def test_what_some_chains_take_of_each_node() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A, B], 1, {})
    ledger.observe(placement, slice_of(placement, 10, {x(0): 1.0, x(1): 2.0, y(0): 4.0}), 0)
    took = {placement.owners[x(0)].node: 0.1, placement.owners[x(1)].node: 0.2}
    assert ledger.node_row_s(placement, {"x"}) == pytest.approx(took)
