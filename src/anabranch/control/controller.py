"""The control plane of one run: a state machine from events to commands.

It decides which slice runs next and with which time and mapping, when a slice has happened, what
a restart replays and when to checkpoint. It owns the frontier of every partition (its next slice,
its epoch) and refuses, as a broken invariant, any report that contradicts it.

Phases: waiting for nodes → installing partitions → replaying journalled slices → running →
stopping (a last slice seals a checkpoint) → ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field
from enum import Enum, auto

from anabranch.control.checkpoints import CheckpointLedger, partition_key
from anabranch.control.watermark import WatermarkTracker
from anabranch.errors import (
    AnabranchError,
    ClusterError,
    InvariantError,
    OperatorError,
    StorageError,
)
from anabranch.model.commands import (
    Command,
    ExposeSlice,
    FailRun,
    FinishBatch,
    FinishRun,
    InstallPartitions,
    PollNodes,
    RunSlice,
    TrimStorage,
    WriteCut,
    WriteSlice,
)
from anabranch.model.events import (
    BatchArrived,
    Event,
    Idled,
    NodesJoined,
    NodesPolled,
    PartitionsInstalled,
    RestoreFailed,
    SliceRan,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping, place
from anabranch.model.plan import Plan
from anabranch.model.reports import NodeReport, SourceReport
from anabranch.model.slices import Cut, Feed, SlicePlan, SliceRecord


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The run's settings that decisions depend on."""

    checkpoint_interval_ms: int = 10_000
    # Event-time delay per source that declares an event time.
    watermark_delays_us: MappingOf[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Past:
    """What the journal of earlier runs on the same directory says; empty for a new one."""

    cut: Cut | None = None
    previous: Cut | None = None
    slices: tuple[SliceRecord, ...] = ()  # after the previous cut, in order
    epochs: MappingOf[PartitionId, int] = field(default_factory=dict)
    groups: MappingOf[str, tuple[int, ...]] = field(default_factory=dict)  # of the cut
    parallelism: MappingOf[str, int] = field(default_factory=dict)  # declared, at the cut
    rescaled: frozenset[str] = frozenset()  # chains whose declared parallelism is another now
    mapping_version: int = 0
    generation: int = 0  # of the driver that wrote the journal last


class Phase(Enum):
    """What the run is doing."""

    WAITING = auto()
    INSTALLING = auto()
    REPLAYING = auto()
    RUNNING = auto()
    STOPPING = auto()
    ENDED = auto()


class Controller:
    """Feed it events in order; execute the commands it returns in order."""

    def __init__(self, plan: Plan, config: ControlConfig, past: Past) -> None:
        self.phase = Phase.WAITING
        self.frontier: dict[PartitionId, int] = {}
        self.mapping: Mapping | None = None
        self._plan = plan
        self._past = past
        self._generation = past.generation + 1
        self._checkpoints = CheckpointLedger(config.checkpoint_interval_ms, past.cut, past.previous)
        self._watermark = WatermarkTracker(config.watermark_delays_us)
        self._records: list[SliceRecord] = list(past.slices)  # after the previous cut
        for record in past.slices:
            self._watermark.resume(record.watermark_us)
            self._watermark.observe(record.max_time_us, record.batch_end)
        self._to_replay: list[SliceRecord] = []
        self._running: SlicePlan | None = None
        self._incarnations: dict[NodeId, str] = {}
        self._waiting_batch: int | None = None
        self._stop_asked = False

    @property
    def newest(self) -> SliceRecord | None:
        """The newest slice that has happened."""
        return self._records[-1] if self._records else None

    @property
    def watermark_us(self) -> int | None:
        return self._watermark.watermark_us

    @property
    def previous_cut(self) -> Cut | None:
        """The cut before the newest: what a restart falls back on."""
        return self._checkpoints.previous

    def handle(self, event: Event) -> list[Command]:
        """One event in, the commands it causes out."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case NodesJoined():
                return self._on_nodes(event.nodes)
            case PartitionsInstalled():
                return self._on_installed(event)
            case RestoreFailed():
                return self._on_restore_failed(event)
            case BatchArrived():
                self._waiting_batch = event.batch
                return self._go_on(event.now_ms)
            case SliceRan():
                return self._on_slice(event)
            case NodesPolled():
                return self._on_poll(event)
            case Idled():
                return self._on_idle(event.now_ms)
            case StopRequested():
                self._stop_asked = True
                return self._go_on(event.now_ms)

    # -- start and restart ---------------------------------------------------------------------

    def _on_nodes(self, nodes: Sequence[NodeId]) -> list[Command]:
        if self.phase is not Phase.WAITING:
            return []  # later arrivals serve the next placement
        past = self._past
        kept = {c: g for c, g in past.groups.items() if c not in past.rescaled}
        self.mapping = place(self._plan, nodes, past.mapping_version + 1, past.epochs, kept)
        self.phase = Phase.INSTALLING
        return self._install()

    def _install(self) -> list[Command]:
        """Restore every partition from the newest cut that has not proved unreadable."""
        assert self.mapping is not None
        start = self._cut_slice + 1
        self.frontier = dict.fromkeys(self.mapping.owners, start)
        restore = {p: self._files_of(p) for p in self.mapping.owners}
        return [InstallPartitions(self.mapping, restore, start)]

    def _on_restore_failed(self, event: RestoreFailed) -> list[Command]:
        """A torn checkpoint is skipped: the cut before it and a longer replay give the same."""
        if self._checkpoints.cut is not None:
            self._checkpoints.fall_back()
            first = self._records[0].number if self._records else 1
            if first <= self._cut_slice + 1:
                return self._install()
        self.phase = Phase.ENDED
        return [FailRun(event.error)]

    def _files_of(self, partition: PartitionId) -> tuple[str, ...]:
        """The checkpoint files with this partition's key groups, each old partition's in order."""
        assert self.mapping is not None
        cut = self._checkpoints.cut
        if cut is None or partition.chain not in cut.groups:
            return ()
        old, mine = cut.groups[partition.chain], self.mapping.groups[partition.chain]
        owners = sorted({o for o, m in zip(old, mine, strict=True) if m == partition.index})
        keys = [partition_key(PartitionId(partition.chain, o)) for o in owners]
        return tuple(f for k in keys for f in cut.files.get(k, ()))

    def _on_installed(self, event: PartitionsInstalled) -> list[Command]:
        self._to_replay = [r for r in self._past.slices if r.number > self._cut_slice]
        self.phase = Phase.REPLAYING
        return self._go_on(event.now_ms)

    # -- choosing the next slice ---------------------------------------------------------------

    def _go_on(self, now_ms: int) -> list[Command]:
        """The next step whenever no slice is running."""
        if self._running is not None:
            return []
        if self.phase is Phase.REPLAYING:
            if self._to_replay:
                return self._replay(self._to_replay.pop(0))
            self.phase = Phase.RUNNING
        if self.phase is Phase.STOPPING:
            return self._stop_step()
        if self.phase is not Phase.RUNNING:
            return []
        newest = self.newest
        if newest and newest.chunks_left:
            return self._start(Feed.LOG, newest.batch, newest.source_tasks, now_ms)
        if self._waiting_batch is not None:
            batch = self._waiting_batch
            if newest and newest.batch is not None and batch <= newest.batch:
                self._waiting_batch = None  # journalled before a crash; Spark offers it again
                return [FinishBatch(batch), *self._go_on(now_ms)]
            return self._start(Feed.LIVE, batch, 0, now_ms)
        if self._stop_asked:
            self.phase = Phase.STOPPING
            return self._stop_step(now_ms)
        return []

    def _on_idle(self, now_ms: int) -> list[Command]:
        """Without rows, time may still have to move, or a checkpoint be taken or waited for."""
        if self._running is not None or self.phase is not Phase.RUNNING:
            return []
        if self._waiting_batch is not None:
            return []
        newest = self.newest
        if newest and newest.watermark_us != self._watermark.watermark_us:
            return self._start(Feed.NONE, None, 0, now_ms)
        if self._checkpoints.in_flight:
            return [PollNodes()]
        if newest and newest.number > self._cut_slice and self._checkpoints.is_due(now_ms):
            return self._start(Feed.NONE, None, 0, now_ms)
        return []

    @property
    def _cut_slice(self) -> int:
        return self._checkpoints.cut.slice if self._checkpoints.cut else 0

    def _stop_step(self, now_ms: int | None = None) -> list[Command]:
        """Close what the watermark allows, seal the last slice, wait for its files, end."""
        newest = self.newest
        if self._checkpoints.in_flight:
            return [PollNodes()]
        behind = newest is not None and newest.watermark_us != self._watermark.watermark_us
        if newest is not None and (newest.number > self._cut_slice or behind):
            when = now_ms if now_ms is not None else newest.processing_ms
            return self._start(Feed.NONE, None, 0, when, seal=True)
        self.phase = Phase.ENDED
        return [FinishRun()]

    def _start(
        self, feed: Feed, batch: int | None, source_tasks: int, now_ms: int, seal: bool = False
    ) -> list[Command]:
        assert self.mapping is not None
        newest = self.newest
        number = (newest.number if newest else 0) + 1
        generation = newest.generation if newest and feed is Feed.LOG else self._generation
        self._running = SlicePlan(
            number=number,
            feed=feed,
            batch=batch,
            source_tasks=source_tasks,
            watermark_us=self._watermark.watermark_us,
            processing_ms=now_ms,
            mapping=self.mapping.version,
            seal=(seal or self._checkpoints.is_due(now_ms)) and not self._checkpoints.in_flight,
            replay=False,
            generation=generation,
        )
        return [RunSlice(self._running)]

    def _replay(self, record: SliceRecord) -> list[Command]:
        assert self.mapping is not None
        self._running = SlicePlan(
            number=record.number,
            feed=Feed.NONE if record.feed == Feed.NONE.value else Feed.LOG,
            batch=record.batch,
            source_tasks=record.source_tasks,
            watermark_us=record.watermark_us,
            processing_ms=record.processing_ms,
            mapping=self.mapping.version,
            seal=False,
            replay=True,
            generation=record.generation,
        )
        return [RunSlice(self._running)]

    # -- after a slice -------------------------------------------------------------------------

    def _on_slice(self, event: SliceRan) -> list[Command]:
        plan = self._running
        if plan is None or plan.number != event.number:
            raise InvariantError(
                f"slice {event.number} was reported while {plan and plan.number} was running",
                slice=event.number,
            )
        error = (
            _first_failure(event.reports, f"slice {plan.number}", plan.number)
            or self._lost_node(event.reports, plan.number)
            or (self._incomplete_log(plan, event.reports) if plan.replay else None)
        )
        if error is not None:
            self.phase = Phase.ENDED
            return [FailRun(error)]
        self._running = None
        self._advance(event.reports, plan.number)
        commands: list[Command] = []
        if not plan.replay:
            commands += self._commit(plan, event)
        if plan.seal:
            assert self.mapping is not None
            self._checkpoints.sealed(plan.number, self.mapping, plan.processing_ms)
        commands += self._on_reports(event.reports)
        return commands + self._go_on(event.now_ms)

    def _on_poll(self, event: NodesPolled) -> list[Command]:
        """What goes wrong between slices (a full disk, a lost node) must end the waiting too."""
        newest = self.newest.number if self.newest else 0
        error = _first_failure(event.reports, f"after slice {newest}", newest) or self._lost_node(
            event.reports, newest
        )
        if error is not None:
            self.phase = Phase.ENDED
            return [FailRun(error)]
        return self._on_reports(event.reports) + self._go_on(event.now_ms)

    def _lost_node(self, reports: Sequence[NodeReport], number: int) -> AnabranchError | None:
        """A node process that was replaced has lost its partitions, and its name with them."""
        assert self.mapping is not None
        found = {r.node: r.incarnation for r in reports}
        for node in dict.fromkeys(o.node for o in self.mapping.owners.values()):
            known = self._incarnations.setdefault(node, found.get(node, ""))
            if found.get(node) != known:
                return ClusterError(
                    f"slice {number}: the process of node {node} was lost with its partitions; "
                    "start the job again with the same checkpoint directory, nothing committed is "
                    "lost",
                    slice=number,
                )
        return None

    def _incomplete_log(
        self, plan: SlicePlan, reports: Sequence[NodeReport]
    ) -> AnabranchError | None:
        """A replay must read as many rows as the journal says the slice had."""
        record = next(r for r in self._records if r.number == plan.number)
        read = _rows_by_source({s.partition: s for r in reports for s in r.sources}.values())
        for source in sorted({*read, *record.rows}):
            found, wanted = read.get(source, 0), record.rows.get(source, 0)
            if found != wanted:
                return StorageError(
                    f"the source log of slice {plan.number} has {found} rows of source "
                    f"{source!r}, the journal says {wanted}; restore the directory from a copy, "
                    "or start with a new checkpoint directory",
                    slice=plan.number,
                )
        return None

    def _advance(self, reports: Sequence[NodeReport], number: int) -> None:
        """Move every partition's frontier; each must have applied exactly this slice."""
        assert self.mapping is not None
        for report in reports:
            for partition, state in report.partitions.items():
                owner = self.mapping.owners.get(partition)
                if owner is None or state.epoch != owner.epoch:
                    continue  # an owner that was replaced
                if state.next_slice != number + 1 or self.frontier[partition] != number:
                    raise InvariantError(
                        f"{partition} reports next slice {state.next_slice} after slice {number}; "
                        f"its frontier was {self.frontier[partition]}",
                        partition=str(partition),
                    )
                self.frontier[partition] = number + 1
        behind = [str(p) for p, nxt in self.frontier.items() if nxt != number + 1]
        if behind:
            raise InvariantError(f"after slice {number} no report came from {', '.join(behind)}")

    def _commit(self, plan: SlicePlan, event: SliceRan) -> list[Command]:
        sources = [s for r in event.reports for s in r.sources]
        seen = {s.partition for s in sources}
        if plan.feed is not Feed.NONE and len(seen) != event.source_tasks:
            raise InvariantError(
                f"slice {plan.number} was read by {event.source_tasks} source tasks, "
                f"{len(seen)} reported"
            )
        unique = {s.partition: s for s in sources}.values()
        latest: dict[str, int] = {}
        for s in unique:
            for name, t in s.max_time_us.items():
                latest[name] = max(t, latest.get(name, t))
        if plan.feed is Feed.LIVE:
            chunks_left = max((s.chunks for s in unique), default=1) - 1
        else:
            newest = self.newest
            chunks_left = max(newest.chunks_left - 1, 0) if newest else 0
        self._watermark.observe(latest, chunks_left == 0)
        previous = self.newest
        staged = tuple(
            sorted(
                {(s.sink, s.writer): s for r in event.reports for s in r.staged}.values(),
                key=lambda s: (s.sink, s.writer),
            )
        )
        files: dict[str, list[str]] = {}
        for out in staged:
            if out.path is not None:
                files.setdefault(out.sink, []).append(out.path)
        record = SliceRecord(
            number=plan.number,
            feed=plan.feed.value,
            # Slices without rows keep the newest batch, so that a restart knows it.
            batch=plan.batch if plan.batch is not None else (previous.batch if previous else None),
            batch_end=chunks_left == 0,
            source_tasks=event.source_tasks,
            chunks_left=chunks_left,
            watermark_us=plan.watermark_us,
            processing_ms=plan.processing_ms,
            mapping=plan.mapping,
            generation=plan.generation,
            max_time_us=self._watermark.latest_us,
            rows=_rows_by_source(unique),
            staged=files,
        )
        self._records.append(record)
        commands: list[Command] = [WriteSlice(record), ExposeSlice(record, staged)]
        if plan.batch is not None and chunks_left == 0:
            commands.append(FinishBatch(plan.batch))
            self._waiting_batch = None
        return commands

    def _on_reports(self, reports: Sequence[NodeReport]) -> list[Command]:
        """Checkpoint files that became durable; a completed cut moves the restart point."""
        cut = self._checkpoints.written(c for r in reports for c in r.checkpoints)
        if cut is None:
            return []
        assert self.mapping is not None
        start = self._checkpoints.replay_from
        self._records = [r for r in self._records if r.number >= start]
        # Partitions that this run does not have may come back: their epochs must not repeat.
        epochs = dict(self._past.epochs) | {p: o.epoch for p, o in self.mapping.owners.items()}
        return [
            WriteCut(cut, tuple(self._records), self.mapping, epochs),
            TrimStorage(start, self._checkpoints.keep_files),
        ]


def _rows_by_source(reports: Iterable[SourceReport]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for report in reports:
        for name, n in report.rows.items():
            rows[name] = rows.get(name, 0) + n
    return rows


def _first_failure(reports: Sequence[NodeReport], when: str, number: int) -> AnabranchError | None:
    """The one error to show for a slice that was not applied everywhere, causes first."""
    failures = [f for r in reports for f in r.failures]
    if failures:
        first = failures[0]
        cls = StorageError if first.kind == "storage" else OperatorError
        operator = f", operator {first.operator!r}" if first.operator else ""
        return cls(
            f"{when}{operator} ({first.where}): {first.message}",
            operator=first.operator,
            slice=number,
            detail=first.detail,
        )
    lost = [p for r in reports for p in r.not_hosted]
    if lost:
        return ClusterError(
            f"slice {number}: {', '.join(map(str, lost))} lost with its node process; start the "
            "job again with the same checkpoint directory, nothing committed is lost",
            slice=number,
        )
    for report in reports:
        for partition, why in report.incomplete.items():
            return ClusterError(
                f"slice {number}: {partition} on node {report.node} lacked input ({why}); start "
                "the job again with the same checkpoint directory, nothing committed is lost",
                slice=number,
            )
    return None
