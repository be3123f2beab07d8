"""From a topology to what nodes run: chains, the edges between them, and waves.

A **chain** is what runs in one place without a shuffle. Every source and every keyed operator is
the root of one; stateless operators and sinks are evaluated in the chains of the roots they hang
on (in several, after a union). Keyed operators that use the same key at the same parallelism are
fused into one chain, as long as the chains still form a DAG. The depth of a chain is its wave:
source chains are wave 0 and run in Spark's own source tasks, wherever Spark likes; all others run
in nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.progress import Clocks, event_clocks


@dataclass(frozen=True, slots=True)
class Edge:
    """A shuffle: rows of `producer`, evaluated in `source`, go to input `port` of `target_op`."""

    id: int
    source: str
    producer: str
    target: str
    target_op: str
    port: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Operators that run together; `name` is that of the first root."""

    name: str
    operators: tuple[str, ...]
    inputs: tuple[Edge, ...]
    outputs: tuple[Edge, ...]
    sinks: tuple[str, ...]
    depth: int
    parallelism: int

    @property
    def is_source(self) -> bool:
        return self.depth == 0


@dataclass(frozen=True, slots=True)
class Query:
    """What a sink shows, and the node chains it takes: those that evaluate it and all above."""

    sink: str
    priority: int
    chains: frozenset[str]


@dataclass(frozen=True)
class Plan:
    """The graph, compiled; chains in topological order."""

    graph: Graph
    chains: tuple[Chain, ...]
    clocks: Clocks = field(default_factory=dict)  # of operators that other operators keep waiting

    @cached_property
    def by_name(self) -> Mapping[str, Chain]:
        return {c.name: c for c in self.chains}

    @cached_property
    def source_chains(self) -> tuple[Chain, ...]:
        return tuple(c for c in self.chains if c.is_source)

    @cached_property
    def node_chains(self) -> tuple[Chain, ...]:
        return tuple(c for c in self.chains if not c.is_source)

    @cached_property
    def repeatable(self) -> bool:
        """Does a replay give the same rows? Source chains do not count: their rows are logged."""
        ops = self.graph.by_name
        return all(ops[o].deterministic for c in self.node_chains for o in c.operators)

    @cached_property
    def above(self) -> Mapping[str, frozenset[str]]:
        """Per node chain, those it takes rows from, directly or not, and itself."""
        found: dict[str, frozenset[str]] = {}
        for chain in self.node_chains:
            sources = (found.get(e.source, frozenset()) for e in chain.inputs)
            found[chain.name] = frozenset({chain.name}).union(*sources)
        return found

    @cached_property
    def together(self) -> Mapping[str, frozenset[str]]:
        """Per node chain, those that go back to a checkpoint with it, itself among them, because an
        operator is not deterministic: what it produces again are other rows. That concerns all that
        is connected with it. Where every operator is, none does."""
        ops, parts = self.graph.by_name, {c.name: {c.name} for c in self.node_chains}
        for edge in (e for c in self.node_chains for e in c.inputs if e.source in parts):
            joined = parts[edge.source] | parts[edge.target]
            parts |= dict.fromkeys(joined, joined)
        odd = {
            c.name for c in self.node_chains if not all(ops[o].deterministic for o in c.operators)
        }
        return {c: frozenset(some if some & odd else ()) for c, some in parts.items()}

    def going_back(self, chains: Iterable[str]) -> frozenset[str]:
        """Chains that go back to a checkpoint as a whole if these do."""
        return frozenset[str]().union(*(self.together[c] for c in chains))

    def below(self, chains: Iterable[str]) -> frozenset[str]:
        """These node chains, and all that take rows from them, directly or not."""
        some = frozenset(chains)
        return frozenset(c for c, above in self.above.items() if above & some)

    @cached_property
    def evaluating(self) -> Mapping[str, frozenset[str]]:
        """Per sink, the node chains that give it rows; none, where source chains do."""
        found: dict[str, frozenset[str]] = {}
        for chain in self.chains:
            for sink in chain.sinks:
                here = frozenset() if chain.is_source else frozenset({chain.name})
                found[sink] = found.get(sink, frozenset()) | here
        return found

    @cached_property
    def queries(self) -> tuple[Query, ...]:
        """One per sink, but for that of dead letters."""
        return tuple(
            Query(o.name, o.priority, frozenset().union(*(self.above[c] for c in chains)))
            for o in self.graph.operators
            if o.kind is Kind.SINK and o.priority
            for chains in [self.evaluating.get(o.name, frozenset())]
        )

    @cached_property
    def whole_queries(self) -> tuple[Query, ...]:
        """With the chains that go back to a checkpoint, and so come back, only with theirs."""
        return tuple(replace(q, chains=q.chains | self.going_back(q.chains)) for q in self.queries)

    @property
    def waves(self) -> int:
        """Number of waves after the source wave; at least one, which brings the reports."""
        return max(1, *(c.depth for c in self.chains))


def compile_plan(graph: Graph) -> Plan:
    """Group operators into chains, draw the shuffles between them, number the waves."""
    ops = graph.by_name
    roots = _roots(graph)
    chain_of = _fuse(graph, roots)
    members: dict[str, list[str]] = {}
    for op in graph.operators:
        homes = dict.fromkeys(chain_of[r] for r in roots[op.name])
        for home in homes:
            members.setdefault(home, []).append(op.name)
    edges = _edges(graph, chain_of, members)
    depths = _depths(list(members), edges)
    chains = [
        Chain(
            name=name,
            operators=tuple(names),
            inputs=tuple(e for e in edges if e.target == name),
            outputs=tuple(e for e in edges if e.source == name),
            sinks=tuple(n for n in names if ops[n].kind is Kind.SINK),
            depth=depths[name],
            parallelism=ops[name].parallelism,
        )
        for name, names in members.items()
    ]
    ordered = tuple(sorted(chains, key=lambda c: c.depth))
    return Plan(graph, ordered, event_clocks(graph))


def _roots(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Per operator, the sources and keyed operators it hangs on through stateless ones only."""
    roots: dict[str, tuple[str, ...]] = {}
    for op in graph.operators:
        if op.kind in (Kind.SOURCE, Kind.KEYED):
            roots[op.name] = (op.name,)
        else:
            roots[op.name] = tuple(dict.fromkeys(r for p in op.producers for r in roots[p]))
    return roots


def _keeps_key(graph: Graph, producer: str) -> bool:
    """Does the path from the roots to `producer` keep the columns that are the key?"""
    op = graph.by_name[producer]
    if op.kind is Kind.KEYED:
        return True
    if op.kind is Kind.SOURCE or not op.keeps_columns:
        return False
    return all(_keeps_key(graph, p) for p in op.producers)


def _fuse(graph: Graph, roots: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Root → name of its chain, after fusing keyed operators that share key and parallelism."""
    ops = graph.by_name
    chain_of = {r: r for rs in roots.values() for r in rs}
    for op in graph.operators:
        if op.kind is not Kind.KEYED:
            continue
        above = {r for p in op.producers for r in roots[p]}
        fits = all(_keeps_key(graph, p) for p in op.producers) and all(
            ops[r].keys == op.keys and ops[r].parallelism == op.parallelism for r in above
        )
        if not fits:
            continue
        joined = {chain_of[r] for r in above} | {op.name}
        first = min(joined, key=lambda n: [o.name for o in graph.operators].index(n))
        merged = {r: first if c in joined else c for r, c in chain_of.items()}
        if _acyclic(graph, roots, merged):
            chain_of = merged
    return chain_of


def _acyclic(
    graph: Graph, roots: Mapping[str, tuple[str, ...]], chain_of: Mapping[str, str]
) -> bool:
    above: dict[str, set[str]] = {c: set() for c in chain_of.values()}
    for op in graph.operators:
        if op.kind is Kind.KEYED:
            here = chain_of[op.name]
            above[here] |= {chain_of[r] for p in op.producers for r in roots[p]} - {here}
    done: set[str] = set()
    while ready := [c for c, up in above.items() if c not in done and up <= done]:
        done.update(ready)
    return len(done) == len(above)


def _edges(
    graph: Graph, chain_of: Mapping[str, str], members: Mapping[str, list[str]]
) -> list[Edge]:
    edges: list[Edge] = []
    for op in graph.operators:
        if op.kind is not Kind.KEYED:
            continue
        target = chain_of[op.name]
        for port, producers in enumerate(op.inputs):
            for producer in producers:
                for source, names in members.items():
                    if producer in names and source != target:
                        edges.append(
                            Edge(len(edges), source, producer, target, op.name, port, op.keys)
                        )
    return edges


def _depths(chains: list[str], edges: list[Edge]) -> dict[str, int]:
    depths: dict[str, int] = {}
    while len(depths) < len(chains):
        for chain in chains:
            above = [e.source for e in edges if e.target == chain]
            if chain not in depths and all(a in depths for a in above):
                depths[chain] = max((depths[a] + 1 for a in above), default=0)
    return depths


def inputs_in_chain(chain: Chain, op: Operator, port: int) -> tuple[str, ...]:
    """The producers of `port` that are evaluated in the same chain (no shuffle between)."""
    shuffled = {e.producer for e in chain.inputs if e.target_op == op.name and e.port == port}
    return tuple(p for p in op.inputs[port] if p in chain.operators and p not in shuffled)
