"""Recovery order: the papers' examples, brute force on small failures, and refusals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import PlanningError
from anabranch.planning.recovery import order as recovery
from anabranch.planning.recovery.exact import best_plan, plan_exact
from anabranch.planning.recovery.order import (
    Node,
    candidate_plans,
    plan_best_density,
    plan_dp,
    plan_operator_centric,
    plan_progressive,
    schedule_recovery,
)
from anabranch.planning.recovery.queries import (
    RecoveryProblem,
    failure,
    partition_topology,
    query_partitions,
    random_queries,
)

PLANNERS = [plan_dp, plan_best_density, plan_progressive, plan_operator_centric]


def best_by_brute_force(problem, resources):
    names = list(problem.queries)
    best = 0
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            needs = frozenset().union(*(problem.queries[q] for q in chosen))
            if problem.cost(needs) <= resources + 1e-6:
                best = max(best, problem.value(chosen))
    return best


@st.composite
def problems(draw, max_queries=7):
    count = draw(st.integers(1, max_queries))
    partitions = [f"p{i}" for i in range(draw(st.integers(1, 9)))]
    costs = {p: draw(st.integers(0, 12)) / draw(st.sampled_from([1, 3])) for p in partitions}
    queries = {
        f"q{i}": draw(st.frozensets(st.sampled_from(partitions), min_size=0, max_size=5))
        for i in range(count)
    }
    priorities = {q: draw(st.integers(1, 9)) for q in queries}
    return RecoveryProblem(costs, queries, priorities)


resources = st.floats(0, 60).map(lambda x: round(x, 1))


def figure_2():
    queries = {
        "Q1": {"p3", "p5", "p7", "p9"},
        "Q2": {"p4", "p5", "p7", "p10"},
        "Q3": {"p3", "p6", "p8", "p11"},
        "Q4": {"p4", "p6", "p8", "p12"},
    }
    depths = {"p3": 1, "p4": 1, "p5": 2, "p6": 2, "p7": 3, "p8": 3}
    depths |= {f"p{i}": 4 for i in range(9, 13)}
    return RecoveryProblem(
        {f"p{i}": 1.0 for i in range(3, 13)},
        {q: frozenset(p) for q, p in queries.items()},
        depths=depths,
    )


def figure_1():
    upstream = partition_topology(
        {"O1": 1, "O2": 1, "O3": 4, "O4": 2, "O5": 2},
        [
            ("O1", "O3", "all"),
            ("O2", "O4", "all"),
            ("O3", "O5", "keyed"),
            ("O4", "O5", "keyed"),
        ],
    )
    outputs = [p for p in upstream if p[:2] in ("O3", "O4", "O5")]
    return upstream, failure(
        upstream, dict.fromkeys(outputs, 1), dict.fromkeys(upstream, 1.0), set(upstream)
    )


@pytest.mark.parametrize("planner", [plan_dp, plan_best_density, best_plan])
def test_figure_2_recovers_one_two_two_three_four_queries(planner):
    found = [len(planner(figure_2(), r).queries) for r in (4, 6, 8, 9, 10)]
    assert found == [1, 2, 2, 3, 4]


@pytest.mark.parametrize("planner", [plan_dp, best_plan])
def test_figure_1_when_everything_failed(planner):
    _, problem = figure_1()
    assert len(problem.queries) == 8
    found = [planner(problem, r).priority for r in range(1, 11)]
    assert found == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]


def test_figure_1_query_of_the_first_join_partition():
    upstream, _ = figure_1()
    query = query_partitions(upstream, ["O5/0"])["O5/0"]
    assert query == {"O1/0", "O2/0", "O3/0", "O3/1", "O4/0", "O5/0"}


def test_figure_2_schedule_over_five_nodes_of_two_partitions():
    nodes = [Node(f"N{i}", cpu=2.5) for i in range(1, 6)]
    for planner in (plan_best_density, best_plan):
        plans = schedule_recovery(figure_2(), nodes, planner)
        assert [p.recovered for p in plans] == [(), ("Q1",), ("Q2",), (), ("Q3", "Q4")]
        assert all(len(p.placement) == 2 for p in plans)


def test_operator_centric_recovers_nothing_before_the_fourth_node():
    found = [len(plan_operator_centric(figure_2(), 2 * n).queries) for n in range(1, 6)]
    assert found == [0, 0, 0, 2, 4]


def test_best_density_needs_every_single_query_as_a_seed():
    problem = RecoveryProblem(
        {"a": 1.0, "b": 10.0},
        {"small": frozenset("a"), "large": frozenset("b")},
        {"small": 1, "large": 9},
    )
    assert plan_best_density(problem, 10).priority == 9
    assert plan_progressive(problem, 10).priority == 1  # why 001 improves on 004


def test_queries_that_lost_only_free_partitions_come_back_for_nothing():
    problem = RecoveryProblem(
        {"a": 0.0, "b": 5.0}, {"x": frozenset("a"), "y": frozenset("b"), "z": frozenset()}
    )
    for planner in [*PLANNERS, best_plan]:
        assert set(planner(problem, 0).queries) == {"x", "z"}


@given(problems(), resources)
@settings(max_examples=40, deadline=None)
def test_dp_and_exact_equal_brute_force(problem, room):
    best = best_by_brute_force(problem, room)
    assert plan_dp(problem, room).priority == best
    found = plan_exact(problem, room)
    assert (found.plan.priority, found.bound, found.gap) == (best, best, 0.0)


@given(problems(), resources)
@settings(max_examples=40, deadline=None)
def test_every_plan_is_feasible_and_complete(problem, room):
    for planner in [*PLANNERS, best_plan]:
        plan = planner(problem, room)
        assert plan.cost <= room + 1e-6
        assert plan.queries == problem.recovered(plan.partitions)
        assert plan.priority == problem.value(plan.queries)


@given(problems(), resources)
@settings(max_examples=50, deadline=None)
def test_best_density_keeps_its_guarantee(problem, room):
    shared = max(
        (sum(p in needs for needs in problem.queries.values()) for p in problem.costs), default=1
    )
    share = 1 - math.exp(-1 / max(1, shared))
    best = best_by_brute_force(problem, room)
    assert plan_best_density(problem, room).priority >= share * best - 1e-9


@given(problems(), st.lists(st.floats(1, 12), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_schedules_respect_caps_and_never_move_a_partition(problem, sizes):
    nodes = [Node(f"n{i}", cpu=size) for i, size in enumerate(sizes)]
    plans = schedule_recovery(problem, nodes, plan_best_density)
    load = dict.fromkeys((n.name for n in nodes), 0.0)
    placed: set[str] = set()
    recovered: list[str] = []
    for position, plan in enumerate(plans):
        for partition, node in plan.placement.items():
            assert partition not in placed
            assert node in {n.name for n in nodes[: position + 1]}
            placed.add(partition)
            load[node] += problem.costs[partition]
        recovered += plan.recovered
        assert set(recovered) == set(problem.recovered(placed))
    assert all(load[n.name] <= 0.8 * n.cpu + 1e-6 for n in nodes)
    assert len(recovered) == len(set(recovered))


def test_node_with_most_room_takes_the_partition():
    problem = RecoveryProblem({"a": 2.0}, {"q": frozenset("a")})
    nodes = [Node("busy", cpu=10, used=7), Node("idle", cpu=5)]
    first, second = schedule_recovery(problem, nodes, plan_best_density)
    assert first.placement == {}
    assert second.placement == {"a": "idle"}


def test_leftover_room_goes_to_the_next_query_most_shared_first():
    problem = figure_2()
    (plan,) = schedule_recovery(problem, [Node("n", cpu=7.5)], plan_best_density)
    assert plan.recovered == ("Q1", "Q2")
    (plan,) = schedule_recovery(problem, [Node("n", cpu=10)], plan_best_density)
    assert set(plan.placement) >= {"p6", "p8"}


def test_candidates_serve_every_resource_limit():
    problem = random_queries(np.random.default_rng(3), queries=9, partitions=30, max_share=3)
    total = problem.cost(problem.costs)
    table = candidate_plans(problem, total)
    for share in (0.1, 0.35, 0.8, 1.0):
        assert table.best_for(share * total).priority == best_plan(problem, share * total).priority


def test_generated_failures_keep_to_their_settings():
    problem = random_queries(
        np.random.default_rng(0),
        queries=18,
        partitions=90,
        max_share=3,
        priorities="linear",
    )
    counts = [sum(p in n for n in problem.queries.values()) for p in problem.costs]
    assert max(counts) == 3
    assert len(problem.costs) == 90
    by_cost = sorted(problem.queries, key=lambda q: problem.cost(problem.queries[q]))
    assert problem.priority(by_cost[0]) == 1
    assert problem.priority(by_cost[-1]) == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RecoveryProblem({"a": -1.0}, {}), "'a' needs -1.0"),
        (lambda: RecoveryProblem({"a": math.nan}, {}), "finite"),
        (lambda: RecoveryProblem({}, {"q": frozenset("x")}), "'x'"),
        (lambda: RecoveryProblem({}, {}, {"q": 1}), "unknown query 'q'"),
        (lambda: RecoveryProblem({}, {"q": frozenset()}, {"q": 0}), "integer >= 1"),
        (lambda: RecoveryProblem({}, {"q": frozenset()}, {"q": 1.5}), "integer >= 1"),
        (lambda: partition_topology({"a": 0}, []), "at least 1"),
        (lambda: partition_topology({"a": 1}, [("a", "b", "all")]), "unknown operator 'b'"),
        (lambda: query_partitions({"a": ["b"], "b": ["a"]}, ["a"]), "cycle"),
        (lambda: query_partitions({"a": ["z"]}, ["a"]), "unknown partition 'z'"),
        (lambda: query_partitions({"a": []}, ["b"]), "output 'b'"),
        (lambda: failure({"a": []}, {"a": 1}, {}, {"a"}), "no cost"),
        (lambda: failure({"a": []}, {"a": 1}, {}, {"b"}), "'b' is not in the topology"),
        (lambda: schedule_recovery(figure_2(), [Node("n", cpu=0)], plan_dp), "cpu > 0"),
        (
            lambda: schedule_recovery(figure_2(), [Node("n", cpu=1), Node("n", cpu=1)], plan_dp),
            "same name",
        ),
        (lambda: schedule_recovery(figure_2(), [], plan_dp, cap=1.2), "share"),
        (lambda: plan_dp(figure_2(), -1), "resources are -1"),
        (lambda: plan_exact(figure_2(), math.nan), "resources are nan"),
    ],
)
def test_refusals_say_what_to_change(make, message):
    with pytest.raises(PlanningError, match=message):
        make()


def test_dp_refuses_what_it_could_not_hold(monkeypatch):
    monkeypatch.setattr(recovery, "MAX_CANDIDATES", 1 << 12)
    queries = {f"q{i}": frozenset({f"p{i}"}) for i in range(30)}
    problem = RecoveryProblem({f"p{i}": 1.0 for i in range(30)}, queries)
    with pytest.raises(PlanningError, match="plan_exact"):
        plan_dp(problem, 30)
    assert plan_dp(problem, 2).priority == 2
