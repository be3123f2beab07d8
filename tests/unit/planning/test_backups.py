"""Backup plans: the failure-effect model, the paper's vectors, the corrected algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import PlanningError
from anabranch.planning.backups.exact import optimal_backups
from anabranch.planning.backups.paper import (
    dag_backups,
    exhaustive_backups,
    line_backups,
    share_based_backups,
    tree_backups,
)
from anabranch.planning.backups.plan import (
    BackupPlan,
    BackupProblem,
    checkpoint_interval_s,
    evaluate,
    latencies,
)
from anabranch.planning.graph import TaskGraph
from anabranch.planning.workloads import topologies

Planner = Callable[[BackupProblem], BackupPlan]


def line(*times: float) -> tuple[TaskGraph, dict[str, float]]:
    names = [f"t{i}" for i in range(len(times))]
    return TaskGraph.of(pairwise(names), names), dict(zip(names, times, strict=True))


def brute_force(problem: BackupProblem) -> float:
    """The least cost over all subsets, straight from the model."""
    tasks = range(len(problem.graph))
    return min(
        problem.cost_of(choice)
        for size in range(len(problem.graph) + 1)
        for choice in combinations(tasks, size)
        if not evaluate(problem, problem.graph.names(choice)).violations
    )


@st.composite
def problems(draw: st.DrawFn, max_tasks: int = 7, weighted: bool = True) -> BackupProblem:
    tasks = draw(st.integers(1, max_tasks))
    pairs = list(combinations([f"t{i}" for i in range(tasks)], 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    graph = TaskGraph.of(edges, (f"t{i}" for i in range(tasks)))
    times = draw(
        st.lists(st.sampled_from([0.0, 0.1, 0.2, 1, 2, 3]), min_size=tasks, max_size=tasks)
    )
    costs = draw(
        st.lists(st.sampled_from([0.0, 1, 2.5, 3, math.pi]), min_size=tasks, max_size=tasks)
    )
    slack = draw(st.sampled_from([0.1, 0.2, 0.3, 1, 2, 3, 4]))
    return BackupProblem(
        graph,
        max(*times, 0.1) + slack if tasks > 1 else times[0] + slack,
        tuple(times),
        tuple(costs) if weighted else (1.0,) * tasks,
    )


# --- the model


def test_latency_follows_the_definition() -> None:
    graph, times = line(2, 1, 4, 3, 3)
    problem = BackupProblem.of(graph, 7, times)
    assert latencies(problem, {2}) == [2, 3, 7, 3, 6]
    assert latencies(problem, ()) == [2, 3, 7, 10, 13]


def test_evaluation_says_who_breaks_the_bound_and_by_how_much() -> None:
    graph, times = line(2, 1, 4, 3, 3)
    result = evaluate(BackupProblem.of(graph, 7, times), ["t0"])
    assert [(v.task, v.latency_s, v.excess_s) for v in result.violations] == [
        ("t3", 8, 1),
        ("t4", 11, 4),
    ]
    assert (result.worst_s, result.cost) == (11, 1)


def test_a_lost_node_takes_its_backups_with_it() -> None:
    graph, times = line(1, 1, 1, 1)
    hosts = {"t0": "n1", "t1": "n1", "t2": "n1", "t3": "n2"}
    problem = BackupProblem.of(graph, 2, times, hosts=hosts)
    alone = evaluate(BackupProblem.of(graph, 2, times), ["t1"])
    assert not alone.violations
    lost = evaluate(problem, ["t1"])
    assert [(v.task, v.node, v.latency_s) for v in lost.violations] == [("t2", "n1", 3)]
    assert lost.latency_s["t3"] == 2  # its upstream's backup is on the other node


def test_checkpoint_interval_balances_cost_and_loss() -> None:
    best = checkpoint_interval_s(failures_per_s=1e-4, checkpoint_s=0.5)
    assert best == pytest.approx(100.0)

    def lost_time(interval: float) -> float:
        return 0.5 / interval + 1e-4 * interval / 2

    assert lost_time(best) < min(lost_time(0.9 * best), lost_time(1.1 * best))


# --- vectors


@pytest.mark.parametrize("plan", [line_backups, tree_backups, dag_backups, optimal_backups])
@pytest.mark.parametrize(
    ("bound", "count"),
    [(4, 3), (5.9, 3), (6, 2), (6.9, 2), (7, 1), (12.9, 1), (13, 0), (99, 0)],
)
def test_line_of_the_paper(plan: Planner, bound: float, count: int) -> None:
    graph, times = line(2, 1, 4, 3, 3)
    found = plan(BackupProblem.of(graph, bound, times))
    assert len(found.backups) == count
    if bound == 7:
        assert found.backups == {"t2"}


@pytest.mark.parametrize("plan", [line_backups, tree_backups, dag_backups, optimal_backups])
def test_parallel_lines_of_the_paper(plan: Planner) -> None:
    graph = topologies.lines([4, 3])
    times = dict(zip(graph.tasks, (3, 1, 3, 2, 1, 3, 5, 1), strict=True))
    assert len(plan(BackupProblem.of(graph, 8, times)).backups) == 2


@pytest.mark.parametrize("plan", [dag_backups, optimal_backups])
@pytest.mark.parametrize(
    ("shape", "counts"),
    [((50, 20, 20), [92, 22, 2, 1, 1, 0]), ((30, 30, 30), [92, 32, 2, 1, 1, 0])],
)
def test_twitter_sentiment(plan: Planner, shape: tuple[int, int, int], counts: list[int]) -> None:
    graph = topologies.twitter_sentiment(*shape)
    found = [plan(BackupProblem.of(graph, bound)) for bound in range(1, 7)]
    assert [len(f.backups) for f in found] == counts


def printed_tree(problem: BackupProblem) -> set[int]:
    """Algorithm 3 as printed but for its line 8 (which must test u): kept to show its fault."""
    graph, times = problem.graph, problem.reprocess_s
    backups: set[int] = set()
    pending = sorted(graph.sources)
    while pending:
        v = source = pending.pop(0)
        length = 0.0 if source in backups else times[source]
        while True:
            mark = v
            if not graph.downstream[v]:
                break
            u = graph.downstream[v][0]
            length += times[u]
            if length > problem.limit_s:
                backups.add(mark)
                pending.append(mark)
                break
            if u in backups:
                break
            v = u
    return backups


def test_the_printed_tree_search_is_not_optimal() -> None:
    chain = [f"x{i}" for i in range(1, 7)]
    graph = TaskGraph.of([("s1", "x1"), ("s2", "x1"), *pairwise(chain)])
    problem = BackupProblem.of(graph, 4, {**dict.fromkeys(graph.tasks, 1.0), "s2": 2.0})
    assert len(printed_tree(problem)) > 1
    assert tree_backups(problem).backups == {"x2"}
    assert optimal_backups(problem).backups == {"x2"}


def test_striking_tasks_of_other_branches_would_break_the_guarantee() -> None:
    edges = [("s", "x"), ("x", "m"), ("m", "n"), ("x", "y")]
    graph = TaskGraph.of(edges)
    problem = BackupProblem.of(graph, 5, {"s": 1, "x": 1, "m": 3, "n": 1, "y": 4})
    # The printed line 11 strikes s and x once m is chosen; y then stays at 6 s.
    assert [v.task for v in evaluate(problem, ["m"]).violations] == ["y"]
    for plan in (dag_backups(problem), optimal_backups(problem)):
        assert plan.backups in ({"s"}, {"x"})


def test_share_based_meets_the_bound_and_costs_more_on_a_line() -> None:
    graph = topologies.lines([12])
    problem = BackupProblem.of(graph, 5, topologies.reprocess_times(graph, 4, high=4))
    assert share_based_backups(problem).cost >= line_backups(problem).cost


# --- against brute force


@settings(max_examples=120, deadline=None)
@given(problems(weighted=False))
def test_heuristics_keep_the_bound_and_never_beat_the_optimum(problem: BackupProblem) -> None:
    least = brute_force(problem)
    assert exhaustive_backups(problem).cost == least
    for plan in (dag_backups(problem), share_based_backups(problem)):
        assert not evaluate(problem, plan.backups).violations
        assert plan.cost >= least


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_trees_are_optimal_for_equal_costs(data: st.DataObject) -> None:
    tasks = data.draw(st.integers(1, 9))
    parents = [data.draw(st.integers(0, i - 1)) for i in range(1, tasks)]
    names = [f"t{i}" for i in range(tasks)]
    graph = TaskGraph.of([(f"t{i + 1}", f"t{p}") for i, p in enumerate(parents)], names)
    times = {name: data.draw(st.integers(1, 4)) for name in names}
    problem = BackupProblem.of(graph, data.draw(st.integers(4, 9)), times)
    plan = tree_backups(problem)
    assert plan.cost == brute_force(problem)
    assert plan.optimal


@settings(max_examples=60, deadline=None)
@given(problems(max_tasks=9))
def test_dag_heuristic_with_weights_keeps_the_bound(problem: BackupProblem) -> None:
    assert not evaluate(problem, dag_backups(problem).backups).violations


# --- refusals


def test_an_impossible_bound_names_the_task_and_the_bound_that_works() -> None:
    graph, times = line(2, 1, 4, 3, 3)
    for plan in (line_backups, dag_backups, optimal_backups, exhaustive_backups):
        with pytest.raises(PlanningError, match=r"'t2'.*0\.5 s too long.*at least 4 s") as refusal:
            plan(BackupProblem.of(graph, 3.5, times))
        assert refusal.value.fields["smallest_bound_s"] == 4


@pytest.mark.parametrize("bound", [0, -1, math.nan, math.inf])
def test_a_bound_must_be_positive(bound: float) -> None:
    with pytest.raises(PlanningError, match="recovery bound"):
        BackupProblem.of(line(1, 1)[0], bound)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_times_and_costs_must_be_numbers_from_zero_on(value: float) -> None:
    graph, _ = line(1, 1)
    with pytest.raises(PlanningError, match="reprocessing time of task 't1'"):
        BackupProblem.of(graph, 3, {"t0": 1, "t1": value})
    with pytest.raises(PlanningError, match="backup cost of task 't0'"):
        BackupProblem.of(graph, 3, 1.0, {"t0": value, "t1": 1})


def test_unknown_and_missing_names_are_refused() -> None:
    graph, _ = line(1, 1)
    with pytest.raises(PlanningError, match="'t9'"):
        BackupProblem.of(graph, 3, {"t0": 1, "t1": 1, "t9": 1})
    with pytest.raises(PlanningError, match="'t1' has no host"):
        BackupProblem.of(graph, 3, hosts={"t0": "n1"})
    with pytest.raises(PlanningError, match="backup 'zz'"):
        evaluate(BackupProblem.of(graph, 3), ["zz"])
    with pytest.raises(PlanningError, match="failure rate"):
        checkpoint_interval_s(0, 1)


def test_line_and_tree_refuse_other_shapes() -> None:
    fork = BackupProblem.of(TaskGraph.of([("a", "b"), ("a", "c")]), 5)
    join = BackupProblem.of(TaskGraph.of([("a", "c"), ("b", "c"), ("c", "d")]), 5)
    with pytest.raises(PlanningError, match="'a' has several"):
        tree_backups(fork)
    with pytest.raises(PlanningError, match="Not a line"):
        line_backups(fork)
    with pytest.raises(PlanningError, match="Not a line"):
        line_backups(join)


def test_exhaustive_refuses_what_it_cannot_finish() -> None:
    with pytest.raises(PlanningError, match=r"2\^53"):
        exhaustive_backups(BackupProblem.of(topologies.signal_guru(), 5))
