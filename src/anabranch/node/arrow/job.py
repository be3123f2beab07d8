"""A compiled job as nodes and source tasks carry it: kernels, sinks, directories."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Chain, Edge
from anabranch.model.reports import Staged
from anabranch.model.slices import SlicePlan
from anabranch.node import activity
from anabranch.node.arrow.chain import ChainProgram, ChainResult
from anabranch.node.arrow.packets import Route, RowRanges, cut, route_of
from anabranch.node.arrow.state import ArrowState
from anabranch.node.protocol.carried import Sealed, Share
from anabranch.node.protocol.messages import SourceRequest
from anabranch.node.protocol.source_task import rows_per_slice
from anabranch.operators.base import SliceTime
from anabranch.operators.rows.canonical import canonical_table
from anabranch.sinks import Sink
from anabranch.storage.checkpoint_files import (
    checkpoint_name,
    decode_table,
    encode_table,
    write_checkpoint,
)
from anabranch.storage.identity import Identity
from anabranch.storage.local import LocalStore
from anabranch.storage.source_log import finish_share, log_name, read_log, write_share
from anabranch.storage.store import Store


@dataclass(frozen=True)
class JobSpec:
    """What the driver sends to nodes once."""

    name: str
    identity: Identity
    programs: Mapping[str, ChainProgram]
    sinks: Mapping[str, Sink]
    root: str
    checkpoints: str  # the place of checkpoint files: below `root`, or a URL
    key_groups: int
    max_rows_per_slice: int | None
    event_times: Mapping[str, str]  # source → its event-time column
    counts_keys: bool = False  # are rows counted by key group?

    @cached_property
    def chains(self) -> Mapping[str, Chain]:
        return {name: program.chain for name, program in self.programs.items()}

    @cached_property
    def store(self) -> Store:
        return LocalStore(Path(self.root))

    def rehearse(self) -> None:
        for program in self.programs.values():
            program.rehearse()

    # -- nodes ---------------------------------------------------------------------------------

    def new_state(self, partition: PartitionId) -> ArrowState:
        program = self.programs[partition.chain]
        return ArrowState(str(partition), program, self.store, self.counts_keys)

    def route(self, edge: Edge, placement: Placement, nodes: Sequence[NodeId]) -> Route:
        return route_of(edge, placement, nodes, self.key_groups)

    def cut(
        self, rows: pa.Table, route: Route, only: Collection[int] | None
    ) -> list[RowRanges | None]:
        return cut(rows, route, only)

    def stage(
        self, sink: str, rows: pa.Table, slice_no: int, generation: int, writer: str
    ) -> Staged:
        return self.sinks[sink].stage(sink, rows, slice_no, generation, writer)

    def write_checkpoint(self, sealed: Sealed) -> tuple[str, int]:
        what = (sealed.partition, sealed.slice, sealed.epoch)
        name = checkpoint_name(*what, self.checkpoints)
        job, content = self.identity.job, sealed.content
        return name, write_checkpoint(self.store, name, job, *what, sealed.full, content)

    # -- source tasks --------------------------------------------------------------------------

    def compute(
        self, request: SourceRequest, task: int, batch: Iterable[bytes]
    ) -> list[Share[pa.Table]]:
        """Rows are cut first where a slice has a limit."""
        plan, tasks = request.plan, request.tasks
        with activity.at(f"source task {task}"):
            rows = _read(request.sources, request.schema, batch)
            total = sum(t.num_rows for t in rows.values())
            longest = max((t.num_rows for t in rows.values()), default=0)
            shares = max(1, tasks * len(rows))
            limit = rows_per_slice(longest, shares, self.max_rows_per_slice, plan.max_rows)
            count = max(1, -(-longest // limit))
            return [
                self._share(
                    {n: t.slice(chunk * limit, limit) for n, t in rows.items()},
                    # The watermark is for stateful operators, which source chains do not have.
                    SliceTime(plan.number + chunk, None, plan.processing_ms),
                    {"chunks": count, "batch_rows": total},
                )
                for chunk in range(count)
            ]

    def _share(
        self, rows: Mapping[str, pa.Table], when: SliceTime, facts: dict[str, Any]
    ) -> Share[pa.Table]:
        results = [
            p.run({n: rows[n] for n in p.chain.operators if n in rows}, {}, {}, when)
            for p in self.programs.values()
            if p.chain.is_source
        ]
        facts |= {
            "rows": {n: t.num_rows for n, t in rows.items()},
            "max_time_us": self._latest(results),
            "rows_by_operator": _added(r.rows for r in results),
            "dead_by_operator": _added(r.dead for r in results),
        }
        tables = {f"edge:{i}": t for r in results for i, t in r.edges.items()}
        tables |= {f"sink:{n}": t for n, t in _sink_rows(results).items()}
        return Share(tables, facts)

    def _latest(self, results: Iterable[ChainResult]) -> dict[str, int]:
        """Of rows that were let in: one that was refused must not move time."""
        rows = {name: table for r in results for name, table in r.sources.items()}
        latest = {}
        for source, column in self.event_times.items():
            if source in rows:
                value = pc.max(rows[source].column(column)).cast(pa.int64()).as_py()
                if value is not None:
                    latest[source] = value
        return latest

    def log_name(self, plan: SlicePlan, task: int) -> str:
        return self.store.where(log_name(*_log(plan, task)))

    def read_log(self, plan: SlicePlan, task: int) -> Share[pa.Table] | None:
        found = read_log(self.store, log_name(*_log(plan, task)), decode_table)
        return None if found is None else Share(*found)

    def write_log(
        self, plan: SlicePlan, task: int, shares: Sequence[Share[pa.Table]]
    ) -> tuple[int, bool]:
        chunks = [({n: encode_table(t) for n, t in s.tables.items()}, s.facts) for s in shares]
        return write_share(self.store, *_log(plan, task), chunks)

    def finish_log(self, plan: SlicePlan, task: int, share: Share[pa.Table]) -> None:
        finish_share(self.store, *_log(plan, task), share.facts)


def _log(plan: SlicePlan, task: int) -> tuple[int, int, int, int]:
    return plan.number, plan.generation, plan.attempt, task


def _read(
    sources: tuple[str, ...], schema: pa.Schema, batch: Iterable[bytes]
) -> dict[str, pa.Table]:
    """Rows per source from Spark's Arrow batches."""
    read = [pa.ipc.read_record_batch(pa.py_buffer(b), schema) for b in batch]
    table = pa.Table.from_batches(read, schema)
    if len(sources) == 1:
        return {sources[0]: canonical_table(table)}
    found = {}
    for position, name in enumerate(sources):
        column = table.column(position)
        rows = table.select([position]).filter(pc.is_valid(column)).combine_chunks()
        fields = rows.column(0).type
        if rows.num_rows:
            struct = rows.column(0).chunk(0)
            flat = pa.Table.from_arrays(struct.flatten(), schema=pa.schema(list(fields)))
        else:
            flat = pa.schema(list(fields)).empty_table()
        found[name] = canonical_table(flat)
    return found


def _added(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Rows per operator; one below a union of sources is evaluated in each of their chains."""
    rows: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            rows[name] = rows.get(name, 0) + count
    return rows


def _sink_rows(results: list[ChainResult]) -> dict[str, pa.Table]:
    """Rows per sink, from every chain that ends in it."""
    found: dict[str, list[pa.Table]] = {}
    for result in results:
        for name, table in result.sinks.items():
            if table.num_rows:
                found.setdefault(name, []).append(table)
    return {n: pa.concat_tables(tables) for n, tables in found.items()}
