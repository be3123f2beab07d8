"""A topology as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.api.topology import Topology
from anabranch.errors import TopologyError

if TYPE_CHECKING:
    pass


def describe(topology: Topology) -> str:
    """The topology as text: chains by wave; what operators do, by which key and time; sinks and
    where they lead; queries, and the chains that each needs."""
    if not isinstance(topology, Topology):
        kind = type(topology).__name__
        raise TopologyError(f"describe takes a topology, but got a {kind}; give its .topology")
    plan = topology.plan()
    ops, waves = plan.graph.by_name, plan.waves
    lines = [
        f"topology {topology.name}: {len(ops)} operators, {waves} wave{'s' * (waves != 1)} after "
        "the source"
    ]
    for chain in plan.chains:
        many = f"{chain.parallelism} partition{'s' * (chain.parallelism != 1)}"
        lines.append(
            f"wave {chain.depth}  {chain.name}  ({'source tasks' if chain.is_source else many})"
        )
        for name in chain.operators:
            op = ops[name]
            key = f"by {', '.join(op.keys)}" if op.keys else ""
            reads = f"← {', '.join(op.producers)}" if op.producers else ""
            parts = (f"    {op.kind.value:9} {name}", key, topology._described(op), reads)
            lines.append("  ".join(p for p in parts if p))
        lines += [
            f"    shuffle   {e.producer} → {e.target_op} by {', '.join(e.keys)}"
            for e in chain.outputs
        ]
    for query in plan.queries:
        needs = [c.name for c in plan.node_chains if c.name in query.chains]
        what = f"needs {', '.join(needs)}" if needs else "source tasks only"
        lines.append(f"query   {query.sink}  priority {query.priority}  {what}")
    return "\n".join(lines)
