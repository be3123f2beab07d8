"""Running one chain on one slice: every operator once, in order, nothing installed yet.

The same code runs in Spark's source tasks (source chains) and in nodes (all others).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import OperatorError
from anabranch.model.graph import Kind, Operator
from anabranch.model.plan import Chain, Edge, inputs_in_chain
from anabranch.node import activity
from anabranch.node.protocol.carried import ChainError
from anabranch.operators.base import (
    Computed,
    LateRows,
    SliceTime,
    State,
    punctual,
    stateful,
    stateless,
)
from anabranch.operators.kernels.process import KeyedProcess
from anabranch.operators.rows.event_time import Timed
from anabranch.operators.rows.failing import (
    LETTERS,
    DeadLetters,
    Refused,
    first_refused,
    letters,
    refused_by_key,
    shown,
    sift,
    without,
)
from anabranch.operators.rows.hashing import key_groups
from anabranch.sinks.base import Sink


@dataclass(frozen=True, slots=True)
class ChainResult:
    """What a chain made of a slice. Changes are installed by the caller, all or none."""

    edges: dict[int, pa.Table]
    sinks: dict[str, pa.Table]
    changes: dict[str, Any]
    rows: dict[str, int]  # rows out, per operator
    late: dict[str, int]  # rows that came too late, per operator
    dead: dict[str, int]  # rows put aside, per operator
    sources: dict[str, pa.Table]  # rows that sources took


@dataclass(frozen=True, slots=True)
class _Arrived:
    """The rows of an input as they came, and the combined row that each is in (None: the one
    with the same number)."""

    rows: pa.Table
    members: npt.NDArray[Any] | None


@dataclass(frozen=True)
class ChainProgram:
    """A chain with its operators and their schemas: what is sent to nodes and source tasks."""

    chain: Chain
    operators: Mapping[str, Operator]  # of the chain, and the keyed targets of its edges
    schemas: Mapping[str, pa.Schema]  # output of every operator the chain evaluates or reads
    key_groups: int
    inputs_of: Mapping[str, tuple[pa.Schema, ...]] = field(default_factory=dict)

    def rows_by_group(self, packets: Mapping[int, Sequence[pa.Table]]) -> dict[int, int]:
        """How many rows came for each key group."""
        counts = np.zeros(self.key_groups, dtype=np.int64)
        for edge in self.chain.inputs:
            for rows in packets.get(edge.id, ()):
                groups = key_groups(rows, edge.keys, self.key_groups)
                counts += np.bincount(groups, minlength=self.key_groups)
        return {int(g): int(counts[g]) for g in np.flatnonzero(counts)}

    @property
    def stateful(self) -> list[str]:
        return [n for n in self.chain.operators if self.operators[n].kind is Kind.KEYED]

    def new_states(self) -> dict[str, State]:
        return {
            n: stateful(self.operators[n].kernel).new_state(self.key_groups, *self.inputs_of[n])
            for n in self.stateful
        }

    def rehearse(self) -> None:
        """Run once on no rows, for what that imports and sets up; whatever comes of it."""
        nothing = {
            n: self.schemas[n].empty_table()
            for n in self.chain.operators
            if self.operators[n].kind is Kind.SOURCE
        }
        with contextlib.suppress(ChainError):
            self.run(nothing, {}, self.new_states(), SliceTime(0, None, 0))

    def run(
        self,
        sources: Mapping[str, pa.Table],
        shuffled: Mapping[int, list[pa.Table]],
        states: Mapping[str, State],
        time: SliceTime,
    ) -> ChainResult:
        """Compute the slice from source rows (source chains) or packets per edge (the others)."""
        tables: dict[str, pa.Table] = dict(sources)
        sinks: dict[str, pa.Table] = {}
        arrived: dict[str, list[_Arrived]] = {}
        done: dict[str, Computed] = {}
        aside = _Aside(time.slice)
        for name in self.chain.operators:
            op = self.operators[name]
            activity.enter(name)
            try:
                if op.kind is Kind.SOURCE:
                    if isinstance(op.kernel, Timed):
                        tables[name] = _let_in(op, op.kernel, tables[name], time, aside)
                elif op.kind is Kind.KEYED:
                    inputs, arrived[name] = self._keyed_inputs(op, tables, shuffled)
                    done[name] = computed = _computed(
                        op, states[name], inputs, time.of(name), aside
                    )
                    tables[name] = computed.output
                elif isinstance(op.kernel, LateRows):
                    producer = op.producers[0]
                    tables[name] = self._late(op, arrived[producer], done[producer].late)
                elif isinstance(op.kernel, DeadLetters):
                    sinks[name] = aside.letters()
                else:
                    producers = inputs_in_chain(self.chain, op, 0)
                    merged = _concat([tables[p] for p in producers])
                    if op.kind is Kind.STATELESS:
                        tables[name] = self._processed(op, merged, aside)
                    else:
                        refused = op.kernel.refused(merged) if isinstance(op.kernel, Sink) else []
                        sinks[name] = aside.without(op, merged, refused)
            except ChainError:
                raise
            except Exception as e:
                raise ChainError(name, e) from e
        return ChainResult(
            self._edge_tables(tables),
            sinks,
            {n: c.change for n, c in done.items()},
            {n: t.num_rows for n, t in tables.items()},
            {n: c.late_rows for n, c in done.items() if c.late_rows},
            aside.counts,
            {n: tables[n] for n in sources},
        )

    def _processed(self, op: Operator, table: pa.Table, aside: _Aside) -> pa.Table:
        """The operator's output. Rows are looked at one by one only when it raises."""
        process = stateless(op.kernel).process
        try:
            return process(table)
        except OperatorError as e:
            if op.puts_aside:
                made, refused = sift(process, table)
                aside.add(op, table, refused)
                return _concat(made or [self.schemas[op.name].empty_table()])
            row = first_refused(process, table)
            raise ChainError(op.name, e, None if row is None else shown(table, row)) from e

    def _keyed_inputs(
        self,
        op: Operator,
        tables: Mapping[str, pa.Table],
        shuffled: Mapping[int, list[pa.Table]],
    ) -> tuple[tuple[pa.Table, ...], list[_Arrived]]:
        """Combined rows per port and, where late ones are kept, the rows they were made of."""
        keeps_late = any(
            isinstance(o.kernel, LateRows) and op.name in o.producers
            for o in self.operators.values()
        )
        kernel = stateful(op.kernel)
        ports, arrived = [], []
        for port in range(len(op.inputs)):
            pieces: list[pa.Table] = []
            for edge in self.chain.inputs:
                if edge.target_op == op.name and edge.port == port:
                    pieces += shuffled.get(edge.id, [])
            own = [tables[p] for p in inputs_in_chain(self.chain, op, port)]
            if not pieces and not own:
                own = [self.inputs_of[op.name][port].empty_table()]
            if keeps_late:
                rows = _concat([*pieces, *own])
                table, members = punctual(kernel).grouped(port, rows)
                arrived.append(_Arrived(rows, members))
            else:
                if not op.precombine:
                    pieces = [kernel.combine(port, t) for t in pieces]
                table = _concat([*pieces, *(kernel.combine(port, t) for t in own)])
            ports.append(table)
        return tuple(ports), arrived

    def _late(
        self, op: Operator, arrived: list[_Arrived], late: tuple[npt.NDArray[np.bool_], ...]
    ) -> pa.Table:
        """The rows that came too late for the operator's producer, given which combined ones."""
        kernel = punctual(self.operators[op.producers[0]].kernel)
        parts = []
        for port, (came, combined) in enumerate(zip(arrived, late, strict=True)):
            mask = combined if came.members is None else combined[came.members]
            rows = came.rows.filter(pa.array(mask))
            parts.append(kernel.late_table(port, rows, self.schemas[op.name]))
        return _concat(parts)

    def _edge_tables(self, tables: Mapping[str, pa.Table]) -> dict[int, pa.Table]:
        """Rows per outgoing edge; edges that carry the same rows share one table."""
        shared: dict[tuple[str, str, int], pa.Table] = {}
        out: dict[int, pa.Table] = {}
        for edge in self.chain.outputs:
            key = (edge.producer, edge.target_op, edge.port)
            if key not in shared:
                shared[key] = self._combined(edge, tables[edge.producer])
            out[edge.id] = shared[key]
        return out

    def _combined(self, edge: Edge, table: pa.Table) -> pa.Table:
        target = self.operators[edge.target_op]
        if not target.precombine:
            return table
        try:
            return stateful(target.kernel).combine(edge.port, table)
        except Exception as e:
            raise ChainError(edge.target_op, e) from e


class _Aside:
    """Rows of a slice that operators could not take."""

    def __init__(self, slice_no: int) -> None:
        self.counts: dict[str, int] = {}
        self._slice = slice_no
        self._letters = [LETTERS.empty_table()]

    def add(self, op: Operator, table: pa.Table, refused: list[Refused]) -> None:
        if refused:
            self.counts[op.name] = self.counts.get(op.name, 0) + len(refused)
            self._letters.append(letters(self._slice, op.name, table, refused))

    def without(self, op: Operator, table: pa.Table, refused: list[Refused]) -> pa.Table:
        """Put aside what an operator refuses; the rest of the rows."""
        self.add(op, table, refused)
        return without(table, refused) if refused else table

    def letters(self) -> pa.Table:
        return pa.concat_tables(self._letters)


def _let_in(
    op: Operator, kernel: Timed, table: pa.Table, time: SliceTime, aside: _Aside
) -> pa.Table:
    """The rows of a source that it takes."""
    refused = kernel.refused(table, time.processing_ms)
    if refused and not op.puts_aside:
        first = refused[0]
        sentence = (
            f"{first.reason}; {len(refused)} of {table.num_rows} rows are refused. Correct them, "
            'let the source put them aside (on_error="dead_letter"), or give it another max_ahead='
        )
        raise ChainError(op.name, OperatorError(sentence), shown(table, first.row))
    return aside.without(op, table, refused)


def _computed(
    op: Operator, state: State, inputs: tuple[pa.Table, ...], time: SliceTime, aside: _Aside
) -> Computed:
    """The operator's slice, without the rows its function raises on if it puts them aside."""
    try:
        return stateful(op.kernel).compute(state, inputs, time)
    except OperatorError as e:
        if not isinstance(op.kernel, KeyedProcess):
            raise  # no function of the user's: no single row is to blame
        table = inputs[0]
        search = refused_by_key(op.kernel, state, table, time)
        if not op.puts_aside:
            first = next(search, None)
            raise ChainError(op.name, e, shown(table, first.row) if first else None) from e
        refused = sorted(search, key=lambda r: r.row)
        aside.add(op, table, refused)
        return stateful(op.kernel).compute(state, (without(table, refused),), time)


def _concat(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)
