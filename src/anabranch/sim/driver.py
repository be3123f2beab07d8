"""A simulated driver: the real controller, its commands carried out on the simulated cluster.

It does what `spark/driver.py` and `driver/actions.py` do, one step at a time; between any two
steps it may crash. The next one knows nothing but the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from anabranch.control.controller import Controller
from anabranch.control.recovery_bound import BackupChoice, RecoveryBound
from anabranch.errors import AdjustmentError, StorageError
from anabranch.model.commands import (
    AwaitNodes,
    Command,
    ExposeSlice,
    FailRun,
    FinishBatch,
    FinishRun,
    NoteBackups,
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
    BatchArrived,
    Event,
    Idled,
    NodesJoined,
    NodesLost,
    NodesPolled,
    PartitionsPrepared,
    PartitionsRecovered,
    RestoreFailed,
    SliceRan,
    StopRequested,
)
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed
from anabranch.sim.checkers import Checkers
from anabranch.sim.cluster import Cluster, NodesLostError
from anabranch.sim.requests import Request, Requests
from anabranch.sim.world import World

IDLE_MS = 25


class DicedBackups(RecoveryBound):
    """Takes the place of the plan that keeps a recovery bound: whatever it chooses, and however
    often, recoveries must be right."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.choice: BackupChoice | None = None

    def observe(self, reports: Sequence[NodeReport], began_ms: int, seconds: float = 0.0) -> None:
        pass

    def recovered(
        self,
        seconds: float,
        partitions: frozenset[PartitionId],
        slices: int,
        reports: Sequence[NodeReport],
    ) -> None:
        pass

    def plan(self, mapping: Mapping) -> BackupChoice | None:
        if not self._world.chance(0.3):
            return None
        share = self._world.dice.random()
        chosen = frozenset(p for p in mapping.owners if self._world.chance(share))
        self.choice = BackupChoice(chosen, {})
        return self.choice


class SimDriver:
    """One life of the driver."""

    def __init__(self, cluster: Cluster, checkers: Checkers, number: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.disk = cluster.disk
        self.job = cluster.job
        self.checkers = checkers
        self.name = f"driver {number}"
        past = self.disk.take_over()
        self.run = past.generation
        self.controller = Controller(self.job.plan, self.job.config, past)
        if self.job.rechooses_backups:
            self.controller.backups.bound = DicedBackups(self.world)
        self.requests = Requests(self.world, self.job)
        self._impatient = self.world.chance(0.1)  # stops although something was asked for
        self.ended = False
        self._finished: int | None = None
        self._heard_joined: dict[NodeId, None] = {}  # in this order
        self._heard_lost: set[NodeId] = set(cluster.lost)
        self.world.tell(
            "{} starts: generation {}, cut {}, slices up to {}",
            self.name, self.run, past.cut.slice if past.cut else 0, self.disk.newest_slice,
        )  # fmt: skip

    # -- events --------------------------------------------------------------------------------

    def live(self) -> None:
        """From the start to the graceful end."""
        if self.disk.slices:
            self._expose(ExposeSlice(self.disk.slices[-1], ()))
        self.disk.discard_staged()
        self.cluster.step("start")
        nodes = self.cluster.await_nodes()
        self._heard_joined |= dict.fromkeys(nodes)
        self._handle(NodesJoined(nodes, self.world.now_ms))
        while not self.ended:
            self.cluster.step("idle")
            self._hear()
            if self.world.chance(0.25):
                self.world.advance(IDLE_MS)
                self._handle(Idled(self.world.now_ms))
            elif self.disk.committed_batch + 1 < len(self.job.batches):
                request = self.cluster.faults.request(self.requests, self.nodes)
                if request is not None:
                    self._ask(request)
                self._offer(self.disk.committed_batch + 1)
            elif self.requests.pending(self.nodes) and not self._impatient:
                self._handle(Idled(self.world.now_ms))  # what was accepted must come true
            elif self.world.chance(0.3):
                self._handle(StopRequested(self.world.now_ms))

    def _hear(self) -> None:
        """Nodes that came or went while no job needed them."""
        lost = tuple(n for n in self.cluster.lost if n not in self._heard_lost)
        if lost:
            self._handle(self._lost(lost, None))
        joined = tuple(n for n in self.cluster.ready if n not in self._heard_joined)
        if joined:
            self._heard_joined |= dict.fromkeys(joined)
            self._handle(NodesJoined(joined, self.world.now_ms))

    @property
    def nodes(self) -> list[NodeId]:
        """As this driver knows them."""
        return [n for n in self._heard_joined if n not in self._heard_lost]

    def _ask(self, request: Request) -> None:
        mapping = self.controller.mapping
        assert mapping is not None
        possible = self.requests.may(request, self.nodes)
        self.world.tell("asked for: {}", request)
        try:
            commands = self.controller.handle(request, self.world.wall_ms)
        except AdjustmentError as e:
            self.world.counts["requests refused"] += 1
            self.world.tell("… refused: {}", e)
            self.checkers.answered(request, possible, accepted=False)
            return
        self.checkers.answered(request, possible, accepted=True)
        self.requests.accepted(request, mapping)
        self._carry_out(commands)

    def _lost(self, nodes: tuple[NodeId, ...], logged: int | None) -> NodesLost:
        self._heard_lost.update(nodes)
        self.requests.gone(nodes)
        return NodesLost(nodes, "gone", logged, self.world.now_ms)

    def _offer(self, batch: int) -> None:
        """Spark offers a batch; when it is finished, Spark commits it."""
        self._finished = None
        while self._finished != batch:
            before = self.disk.newest_slice
            self._handle(BatchArrived(batch, self.world.now_ms))
            if self._finished != batch and self.disk.newest_slice == before:
                break
            if self._finished != batch and not self._between():
                return
        self.checkers.batch_returned(batch, self._finished)
        self.cluster.step("commit")
        self.disk.committed_batch = batch

    def _between(self) -> bool:
        """Between two slices of a batch others have their turn, also somebody who stops the run;
        does it go on?"""
        self._hear()
        request = self.cluster.faults.request(self.requests, self.nodes)
        if request is not None:
            self._ask(request)
        if self.world.chance(0.05):
            self.world.counts["stops in a batch"] += 1
            self._handle(StopRequested(self.world.now_ms))
        return not self.ended

    def _handle(self, event: Event) -> None:
        self._carry_out(self.controller.handle(event, self.world.wall_ms))

    def _carry_out(self, commands: list[Command]) -> None:
        todo = deque(commands)
        while todo and not self.ended:
            command = todo.popleft()
            self.cluster.step(type(command).__name__)
            caused = self._execute(command)
            self.checkers.after(command)
            if caused is not None:
                todo.extend(self.controller.handle(caused, self.world.wall_ms))

    # -- commands ------------------------------------------------------------------------------

    def _execute(self, command: Command) -> Event | None:
        try:
            return self._do(command)
        except NodesLostError as e:
            return self._lost(e.nodes, self._logged(command, e.source_tasks))

    def _do(self, command: Command) -> Event | None:
        if isinstance(command, RecoverPartitions | PreparePartitions):
            self.checkers.asked(command.plan.mapping.nodes, self.nodes)
        match command:
            case RecoverPartitions():
                return self._recover(command.plan)
            case PreparePartitions():
                reports = self.cluster.prepare(command.plan, self.run)
                return PartitionsPrepared(tuple(reports), self.world.now_ms)
            case RequestNodes():
                for _ in range(command.count):
                    self.world.schedule(20, self.cluster.join)
            case ReleaseNodes():
                self.checkers.released(command.nodes)
                self.cluster.release(command.nodes)
                self.requests.gone(command.nodes)
                for node in command.nodes:
                    del self._heard_joined[node]
                self.world.counts["released"] += len(command.nodes)
            case RunSlice():
                return self._run_slice(command)
            case WriteSlice():
                self.checkers.before_slice(command.record)
                self.disk.records.append(command.record)
                self.cluster.faults.slice_happened()
                self.world.tell("slice {} has happened", command.record.number)
            case ExposeSlice():
                self._expose(command)
            case WriteHead():
                free = [n for n in self.nodes if n not in self.requests.drains]
                self.checkers.before_head(command, free)
                self.disk.write_head(command)
                self.requests.journalled(command.mapping)
                self._tell_head(command)
            case TrimStorage():
                self.disk.trim(command)
            case FinishBatch():
                self._finished = command.batch
            case NoteBackups():
                self.world.counts["backups chosen anew"] += 1
                self.world.tell(
                    "{} back up from now on", " ".join(map(str, sorted(command.backups))) or "none"
                )
            case AwaitNodes():
                self.world.tell("no node is left")
                nodes = self.cluster.await_nodes()
                self._heard_joined |= dict.fromkeys(nodes)
                return NodesJoined(nodes, self.world.now_ms)
            case PollNodes():
                assert self.controller.mapping is not None
                reports = self.cluster.poll(self.run, self.controller.mapping.nodes)
                return NodesPolled(tuple(reports), self.world.now_ms)
            case FailRun():
                raise command.error
            case FinishRun():
                self.ended = True
                self.world.tell("the run ends")
        return None

    def _logged(self, command: Command, source_tasks: int | None) -> int | None:
        if not isinstance(command, RunSlice) or command.plan.feed is not Feed.LIVE:
            return None
        plan = command.plan
        found = self.disk.logged_tasks(plan.number, plan.generation, plan.attempt)
        return source_tasks if found == source_tasks else None

    def _run_slice(self, command: RunSlice) -> Event:
        plan, mapping = command.plan, self.controller.mapping
        assert mapping is not None
        live = self.cluster.read_batch(plan.batch) if plan.feed is Feed.LIVE else []
        self.world.tell(
            "slice {} runs: {}, batch {}, attempt {}{} on {} (mapping {})",
            plan.number, plan.feed.value, plan.batch, plan.attempt,
            ", sealed" if plan.seal else "", " ".join(mapping.nodes), plan.mapping,
        )  # fmt: skip
        confirmed = self.disk.newest_slice
        tasks, reports = self.cluster.run_slice(command, self.run, confirmed, mapping, live)
        self.checkers.slice_ran(command, mapping, reports)
        return SliceRan(plan.number, tasks, tuple(reports), self.world.now_ms)

    def _recover(self, plan: RecoveryPlan) -> Event:
        self._tell_recovery(plan)
        # A torn file that nobody is told of counts as whole: later cuts will build upon it.
        known, self.disk.torn = self.disk.torn, set(self.disk.torn)
        found: set[str] = set()
        try:
            reports = self.cluster.recover(plan, self.run, self.name)
            torn = [f for r in reports for f in r.failures if f.kind == "restore"]
            found = self.disk.torn if torn else found
        finally:
            self.disk.torn = known | found
        if torn:
            self.world.counts["restores failed"] += 1
            self.world.tell("the recovery met a torn checkpoint")
            return RestoreFailed(StorageError(torn[0].message), self.world.now_ms)
        return PartitionsRecovered(tuple(reports), self.world.now_ms)

    def _expose(self, command: ExposeSlice) -> None:
        self.disk.expose(command.record)
        self.checkers.exposed(command.record)

    # -- the story -----------------------------------------------------------------------------

    def _tell_head(self, head: WriteHead) -> None:
        cuts = [c.slice for c in (head.cut, head.previous) if c]
        self.world.counts["heads"] += 1
        self.world.tell("the journal begins anew: cuts {}, mapping {}", cuts, head.mapping.version)

    def _tell_recovery(self, plan: RecoveryPlan) -> None:
        self.world.counts["recoveries"] += 1
        self.world.counts["parts"] += plan.part > 0
        self.world.counts["adjustments"] += bool(plan.adjustment)
        self.world.counts["stages"] += plan.seals
        self.world.counts["shadows"] += len(plan.shadows)
        self.world.counts["senders"] += len(plan.senders)
        self.world.counts["promoted"] += len(plan.promoted)
        self.world.tell(
            "{} {}.{} from cut {}: {}; promoted {}; slices {}; shadows {}; senders {}",
            "adjustment" if plan.adjustment else "recovery",
            plan.mapping.version,
            plan.part,
            plan.cut,
            " ".join(f"{p}→{plan.mapping.owners[p].node}" for p in sorted(plan.restored)),
            " ".join(map(str, sorted(plan.promoted))) or "none",
            [s.number for s in plan.slices],
            " ".join(map(str, sorted(plan.shadows))) or "none",
            " ".join(map(str, sorted(plan.senders))) or "none",
        )
