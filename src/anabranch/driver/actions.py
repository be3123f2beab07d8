"""Carries out the control plane's commands: journal, sinks, storage, and waves on a cluster.

The cluster is whatever implements `Waves`: Spark's executors, or hosts in this process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from anabranch.control.controller import Past
from anabranch.driver.preparing import Prepared
from anabranch.driver.progress import Progress, Totals, summarise
from anabranch.errors import AnabranchError, StorageError
from anabranch.model.commands import (
    AwaitNodes,
    Command,
    ExposeSlice,
    FailRun,
    FinishBatch,
    FinishRun,
    NoteBackups,
    NoteDecision,
    PollNodes,
    PreparePartitions,
    RecoverPartitions,
    ReleaseNodes,
    RequestNodes,
    RunSlice,
    TrimStorage,
    WriteHead,
    WriteSlice,
)
from anabranch.model.events import (
    Event,
    NodesJoined,
    NodesLost,
    NodesPolled,
    PartitionsPrepared,
    PartitionsRecovered,
    RestoreFailed,
    SliceRan,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping as PartitionMapping
from anabranch.model.recovery import Adjustment, Recovery, RecoveryPlan
from anabranch.model.reports import NodeReport, Staged
from anabranch.model.scaling import Decision
from anabranch.model.slices import Feed, SlicePlan, SliceRecord
from anabranch.storage import checkpoint_store, source_log
from anabranch.storage.credentials import masked
from anabranch.storage.files import write_atomic
from anabranch.storage.generations import CLAIMS, Generation, claimed
from anabranch.storage.journal import Head, Journal
from anabranch.storage.sinks import Sink, refuse_lost_slice
from anabranch.storage.upgrade import continue_from

log = logging.getLogger("anabranch")
AUTOSCALER = "autoscaler.json"  # of each generation: what it has decided and learnt
PREDICTION = "recovery.json"  # in the checkpoint directory: how soon each partition will be back
POLL_PAUSE_S = 0.02  # between two looks at checkpoints in flight, while nothing else happens
PROGRESS_KEPT = 1_000


class NodesLostError(Exception):
    """Raised by `Waves` instead of an answer: nodes it needs are gone, nothing runs any more."""

    def __init__(self, nodes: Sequence[NodeId], reason: str, source_tasks: int | None) -> None:
        super().__init__(f"{', '.join(nodes)}: {reason}")
        self.nodes = tuple(nodes)
        self.reason = reason
        self.source_tasks = source_tasks  # of the slice that was running, where it has any


class Waves(Protocol):
    """A cluster that runs waves. Every method may raise NodesLostError."""

    def run_slice(
        self,
        plan: SlicePlan,
        run: int,
        confirmed: int,
        trim: int,
        backups: frozenset[PartitionId] | None,
        mapping: PartitionMapping,
        batch: Any,
    ) -> tuple[int, list[NodeReport]]:
        """Run one slice; the number of its source tasks, and every node's report."""
        ...

    def recover(self, plan: RecoveryPlan, run: int) -> list[NodeReport]: ...

    def prepare(self, plan: RecoveryPlan, run: int) -> list[NodeReport]:
        """Have the nodes of a plan load ahead what it will install; how far they are."""
        ...

    def poll(self, run: int, nodes: tuple[NodeId, ...]) -> list[NodeReport]: ...

    def request(self, count: int) -> None:
        """Ask for so many more nodes, if the cluster can be asked."""
        ...

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """Give nodes back that have nothing any more."""
        ...

    def await_nodes(self) -> tuple[NodeId, ...]:
        """Wait for nodes that are ready; raises ClusterError when none comes."""
        ...

    def forget(self) -> None:
        """The job has ended: drop its state on the nodes."""
        ...


class Actions:
    """Owns the journal; one command at a time. Old files are deleted `behind` the stream if asked
    for: a store may take its time, and so does a file system for gigabytes."""

    def __init__(
        self,
        root: Path,
        prepared: Prepared,
        sinks: Mapping[str, Sink],
        clock: Callable[[], int] | None = None,
        behind: bool = False,
    ) -> None:
        """A `clock` takes the place of both of ours."""
        self._clock = clock or now_ms
        self.wall_ms = clock or wall_ms
        self._behind = ThreadPoolExecutor(1, "anabranch-trim") if behind else None
        self._root = root
        self._prepared = prepared
        self._sinks = sinks
        self._journal = Journal(root / "journal", self.check)
        self._generation: Generation | None = None
        self._mapping: PartitionMapping | None = None
        self._confirmed = 0
        self._checkpoint: tuple[int, float | None] = (0, None)  # its slice, when it was complete
        self._known_lost_at: tuple[float, int] | None = None  # by both clocks
        self._recovery_began = self._restore_s = 0.0
        self._lost: tuple[NodeId, ...] = ()
        self._lost_reason = "start"
        self.doing: Command | None = None
        self.predicted: NoteBackups | None = None
        self.run = 0  # the driver's generation
        self.batch: Any = None  # what the source offers now
        self.finished_batch: int | None = None
        self.last_slice_at = time.monotonic()
        self._ran: Progress | None = None  # of the slice that is not journalled yet
        self.progress: deque[Progress] = deque(maxlen=PROGRESS_KEPT)
        self.totals = Totals()
        self.recoveries: list[Recovery] = []
        self.adjustments: list[Adjustment] = []
        self.decisions: list[Decision] = []
        self.untold: deque[Progress] = deque()  # that no observer has heard of yet

    def resume(self, dropped: Collection[str] = ()) -> Past:
        """Take the directory over and read what earlier runs journalled; `dropped` operators' state
        is given up."""
        before_claim = self._journal.read()
        self._generation = Generation.claim(
            self._root, before_claim[0].generation if before_claim else 0
        )
        self.run = self._generation.number
        past = Past(generation=self.run)
        found = self._journal.read()  # once more: nothing that is written from here on counts
        if found is not None:
            now = self._prepared.fingerprint
            head, slices = continue_from(self._root, *found, now, dropped)
            before: Mapping[str, int] = head.fingerprint["parallelism"]
            declared: Mapping[str, int] = now["parallelism"]
            past = Past(
                cut=head.cut,
                previous=head.previous,
                slices=(*head.slices, *slices),
                epochs=head.epochs,
                groups=head.groups,
                layouts=head.layouts,
                rescaled=frozenset(c for c in declared if before.get(c) != declared[c]),
                mapping_version=head.mapping_version,
                generation=self.run,
                autoscaler=self._autoscaler_memory(),
            )
            # From here on an older driver's journal is not read by anybody, whatever becomes of
            # this one; only now may sinks and storage be touched.
            self._journal.begin(_inherited(*found, self.run))
        with self._as_owner():
            self._generation.clean_up()
        self._confirmed = past.slices[-1].number if past.slices else 0
        self._checkpoint = (past.cut.slice if past.cut else 0, None)
        return past

    def check(self) -> None:
        """Refuse to go on where a newer driver has taken over."""
        assert self._generation is not None
        self._generation.check()

    def _autoscaler_memory(self) -> Mapping[str, Any]:
        """Of the newest run that has left any; one that cannot be read is no loss."""
        for generation in reversed(claimed(self._root)):
            try:
                found = json.loads((self._root / CLAIMS / str(generation) / AUTOSCALER).read_text())
            except (OSError, ValueError):
                continue
            if isinstance(found, dict):
                self._remember(found)
                return found
        return {}

    def _remember(self, memory: Mapping[str, Any]) -> None:
        assert self._generation is not None
        write_atomic(self._generation.directory / AUTOSCALER, [json.dumps(memory).encode()])

    @contextlib.contextmanager
    def _as_owner(self) -> Iterator[None]:
        """Whatever goes wrong for a driver that was replaced, that is the reason."""
        try:
            yield
        except AnabranchError:
            self.check()
            raise

    def complete_sinks(self, past: Past) -> None:
        """A crash between journal and sink leaves the newest slice unexposed."""
        job, newest = self._prepared.spec.identity, past.slices[-1].number if past.slices else 0
        with self._as_owner():
            if past.slices:
                refuse_lost_slice(past.slices[-1], self._sinks, self._root)
            for sink in self._sinks.values():
                sink.take_over(job, self.run, newest)
            if past.slices:
                self._expose(ExposeSlice(past.slices[-1], ()))
            for sink in self._sinks.values():
                self.check()
                sink.begin()

    def close(self) -> None:
        if self._behind is not None:
            self._behind.shutdown()
        self._journal.close()
        for sink in self._sinks.values():
            sink.close()

    def execute(self, command: Command, waves: Waves) -> Event | None:
        """Do it, unless a newer driver has taken over; the event it leads to, if any."""
        self.check()
        self.doing = command
        try:
            with self._as_owner():
                return self._execute(command, waves)
        except NodesLostError as e:
            return self.lost(e.nodes, e.reason, self._logged(command, e.source_tasks))
        finally:
            self.doing = None

    def lost(self, nodes: tuple[NodeId, ...], reason: str, logged: int | None = None) -> NodesLost:
        """Nodes are gone: the event that says so."""
        event = NodesLost(nodes, reason, logged, self._clock())
        self._note_lost(event)
        return event

    def heard(self, event: NodesLost) -> None:
        """Nodes went while no job needed them; it may be that one has met the loss since, or that
        nothing lived there."""
        if self._mapping is not None and set(event.nodes) & set(self._mapping.nodes):
            self._note_lost(event)

    def _note_lost(self, event: NodesLost) -> None:
        """From now on the recovery counts."""
        log.warning("lost node %s: %s", ", ".join(event.nodes), event.reason)
        self._lost, self._lost_reason = event.nodes, event.reason
        self._known_lost_at = time.monotonic(), self.wall_ms()

    def _execute(self, command: Command, waves: Waves) -> Event | None:
        match command:
            case RecoverPartitions():
                return self._recover(command.plan, waves)
            case PreparePartitions():
                reports = waves.prepare(command.plan, self.run)
                return PartitionsPrepared(tuple(reports), self._clock())
            case RequestNodes():
                waves.request(command.count)
            case ReleaseNodes():
                log.info("node %s is drained and released", ", ".join(command.nodes))
                waves.release(command.nodes)
            case RunSlice():
                return self._run_slice(command, waves)
            case WriteSlice():
                self._journal.append(command.record)
                self._confirmed = command.record.number
            case ExposeSlice():
                refused = self._expose(command)
                self._publish()
                for sink, rows in refused.items():
                    self.totals.refuse(sink, rows, self._prepared.dead_letters or "")
            case WriteHead():
                self._begin_segment(command)
            case TrimStorage():
                if self._behind is None:
                    self._trim(command)
                else:
                    self._behind.submit(self._trim, command)
            case FinishBatch():
                self.finished_batch = command.batch
            case NoteBackups():
                self._note_backups(command)
            case NoteDecision():
                self.decisions.append(command.decision)
                log.info("%s", command.decision)
                self._remember(command.memory)
            case AwaitNodes():
                log.warning("no node is left; waiting for one")
                return NodesJoined(waves.await_nodes(), self._clock())
            case PollNodes():
                assert self._mapping is not None
                time.sleep(POLL_PAUSE_S)
                reports = waves.poll(self.run, self._mapping.nodes)
                return NodesPolled(tuple(reports), self._clock())
            case FailRun():
                raise command.error
            case FinishRun():
                log.info("the run ended after slice %s", self._confirmed)
        return None

    def _logged(self, command: Command, source_tasks: int | None) -> int | None:
        """The source tasks of a slice that was cut short, if all of them had logged their rows."""
        if not isinstance(command, RunSlice) or command.plan.feed is not Feed.LIVE:
            return None
        plan = command.plan
        found = source_log.logged_tasks(self._root, plan.number, plan.generation, plan.attempt)
        return source_tasks if found == source_tasks else None

    def _run_slice(self, command: RunSlice, waves: Waves) -> Event:
        assert self._mapping is not None
        plan = command.plan
        started = time.monotonic()
        tasks, reports = waves.run_slice(
            plan=plan,
            run=self.run,
            confirmed=self._confirmed,
            trim=command.trim,
            backups=command.backups,
            mapping=self._mapping,
            batch=self.batch,
        )
        self.last_slice_at = time.monotonic()
        slice_no, at = self._checkpoint
        age = None if at is None else self.last_slice_at - at
        seconds = self.last_slice_at - started
        ended_ms = self._clock()
        progress = summarise(plan, reports, seconds, ended_ms, self._mapping, (slice_no, age))
        self._ran = progress
        return SliceRan(plan.number, tasks, tuple(reports), ended_ms)

    def _recover(self, plan: RecoveryPlan, waves: Waves) -> Event:
        self._mapping = plan.mapping
        if plan.part == 0:
            self._recovery_began, self._restore_s = time.monotonic(), 0.0
        if self._known_lost_at is None:  # a start, or a node process that was replaced
            self._known_lost_at = self._recovery_began, self.wall_ms()
        reports = waves.recover(plan, self.run)
        torn = [f for r in reports for f in r.failures if f.kind == "restore"]
        if torn:
            log.warning("%s; trying the checkpoint before it", torn[0].message)
            return RestoreFailed(StorageError(torn[0].message), self._clock())
        if plan.part == 0:
            self._restore_s = max((r.restore_s for r in reports), default=0.0)
        if not plan.more:
            self._note(plan)
        return PartitionsRecovered(tuple(reports), self._clock())

    def _note(self, plan: RecoveryPlan) -> None:
        assert self._known_lost_at is not None
        now = time.monotonic()
        if plan.adjustment:
            self._known_lost_at = None
            paused = now - self.last_slice_at
            moved = tuple(sorted(plan.restored))
            adjustment = Adjustment(plan.adjustment, moved, plan.cut, paused)
            self.adjustments.append(adjustment)
            log.info("%s", adjustment)
            return
        recovery = Recovery(
            nodes=self._lost,
            partitions=tuple(sorted(plan.restored)),
            promoted=tuple(sorted(plan.promoted)),
            shadows=len(plan.shadows),
            from_slice=plan.cut,
            to_slice=plan.next_slice - 1,
            reason=self._lost_reason,
            restore_s=self._restore_s,
            replay_s=now - self._recovery_began - self._restore_s,
            total_s=now - self._known_lost_at[0],
            known_ms=self._known_lost_at[1],
            predicted_s=self._predicted_for(plan) if self._lost else None,
        )
        self._lost, self._lost_reason, self._known_lost_at = (), "its process was replaced", None
        self.recoveries.append(recovery)
        log.info("%s", recovery)

    def _publish(self) -> None:
        """The slice has happened, and its rows are out."""
        if self._ran is None:
            return
        self.progress.append(self._ran)
        self.totals.add(self._ran)
        self.untold.append(self._ran)
        self._ran = None

    def _expose(self, command: ExposeSlice) -> dict[str, int]:
        """Dead letters last: with them go the rows that targets refuse. How many, per sink."""
        record, dead = command.record, self._prepared.dead_letters
        refused: dict[str, pa.Table] = {}
        for name in sorted(self._sinks, key=lambda n: n == dead):
            sink = self._sinks[name]
            staged = [s for s in command.staged if s.sink == name]
            files = record.staged.get(name, [])
            if name == dead and refused:
                rows = pa.concat_tables(refused.values())
                more = sink.stage(name, rows, record.number, self.run, "driver")
                staged.append(more)
            self.check()
            letters = _shown(sink, name, record.number, files, staged)
            if letters is not None:
                refused[name] = letters
        return {name: letters.num_rows for name, letters in refused.items()}

    def _begin_segment(self, command: WriteHead) -> None:
        if command.cut is not None and command.cut.slice > self._checkpoint[0]:
            self._checkpoint = (command.cut.slice, time.monotonic())
        self._journal.begin(
            Head(
                generation=self.run,
                fingerprint=self._prepared.fingerprint,
                cut=command.cut,
                previous=command.previous,
                slices=command.slices,
                epochs=command.epochs,
                groups=command.layout,
                layouts=command.layouts,
                mapping_version=command.mapping.version,
            )
        )

    def _predicted_for(self, plan: RecoveryPlan) -> float | None:
        known = self.predicted.predicted_s if self.predicted is not None else {}
        return max((known[p] for p in plan.restored if p in known), default=None)

    def _note_backups(self, command: NoteBackups) -> None:
        """Keep the prediction where `describe` finds it; say so when others back up than before."""
        before, self.predicted = self.predicted, command
        if before is None or before.backups != command.backups:
            log.info(
                "%d partitions back up; a lost node is predicted to be back within %.2f s%s",
                len(command.backups),
                max(command.predicted_s.values(), default=0.0),
                f" ({command.problem})" if command.problem else "",
            )
        prediction = {
            str(p): {"seconds": s, "backs_up": p in command.backups}
            for p, s in command.predicted_s.items()
        }
        text = json.dumps({"partitions": prediction, "problem": command.problem})
        write_atomic(self._root / PREDICTION, [text.encode()])

    def _trim(self, command: TrimStorage) -> None:
        """Delete what nobody will read again. What cannot be deleted is tried again with the next
        checkpoint: it takes room, but no slice needs it gone."""
        try:
            source_log.trim(self._root, command.log_below)
            for name in checkpoint_store.names(self._root, self._prepared.spec.checkpoints):
                number = name.rpartition("/")[2].lstrip(".").partition("-")[0]
                if not number.isdigit() or name in command.keep_files:
                    continue  # a stranger's, or needed
                if int(number) < command.log_below:
                    self._delete(name)
        except (StorageError, OSError) as e:
            log.warning("old files could not be listed: %s", e)

    def _delete(self, name: str) -> None:
        """One that stays must not keep the others."""
        try:
            checkpoint_store.delete(self._root, name)
        except (StorageError, OSError) as e:
            log.warning("%s could not be deleted yet: %s", masked(name), e)


def _inherited(head: Head, slices: Sequence[SliceRecord], generation: int) -> Head:
    """What was read, as this generation's own."""
    return replace(head, generation=generation, slices=(*head.slices, *slices))


def _shown(
    sink: Sink, name: str, number: int, files: Sequence[str], staged: Sequence[Staged]
) -> pa.Table | None:
    """Expose a slice; what a sink raises that is not ours becomes a sentence."""
    try:
        return sink.expose(number, files, staged)
    except AnabranchError:
        raise
    except Exception as e:
        raise StorageError(
            f"the sink {name!r} could not show slice {number}: {type(e).__name__}: {e}; start the "
            "job again with the same checkpoint directory, nothing committed is lost",
            sink=name,
            slice=number,
        ) from e


def now_ms() -> int:
    """For intervals: it goes on evenly, and means nothing by itself."""
    return time.monotonic_ns() // 1_000_000


def wall_ms() -> int:
    """What people call the time, since 1970; it may be set, or leap."""
    return time.time_ns() // 1_000_000
