"""Carries out the control plane's commands: journal, sinks, storage, and jobs on a cluster.

One command at a time, each of them only while no newer driver has taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import assert_never

from anabranch.driver import notes
from anabranch.driver.clock import Clock
from anabranch.driver.cluster import Caller, Cluster, NodesLostError, Ran
from anabranch.driver.history import History
from anabranch.driver.holding import Holding
from anabranch.driver.showing import Showing
from anabranch.driver.trimming import trim
from anabranch.errors import ClusterError, StorageError
from anabranch.model.commands import (
    AwaitCatchUp,
    AwaitNodes,
    CatchUp,
    Command,
    ExposeLate,
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
    WriteLate,
    WriteSlice,
)
from anabranch.model.events import (
    CaughtUp,
    Event,
    NodesJoined,
    NodesLost,
    NodesPolled,
    PartitionsPrepared,
    PartitionsRecovered,
    RestoreFailed,
    SliceRan,
)
from anabranch.model.ids import NodeId
from anabranch.model.placement import Placement
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed
from anabranch.storage import source_log

log = logging.getLogger("anabranch")
POLL_PAUSE_S = 0.02  # between two looks at checkpoints in flight, while nothing else happens
LOOK_S = 0.05  # between two looks for nodes
SAY_S = 30.0  # between two warnings that there is none
GRACE_S = 15.0  # a lost node is mostly replaced within: until then a stop may yet be graceful
AGAIN = "start it again with the same checkpoint directory, nothing committed is lost"


@dataclass(frozen=True)
class Waiting:
    """For nodes: no longer than `limit_s`, if that is given, and not once the job is `stopped`."""

    limit_s: float | None = None
    stopped: Callable[[], bool] = lambda: False


class Effects:
    """Old files are deleted `behind` the stream if asked for: a store may take its time, and so
    does a file system for gigabytes."""

    def __init__(
        self,
        holding: Holding,
        showing: Showing,
        cluster: Cluster,
        caller: Caller,
        history: History,
        checkpoints: str,
        clock: Clock,
        waiting: Waiting,
        behind: bool = False,
    ) -> None:
        """`checkpoints` is the place of checkpoint files."""
        self._holding = holding
        self._showing = showing
        self._cluster = cluster
        self._caller = caller
        self._history = history
        self._checkpoints = checkpoints
        self._clock = clock
        self._waiting = waiting
        self._behind = ThreadPoolExecutor(1, "anabranch-trim") if behind else None
        self._placement: Placement | None = None  # that nodes were last told of
        self._catching_up: tuple[RecoveryPlan, Future[Ran]] | None = None  # the newest
        # Is given the event that ends what goes on beside slices.
        self.on_caught_up: Callable[[Event], object] = lambda _: None
        self.doing: Command | None = None

    def close(self) -> None:
        """Wait for what is done behind the stream."""
        if self._behind is not None:
            self._behind.shutdown()

    def check(self) -> None:
        """Refuse to go on where a newer driver has taken over."""
        self._holding.check()

    def execute(self, command: Command) -> Event | None:
        """Do it, unless a newer driver has taken over; the event it leads to, if any."""
        self.check()
        self.doing = command
        try:
            with self._holding.as_owner():
                return self._execute(command)
        except NodesLostError as e:
            return self.lost(e.nodes, e.reason, self._logged(command, e.source_tasks))
        finally:
            self.doing = None

    def lost(self, nodes: tuple[NodeId, ...], reason: str, logged: int | None = None) -> NodesLost:
        """Nodes are gone: the event that says so."""
        return NodesLost(nodes, reason, logged, self._clock.now_ms())

    def heard(self, event: NodesLost) -> None:
        """From here on its recovery counts. It may be that a job has met the loss before, or that
        nothing lived there."""
        if self._placement is not None and set(event.nodes) & set(self._placement.nodes):
            self._history.lost(event)

    def await_nodes(self) -> NodesJoined:
        """Wait until there is a node: as long as may be, and until somebody stops the job."""
        cluster, clock, waiting = self._cluster, self._clock, self._waiting
        began_s = clock.seconds()
        say_s = 0.0  # of the waiting
        while not (nodes := cluster.look_for_nodes()):
            waited_s = clock.seconds() - began_s
            if waiting.limit_s is not None and waited_s > waiting.limit_s:
                raise ClusterError(f"there was no node for {waiting.limit_s:g} s; {AGAIN}")
            if waiting.stopped() and waited_s > GRACE_S:
                raise ClusterError(f"the job was stopped while it had no node; {AGAIN}")
            if waited_s >= say_s:
                log.warning(
                    "no node is left: waiting for one%s%s",
                    f" of {cluster.wanted} that there are to be" if cluster.wanted else "",
                    f", for {waited_s:.0f} s now; {len(cluster.joining)} are starting"
                    if waited_s >= 1
                    else "",
                )
                say_s = waited_s + SAY_S
            clock.pause(LOOK_S)
        return NodesJoined(nodes, clock.now_ms(), cluster.host_names)

    def _execute(self, command: Command) -> Event | None:
        match command:
            case RecoverPartitions():
                return self._recover(command.plan)
            case CatchUp():
                self._begin(command.plan)
            case AwaitCatchUp():
                return self._caught_up()
            case PreparePartitions():
                reports = self._cluster.ask(self._caller.preparation(command.plan))
                return PartitionsPrepared(tuple(reports), self._clock.now_ms())
            case RequestNodes():
                self._cluster.request(command.count)
            case ReleaseNodes():
                log.info("node %s is drained and released", ", ".join(command.nodes))
                self._cluster.release(command.nodes)
            case RunSlice():
                return self._run_slice(command)
            case WriteSlice():
                self._holding.write_slice(command.record)
            case ExposeSlice():
                self._history.slice_shown(self._showing.show(command.record, command.staged))
            case WriteLate():
                self._holding.write_late(command.late)
            case ExposeLate():
                refused = self._showing.show_late(command.record, command.sinks, command.staged)
                self._history.late_shown(refused)
            case WriteHead():
                if command.cut is not None:
                    self._history.checkpointed(command.cut.slice)
                self._holding.write_head(command)
            case TrimStorage():
                self._trim(command)
            case NoteBackups():
                self._history.backups_chosen(command)
                if not command.why:
                    notes.write_prediction(self._holding.store, command)
            case NoteDecision():
                self._history.decided(command.decision)
                if command.memory is not None:
                    self._holding.remember(command.memory)
            case AwaitNodes():
                return self.await_nodes()
            case PollNodes():
                assert self._placement is not None
                self._clock.pause(POLL_PAUSE_S)
                reports = self._cluster.ask(self._caller.poll(self._placement.nodes))
                return NodesPolled(tuple(reports), self._clock.now_ms())
            case FailRun():
                raise command.error
            case FinishRun():
                self._history.ended(self._holding.confirmed)
            case FinishBatch():
                pass  # the one who offered it is told (Steps.take)
            case _:
                assert_never(command)
        return None

    def _logged(self, command: Command, source_tasks: int | None) -> int | None:
        """The source tasks of a slice that was cut short, if all of them had logged their rows."""
        if not isinstance(command, RunSlice) or command.plan.feed is not Feed.LIVE:
            return None
        plan = command.plan
        found = source_log.logged_tasks(
            self._holding.store, plan.number, plan.generation, plan.attempt
        )
        return source_tasks if found == source_tasks else None

    def _run_slice(self, command: RunSlice) -> Event:
        assert self._placement is not None
        began_s = self._clock.seconds()
        job = self._caller.slice(command, self._placement, self._holding.confirmed)
        ran = self._cluster.run(job)
        self._history.slice_ran(command.plan, ran.reports, self._placement, began_s)
        told = {
            s.partition for r in ran.reports for s in r.sources
        }  # by a node that may be replaced
        logged = (
            len(told) == ran.source_tasks or self._logged(command, ran.source_tasks) is not None
        )
        now_ms = self._clock.now_ms()
        return SliceRan(command.plan.number, ran.source_tasks, ran.reports, now_ms, logged)

    def _recover(self, plan: RecoveryPlan) -> Event:
        self._placement = plan.placement
        self._history.recovery_begins(plan)
        reports = self._cluster.run(self._caller.recovery(plan)).reports
        torn = [f for r in reports for f in r.failures if f.kind == "restore"]
        if torn:
            log.warning("%s; trying the checkpoint before it", torn[0].message)
            return RestoreFailed(StorageError(torn[0].message), self._clock.now_ms())
        self._history.recovery_ended(plan, reports)
        return PartitionsRecovered(reports, self._clock.now_ms())

    def _begin(self, plan: RecoveryPlan) -> None:
        """Beside slices. How it ended is said by its own thread, or by one that waits for it, or by
        both: the controller does not mind to hear it twice."""
        future = self._cluster.begin(self._caller.recovery(plan))
        self._catching_up = (plan, future)
        future.add_done_callback(lambda done: self.on_caught_up(self._ended(plan, done)))

    def _caught_up(self) -> Event:
        assert self._catching_up is not None
        return self._ended(*self._catching_up)

    def _ended(self, plan: RecoveryPlan, future: Future[Ran]) -> Event:
        """How it ended; waits for that."""
        reports: tuple[NodeReport, ...] = ()
        error: Exception | None = None
        try:
            reports = future.result().reports
        except NodesLostError as e:
            return self.lost(e.nodes, e.reason)
        except Exception as e:
            error = e
        version, now_ms = plan.placement.version, self._clock.now_ms()
        return CaughtUp(version, plan.part, reports, now_ms, error)

    def _trim(self, command: TrimStorage) -> None:
        if self._behind is None:
            trim(self._holding.store, self._checkpoints, command)
        else:
            self._behind.submit(trim, self._holding.store, self._checkpoints, command)
