"""The exact planner: every way it resolves a failure, and bounds that hold where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.planning.recovery import solver
from anabranch.planning.recovery.exact import plan_exact
from anabranch.planning.recovery.order import plan_best_density, plan_dp
from anabranch.planning.recovery.queries import (
    RecoveryProblem,
    failure,
    partition_topology,
    random_queries,
)
from anabranch.planning.recovery.solver import cost_shares


def still():
    return 0.0


@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.3, 0.5, 0.8]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_equals_dp_on_random_failures(seed, share, linear):
    problem = random_queries(
        np.random.default_rng(seed),
        queries=11,
        partitions=40,
        max_share=4,
        share_skew=0.5,
        priorities="linear" if linear else "random",
    )
    room = share * problem.cost(problem.costs)
    found = plan_exact(problem, room)
    assert found.plan.priority == plan_dp(problem, room).priority == found.bound


@given(st.integers(0, 10_000), st.floats(0.05, 1.0))
@settings(max_examples=30, deadline=None)
def test_branching_and_splitting_lose_nothing(seed, share):
    problem = random_queries(
        np.random.default_rng(seed), queries=10, partitions=26, max_share=5, per_topology=5
    )
    room = share * problem.cost(problem.costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "ENUMERATE_MAX", 2)
        patch.setattr(solver, "BRANCH_SHARE", 0.0)
        patch.setattr(solver, "BRANCHES_MAX", 10_000)
        found = plan_exact(problem, room)
    assert found.gap == 0
    assert found.plan.priority == plan_dp(problem, room).priority


@given(st.integers(0, 10_000), st.floats(0.05, 1.0))
@settings(max_examples=30, deadline=None)
def test_the_bound_of_cost_shares_is_never_below_the_optimum(seed, share):
    problem = random_queries(np.random.default_rng(seed), queries=10, partitions=40, max_share=5)
    room = share * problem.cost(problem.costs)
    best = plan_dp(problem, room).priority
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "ENUMERATE_MAX", 1)
        patch.setattr(solver, "BRANCHES_MAX", 0)
        found = plan_exact(problem, room, time_limit_s=0.02)
    assert found.bound >= best >= found.plan.priority
    assert found.plan.cost <= room + 1e-6


def test_cost_shares_hand_out_every_cost_and_undercut_every_set():
    problem = random_queries(np.random.default_rng(5), queries=9, partitions=40, max_share=4)
    sharing = problem.sharing
    groups = list(zip(sharing.users, sharing.costs.tolist(), strict=True))
    shares = cost_shares(range(9), groups, sharing.priorities)
    assert shares.sum() == pytest.approx(sharing.costs.sum())
    for mask in range(1 << 9):
        chosen = {q for q in range(9) if mask >> q & 1}
        paid = sum(cost for users, cost in groups if chosen & set(users))
        assert shares[list(chosen)].sum() <= paid + 1e-9


def test_a_tree_of_a_thousand_queries_is_solved_exactly():
    upstream = partition_topology(
        {"source": 1, "parse": 10, "count": 100, "top": 1000},
        [("source", "parse", "all"), ("parse", "count", "keyed"), ("count", "top", "keyed")],
    )
    costs = {p: 1.0 + len(ups) + (int(p.split("/")[1]) % 7) for p, ups in upstream.items()}
    outputs = {p: 1 + int(p.split("/")[1]) % 5 for p in upstream if p.startswith("top")}
    problem = failure(upstream, outputs, costs, set(upstream))
    room = 0.2 * problem.cost(problem.costs)
    found = plan_exact(problem, room)
    assert found.gap == 0
    assert found.plan.cost <= room
    assert found.plan.priority > 0


def test_a_large_tangle_gets_a_plan_near_its_bound():
    problem = random_queries(np.random.default_rng(2), queries=200, partitions=4000, max_share=3)
    room = 0.2 * problem.cost(problem.costs)
    found = plan_exact(problem, room, time_limit_s=0.3)
    assert found.plan.cost <= room
    assert found.gap <= 0.05


def test_without_time_it_still_returns_a_feasible_plan():
    problem = random_queries(np.random.default_rng(2), queries=60, partitions=300, max_share=3)
    room = 0.3 * problem.cost(problem.costs)
    found = plan_exact(problem, room, time_limit_s=0.0, clock=still)
    assert 0 < found.plan.priority <= found.bound
    assert found.plan.cost <= room


def test_beats_or_equals_best_density():
    problem = random_queries(np.random.default_rng(9), queries=40, partitions=200, max_share=3)
    room = 0.4 * problem.cost(problem.costs)
    found = plan_exact(problem, room, time_limit_s=0.3)
    assert found.plan.priority >= plan_best_density(problem, room).priority


def test_no_queries_and_no_room():
    assert plan_exact(RecoveryProblem({}, {}), 5).bound == 0
    problem = RecoveryProblem({"a": 1.0}, {"q": frozenset("a")})
    assert plan_exact(problem, 0).plan.queries == ()


def test_huge_priorities_are_rounded_and_the_bound_says_so():
    queries = {f"q{i}": frozenset({f"p{i}"}) for i in range(30)}
    costs = {f"p{i}": float(i + 1) for i in range(30)}
    priorities = {f"q{i}": 1_000_003 * (i % 7 + 1) for i in range(30)}
    exact = plan_exact(RecoveryProblem(costs, queries, priorities), 100)
    assert exact.gap == 0
    uneven = {q: p + i for i, (q, p) in enumerate(priorities.items())}
    rounded = plan_exact(RecoveryProblem(costs, queries, uneven), 100)
    assert rounded.bound >= rounded.plan.priority
    assert rounded.gap < 0.005
