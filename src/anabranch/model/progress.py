"""How far event time has come for each operator, as far as the topology decides it.

A watermark promises an operator that no more rows come from before it. An operator that keeps rows
until the watermark passes (a window, a session, a timer) emits rows from before that very
watermark, so whatever reads them needs a promise of its own: its watermark must come after them.

What an operator emits in a slice was not due under the watermark it had in the slice before. So
that one, held back by what the operator declares (`Hold`), is the promise for those who read its
rows: time reaches an operator a slice after it has reached the operator above, and finds there
everything that it made that operator emit, however rows fall into slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from anabranch.errors import TopologyError
from anabranch.model.graph import Graph, Hold, Kind, Operator


@dataclass(frozen=True, slots=True)
class Promise:
    """What bounds the event times an operator gets: the watermark that `operator` had in the slice
    before, held back; without one, the sources' watermark of the slice itself."""

    operator: str | None = None
    hold: Hold | None = None


Clocks = Mapping[str, tuple[Promise, ...]]


def event_clocks(graph: Graph) -> Clocks:
    """The promises to every operator that reads what time made another emit; all other operators
    go by the sources' watermark. Raises TopologyError where nothing bounds the times of a column.
    """
    clocks = {}
    for op in graph.operators:
        if op.kind is not Kind.KEYED:
            continue
        found = (p for name in op.producers for p in _promises(graph, op, name, op.time))
        promises = tuple(dict.fromkeys(found))
        if any(p.operator is not None for p in promises):
            clocks[op.name] = promises
    return clocks


def _promises(graph: Graph, reader: Operator, name: str, column: str | None) -> Iterator[Promise]:
    """What bounds the times in `column` of what operator `name` emits; None: in any column."""
    op = graph.by_name[name]
    if op.kind is Kind.SOURCE:
        yield Promise()
    elif op.holds:
        yield Promise(name, _hold(reader, op, column))
    else:
        # Late rows are rows that their producer was given.
        above = graph.by_name[op.producers[0]] if op.gives_late else op
        kept = column if above is not op or op.keeps_columns or column in op.keys else None
        for producer in above.producers:
            yield from _promises(graph, reader, producer, kept)


def _hold(reader: Operator, op: Operator, column: str | None) -> Hold:
    holds = dict(op.holds)
    if column in holds:
        return holds[column]
    if None in holds:
        return holds[None]
    if reader.time is None:  # it reads no times, only the clock
        return op.holds[0][1]
    known = " or ".join(repr(c) for c in holds)
    raise TopologyError(
        f"operator {reader.name!r} goes by event time, but rows of {op.name!r} may have any time "
        f"in its past in the column {reader.time!r}; go by {known} of {op.name!r}, as it is and "
        "under its own name (time=)",
        operator=reader.name,
        column=reader.time,
    )
