"""The topology a user declared: a DAG of named operators, checked before anything runs.

Streams are edges; a union is an input port with several producers, not an operator. Kernels are
opaque here (`anabranch.operators` defines them), so the model stays free of Arrow and of Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from anabranch.errors import TopologyError

DEFAULT_KEY_GROUPS = 128  # the ceiling of parallelism; divides evenly over 2, 4, 8 … partitions
MAX_KEY_GROUPS = 32_768  # key groups are stored in 16 bits
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


class Kind(Enum):
    """What an operator may do: only KEYED ones have state, only SINKs have no output."""

    SOURCE = "source"
    STATELESS = "stateless"
    KEYED = "keyed"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class Hold:
    """A bound on event times: rows that come out after the watermark was W have times from the
    first multiple of `step_us` above W − `reach_us` on, plus `shift_us`."""

    reach_us: int
    step_us: int = 1
    shift_us: int = 0

    def after(self, watermark_us: int) -> int:
        steps = (watermark_us - self.reach_us) // self.step_us + 1
        return steps * self.step_us + self.shift_us


@dataclass(frozen=True, slots=True)
class Operator:
    """A vertex. `inputs` holds, per input port, the names of the producers united there."""

    name: str
    kind: Kind
    inputs: tuple[tuple[str, ...], ...] = ()
    kernel: object = None  # what it does: one of operators/, of which this knows nothing
    keys: tuple[str, ...] = ()
    parallelism: int = 1
    # True when columns that survive keep their values, so that a key stays a key across it.
    keeps_columns: bool = False
    # Shrink rows before the shuffle (KEYED only); off, the receiver does it.
    precombine: bool = True
    # False when the same input may give another output: what was shown must not be computed again.
    deterministic: bool = True
    # Rows it cannot take become dead letters; else they end the run.
    puts_aside: bool = False
    # The event-time column it goes by.
    time: str | None = None
    # What bounds the times it emits when time has passed: by output column, under None in all the
    # others. Empty where rows come out in the slice they come in, with the times they have.
    holds: tuple[tuple[str | None, Hold], ...] = ()
    gives_late: bool = False  # its rows are those that came too late for its producer
    priority: int = 1  # of the query that a sink shows; 0: it is none (dead letters)

    @property
    def producers(self) -> tuple[str, ...]:
        """All operators this one reads from, port by port."""
        return tuple(p for port in self.inputs for p in port)


@dataclass(frozen=True, slots=True)
class Graph:
    """Operators in topological order; built by `checked`, which refuses what cannot run."""

    name: str
    operators: tuple[Operator, ...]
    key_groups: int = DEFAULT_KEY_GROUPS

    @property
    def by_name(self) -> Mapping[str, Operator]:
        return {o.name: o for o in self.operators}

    @staticmethod
    def checked(
        name: str, operators: Iterable[Operator], key_groups: int = DEFAULT_KEY_GROUPS
    ) -> Graph:
        """A topology that can run, or a TopologyError that says what to change."""
        ops = list(operators)
        _check_names(name, ops)
        _check_edges(ops)
        if not 1 <= key_groups <= MAX_KEY_GROUPS:
            raise TopologyError(
                f"key_groups is {key_groups}; choose a number from 1 to {MAX_KEY_GROUPS}",
                key_groups=key_groups,
            )
        for op in ops:
            check_operator(op, key_groups)
        return Graph(name, tuple(_in_order(ops)), key_groups)


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TopologyError(
            f"the name {name!r} cannot be used: start with a letter, then letters, digits, "
            "'_', '-' or '.' (names become file names and job names)",
            name=name,
        )
    return name


def _check_names(topology: str, ops: list[Operator]) -> None:
    for name in [topology, *(o.name for o in ops)]:
        check_name(name)
    seen: set[str] = set()
    for op in ops:
        if op.name in seen:
            raise TopologyError(
                f"two operators are named {op.name!r}; give each its own name "
                "(state is found again by it after a restart)",
                name=op.name,
            )
        seen.add(op.name)


def _check_edges(ops: list[Operator]) -> None:
    names = {o.name: o for o in ops}
    for op in ops:
        for producer in op.producers:
            if producer not in names:
                raise TopologyError(
                    f"operator {op.name!r} reads from {producer!r}, which is not in the topology",
                    operator=op.name,
                )
            if names[producer].kind is Kind.SINK:
                raise TopologyError(
                    f"operator {op.name!r} reads from the sink {producer!r}; read from the "
                    "stream that feeds it",
                    operator=op.name,
                )
    if not any(o.kind is Kind.SOURCE for o in ops):
        raise TopologyError("the topology has no source; add one with topology.source(...)")
    if not any(o.kind is Kind.SINK for o in ops):
        raise TopologyError("the topology has no sink; end at least one stream with .to(...)")


def check_operator(op: Operator, key_groups: int) -> None:
    """What can be said of an operator by itself."""
    if op.kind is Kind.KEYED and not op.keys:
        raise TopologyError(
            f"operator {op.name!r} keeps state per key but its input has no key; "
            "call .key_by(...) before it",
            operator=op.name,
        )
    if not isinstance(op.parallelism, int) or not 1 <= op.parallelism <= key_groups:
        raise TopologyError(
            f"operator {op.name!r} has parallelism {op.parallelism!r}; choose a number from 1 to "
            f"{key_groups}, the number of key groups of this topology",
            operator=op.name,
        )
    if op.kind is Kind.SOURCE and op.inputs:
        raise TopologyError(f"the source {op.name!r} cannot have inputs", operator=op.name)
    if op.kind is not Kind.SOURCE and not op.producers:
        raise TopologyError(f"operator {op.name!r} has no input", operator=op.name)


def _in_order(ops: list[Operator]) -> list[Operator]:
    """Topological order, stable in the order of declaration; a cycle is named in the error."""
    done: dict[str, Operator] = {}
    waiting = list(ops)
    while waiting:
        ready = [o for o in waiting if all(p in done for p in o.producers)]
        if not ready:
            raise TopologyError(_describe_cycle(waiting), operators=[o.name for o in waiting])
        done.update((o.name, o) for o in ready)
        waiting = [o for o in waiting if o.name not in done]
    return list(done.values())


def _describe_cycle(stuck: list[Operator]) -> str:
    """Walk upstream among the stuck operators until one repeats: that walk is a cycle."""
    names = {o.name: o for o in stuck}
    walk = [stuck[0].name]
    while True:
        nxt = next(p for p in names[walk[-1]].producers if p in names)
        if nxt in walk:
            cycle = [*walk[walk.index(nxt) :], nxt]
            return (
                f"the topology has a cycle: {' → '.join(reversed(cycle))}; a stream must not "
                "feed an operator upstream of itself"
            )
        walk.append(nxt)
