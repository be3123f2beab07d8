"""Simulated source and replay tasks: the rules of `node/source_task.py`.

What a source task emits is decided by the source log alone: the first complete log is the truth,
for a retried task and for every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.model.mapping import Mapping
from anabranch.model.plan import Edge
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import SourceReport, Staged
from anabranch.model.slices import Feed, SlicePlan
from anabranch.sim.disk import Disk, Logged, LogName
from anabranch.sim.packets import Blob, Bundle, cut, needed
from anabranch.sim.workload import Row, Share, Workload

NOTHING = Logged({}, 0)


@dataclass(frozen=True)
class SourceJob:
    """One slice as its source tasks see it; `live` are their shares of the batch."""

    job: Workload
    disk: Disk
    run: int
    mapping: Mapping
    plan: SlicePlan
    tasks: int
    live: tuple[Share, ...]


def source_task(source: SourceJob, task: int) -> list[Blob]:
    """Log, stage and cut one task's share; one blob per node."""
    plan, job = source.plan, source.job
    log_share(source, task)
    logged = source.disk.logs.get(_name(plan, task, 0), NOTHING)
    staged = []
    for sink, rows in _sink_rows(job, logged.share).items():
        name = (sink, plan.number, source.run, f"source-{task}")
        staged.append(Staged(sink, name[3], len(rows), source.disk.stage(name, rows)))
    report = SourceReport(
        partition=task,
        chunks=logged.chunks,
        rows=_count(job, logged.share),
        batch_rows=0,
        max_time_us={s: max(t for _, _, t in r) for s, r in logged.share.items() if r},
        log_bytes=0,
        cpu_s=0.0,
    )
    blobs = _cut(job, source.run, source.mapping, plan.number, task, logged.share, lambda _: None)
    home = task % len(blobs)
    blobs[home] = Blob(blobs[home].bundles, (report,), tuple(staged))
    return blobs


def log_share(source: SourceJob, task: int, whole: bool = True) -> None:
    """Write a live share to the log, one slice of it after the other; not `whole`: the task dies
    before the first one, which comes last: it says that all of them are there."""
    plan, disk = source.plan, source.disk
    if plan.feed is not Feed.LIVE or _name(plan, task, 0) in disk.logs:
        return
    chunks = source.job.chunks(source.live[task], source.tasks)
    if source.job.max_rows_per_slice is not None:
        newest = plan.number + len(chunks) - 1
        for old in [n for n in disk.logs if n[0] > newest and n[1:] == _name(plan, task, 0)[1:]]:
            del disk.logs[old]
    for offset in reversed(range(0 if whole else 1, len(chunks))):
        disk.logs[_name(plan, task, offset)] = Logged(chunks[offset], len(chunks))


def _name(plan: SlicePlan, task: int, offset: int) -> LogName:
    return (plan.number + offset, plan.generation, plan.attempt, task)


def replay_task(
    job: Workload, disk: Disk, run: int, plan: RecoveryPlan, task: int, tasks: int
) -> list[Blob]:
    """What some source tasks logged over several slices, for the partitions that are rebuilt."""
    logs = [(s, t) for s in plan.slices for t in range(s.source_tasks)]
    bundles: list[list[Bundle]] = [[] for _ in plan.mapping.nodes]
    replayed = []
    for slice_plan, logged_by in logs[task::tasks]:
        number = slice_plan.number
        name = (number, slice_plan.generation, slice_plan.attempt, logged_by)
        share = disk.logs.get(name, NOTHING).share
        replayed.append(((number, logged_by), _count(job, share)))
        blobs = _cut(
            job, run, plan.mapping, number, logged_by, share, lambda edge: needed(edge, plan)
        )
        for mine, blob in zip(bundles, blobs, strict=True):
            mine += blob.bundles
    made = [Blob(tuple(b)) for b in bundles]
    home = task % len(made)
    made[home] = Blob(made[home].bundles, replayed=tuple(replayed))
    return made


def _cut(
    job: Workload,
    run: int,
    mapping: Mapping,
    slice_no: int,
    task: int,
    share: Share,
    only: Callable[[Edge], set[int] | None],
) -> list[Blob]:
    bundles: list[list[Bundle]] = [[] for _ in mapping.nodes]
    for chain in job.plan.source_chains:
        rows = _rows(share, chain.name)
        for edge in chain.outputs:
            wanted = only(edge)
            if wanted is not None and not wanted:
                continue
            for mine, packets in zip(bundles, cut(rows, edge, mapping, wanted), strict=True):
                mine.append(Bundle(edge.id, slice_no, task, run, packets))
    return [Blob(tuple(b)) for b in bundles]


def _rows(share: Share, source: str) -> tuple[Row, ...]:
    return tuple((key, value) for key, value, _ in share.get(source, ()))


def _sink_rows(job: Workload, share: Share) -> dict[str, tuple[Row, ...]]:
    """Rows per sink that hangs on a source without a shuffle."""
    found: dict[str, tuple[Row, ...]] = {}
    for chain in job.plan.source_chains:
        for sink in chain.sinks:
            found[sink] = (*found.get(sink, ()), *_rows(share, chain.name))
    return {sink: rows for sink, rows in found.items() if rows}


def _count(job: Workload, share: Share) -> dict[str, int]:
    return {s: len(rows) * job.row_weight for s, rows in share.items()}
