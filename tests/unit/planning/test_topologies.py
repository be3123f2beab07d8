"""The topologies have the sizes the papers state, and bad graphs are refused by name."""

from __future__ import annotations

import pytest

from anabranch.errors import PlanningError
from anabranch.planning.graph import TaskGraph
from anabranch.planning.workloads import topologies


@pytest.mark.parametrize(
    ("shape", "edges"), [((50, 20, 20), 560), ((30, 30, 30), 1050), ((1, 1, 1), 6)]
)
def test_twitter_sentiment_has_the_edges_of_the_paper(
    shape: tuple[int, int, int], edges: int
) -> None:
    a, b, c = shape
    graph = topologies.twitter_sentiment(*shape)
    assert len(graph.edges) == edges == 2 * a + 2 * b + b * c + c
    assert len(graph) == a + b + c + 3


def test_signal_guru_has_nine_steps_and_55_tasks() -> None:
    graph = topologies.signal_guru()
    assert len(topologies.SIGNAL_GURU_STEPS) == 9
    assert len(graph) == 55
    assert len({len(graph.downstream[v]) for v in graph.order}) > 5


def test_topologies_of_paper_000() -> None:
    assert topologies.distinct_count(1).is_forest
    assert len(topologies.distinct_count(30)) == 4 * 30 + 1
    assert len(topologies.elastic_sentiment(20)) == 1 + 5 + 1 + 5 + 20 + 1
    assert len(topologies.word_count(2)) == 5


def test_lines_join_in_one_sink() -> None:
    graph = topologies.lines([4, 3])
    assert len(graph) == 8
    assert [graph.tasks[v] for v in graph.sinks] == ["sink"]
    assert graph.is_forest


def test_a_tree_has_one_sink_and_bounded_fan_in() -> None:
    graph = topologies.tree(200, seed=3, width=2)
    assert graph.is_forest
    assert [graph.tasks[v] for v in graph.sinks] == ["t0"]
    assert max(len(ups) for ups in graph.upstream) == 2


@pytest.mark.parametrize(("tasks", "edges", "span"), [(50, 200, None), (50, 120, 5), (6, 15, None)])
def test_a_random_dag_is_named_by_its_arguments(tasks: int, edges: int, span: int | None) -> None:
    graph = topologies.random_dag(tasks, edges, seed=7, span=span)
    assert graph == topologies.random_dag(tasks, edges, seed=7, span=span)
    assert (len(graph), len(graph.edges)) == (tasks, edges)
    reach = span or tasks
    assert all(0 < graph.number[b] - graph.number[a] <= reach for a, b in graph.edges)


def test_order_puts_upstream_first() -> None:
    graph = topologies.random_dag(60, 300, seed=1)
    place = {v: i for i, v in enumerate(graph.order)}
    assert all(place[graph.number[a]] < place[graph.number[b]] for a, b in graph.edges)


@pytest.mark.parametrize(
    ("tasks", "edges", "said"),
    [
        ((), (), "no tasks"),
        (("a", "a"), (), "'a' is listed twice"),
        (("a",), (("a", "b"),), "unknown task 'b'"),
        (("a", "b"), (("a", "b"), ("a", "b")), "'a' -> 'b' is listed twice"),
        (("a", "b", "c"), (("a", "b"), ("b", "c"), ("c", "b")), "b -> c -> b"),
        (("a",), (("a", "a"),), "a -> a"),
    ],
)
def test_a_bad_graph_is_refused(
    tasks: tuple[str, ...], edges: tuple[tuple[str, str], ...], said: str
) -> None:
    with pytest.raises(PlanningError) as refusal:
        TaskGraph(tasks, edges)
    assert said in str(refusal.value) or said.replace("b -> c -> b", "c -> b -> c") in str(
        refusal.value
    )


@pytest.mark.parametrize(
    "build",
    [
        lambda: topologies.lines([]),
        lambda: topologies.lines([3, 0]),
        lambda: topologies.tree(0, seed=1),
        lambda: topologies.random_dag(4, 7, seed=1),
        lambda: topologies.random_dag(0, 0, seed=1),
        lambda: topologies.twitter_sentiment(0, 1, 1),
    ],
)
def test_impossible_sizes_are_refused(build: object) -> None:
    assert callable(build)
    with pytest.raises(PlanningError):
        build()
