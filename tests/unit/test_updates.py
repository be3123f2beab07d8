"""Rows that are updates: who takes them, who refuses them, and rankings that are final."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import polars as pl
import pytest

import anabranch as ab
from anabranch.errors import TopologyError
from anabranch.testing import Idle, Restart, play

Declare = Callable[[ab.Stream], Any]
WINDOW = ab.tumbling("1s")


def counts(topology: ab.Topology) -> ab.Stream:
    return topology.source("in", None, time="ts").key_by("k").aggregate("count", n=ab.count())


def ranking(topology: ab.Topology) -> ab.Stream:
    return topology.source("in", None, time="ts").key_by("k").top_k("count", 2, by="v")


def of_all(topology: ab.Topology) -> ab.Stream:
    """Through stateless operators and a union with rows that are final."""
    final = topology.source("more", None).select("shaped", "k", "n")
    return final.union(counts(topology).filter("some", pl.col("n") > 1).select("n", "k", "n"))


class Sum(ab.RowFunction):
    state: ClassVar[dict[str, Any]] = {"n": pl.Int64}
    output: ClassVar[dict[str, Any]] = {"n": pl.Int64}

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> Any:
        state.set(n=row["n"])
        return [{"n": row["n"]}]


@pytest.mark.parametrize("updates", [counts, ranking, of_all])
@pytest.mark.parametrize(
    "declare",
    [
        lambda s: s.key_by("k").aggregate("op", n=ab.sum("n")),
        lambda s: s.key_by("k").window(WINDOW, time="ts").aggregate("op", n=ab.sum("n")),
        lambda s: s.key_by("k").window(ab.session("1s"), time="ts").aggregate("op", n=ab.count()),
        lambda s: s.key_by("k").deduplicate("op"),
        lambda s: s.key_by("k").top_k("op", 3, by="n"),
        lambda s: s.top_k("op", 3, by="n"),
        lambda s: s.key_by("k").join_windows("op", s.key_by("k"), left=["n"], right=["n"]),
    ],
)
def test_what_would_count_every_update_refuses_them(
    declare: Declare, updates: Callable[[ab.Topology], ab.Stream]
) -> None:
    with pytest.raises(TopologyError, match=r"'op' would take every update .*'count' shows a key"):
        declare(updates(ab.Topology("t")))


def test_joins_refuse_updates_on_either_side() -> None:
    topology = ab.Topology("t")
    updates = counts(topology).key_by("k")
    windows = topology.source("w", None, time="ts").key_by("k").window(WINDOW, time="ts")
    final = windows.aggregate("final", n=ab.count()).key_by("k")
    for left, right in ((final, updates), (updates, final)):
        with pytest.raises(TopologyError, match="every update"):
            left.join_windows("op", right, left=["n"], right=["n"])


@pytest.mark.parametrize("updates", [counts, ranking])
def test_stateless_operators_functions_and_sinks_take_updates_as_rows(
    updates: Callable[[ab.Topology], ab.Stream],
) -> None:
    stream = updates(ab.Topology("t"))
    stream.select("s", "k").filter("f", pl.col("k") == 1).to("out", ab.Memory())
    rows = stream.key_by("k").process("p", Sum())
    rows.key_by("k").aggregate("again", n=ab.count())  # what a function gives are rows


def test_changes_says_that_every_update_counts() -> None:
    topology = ab.Topology("t", parallelism=1)
    rows = topology.source("in", None).key_by("k").aggregate("count", n=ab.count())
    rows.changes().key_by("k").aggregate("sum", n=ab.sum("n")).to("out", ab.Memory())
    outputs = play(topology, [{"in": [{"k": 1}]}] * 4)
    assert [out["out"].rows() for out in outputs] == [[(1, 1)], [(1, 3)], [(1, 6)], [(1, 10)]]


# -- rankings by window ----------------------------------------------------------------------------


def at(seconds: int) -> datetime:
    return datetime(2024, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


def rows(second: int, **counts: int) -> dict[str, Any]:
    return {"in": [{"k": k, "ts": at(second)} for k, n in counts.items() for _ in range(n)]}


@pytest.mark.parametrize(
    "key", [("window_end",), ("window_start",), ("window_start", "window_end")]
)
def test_a_ranking_by_window_is_shown_once_when_its_window_is_over(key: tuple[str, ...]) -> None:
    topology = ab.Topology("hot")
    windows = topology.source("in", None, time="ts").key_by("k").window(WINDOW, time="ts")
    ranked = windows.aggregate("n", n=ab.count()).key_by(*key).top_k("top", 2, by="n")
    assert ranked.updated_by is None
    ranked.to("out", ab.Memory())
    steps = [rows(0, a=1, b=3), rows(0, a=4, c=2), Restart(), rows(7, a=1), Idle(), Idle()]
    outputs = [
        out["out"].select("window_start", "k", "n", "rank").rows() for out in play(topology, steps)
    ]
    assert [row for out in outputs for row in out] == [(at(0), "a", 5, 1), (at(0), "b", 3, 2)]


def test_a_ranking_by_window_is_aggregated_again() -> None:
    """How often each key is among the best of its second, in every ten seconds."""
    topology = ab.Topology("hot")
    windows = topology.source("in", None, time="ts").key_by("k").window(WINDOW, time="ts")
    ranked = windows.aggregate("n", n=ab.count()).key_by("window_end").top_k("top", 1, by="n")
    by_key = ranked.key_by("k").window(ab.tumbling("10s"), time="window_end")
    by_key.aggregate("often", times=ab.count()).to("out", ab.Memory())
    steps = [*(rows(s, a=2 + s % 2, b=3 - s % 2) for s in range(9)), rows(100, c=1), Idle()]
    found = [row for out in play(topology, steps) for row in out["out"].rows()]
    assert sorted(found) == [("a", at(0), at(10), 4), ("b", at(0), at(10), 5)]


def test_a_ranking_by_window_needs_no_time_to_live() -> None:
    topology = ab.Topology("hot")
    windows = topology.source("in", None, time="ts").key_by("k").window(WINDOW, time="ts")
    keyed = windows.aggregate("n", n=ab.count()).key_by("window_end")
    with pytest.raises(TopologyError, match="leave ttl= and time= out"):
        keyed.top_k("top", 2, by="n", ttl="1m", time="window_end")


def test_a_column_that_only_looks_like_a_window_makes_no_ranking_final() -> None:
    topology = ab.Topology("hot")
    stream = topology.source("in", None, time="ts")
    assert stream.key_by("window_end").top_k("running", 2, by="n").updated_by == "running"
