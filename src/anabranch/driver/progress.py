"""What a user sees of a slice: the sum of all reports, as one flat value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.model.placement import Placement
from anabranch.model.reports import NodeReport
from anabranch.model.slices import SlicePlan


@dataclass(frozen=True, slots=True)
class Progress:
    """One slice. Times in seconds, sizes in bytes."""

    slice: int
    batch: int | None
    processing_ms: int
    seconds: float
    ended_ms: int  # by a clock that goes on evenly, and means nothing by itself: for rates
    rows_in: int
    rows_by_source: Mapping[str, int]
    rows_by_operator: Mapping[str, int]
    rows_to_sinks: int
    late_rows: int
    watermark_us: int | None
    packet_bytes: int
    source_log_bytes: int
    state_rows: int
    state_bytes: int
    state_by_operator: Mapping[str, tuple[int, int]]  # chain → (rows, bytes)
    backup_bytes: int
    checkpoint_slice: int  # the newest slice that a checkpoint covers
    checkpoint_age_s: float | None  # since that checkpoint was complete
    cpu_s: float
    nodes: Mapping[str, tuple[int, int, int]]  # node → (pid, resident bytes, partitions)
    rows_by_sink: Mapping[str, int] = field(default_factory=dict)
    late_by_operator: Mapping[str, int] = field(default_factory=dict)
    dead_by_operator: Mapping[str, int] = field(default_factory=dict)  # rows put aside
    cpu_by_operator: Mapping[str, float] = field(default_factory=dict)  # chain → seconds
    waiting: tuple[str, ...] = ()  # sinks whose rows of this slice come later


@dataclass
class Totals:
    """What became of the rows since the run started, slice by slice as they were committed.

    Every row that was read, and every row an operator made, is in the next operator's output or
    state, in a sink, late or put aside; a filter, a deduplication or an inner enrichment drops
    rows by its own meaning.
    """

    read: dict[str, int] = field(default_factory=dict)  # per source
    made: dict[str, int] = field(default_factory=dict)  # rows out, per operator
    to_sinks: dict[str, int] = field(default_factory=dict)  # per sink, dead letters among them
    late: dict[str, int] = field(default_factory=dict)  # per operator
    dead: dict[str, int] = field(default_factory=dict)  # per operator (or sink) that refused them

    def add(self, progress: Progress) -> None:
        """A slice has been committed."""
        _add(self.read, progress.rows_by_source)
        _add(self.made, progress.rows_by_operator)
        _add(self.to_sinks, progress.rows_by_sink)
        _add(self.late, progress.late_by_operator)
        _add(self.dead, progress.dead_by_operator)

    def refuse(self, sink: str, rows: int, letters: str) -> None:
        """The target of a sink refused rows: they went to the sink of dead letters instead."""
        _add(self.to_sinks, {sink: -rows, letters: rows})
        _add(self.dead, {sink: rows})


def summarise(
    plan: SlicePlan,
    reports: Sequence[NodeReport],
    seconds: float,
    ended_ms: int,
    placement: Placement,
    checkpoint: tuple[int, float | None],
    waiting: tuple[str, ...] = (),
) -> Progress:
    """Add up what the nodes reported."""
    sources = [s for r in reports for s in r.sources]
    partitions = [(p, x) for r in reports for p, x in r.partitions.items()]
    by_source: dict[str, int] = {}
    by_operator: dict[str, int] = {}
    by_sink: dict[str, int] = {}
    late: dict[str, int] = {}
    dead: dict[str, int] = {}
    state: dict[str, tuple[int, int]] = {}
    cpu: dict[str, float] = {}
    for source in sources:
        _add(by_source, source.rows)
        _add(by_operator, source.rows_by_operator)
        _add(dead, source.dead_by_operator)
    for staged in (s for r in reports for s in r.staged):
        _add(by_sink, {staged.sink: staged.rows})
    for partition, report in partitions:
        _add(by_operator, report.rows_by_operator)
        _add(late, report.late_by_operator)
        _add(dead, report.dead_by_operator)
        rows, size = state.get(partition.chain, (0, 0))
        state[partition.chain] = (rows + report.state_rows, size + report.state_bytes)
        cpu[partition.chain] = cpu.get(partition.chain, 0.0) + report.cpu_s
    return Progress(
        slice=plan.number,
        batch=plan.batch,
        processing_ms=plan.processing_ms,
        seconds=seconds,
        ended_ms=ended_ms,
        rows_in=sum(by_source.values()),
        rows_by_source=by_source,
        rows_by_operator=by_operator,
        rows_to_sinks=sum(by_sink.values()),
        late_rows=sum(late.values()),
        watermark_us=plan.watermark_us,
        packet_bytes=sum(x.packet_bytes for _, x in partitions),
        source_log_bytes=sum(s.log_bytes for s in sources),
        state_rows=sum(x.state_rows for _, x in partitions),
        state_bytes=sum(x.state_bytes for _, x in partitions),
        state_by_operator=state,
        backup_bytes=sum(x.backup_bytes for _, x in partitions),
        checkpoint_slice=checkpoint[0],
        checkpoint_age_s=checkpoint[1],
        cpu_s=sum(x.cpu_s for _, x in partitions) + sum(s.cpu_s for s in sources),
        nodes={r.node: (r.pid, r.memory_bytes, len(placement.hosted_by(r.node))) for r in reports},
        rows_by_sink=by_sink,
        late_by_operator=late,
        dead_by_operator=dead,
        cpu_by_operator=cpu,
        waiting=waiting,
    )


def _add(total: dict[str, int], part: Mapping[str, int]) -> None:
    for name, rows in part.items():
        total[name] = total.get(name, 0) + rows
