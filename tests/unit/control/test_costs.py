"""What partitions cost: measured, kept when the placement changes, and what is done with it."""

from __future__ import annotations

import pytest

from anabranch.control.ledgers.costs import CostLedger
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


def slice_of(placement: Placement, rows: int, busy_s: dict[PartitionId, float]) -> list[NodeReport]:
    """Of this number of rows; partitions that are not named are free."""
    source = SourceReport(0, 1, {"s": rows}, {}, 0, 0.0)
    return [
        NodeReport(
            node,
            "1",
            1,
            {
                p: PartitionReport(2, 1, busy_s=busy_s.get(p, 0.0))
                for p in placement.hosted_by(node)
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
    ledger.observe(placement, slice_of(placement, 0, {x(0): 0.1}))
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
        ledger.observe(placement, slice_of(placement, 1000, busy_s))
    assert ledger.slice_s(placement, 1000) == pytest.approx(0.4 + 0.2 + 0.3)
    assert ledger.slice_s(placement, 500) == pytest.approx(0.45)
    one = reassign(placement, [x(1)], [A])
    assert ledger.slice_s(one, 1000) == pytest.approx(1.0)  # all on one node


def test_the_newest_slices_count_most() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    for cost in (1.0, *[3.0] * 30):
        ledger.observe(placement, slice_of(placement, 100, {x(0): cost}))
    assert ledger.slice_s(placement, 100) == pytest.approx(3.0, rel=0.05)


def test_costs_go_with_key_groups() -> None:
    plan = line()
    ledger, placement = CostLedger(plan), place(plan, [A], 1, {})
    busy_s = {x(0): 0.4, x(1): 0.8, y(0): 0.5, y(1): 0.5}
    ledger.observe(placement, slice_of(placement, 1000, busy_s))
    four = place(plan, [A], 2, {}, {"x": even_groups(8, 4), "y": even_groups(8, 2)})
    assert ledger.of(four) == pytest.approx(
        {x(0): 0.2, x(1): 0.2, x(2): 0.4, x(3): 0.4, y(0): 0.5, y(1): 0.5}
    )
    one = place(plan, [A], 3, {}, {"x": even_groups(8, 1), "y": even_groups(8, 2)})
    assert ledger.of(one)[x(0)] == pytest.approx(1.2)
    assert x(1) not in ledger.of(one)


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
