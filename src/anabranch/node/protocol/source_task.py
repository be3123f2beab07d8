"""A source task's work: read a share of a batch, run the source chains, log, cut into packets.

It runs wherever Spark chose. What it emits is decided by the source log alone: a retried task, and
every replay, reads the log instead of the batch. A replay task sends what several source tasks
logged over several slices, to the partitions that are rebuilt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anabranch.errors import AnabranchError, StorageError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.reports import Failure, SourceReport, Staged
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.protocol.carried import ChainError, Job, Packets, R, Share
from anabranch.node.protocol.exchange import Bundle, Parcel, SideFacts
from anabranch.node.protocol.messages import ReplayRequest, SourceRequest

NOTHING: Share[Any] = Share(
    {}, {"chunks": 0, "batch_rows": 0, "rows": {}, "max_time_us": {}, "rows_by_operator": {}}
)


# A stall makes the rows of a small slice look dear; the burst after it must not become thousands of
# slices, each of which has its price.
MAX_PIECES = 100


def rows_per_slice(longest: int, shares: int, asked: int | None, in_time: int | None) -> int:
    """Of one task and source, whose share of the batch are `longest` rows at most: as few as leave
    all these `shares` together the number that was asked for, or that fits in time."""
    limit = longest or 1
    if in_time is not None:
        limit = min(limit, max(in_time // shares, -(-longest // MAX_PIECES)))
    if asked is not None:
        limit = min(limit, asked // shares)
    return max(1, limit)


def run_source_task(
    job: Job[R],
    request: SourceRequest,
    task: int,
    batch: Iterable[Any],
    cpu_s: Callable[[], float] = time.process_time,
) -> list[Parcel[R]]:
    """One parcel per node."""
    began = cpu_s()
    try:
        share, log_bytes = _share(job, request, task, batch)
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
        max_time_us=share.facts["max_time_us"],
        log_bytes=log_bytes,
        cpu_s=cpu_s() - began,
        rows_by_operator=share.facts["rows_by_operator"],
        dead_by_operator=share.facts.get("dead_by_operator", {}),
    )
    addressed = (request.generation, request.nodes, request.placement)
    bundles = _cut(job, *addressed, request.plan.number, task, share, None, request.plan.paused)
    # The report rides with the parcel of one node; which one does not matter.
    return _with_facts(bundles, SideFacts(sources=(report,), staged=staged), task)


def _failed(request: SourceRequest, failure: Failure, task: int) -> list[Parcel[R]]:
    nothing: list[list[Bundle[R]]] = [[] for _ in request.nodes]
    return _with_facts(nothing, SideFacts(failures=(failure,)), task)


def _with_facts(bundles: list[list[Bundle[R]]], facts: SideFacts, task: int) -> list[Parcel[R]]:
    home = task % len(bundles)
    return [Parcel(b, facts if n == home else None) for n, b in enumerate(bundles)]


def _share(
    job: Job[R], request: SourceRequest, task: int, batch: Iterable[Any]
) -> tuple[Share[R], int]:
    """This task's share of the slice, and how many bytes it just logged."""
    plan = request.plan
    logged = _logged(job, plan, task)
    if logged is not None:
        for _ in batch:
            pass  # Spark reuses a worker only if it read all its input
        job.finish_log(plan, task, logged)
        return logged, 0
    shares = job.compute(request, task, batch)
    size, counts = job.write_log(plan, task, shares)
    if counts:
        return shares[0], size
    # Another attempt of this task was faster; what it has read is what everybody uses.
    logged = _logged(job, plan, task)
    assert logged is not None
    job.finish_log(plan, task, logged)
    return logged, size


def _logged(job: Job[R], plan: SlicePlan, task: int) -> Share[R] | None:
    """What a task logged for the slice; None where a live batch is still to be read."""
    found = job.read_log(plan, task)
    if found is not None:
        return found
    if plan.feed is Feed.LIVE:
        return None
    if plan.without_log is None or task in plan.without_log:
        return NOTHING  # its share of the batch was cut into fewer slices than another task's
    path = job.log_name(plan, task)
    raise StorageError(
        f"the source log {path} of slice {plan.number} is missing; restore the directory from a "
        "copy, or start with a new checkpoint directory",
        path=path,
    )


def _stage(job: Job[R], request: SourceRequest, task: int, share: Share[R]) -> tuple[Staged, ...]:
    return tuple(
        job.stage(name, rows, request.plan.number, request.generation, f"source-{task}")
        for key, rows in share.tables.items()
        if key.startswith("sink:") and (name := key.removeprefix("sink:"))
    )


def _cut(
    job: Job[R],
    generation: int,
    nodes: tuple[NodeId, ...],
    placement: Placement,
    slice_no: int,
    task: int,
    share: Share[R],
    rebuilt: frozenset[PartitionId] | None,
    paused: frozenset[str] = frozenset(),
) -> list[list[Bundle[R]]]:
    """The share's bundles per node; with `rebuilt`, only what these partitions need, and nothing
    for chains that are `paused`."""
    bundles: list[list[Bundle[R]]] = [[] for _ in nodes]
    for edge in (e for c in job.chains.values() if c.is_source for e in c.outputs):
        if edge.target in paused:
            continue  # it is in the log for them
        only: set[int] | None = None
        if rebuilt is not None:
            only = {p.index for p in rebuilt if p.chain == edge.target}
            if not only:
                continue
        cuts: Sequence[Packets[R] | None] = [None for _ in nodes]
        if f"edge:{edge.id}" in share.tables:
            cuts = job.cut(share.tables[f"edge:{edge.id}"], job.route(edge, placement, nodes), only)
        for mine, packets in zip(bundles, cuts, strict=True):
            mine.append(Bundle(edge.id, slice_no, task, generation, packets))
    return bundles


def run_replay_task(job: Job[R], request: ReplayRequest, task: int) -> list[Parcel[R]]:
    """One parcel per node, with this task's share of the logged slices."""
    plan, nodes = request.plan, request.nodes
    logs = [(s, t) for s in plan.slices for t in range(s.source_tasks)]
    bundles: list[list[Bundle[R]]] = [[] for _ in nodes]
    replayed: dict[tuple[int, int], Mapping[str, int]] = {}
    failures: tuple[Failure, ...] = ()
    try:
        for slice_plan, logged_by in logs[task :: request.tasks]:
            number = slice_plan.number
            share = _logged(job, slice_plan, logged_by) or NOTHING
            replayed[(number, logged_by)] = share.facts["rows"]
            addressed = (request.generation, nodes, plan.placement)
            rebuilt = frozenset(p for p in plan.rebuilt if plan.takes(p.chain, number))
            cuts = _cut(job, *addressed, number, logged_by, share, rebuilt)
            for mine, more in zip(bundles, cuts, strict=True):
                mine += more
    except AnabranchError as e:
        failures = (Failure(f"replay task {task}", "", e.message, repr(e), kind="storage"),)
    return _with_facts(bundles, SideFacts(failures=failures, replayed=replayed), task)
