"""The exact planner against brute force: costs, lost nodes, kept backups, bounds, the curve."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backups import brute_force, line, problems

from anabranch.errors import PlanningError
from anabranch.planning.backups import exact as backups_exact
from anabranch.planning.backups.cover import Effort
from anabranch.planning.backups.curve import tradeoff
from anabranch.planning.backups.exact import optimal_backups, replan_backups
from anabranch.planning.backups.paths import LongPaths
from anabranch.planning.backups.plan import BackupProblem, evaluate, smallest_bound
from anabranch.planning.backups.reduce import reduce, whole
from anabranch.planning.backups.search import (
    cut_greedily,
    improve,
    packing_bound,
    prune,
    repair,
    slow_paths,
)
from anabranch.planning.workloads import topologies


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_plan_is_the_cheapest_and_proven(problem: BackupProblem) -> None:
    plan = optimal_backups(problem)
    assert plan.optimal
    assert plan.cost == pytest.approx(brute_force(problem), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_a_plan_for_lost_nodes_is_the_cheapest(problem: BackupProblem, data: st.DataObject) -> None:
    count = len(problem.graph)
    hosts = tuple(data.draw(st.lists(st.sampled_from("ABC"), min_size=count, max_size=count)))
    hosted = BackupProblem(problem.graph, problem.bound_s, problem.reprocess_s, problem.cost, hosts)
    least, _ = smallest_bound(hosted)
    hosted = hosted.with_bound(max(hosted.bound_s, least))
    plan = optimal_backups(hosted)
    assert plan.optimal
    assert plan.cost == pytest.approx(brute_force(hosted), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(weighted=False), st.data())
def test_replanning_keeps_most_backups_at_equal_cost(
    problem: BackupProblem, data: st.DataObject
) -> None:
    names = problem.graph.tasks
    existing = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    plan = replan_backups(problem, [*existing, "gone"])
    least = brute_force(problem)
    assert plan.cost == plan.lower_bound == least
    most = max(
        len(existing & set(choice))
        for choice in combinations(names, round(least))
        if not evaluate(problem, choice).violations
    )
    assert len(existing & plan.backups) == most


@settings(max_examples=80, deadline=None)
@given(problems(max_tasks=8))
def test_rows_search_and_packing_agree_with_brute_force(problem: BackupProblem) -> None:
    """The methods for large parts, on parts small enough to check."""
    least = brute_force(problem)
    reduction = reduce(problem)
    bound = upper = problem.cost_of(reduction.forced)
    for part in reduction.parts:
        paths = LongPaths(part)
        bound += packing_bound(part, paths, rounds=30)
        plan = improve(part, paths, cut_greedily(part, paths), rounds=2)
        assert not slow_paths(part, plan)
        upper += math.fsum(part.cost[v] for v in plan)
    assert bound <= least + 1e-6
    assert upper >= least - 1e-9


def test_a_free_task_at_the_end_of_a_path_does_not_stop_the_search() -> None:
    graph, times = line(1, 1, 1, 1)
    problem = BackupProblem.of(graph, 2, times, {"t0": 1, "t1": 1, "t2": 0, "t3": 1})
    (part,) = reduce(problem).parts
    assert 0.0 in part.cost
    assert len(cut_greedily(part, LongPaths(part))) == 1


def test_large_parts_are_proven_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = topologies.random_dag(60, 180, seed=5)
    problem = BackupProblem.of(graph, 9, topologies.reprocess_times(graph, 5, high=3))
    by_program = optimal_backups(problem)
    monkeypatch.setattr(backups_exact, "PROGRAM_TASKS", 0)
    by_rows = optimal_backups(problem)
    assert by_rows.optimal
    assert by_rows.cost == by_program.cost
    monkeypatch.setattr(backups_exact, "ROW_TASKS", 0)
    by_search = optimal_backups(problem)
    assert by_search.lower_bound <= by_program.cost <= by_search.cost


@settings(max_examples=60, deadline=None)
@given(problems(max_tasks=8), st.data())
def test_repair_reaches_the_bound_and_prune_keeps_it(
    problem: BackupProblem, data: st.DataObject
) -> None:
    part = whole(problem)
    start = data.draw(st.sets(st.integers(0, len(problem.graph) - 1)))
    repaired = repair(part, start)
    assert start <= repaired
    pruned = prune(part, repaired)
    assert not evaluate(problem, problem.graph.names(pruned)).violations
    for v in pruned:
        assert evaluate(problem, problem.graph.names(pruned - {v})).violations


def test_loads_count_the_long_paths_through_each_task() -> None:
    graph = topologies.random_dag(12, 30, seed=2)
    problem = BackupProblem.of(graph, 3)
    part = whole(problem)
    load, total = LongPaths(part).loads(np.ones(12))
    paths = [(v,) for v in range(12)]
    for _ in range(2):
        paths = [(*p, w) for p in paths for w in graph.downstream[p[-1]]]
    prefixes = [p for p in paths if graph.downstream[p[-1]]]
    assert total == len(prefixes)
    assert load.tolist() == [sum(v in p for p in prefixes) for v in range(12)]


def test_the_curve_of_the_paper_line() -> None:
    graph, times = line(2, 1, 4, 3, 3)
    points = tradeoff(BackupProblem.of(graph, 1, times))
    assert [(p.bound_s, p.plan.cost) for p in points] == [(4, 3), (6, 2), (7, 1), (13, 0)]


def test_the_curve_of_twitter_sentiment_and_of_a_lone_task() -> None:
    points = tradeoff(BackupProblem.of(topologies.twitter_sentiment(50, 20, 20), 1))
    assert [(p.bound_s, p.plan.cost) for p in points] == [(1, 92), (2, 22), (3, 2), (4, 1), (6, 0)]
    lone = tradeoff(BackupProblem.of(topologies.lines([1]), 1, 2.5))
    assert [(p.bound_s, p.plan.cost) for p in lone] == [(2.5, 0)]


def test_scaling_up_starts_no_backup_that_runs_already() -> None:
    before = optimal_backups(BackupProblem.of(topologies.elastic_sentiment(10), 3))
    after = BackupProblem.of(topologies.elastic_sentiment(20), 3)
    again = replan_backups(after, before.backups)
    assert again.backups == before.backups
    assert again.optimal


def test_decimal_times_fit_their_sum() -> None:
    graph, times = line(0.1, 0.2)
    assert optimal_backups(BackupProblem.of(graph, 0.3, times)).cost == 0


def test_a_path_on_one_node_sets_the_smallest_bound() -> None:
    graph, times = line(1, 1, 1)
    problem = BackupProblem.of(graph, 2, times, hosts=dict.fromkeys(graph.tasks, "n1"))
    with pytest.raises(PlanningError, match=r"'t2'.*when its node is lost.*at least 3 s"):
        optimal_backups(problem)


def test_out_of_time_still_gives_a_plan_and_a_bound() -> None:
    graph = topologies.random_dag(120, 600, seed=1)
    problem = BackupProblem.of(graph, 4)
    plan = optimal_backups(problem, effort=Effort(0.05))
    assert not evaluate(problem, plan.backups).violations
    assert 0 <= plan.lower_bound <= plan.cost
    assert plan.gap_pct >= 0


@pytest.mark.parametrize("hosts", [None, 13])
def test_limited_by_work_a_plan_does_not_depend_on_the_machine(hosts: int | None) -> None:
    """What the work allows is found, and always the same; more work proves more."""
    graph = topologies.random_dag(40, 130, seed=2)
    nodes = None if hosts is None else {t: f"n{i % hosts}" for i, t in enumerate(graph.tasks)}
    problem = BackupProblem.of(graph, 4, hosts=nodes)
    little, more = Effort(rows=10, nodes=1), Effort(rows=10_000, nodes=100_000)
    plans = [optimal_backups(problem, effort=little) for _ in range(2)]
    assert {p.backups for p in plans} == {plans[0].backups}
    assert not evaluate(problem, plans[0].backups).violations
    best = optimal_backups(problem, effort=more)
    assert best.optimal
    assert plans[0].lower_bound <= best.cost <= plans[0].cost


def test_rows_limit_the_work() -> None:
    graph = topologies.random_dag(60, 200, seed=2)
    hosts = {t: f"n{i % 13}" for i, t in enumerate(graph.tasks)}
    problem = BackupProblem.of(graph, 4, hosts=hosts)
    assert not optimal_backups(problem, effort=Effort(rows=1)).optimal
