"""Topologies that cannot run are refused, with the name of what to change."""

from __future__ import annotations

import pytest

import anabranch as ab
from anabranch.errors import ConfigError, TopologyError
from anabranch.model.duration import parse_duration
from anabranch.model.graph import Graph, Kind, Operator

SOURCE = Operator("s", Kind.SOURCE)
SINK = Operator("out", Kind.SINK, (("s",),))


def keyed(name: str, reads: str, **options: object) -> Operator:
    return Operator(name, Kind.KEYED, ((reads,),), keys=("k",), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        ([SINK], "reads from 's', which is not in the topology"),
        ([SOURCE], "has no sink"),
        ([keyed("a", "a"), Operator("out", Kind.SINK, (("a",),))], "has no source"),
        ([SOURCE, SOURCE, SINK], "two operators are named 's'"),
        ([SOURCE, SINK, keyed("a", "out")], "reads from the sink 'out'"),
        ([SOURCE, SINK, Operator("a", Kind.KEYED, (("s",),))], "no key; call .key_by"),
        ([SOURCE, SINK, keyed("a", "s", parallelism=0)], "has parallelism 0"),
        ([SOURCE, SINK, keyed("a", "s", parallelism=129)], "from 1 to 128"),
        ([Operator("s", Kind.SOURCE, (("out",),)), SINK], "reads from the sink"),
        ([SOURCE, SINK, Operator("t", Kind.SOURCE, (("s",),))], "cannot have inputs"),
        ([SOURCE, SINK, Operator("a", Kind.STATELESS)], "'a' has no input"),
        ([SOURCE, SINK, keyed("a", "b"), keyed("b", "a")], "cycle: (a → b → a|b → a → b)"),
        ([SOURCE, SINK, keyed("a", "a")], "cycle: a → a"),
        ([SOURCE, SINK, keyed("1a", "s")], "'1a' cannot be used"),
        ([SOURCE, SINK, keyed("a/b", "s")], "'a/b' cannot be used"),
        ([SOURCE, SINK, keyed("", "s")], "'' cannot be used"),
    ],
)
def test_a_graph_that_cannot_run(operators: list[Operator], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        Graph.checked("t", operators)


@pytest.mark.parametrize("groups", [0, -1, 32_769])
def test_key_groups_out_of_range(groups: int) -> None:
    with pytest.raises(TopologyError, match="choose a number from 1 to 32768"):
        Graph.checked("t", [SOURCE, SINK], groups)


def test_refusals_of_the_api() -> None:
    topology = ab.Topology("t")
    source = topology.source("s", None)
    with pytest.raises(TopologyError, match="two operators are named 's'"):
        topology.source("s", None)
    with pytest.raises(TopologyError, match="at least one column"):
        source.key_by()
    with pytest.raises(TopologyError, match="key both by the same columns"):
        source.key_by("a").join_windows("j", source.key_by("b"), left=["x"], right=["y"])


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "1 year", "1s 2s", None, 5])
def test_bad_durations(text: object) -> None:
    with pytest.raises(ConfigError, match="write a number and a unit"):
        parse_duration(text)  # type: ignore[arg-type]
