"""Chains, edges and waves: fusing keeps the meaning, and chains always form a DAG."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import ClusterError
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import even_groups, place
from anabranch.model.plan import Plan, compile_plan, inputs_in_chain


def source(name: str = "s") -> Operator:
    return Operator(name, Kind.SOURCE)


def keyed(name: str, *ports: str, key: str = "k", parallelism: int = 2) -> Operator:
    inputs = tuple(tuple(p.split("+")) for p in ports)
    return Operator(name, Kind.KEYED, inputs, keys=(key,), parallelism=parallelism)


def stateless(name: str, reads: str, keeps: bool = True) -> Operator:
    return Operator(name, Kind.STATELESS, (tuple(reads.split("+")),), keeps_columns=keeps)


def sink(reads: str, name: str = "out") -> Operator:
    return Operator(name, Kind.SINK, (tuple(reads.split("+")),))


def plan(*operators: Operator) -> Plan:
    return compile_plan(Graph.checked("t", operators))


def chains(compiled: Plan) -> dict[str, tuple[str, ...]]:
    return {c.name: c.operators for c in compiled.chains}


def test_same_key_and_parallelism_are_fused_across_what_keeps_the_key() -> None:
    compiled = plan(source(), keyed("a", "s"), stateless("f", "a"), keyed("b", "f"), sink("b"))
    assert chains(compiled) == {"s": ("s",), "a": ("a", "f", "b", "out")}
    assert compiled.waves == 1


@pytest.mark.parametrize(
    "second",
    [keyed("b", "f", key="j"), keyed("b", "f", parallelism=3)],
)
def test_another_key_or_parallelism_is_a_shuffle(second: Operator) -> None:
    compiled = plan(source(), keyed("a", "s"), stateless("f", "a"), second, sink("b"))
    assert chains(compiled) == {"s": ("s",), "a": ("a", "f"), "b": ("b", "out")}
    assert [(e.source, e.producer, e.target) for c in compiled.chains for e in c.outputs] == [
        ("s", "s", "a"),
        ("a", "f", "b"),
    ]


def test_what_may_change_the_key_is_not_fused_across() -> None:
    made = plan(
        source(), keyed("a", "s"), stateless("m", "a", keeps=False), keyed("b", "m"), sink("b")
    )
    assert made.by_name["b"].depth == 2


def test_a_union_over_chains_is_evaluated_in_each() -> None:
    compiled = plan(
        source(),
        keyed("a", "s"),
        stateless("u", "s+a"),
        keyed("b", "u", key="j"),
        sink("u+b"),
    )
    assert compiled.by_name["s"].operators == ("s", "u", "out")
    assert compiled.by_name["a"].operators == ("a", "u", "out")
    assert [(e.source, e.port) for e in compiled.by_name["b"].inputs] == [("s", 0), ("a", 0)]
    u = compiled.graph.by_name["u"]
    assert inputs_in_chain(compiled.by_name["s"], u, 0) == ("s",)
    assert inputs_in_chain(compiled.by_name["a"], u, 0) == ("a",)


def test_an_edge_may_skip_levels() -> None:
    compiled = plan(source(), keyed("a", "s"), keyed("b", "a", "s", key="j"), sink("b"))
    depths = {c.name: c.depth for c in compiled.chains}
    assert depths == {"s": 0, "a": 1, "b": 2}
    assert {e.source for e in compiled.by_name["b"].inputs} == {"s", "a"}


def test_fusing_never_makes_a_cycle() -> None:
    """a and c share a key, but b lies between them on another path."""
    compiled = plan(
        source(), keyed("a", "s"), keyed("b", "a", key="j"), keyed("c", "a", "b"), sink("c")
    )
    assert {c.name: c.depth for c in compiled.chains} == {"s": 0, "a": 1, "b": 2, "c": 3}


def test_no_keyed_operator_still_has_a_wave_that_reports() -> None:
    compiled = plan(source(), stateless("f", "s"), sink("f"))
    assert compiled.waves == 1
    assert compiled.node_chains == ()


@st.composite
def topologies(draw: st.DrawFn) -> Graph:
    ops = [source(f"s{i}") for i in range(draw(st.integers(1, 2)))]
    for i in range(draw(st.integers(1, 8))):
        names = st.lists(
            st.sampled_from([o.name for o in ops]), min_size=1, max_size=2, unique=True
        )
        if draw(st.booleans()):
            ops.append(stateless(f"o{i}", "+".join(draw(names)), draw(st.booleans())))
        else:
            ports = [draw(names) for _ in range(draw(st.integers(1, 2)))]
            key, parallelism = draw(st.sampled_from("jk")), draw(st.integers(1, 2))
            texts = ["+".join(p) for p in ports]
            ops.append(keyed(f"o{i}", *texts, key=key, parallelism=parallelism))
    ops.append(sink("+".join(o.name for o in ops[-2:])))
    return Graph.checked("t", ops)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(topologies())
def test_every_input_reaches_its_operator_exactly_once(topology: Graph) -> None:
    """Per keyed operator and port: shuffled from, or evaluated beside, each root of a producer."""
    compiled = compile_plan(topology)
    depth = {c.name: c.depth for c in compiled.chains}
    homes: dict[str, set[str]] = {}
    for chain in compiled.chains:
        for name in chain.operators:
            homes.setdefault(name, set()).add(chain.name)
        assert all(depth[e.source] < depth[e.target] for e in chain.inputs)
        assert chain.operators == tuple(
            o.name for o in topology.operators if o.name in chain.operators
        )
    for op in topology.operators:
        if op.kind is not Kind.KEYED:
            continue
        (home,) = homes[op.name]
        chain = compiled.by_name[home]
        for port, producers in enumerate(op.inputs):
            here = inputs_in_chain(chain, op, port)
            shuffled = [
                (e.producer, e.source)
                for e in chain.inputs
                if e.target_op == op.name and e.port == port
            ]
            local = [(p, home) for p in here]
            assert sorted(shuffled + local) == sorted((p, c) for p in producers for c in homes[p])
        assert all(topology.by_name[n].keys in ((), op.keys) for n in chain.operators)


@given(st.integers(1, 300), st.integers(1, 300))
def test_even_groups(groups: int, parallelism: int) -> None:
    if parallelism > groups:
        return
    spread = even_groups(groups, parallelism)
    assert sorted(spread) == list(spread)
    sizes = [spread.count(p) for p in range(parallelism)]
    assert max(sizes) - min(sizes) <= 1


def test_place_raises_every_epoch_and_names_all_nodes() -> None:
    compiled = plan(source(), keyed("a", "s", parallelism=4), keyed("b", "a", key="j"), sink("b"))
    nodes = [NodeId("1"), NodeId("2"), NodeId("3")]
    placement = place(compiled, nodes, 7, {PartitionId("a", 1): 5})
    assert {str(p): (o.node, o.epoch) for p, o in placement.owners.items()} == {
        "a[0]": ("1", 1),
        "a[1]": ("2", 6),
        "a[2]": ("3", 1),
        "a[3]": ("1", 1),
        "b[0]": ("2", 1),
        "b[1]": ("3", 1),
    }
    assert placement.version == 7
    with pytest.raises(ClusterError, match="no node is ready"):
        place(compiled, [], 1, {})
