"""Backups chosen from measurements, so that a lost node is back within a bound."""

from __future__ import annotations

import math

import pytest

from anabranch.control.policies.recovery_bound import EFFORT, FIXED_S, PLAN_EVERY, RecoveryBound
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement, adjust, evenly, place, reassign
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.reports import NodeReport, PartitionReport

NODES = tuple(NodeId(str(i)) for i in range(6))
INTERVAL_S = 10.0


def line(chains: int = 3, parallelism: int = 2) -> Plan:
    """s → o0 → o1 → …, each with a key of its own; 10 slices between two checkpoints."""
    operators = [Operator("s", Kind.SOURCE)]
    for i in range(chains):
        before = operators[-1].name
        operators.append(
            Operator(f"o{i}", Kind.KEYED, ((before,),), keys=(f"k{i}",), parallelism=parallelism)
        )
    operators.append(Operator("out", Kind.SINK, ((operators[-1].name,),)))
    return compile_plan(Graph.checked("t", operators, key_groups=8))


def reports(placement: Placement, cpu_s: dict[str, float]) -> list[NodeReport]:
    return [
        NodeReport(
            n,
            "i",
            1,
            {
                p: PartitionReport(2, e, cpu_s=cpu_s.get(p.chain, 0.1), out_bytes=1_000)
                for p, e in placement.hosted_by(n).items()
            },
        )
        for n in placement.nodes
    ]


def run(bound: RecoveryBound, placement: Placement, cpu_s: dict[str, float], slices: int) -> None:
    start = bound._last_ms or 0
    for i in range(slices):
        bound.observe(reports(placement, cpu_s), start + 1_000 * (i + 1))


def test_the_fewest_backups_within_the_bound() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})  # every partition on a node of its own
    # Each partition: 10 slices of 0.1 s again: 1 s. Three in a row without a backup: 3 s.
    for seconds, chains in ((3.1, set()), (2.1, {"o1"}), (1.1, {"o0", "o1"})):
        bound = RecoveryBound(plan, FIXED_S + seconds, INTERVAL_S)
        run(bound, placement, {}, PLAN_EVERY)
        choice = bound.plan(placement)
        assert choice is not None
        found = {p.chain for p in choice.backups}
        assert len(found) == len(chains)
        assert found == chains or seconds == 2.1  # o0 or o1 will do
        assert max(choice.predicted_s.values()) <= FIXED_S + seconds
        assert not choice.problem


def test_nothing_before_it_was_measured_and_then_now_and_again() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, 5.0, INTERVAL_S)
    assert bound.plan(placement) is None
    run(bound, placement, {}, PLAN_EVERY)
    first = bound.plan(placement)
    run(bound, placement, {"o2": 0.2}, PLAN_EVERY - 1)
    assert bound.plan(placement) is None
    run(bound, placement, {"o2": 0.2}, 1)
    second = bound.plan(placement)
    assert first is not None
    assert second is not None
    assert second.backups == first.backups  # nobody else backs up, but it will take longer
    slow = PartitionId("o2", 0)
    assert second.predicted_s[slow] > first.predicted_s[slow] + 0.9


def test_measurements_and_placements_that_change_are_planned_again() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, FIXED_S + 2.1, INTERVAL_S)
    run(bound, placement, {}, PLAN_EVERY)
    first = bound.plan(placement)
    run(bound, placement, {"o0": 0.001, "o1": 0.001}, 2 * PLAN_EVERY)
    second = bound.plan(placement)
    assert first is not None
    assert second is not None
    assert len(second.backups) < len(first.backups)
    moved = reassign(placement, [PartitionId("o0", 0)], NODES[1:])
    run(bound, moved, {}, 1)
    bound.plan(moved)
    assert bound._version == moved.version


def test_after_a_scaling_the_first_slice_plans_for_the_new_partitions() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, FIXED_S + 2.1, INTERVAL_S)
    run(bound, placement, {}, PLAN_EVERY)
    first = bound.plan(placement)
    assert first is not None
    assert len({p.chain for p in first.backups}) == 1
    epochs = {p: o.epoch for p, o in placement.owners.items()}
    sizes = evenly(placement.groups, {"o0": 4, "o1": 4, "o2": 1})
    after = adjust(placement, sizes, NODES, epochs)
    assert bound.plan(after) is None  # the new ones are not measured yet
    # Half the work in each partition of o0 and o1, twice as much in the one of o2: 0.5, 0.5, 2 s.
    run(bound, after, {"o0": 0.05, "o1": 0.05, "o2": 0.2}, 1)
    second = bound.plan(after)
    assert second is not None
    assert bound._version == after.version
    assert second.predicted_s.keys() == after.owners.keys()
    assert second.backups <= after.owners.keys()
    assert second.backups & (after.owners.keys() - placement.owners.keys())
    assert max(second.predicted_s.values()) <= FIXED_S + 2.1


def test_a_backup_on_the_lost_node_does_not_count() -> None:
    plan = line(chains=2, parallelism=1)
    alone = place(plan, NODES[:1], 1, {})
    bound = RecoveryBound(plan, FIXED_S + 1.5, INTERVAL_S)
    run(bound, alone, {}, PLAN_EVERY)
    choice = bound.plan(alone)
    assert choice is not None
    assert "too long" in choice.problem
    assert max(choice.predicted_s.values()) == pytest.approx(FIXED_S + 2.0)


def test_what_recoveries_really_take_is_learnt() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, 5.0, INTERVAL_S)
    run(bound, placement, {}, PLAN_EVERY)
    choice = bound.plan(placement)
    assert choice is not None
    lost = frozenset({PartitionId("o0", 0)})
    before = choice.predicted_s[PartitionId("o0", 0)]
    for _ in range(20):
        bound.recovered(before + 1.0, lost, 10, ())
        run(bound, placement, {}, PLAN_EVERY)
        bound.plan(placement)
    assert bound.choice is not None
    assert bound.choice.predicted_s[PartitionId("o0", 0)] == pytest.approx(before + 1.0, rel=0.05)


def test_an_early_loss_says_nothing_about_what_is_fixed() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, 5.0, INTERVAL_S)
    run(bound, placement, {}, PLAN_EVERY)
    first = bound.plan(placement)
    lost = PartitionId("o0", 0)
    bound.recovered(FIXED_S + 0.1, frozenset({lost}), 1, ())  # one slice to replay, not ten
    run(bound, placement, {}, PLAN_EVERY)
    second = bound.plan(placement)
    assert first is not None
    assert second is not None
    assert second.predicted_s[lost] == pytest.approx(first.predicted_s[lost])


def test_how_fast_state_is_restored_is_learnt() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})
    bound = RecoveryBound(plan, 60.0, INTERVAL_S)
    lost = PartitionId("o0", 0)
    node = placement.owners[lost].node
    large = {lost: PartitionReport(2, 1, state_bytes=1_000_000_000)}
    for i in range(PLAN_EVERY):
        bound.observe([*reports(placement, {}), NodeReport(node, "i", 1, large)], 1_000 * (i + 1))
    first = bound.plan(placement)
    for _ in range(20):  # 50 MB a second, not 200
        bound.recovered(25.0, frozenset({lost}), 0, [NodeReport(node, "i", 1, large, restore_s=20)])
    bound.observe([*reports(placement, {}), NodeReport(node, "i", 1, large)], 30_000)
    moved = reassign(placement, [lost], NODES[1:])
    second = bound.plan(moved)
    assert first is not None
    assert second is not None
    assert second.predicted_s[lost] - first.predicted_s[lost] == pytest.approx(15.0 + 4.5, rel=0.1)


def test_slices_say_how_long_a_job_takes() -> None:
    plan = line()
    placement = place(plan, NODES, 1, {})
    quiet, busy = (RecoveryBound(plan, 60.0, INTERVAL_S) for _ in range(2))
    for i in range(4 * PLAN_EVERY):
        quiet.observe(reports(placement, {}), 1_000 * (i + 1), 0.3)
        busy.observe(reports(placement, {}), 1_000 * (i + 1), 2.3)  # with the same work
    first, second = quiet.plan(placement), busy.plan(placement)
    assert first is not None
    assert second is not None
    some = PartitionId("o0", 0)
    assert second.predicted_s[some] - first.predicted_s[some] == pytest.approx(2.0, rel=0.01)


def test_a_plan_is_limited_by_work_and_not_by_time() -> None:
    """Two drivers that have measured the same choose the same, however busy they are."""
    assert math.isinf(EFFORT.seconds)
    plan = line(chains=5, parallelism=8)
    placement = place(plan, tuple(NodeId(str(i)) for i in range(13)), 1, {})
    choices = []
    for _ in range(3):
        bound = RecoveryBound(plan, FIXED_S + 4.1, INTERVAL_S)
        run(bound, placement, {"o1": 0.13, "o3": 0.07}, PLAN_EVERY)
        choices.append(bound.plan(placement))
    assert choices[0] is not None
    assert choices[0].backups
    assert choices.count(choices[0]) == 3
