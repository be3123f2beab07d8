"""A source task's work: read a share of a batch, run the source chains, log, cut into packets.

It runs in a Spark Python worker, on whichever executor Spark chose. What it emits is decided by
the source log alone: a retried task, and every replay, reads the log instead of the batch. A
replay task sends what several source tasks logged over several slices, to the partitions that are
rebuilt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.errors import AnabranchError, StorageError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping as PartitionMapping
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import Failure, SourceReport, Staged
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node import activity
from anabranch.node.chain import ChainError, ChainProgram, ChainResult
from anabranch.node.host import route_of
from anabranch.node.messages import JobSpec
from anabranch.node.packets import Bundle, SideFacts, cut, encode_blob
from anabranch.operators.base import SliceTime
from anabranch.operators.canonical import canonical_table
from anabranch.storage.source_log import finish_share, log_path, read_log, write_share


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """One slice as the source tasks see it."""

    run: int
    nodes: tuple[NodeId, ...]
    mapping: PartitionMapping
    plan: SlicePlan
    tasks: int
    # Sources in the order of the batch's columns. With several, each is one struct column.
    sources: tuple[str, ...]
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Share:
    """One task's share of one slice: what is logged and sent on."""

    tables: dict[str, pa.Table]  # "edge:ID" and "sink:NAME"
    facts: dict[str, Any]


def run_source_task(
    job: JobSpec, request: SourceRequest, task: int, batches: Iterable[bytes]
) -> list[list[Any]]:
    """One blob (as buffers) per node."""
    cpu = time.process_time()
    try:
        share, log_bytes = _share(job, request, task, batches)
        staged = _stage(job, request, task, share)
    except ChainError as e:
        return _failed(request, e.failure(f"source task {task}"), task)
    except AnabranchError as e:
        failure = Failure(f"source task {task}", "", e.message, repr(e), kind="storage")
        return _failed(request, failure, task)
    report = SourceReport(
        partition=task,
        chunks=share.facts["chunks"],
        rows=share.facts["rows"],
        batch_rows=share.facts["batch_rows"],
        max_time_us=share.facts["max_time_us"],
        log_bytes=log_bytes,
        cpu_s=time.process_time() - cpu,
        rows_by_operator=share.facts["rows_by_operator"],
        dead_by_operator=share.facts.get("dead_by_operator", {}),
    )
    bundles = _cut(
        job, request.run, request.nodes, request.mapping, request.plan.number, task, share, None
    )
    # The report rides with the blob of one node; which one does not matter.
    home = task % len(request.nodes)
    facts = SideFacts(sources=(report,), staged=staged)
    return [encode_blob(b, facts if n == home else None) for n, b in enumerate(bundles)]


def _failed(request: SourceRequest, failure: Failure, task: int) -> list[list[Any]]:
    home = task % len(request.nodes)
    facts = SideFacts(failures=(failure,))
    return [encode_blob([], facts if n == home else None) for n in range(len(request.nodes))]


def _share(
    job: JobSpec, request: SourceRequest, task: int, batches: Iterable[bytes]
) -> tuple[Share, int]:
    """This task's share of the slice, and how many bytes it just logged."""
    plan, root = request.plan, Path(job.root)
    which = (root, plan.number, plan.generation, plan.attempt, task)
    logged = _logged(root, plan, task)
    if logged is not None:
        deque(batches, maxlen=0)  # Spark reuses a worker only if it read all its input
        finish_share(*which, logged.facts)
        return logged, 0
    with activity.at(f"source task {task}"):
        chunks = _compute(job, request, _read(request, batches))
    size, counts = write_share(*which, [(c.tables, c.facts) for c in chunks])
    if counts:
        return chunks[0], size
    # Another attempt of this task was faster; what it has read is what everybody uses.
    logged = _logged(root, plan, task)
    assert logged is not None
    finish_share(*which, logged.facts)
    return logged, size


def _logged(root: Path, plan: SlicePlan, task: int) -> Share | None:
    """What a task logged for the slice; None where a live batch is still to be read."""
    path = log_path(root, plan.number, plan.generation, plan.attempt, task)
    found = read_log(path)
    if found is not None:
        return Share(*found)
    if plan.feed is Feed.LIVE:
        return None
    if plan.without_log is None or task in plan.without_log:
        return _NOTHING  # its share of the batch was cut into fewer slices than another task's
    raise StorageError(
        f"the source log {path} of slice {plan.number} is missing; restore the directory from a "
        "copy, or start with a new checkpoint directory",
        path=str(path),
    )


def _read(request: SourceRequest, batches: Iterable[bytes]) -> dict[str, pa.Table]:
    """Rows per source from Spark's Arrow batches."""
    read = [pa.ipc.read_record_batch(pa.py_buffer(b), request.schema) for b in batches]
    table = pa.Table.from_batches(read, request.schema)
    if len(request.sources) == 1:
        return {request.sources[0]: canonical_table(table)}
    found = {}
    for position, name in enumerate(request.sources):
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


def _compute(job: JobSpec, request: SourceRequest, rows: Mapping[str, pa.Table]) -> list[Share]:
    """Run the source chains on the rows, cut first where the slice has a limit."""
    total = sum(t.num_rows for t in rows.values())
    limit = total or 1
    if job.max_rows_per_slice is not None:
        limit = max(1, job.max_rows_per_slice // max(1, request.tasks * len(rows)))
    longest = max((t.num_rows for t in rows.values()), default=0)
    count = max(1, -(-longest // limit))
    shares = []
    for chunk in range(count):
        part = {n: t.slice(chunk * limit, limit) for n, t in rows.items()}
        # The watermark is for stateful operators, which source chains do not have.
        when = SliceTime(request.plan.number + chunk, None, request.plan.processing_ms)
        results = [_run_chain(p, part, when) for p in _source_programs(job)]
        facts = {
            "chunks": count,
            "batch_rows": total,
            "rows": {n: t.num_rows for n, t in part.items()},
            "max_time_us": _latest(job, results),
            "rows_by_operator": _added(r.rows for r in results),
            "dead_by_operator": _added(r.dead for r in results),
        }
        tables = {f"edge:{i}": t for r in results for i, t in r.edges.items()}
        tables |= {f"sink:{n}": t for n, t in _sink_rows(results).items()}
        shares.append(Share(tables, facts))
    return shares


def _run_chain(program: ChainProgram, rows: Mapping[str, pa.Table], when: SliceTime) -> ChainResult:
    return program.run({n: rows[n] for n in program.chain.operators if n in rows}, {}, {}, when)


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


def _source_programs(job: JobSpec) -> list[ChainProgram]:
    return [p for p in job.programs.values() if p.chain.is_source]


_NOTHING = Share(
    {}, {"chunks": 0, "batch_rows": 0, "rows": {}, "max_time_us": {}, "rows_by_operator": {}}
)


def _latest(job: JobSpec, results: Iterable[ChainResult]) -> dict[str, int]:
    """Of rows that were let in: one that was refused must not move time."""
    rows = {name: table for r in results for name, table in r.sources.items()}
    latest = {}
    for source, column in job.event_times.items():
        if source in rows:
            value = pc.max(rows[source].column(column)).cast(pa.int64()).as_py()
            if value is not None:
                latest[source] = value
    return latest


def _stage(job: JobSpec, request: SourceRequest, task: int, share: Share) -> tuple[Staged, ...]:
    return tuple(
        job.sinks[name].stage(name, table, request.plan.number, request.run, f"source-{task}")
        for key, table in share.tables.items()
        if key.startswith("sink:") and (name := key.removeprefix("sink:"))
    )


def _cut(
    job: JobSpec,
    run: int,
    nodes: tuple[NodeId, ...],
    mapping: PartitionMapping,
    slice_no: int,
    task: int,
    share: Share,
    rebuilt: frozenset[PartitionId] | None,
) -> list[list[Bundle]]:
    """The share's bundles per node; with `rebuilt`, only what these partitions need."""
    bundles: list[list[Bundle]] = [[] for _ in nodes]
    for program in _source_programs(job):
        for edge in program.chain.outputs:
            only: set[int] | None = None
            if rebuilt is not None:
                only = {p.index for p in rebuilt if p.chain == edge.target}
                if not only:
                    continue
            table = share.tables.get(f"edge:{edge.id}")
            if table is None:
                cuts = [Bundle(edge.id, slice_no, task, run, {}, None) for _ in nodes]
            else:
                route = route_of(edge, mapping, nodes, job.key_groups)
                cuts = cut(table, route, len(nodes), edge.id, slice_no, task, run, only)
            for n, bundle in enumerate(cuts):
                bundles[n].append(bundle)
    return bundles


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A recovery as its source stage sees it; `tasks` of them share the logs evenly."""

    run: int
    nodes: tuple[NodeId, ...]
    plan: RecoveryPlan
    tasks: int


def run_replay_task(job: JobSpec, request: ReplayRequest, task: int) -> list[list[Any]]:
    """One blob (as buffers) per node, with this task's share of the logged slices."""
    plan, nodes = request.plan, request.nodes
    logs = [(s, t) for s in plan.slices for t in range(s.source_tasks)]
    bundles: list[list[Bundle]] = [[] for _ in nodes]
    replayed: dict[tuple[int, int], Mapping[str, int]] = {}
    failures: tuple[Failure, ...] = ()
    try:
        for slice_plan, logged_by in logs[task :: request.tasks]:
            number = slice_plan.number
            share = _logged(Path(job.root), slice_plan, logged_by) or _NOTHING
            replayed[(number, logged_by)] = share.facts["rows"]
            cuts = _cut(
                job, request.run, nodes, plan.mapping, number, logged_by, share, plan.rebuilt
            )
            for n, more in enumerate(cuts):
                bundles[n] += more
    except AnabranchError as e:
        failures = (Failure(f"replay task {task}", "", e.message, repr(e), kind="storage"),)
    facts = SideFacts(failures=failures, replayed=replayed)
    home = task % len(nodes)
    return [encode_blob(b, facts if n == home else None) for n, b in enumerate(bundles)]
