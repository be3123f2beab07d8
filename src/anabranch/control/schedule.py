"""The choice of the next slice: whether one runs, with which time, and whether it seals.

At most one slice is in hand. One that was cut short runs next, before anything else: with all its
rows in the log, some node may have applied it, so exactly these rows come again. Then come the
steps of an adjustment, a stop, the batch that waits, and time that has to pass without rows.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

from anabranch.control.adjustment import Adjustment
from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.processing_time import ProcessingTime
from anabranch.control.settings import ControlConfig
from anabranch.control.story import Machine, Story
from anabranch.errors import InvariantError
from anabranch.model.commands import (
    Command,
    ExposeSlice,
    FinishBatch,
    FinishRun,
    PollNodes,
    RunSlice,
    WriteSlice,
)
from anabranch.model.events import BatchArrived, SliceRan
from anabranch.model.ids import NodeId
from anabranch.model.placement import Placement
from anabranch.model.slices import Feed, SlicePlan, SliceRecord, Writes

# A batch that would take longer is cut into slices.
LONG_S = 5.0
LONG_INTERVALS = 5  # … than this, and than this number of intervals


class SliceState(Enum):
    """What there is of the slice in hand."""

    FREE = auto()  # none
    RUNNING = auto()
    CUT_SHORT = auto()  # it has not happened, and runs next
    ENDED = auto()  # no slice runs any more


LEGAL = {
    SliceState.FREE: frozenset({SliceState.RUNNING, SliceState.ENDED}),
    SliceState.RUNNING: frozenset({SliceState.FREE, SliceState.CUT_SHORT, SliceState.ENDED}),
    SliceState.CUT_SHORT: frozenset({SliceState.RUNNING, SliceState.ENDED}),
    SliceState.ENDED: frozenset[SliceState](),
}


class Schedule(Machine[SliceState]):
    """One slice after the other. Ask it only while no partition is being rebuilt."""

    def __init__(
        self,
        config: ControlConfig,
        ledgers: Ledgers,
        adjustment: Adjustment,
        generation: int,
        story: Story,
    ) -> None:
        super().__init__("slice", SliceState.FREE, LEGAL, story)
        self._config = config
        self._ledgers = ledgers
        self._adjustment = adjustment
        self._generation = generation
        newest = ledgers.slices.newest
        self._time = ProcessingTime(newest.processing_ms if newest else None)
        self.wall_ms = 0  # with the event in hand
        self.began_ms = 0  # the slice in hand, or the one before
        self.slice: SlicePlan | None = None  # in hand: RUNNING or CUT_SHORT
        self.waiting_batch: BatchArrived | None = None
        self.stop_asked = False
        self.stopping = False  # nothing is begun any more that a stop would have to wait for
        self.beside = False  # do others come back beside slices?
        self.busy: frozenset[NodeId] = frozenset()  # with nothing else
        self.nodes: tuple[NodeId, ...] = ()  # of the slice in hand
        self.disk_full = False  # of a node that keeps backups
        self._attempts = 0  # to read a batch

    # -- what comes next -------------------------------------------------------------------------

    def next(self, now_ms: int) -> list[Command]:
        """The next step, unless a slice is running."""
        if self.state is SliceState.CUT_SHORT and self.slice is not None:
            return self._run(self.slice)
        if self.state is not SliceState.FREE:
            return []
        if self.disk_full and self._ledgers.checkpoints.in_flight:
            return [PollNodes()]
        if self.stopping:
            return self._stop(now_ms)
        step = self._adjustment.step()
        if step:
            return step
        if self.stop_asked:
            self.stopping = True
            return self._stop(now_ms)
        return self._next_rows(now_ms)

    def _next_rows(self, now_ms: int) -> list[Command]:
        waiting, newest = self.waiting_batch, self._ledgers.slices.newest
        if waiting is not None:
            if newest and newest.chunks_left:
                return self._start(Feed.LOG, newest.batch, newest.source_tasks, now_ms)
            if newest and newest.batch is not None and waiting.batch <= newest.batch:
                self.waiting_batch = None  # journalled before a crash; Spark offers it again
                return [FinishBatch(waiting.batch)]
            return self._start(Feed.LIVE, waiting.batch, 0, now_ms)
        idle = newest and newest.feed == Feed.NONE.value
        if idle and self._ledgers.slices.time_has_moved:
            # Nothing comes: time need not wait for the next look to reach the last operator.
            return self._start(Feed.NONE, None, 0, now_ms)
        return []

    def idle(self, now_ms: int) -> list[Command]:
        """Without rows, time may still have to move, or a checkpoint be taken or waited for."""
        slices, checkpoints = self._ledgers.slices, self._ledgers.checkpoints
        if self.state is not SliceState.FREE or self.stopping:
            return []
        if self.waiting_batch is not None or (slices.newest and slices.newest.chunks_left):
            return []  # a batch comes first, also one that an earlier run did not finish
        self._adjustment.ask_again()
        step = self._adjustment.step()
        if step:
            return step
        due = slices.look_is_due(now_ms) or self._timer_is_due(now_ms)
        if due or slices.time_has_moved:
            return self._start(Feed.NONE, None, 0, now_ms)
        if self._adjustment.needs_cut and not checkpoints.in_flight:
            return self._start(Feed.NONE, None, 0, now_ms)
        if checkpoints.in_flight:
            return [PollNodes()]
        if self._ledgers.uncut and checkpoints.is_due(now_ms):
            return self._start(Feed.NONE, None, 0, now_ms)
        return []

    def _timer_is_due(self, now_ms: int) -> bool:
        paused = self._ledgers.behind.chains
        return self._ledgers.owners.timer_is_due(self._time.at(now_ms, self.wall_ms), paused)

    def _stop(self, now_ms: int) -> list[Command]:
        """Close what the watermark allows, seal the last slice, wait for its files, end. The rest
        of a batch that is cut into slices stays in the log; the next of them is the one to seal,
        because their numbers are given."""
        slices, uncut = self._ledgers.slices, self._ledgers.uncut
        newest = slices.newest
        if self._ledgers.checkpoints.in_flight:
            return [PollNodes()]
        if newest is not None and newest.chunks_left:
            if uncut:
                return self._start(Feed.LOG, newest.batch, newest.source_tasks, now_ms, seal=True)
        elif newest is not None and (uncut or slices.time_has_moved):
            return self._start(Feed.NONE, None, 0, now_ms, seal=slices.time_will_rest)
        return [FinishRun()]

    def reopen(self) -> None:
        """Partitions were rebuilt: if a stop was under way, it begins again."""
        self.stopping = False

    def end(self) -> None:
        self._to(SliceState.ENDED)

    # -- starting one ----------------------------------------------------------------------------

    def _start(
        self, feed: Feed, batch: int | None, source_tasks: int, now_ms: int, seal: bool = False
    ) -> list[Command]:
        slices = self._ledgers.slices
        logged = slices.newest if feed is Feed.LOG else None  # a further slice of the same batch
        self.began_ms = now_ms
        return self._run(
            SlicePlan(
                number=slices.next_slice,
                feed=feed,
                batch=batch,
                source_tasks=source_tasks,
                watermark_us=slices.watermark_us,
                watermarks=slices.watermarks,
                processing_ms=self._time.at(now_ms, self.wall_ms),
                placement=0,
                seal=self._shall_seal(now_ms, seal) and not self._ledgers.checkpoints.in_flight,
                writes=self._seal_writes,
                waits=self._config.strategy.synchronous,
                generation=logged.generation if logged else self._generation,
                attempt=self._attempt_of(feed, logged),
                without_log=logged.without_log(1) if logged else (),
            )
        )

    def _shall_seal(self, now_ms: int, asked: bool) -> bool:
        # Backups that find no room on disk are trimmed by checkpoints: until then the stream waits.
        if asked or self.disk_full or self._adjustment.needs_cut:
            return True
        # While state is loaded from a cut, that cut stays the newest.
        return self._ledgers.checkpoints.is_due(now_ms) and self._adjustment.settled

    @property
    def _seal_writes(self) -> Writes:
        if self._config.strategy.whole or self._ledgers.checkpoints.broken:
            return Writes.WHOLE
        # State that is loaded ahead must stay a part of the files.
        return Writes.FOLDED if self._adjustment.settled else Writes.CHANGES

    def _attempt_of(self, feed: Feed, logged: SliceRecord | None) -> int:
        if feed is Feed.LIVE:
            return self._next_attempt()
        return logged.attempt if logged else 0

    def _next_attempt(self) -> int:
        """Of reading a batch, by this driver: no two write to the same log. A source task that
        nobody waits for any more cannot touch a later slice's, whatever its batch is cut into."""
        self._attempts += 1
        return self._attempts - 1

    def _run(self, plan: SlicePlan) -> list[Command]:
        placement = self._ledgers.owners.placement
        paused = self._ledgers.behind.chains
        plan = replace(plan, placement=placement.version, paused=paused)
        if plan.feed is Feed.LIVE:
            plan = replace(plan, max_rows=self._rows_in_time(placement))
        self.slice = plan
        self._to(SliceState.RUNNING, f"slice {plan.number}")
        backups = self._ledgers.backups.chosen(placement)
        live = self.waiting_batch if plan.feed is Feed.LIVE else None
        rows = live.rows if live is not None else None
        trim = self._ledgers.checkpoints.replay_from - 1
        command = RunSlice(self.slice, trim, backups, rows, self.beside, self.busy)
        self.nodes = command.nodes(placement)
        return [command]

    def _rows_in_time(self, placement: Placement) -> int | None:
        """The most that a slice may have: losses, arrivals and requests wait for its end, and a
        batch that has piled up behind a loss is large. None: as many as there are."""
        limit_s = max(LONG_S, LONG_INTERVALS * self._config.slice_interval_ms / 1000)
        row_s = self._ledgers.costs.slice_s(placement, 1, self._ledgers.behind.chains)
        return max(1, int(limit_s / row_s)) if row_s else None

    # -- what became of it -----------------------------------------------------------------------

    def reported(self, number: int) -> SlicePlan:
        """The slice that runs, which must be this one."""
        plan = self.slice if self.state is SliceState.RUNNING else None
        if plan is None or plan.number != number:
            raise InvariantError(
                f"slice {number} was reported while {plan and plan.number} was running",
                slice=number,
            )
        return plan

    def interrupt(self, logged: int | None) -> None:
        """The slice in hand did not happen; it runs again after the rebuild.

        With all its rows in the log, some node may have applied it: exactly these rows come
        again. Otherwise none has seen any, and the batch is read anew into another log.
        """
        plan = self.slice
        if self.state is not SliceState.RUNNING or plan is None:
            return
        if plan.feed is Feed.LIVE and logged is not None:
            plan = replace(plan, feed=Feed.LOG, source_tasks=logged)
        elif plan.feed is Feed.LIVE:
            plan = replace(plan, attempt=self._next_attempt())
        self.slice = plan
        self._to(SliceState.CUT_SHORT, f"slice {plan.number}")

    def happened(self, plan: SlicePlan, event: SliceRan) -> list[Command]:
        """Every partition has applied the slice: journal it, then show it."""
        self.slice = None
        self._to(SliceState.FREE, f"slice {plan.number} has happened")
        owners = self._ledgers.owners
        live = [p for p in owners.placement.owners if p.chain not in plan.paused]
        owners.advance(event.reports, plan.number + 1, live)
        return self._commit(plan, event)

    def _commit(self, plan: SlicePlan, event: SliceRan) -> list[Command]:
        record, staged = self._ledgers.slices.commit(
            plan, event.source_tasks, event.reports, self.began_ms
        )
        commands: list[Command] = [WriteSlice(record), ExposeSlice(record, staged)]
        if plan.batch is not None and record.batch_end:
            commands.append(FinishBatch(plan.batch))
            self.waiting_batch = None
        return commands
