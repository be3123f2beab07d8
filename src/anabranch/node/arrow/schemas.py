"""Schemas along the graph, inferred from the sources before anything runs.

A column that is missing or of a wrong type is refused here, with the operator's name, instead of
in the middle of a slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.plan import Chain, Plan
from anabranch.node.arrow.chain import ChainProgram
from anabranch.operators.base import LateRows, punctual, stateful, stateless
from anabranch.operators.rows.canonical import canonical
from anabranch.operators.rows.failing import LETTERS, DeadLetters
from anabranch.operators.rows.hashing import check_key_types
from anabranch.sinks import Sink
from anabranch.upgrade.kernel_settings import encode, encode_schema


def infer_schemas(
    graph: Graph, sources: Mapping[str, pa.Schema], sinks: Mapping[str, Sink]
) -> tuple[dict[str, pa.Schema], dict[str, tuple[pa.Schema, ...]]]:
    """Per operator the schema of its output and those of its inputs, port by port."""
    outputs: dict[str, pa.Schema] = {}
    inputs: dict[str, tuple[pa.Schema, ...]] = {}
    for op in graph.operators:
        if op.kind is Kind.SOURCE:
            outputs[op.name] = canonical(sources[op.name])
            continue
        if isinstance(op.kernel, DeadLetters):
            ports: tuple[pa.Schema, ...] = (LETTERS,)
        else:
            ports = tuple(_united(op, port, outputs) for port in op.inputs)
        inputs[op.name] = ports
        try:
            if op.kind is Kind.SINK:
                sinks[op.name].check(ports[0])
            elif op.kind is Kind.KEYED:
                for schema in ports:
                    check_key_types(schema, op.keys)
                outputs[op.name] = stateful(op.kernel).output_schema(*ports)
            elif isinstance(op.kernel, LateRows):
                (keyed,) = op.producers
                kernel = punctual(graph.by_name[keyed].kernel)
                outputs[op.name] = kernel.late_schema(*inputs[keyed])
            else:
                outputs[op.name] = stateless(op.kernel).output_schema(ports[0])
        except TopologyError as e:
            raise TopologyError(f"operator {op.name!r}: {e.message}", **e.fields) from e
    return outputs, inputs


def _united(
    op: Operator, producers: tuple[str, ...], outputs: Mapping[str, pa.Schema]
) -> pa.Schema:
    first = outputs[producers[0]]
    for other in producers[1:]:
        if not outputs[other].equals(first):
            raise TopologyError(
                f"operator {op.name!r} unites {producers[0]!r} ({_columns(first)}) and {other!r} "
                f"({_columns(outputs[other])}); give both the same columns, in the same order",
                operator=op.name,
            )
    return first


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name}: {f.type}" for f in schema)


def build_programs(
    plan: Plan,
    outputs: Mapping[str, pa.Schema],
    inputs: Mapping[str, tuple[pa.Schema, ...]],
) -> dict[str, ChainProgram]:
    """What each chain needs to run by itself."""
    return {c.name: _program(plan, c, outputs, inputs) for c in plan.chains}


def _program(
    plan: Plan,
    chain: Chain,
    outputs: Mapping[str, pa.Schema],
    inputs: Mapping[str, tuple[pa.Schema, ...]],
) -> ChainProgram:
    ops = plan.graph.by_name
    names = [*chain.operators, *(e.target_op for e in chain.outputs)]
    return ChainProgram(
        chain=chain,
        operators={n: ops[n] for n in names},
        schemas={n: outputs[n] for n in chain.operators if n in outputs},
        key_groups=plan.graph.key_groups,
        inputs_of={n: inputs[n] for n in names if n in inputs},
    )


def declared(plan: Plan) -> dict[str, Any]:
    """What of the fingerprint a topology says by itself, before its sources are opened."""
    ops = plan.graph.operators
    return {
        "topology": plan.graph.name,
        "key_groups": plan.graph.key_groups,
        "sources": [o.name for o in ops if o.kind is Kind.SOURCE],
        "sinks": [o.name for o in ops if o.kind is Kind.SINK],
        "operators": {
            o.name: {
                "type": type(o.kernel).__name__,
                "keys": list(o.keys),
                "kernel": encode(o.kernel),
            }
            for o in ops
            if o.kind is Kind.KEYED
        },
        "chains": {
            c.name: [n for n in c.operators if plan.graph.by_name[n].kind is Kind.KEYED]
            for c in plan.node_chains
        },
        "parallelism": {c.name: c.parallelism for c in plan.node_chains},
        "feeds": {sink: sorted(chains) for sink, chains in plan.evaluating.items()},
    }


def fingerprint(plan: Plan, inputs: Mapping[str, tuple[pa.Schema, ...]]) -> dict[str, Any]:
    """What the state of this topology depends on, as JSON; see `upgrade.fit`."""
    known, ops = declared(plan), plan.graph.by_name
    return {
        **known,
        "operators": {
            name: {
                **operator,
                "state": [
                    f"{f.name}: {f.type}" for f in stateful(ops[name].kernel).state_schema(*columns)
                ],
                "inputs": [encode_schema(s) for s in columns],
            }
            for name, operator in known["operators"].items()
            for columns in [inputs[name]]
        },
        "log": {
            str(e.id): _logged(plan.graph.by_name[e.target_op], e.port, inputs)
            for c in plan.source_chains
            for e in c.outputs
        },
    }


def _logged(op: Operator, port: int, inputs: Mapping[str, tuple[pa.Schema, ...]]) -> str:
    """What the source log holds for a shuffle: for whom, in which form."""
    form = "combined" if op.precombine else "rows"
    return f"{op.name}/{port} {form} ({_columns(inputs[op.name][port])})"
