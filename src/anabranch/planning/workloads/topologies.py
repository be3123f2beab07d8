"""Topologies to plan for: the named ones of the papers, and families by size and seed.

A topology is a list of steps, each with a parallelism, joined all-to-all, unless said
otherwise; a task is named `step` when it is alone in its step and `step.i` otherwise.
Everything random is drawn from a seed, so a topology is named by its arguments.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

from anabranch.errors import PlanningError
from anabranch.planning.graph import TaskGraph

# Paper 003 says only: nine steps, 55 tasks, a different parallelism per step. The steps follow
# the pipeline of the SignalGuru application (camera frames to signal schedule); the split of
# the 55 tasks is ours: wide where frames are processed, narrow where results meet.
SIGNAL_GURU_STEPS: tuple[tuple[str, int], ...] = (
    ("camera", 4),
    ("motion", 6),
    ("colour", 12),
    ("shape", 10),
    ("vote", 8),
    ("group", 5),
    ("match", 5),
    ("predict", 3),
    ("advise", 2),
)


def steps(parallelism: Mapping[str, int], links: Sequence[tuple[str, str]]) -> TaskGraph:
    """Expand steps into tasks: each link joins every task of one step to every one of another."""
    for step, count in parallelism.items():
        if count < 1:
            raise PlanningError(
                f"Step {step!r} has parallelism {count}: it needs at least one task.", step=step
            )
    members = {
        step: [step] if count == 1 else [f"{step}.{i}" for i in range(count)]
        for step, count in parallelism.items()
    }
    edges = [(u, v) for a, b in links for u in members[a] for v in members[b]]
    return TaskGraph.of(edges, (task for names in members.values() for task in names))


def twitter_sentiment(hot_topics: int, filters: int, sentiments: int) -> TaskGraph:
    """Paper 003, fig. 8d: 2a + 2b + bc + c edges; (50, 20, 20) has 560, (30, 30, 30) 1,050."""
    parallelism = {
        "source": 1,
        "hot_topics": hot_topics,
        "merge": 1,
        "filter": filters,
        "sentiment": sentiments,
        "sink": 1,
    }
    return steps(parallelism, [*pairwise(parallelism), ("source", "filter")])


def signal_guru() -> TaskGraph:
    """Paper 003, fig. 8a: our declared reconstruction, nine steps and 55 tasks in sequence."""
    parallelism = dict(SIGNAL_GURU_STEPS)
    return steps(parallelism, list(pairwise(parallelism)))


def distinct_count(parallelism: int = 1) -> TaskGraph:
    """G1 of paper 000 (table 5): source, filter, hop window and distinct count, then one sum."""
    counts = dict.fromkeys(("source", "filter", "hop_window", "distinct_count"), parallelism)
    counts["sum"] = 1
    return steps(counts, list(pairwise(counts)))


def elastic_sentiment(sentiments: int = 10) -> TaskGraph:
    """G2 of paper 000 (table 6): Twitter sentiment whose last step runs 10, 20 or 5 tasks."""
    return twitter_sentiment(5, 5, sentiments)


def word_count(counters: int = 1) -> TaskGraph:
    """G3 of paper 000 (table 7): source, splitter, one or two counters, sink."""
    counts = {"source": 1, "splitter": 1, "counter": counters, "sink": 1}
    return steps(counts, list(pairwise(counts)))


def lines(lengths: Sequence[int]) -> TaskGraph:
    """One line of tasks per length; two or more lines join in a common sink."""
    if not lengths or min(lengths) < 1:
        raise PlanningError(f"Lines of lengths {list(lengths)}: each needs at least one task.")
    if len(lengths) == 1:
        names = [f"t{i}" for i in range(lengths[0])]
        return TaskGraph.of(pairwise(names), names)
    runs = [[*(f"l{i}.{j}" for j in range(n)), "sink"] for i, n in enumerate(lengths)]
    return TaskGraph.of([edge for run in runs for edge in pairwise(run)])


def tree(tasks: int, seed: int, width: int = 3) -> TaskGraph:
    """A random tree of tasks that aggregate towards one sink, `t0`; at most `width` into each."""
    _at_least_one(tasks)
    rng = random.Random(seed)
    open_slots = [0] * width  # one entry per free place below a task, so a draw is uniform
    edges = []
    for i in range(1, tasks):
        slot = rng.randrange(len(open_slots))
        edges.append((f"t{i}", f"t{open_slots[slot]}"))
        open_slots[slot] = i
        open_slots.extend([i] * (width - 1))
    return TaskGraph.of(edges, (f"t{i}" for i in range(tasks)))


def random_dag(tasks: int, edges: int, seed: int, span: int | None = None) -> TaskGraph:
    """Distinct edges drawn uniformly among all pairs i < j (with j - i <= span, if given)."""
    _at_least_one(tasks)
    reach = tasks - 1 if span is None else min(span, tasks - 1)
    pairs = reach * (2 * tasks - reach - 1) // 2
    if not 0 <= edges <= pairs:
        raise PlanningError(
            f"{edges} edges do not fit: {tasks} tasks within span {reach} have {pairs} pairs."
        )
    rng = random.Random(seed)
    drawn: set[tuple[int, int]] = set()
    if 2 * edges > pairs:  # dense: drawing until distinct would take long
        every = [(i, j) for i in range(tasks) for j in range(i + 1, min(tasks, i + reach + 1))]
        drawn.update(rng.sample(every, edges))
    while len(drawn) < edges:
        i = rng.randrange(tasks - 1)
        j = i + rng.randint(1, reach)
        if j < tasks:
            drawn.add((i, j))
    names = [f"t{i}" for i in range(tasks)]
    return TaskGraph.of(((names[i], names[j]) for i, j in sorted(drawn)), names)


def reprocess_times(graph: TaskGraph, seed: int, low: int = 1, high: int = 10) -> dict[str, float]:
    """The non-uniform scenario of paper 003: a whole number of `low`..`high` per task."""
    rng = random.Random(seed)
    return {task: float(rng.randint(low, high)) for task in graph.tasks}


def _at_least_one(tasks: int) -> None:
    if tasks < 1:
        raise PlanningError(f"A topology of {tasks} tasks: ask for at least one.")
