"""Simulated machines and the jobs that run on them, as Spark would: stages of calls that may be
repeated, come late, or reach a machine that everybody else has given up.

A job ends with every node's report, or with `NodesLostError` as soon as the driver knows that one
of its nodes is gone. What was cut short may still arrive, at any later time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from anabranch.driver.cluster import (
    NodesLostError,
    NodesObserver,
    Ran,
    RecoveryJob,
    SliceJob,
    Stages,
)
from anabranch.errors import (
    AnabranchError,
    ClusterError,
    InvariantError,
    OperatorError,
    StorageError,
)
from anabranch.model.ids import NodeId
from anabranch.model.plan import Plan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed
from anabranch.node.protocol.host import Answer
from anabranch.node.protocol.messages import (
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    ReplayRequest,
    WaveRequest,
)
from anabranch.node.protocol.source_task import run_replay_task
from anabranch.sim.disk import Disk
from anabranch.sim.faults import DriverCrashedError, Faults
from anabranch.sim.machines import Machines
from anabranch.sim.payload import Rows, SimJob
from anabranch.sim.sinks import bound_sinks
from anabranch.sim.tasks import Call, SimParcel, source_call
from anabranch.sim.weather import SimWeather
from anabranch.sim.workload import RawShare, Workload
from anabranch.sim.world import World, violated

Result = TypeVar("Result")
# A job, call by call: where it is, on which nodes, with how many source tasks.
Work = Generator[tuple[str, tuple[NodeId, ...], int | None], None, Result]


class SimCluster(Machines):
    """The machines, and what a driver has them do."""

    def __init__(self, world: World, job: Workload, disk: Disk, faults: Faults) -> None:
        self.job = job
        self.disk = disk
        sinks = bound_sinks(disk.targets, job.plan.graph.name, disk.store)
        carried = SimJob(job, disk.store, sinks, raises=self._function_raises)
        super().__init__(world, carried, faults)
        self._reads = 0
        self.awaited = False  # does the driver wait for the call in hand?
        self._beside: list[tuple[Work[Ran], Future[Ran]]] = []  # jobs, the oldest first
        # What may end a run, because of what was done to it.
        self.excuses: set[type[AnabranchError]] = set()
        self.ran_plan: Plan | None = None  # of the newest driver that was not refused
        self.wanted_plan: Plan | None = None  # by the next one
        self.replace_driver: Callable[[], None] = lambda: None  # while the one in hand pauses
        self.weather = disk.store.weather = SimWeather(self)
        for target in disk.targets.values():
            target.on_moment = self._sink_moment

    def driver_crashed(self) -> None:
        """With its Spark application, whose machines end too, or alone: then the next driver
        finds them as they are, also those that this one had given up."""
        self._give_up_beside()
        if self.faults.takes_machines():
            self.world.tell("… and its machines with it")
            for machine in self.machines.values():
                machine.dead = True
            self.ready, self.lost = [], []
            for _ in range(self.world.dice.randint(0, 4)):
                self.join()
            return
        for node in [n for n in self.lost if not self.is_silent(n)]:
            if self.world.chance(0.5):
                self.lost.remove(node)
                self.ready.append(node)

    def read_batch(self, batch: int | None) -> list[RawShare]:
        """A batch's rows, split among source tasks; every time they may be split differently."""
        assert batch is not None
        self._reads += 1
        return self.job.read(batch, self._reads)

    # -- jobs ----------------------------------------------------------------------------------

    def run(self, job: SliceJob | RecoveryJob) -> Ran:
        """One stage after the other."""
        return self._through(self._slice(job) if isinstance(job, SliceJob) else self._recovery(job))

    def begin(self, job: RecoveryJob) -> Future[Ran]:
        """Its calls come between those of others."""
        future: Future[Ran] = Future()
        self._beside.append((self._recovery(job), future))
        return future

    def _through(self, work: Work[Result]) -> Result:
        """Do it, and nothing else until it has ended."""
        try:
            point = next(work)
            while True:
                try:
                    self.step(*point)
                except BaseException as e:
                    work.throw(e)
                    raise
                point = next(work)
        except StopIteration as end:
            result: Result = end.value
            return result

    def go_on_beside(self) -> None:
        """One call of what was begun first, and has not ended."""
        if not self._beside:
            return
        work, future = self._beside[0]
        try:
            _, nodes, source_tasks = next(work)
            lost = tuple(n for n in nodes if n in self.lost)
            if lost:
                work.throw(NodesLostError(lost, "gone", source_tasks))
            return
        except StopIteration as end:
            ended: Ran | BaseException = end.value
        except (AnabranchError, NodesLostError) as e:
            ended = e
        del self._beside[0]
        if isinstance(ended, Ran):
            future.set_result(ended)
        else:
            future.set_exception(ended)

    def _give_up_beside(self) -> None:
        """The driver is gone: what was on its way may still arrive."""
        for work, _ in self._beside:
            with contextlib.suppress(StopIteration, DriverCrashedError):
                next(work)
                work.throw(DriverCrashedError())
        self._beside = []

    def _slice(self, job: SliceJob) -> Work[Ran]:
        live = self.read_batch(job.plan.batch) if job.plan.feed is Feed.LIVE else []
        stages = job.stages(len(live))
        shares = live or [{}] * stages.tasks
        calls = [source_call(self, stages.source, t, share) for t, share in enumerate(shares)]
        sent = yield from self._stage("source", calls, stages.nodes, stages.tasks)
        what = f"slice {job.plan.number}"
        reports = yield from self._waves("wave", what, stages, sent, stages.tasks)
        return Ran(stages.tasks, reports)

    def _recovery(self, job: RecoveryJob) -> Work[Ran]:
        plan, stages = job.plan, job.stages()
        calls = [self._replay_call(stages.source, t) for t in range(stages.tasks)]
        sent = yield from self._stage("replay", calls, stages.nodes, None)
        what = f"recovery {plan.placement.version}.{plan.part}"
        reports = yield from self._waves("recovery", what, stages, sent, None)
        return Ran(stages.tasks, reports)

    def ask(self, requests: Sequence[PrepareRequest | PollRequest]) -> list[NodeReport]:
        """Nodes load ahead in the background: some are ready when they are asked, some later."""
        calls = [self._ask_call(r) for r in requests]
        kind = "prepare" if isinstance(requests[0], PrepareRequest) else "poll"
        return self._through(self._stage(kind, calls, tuple(r.node for r in requests), None))

    def _ask_call(self, request: PrepareRequest | PollRequest) -> Call:
        if isinstance(request, PollRequest):
            return Call("poll", request.node, lambda process: process.poll(request))
        plan = request.plan
        what = f"prepare placement {plan.placement.version} from cut {plan.cut}"
        return Call(what, request.node, lambda process: process.prepare(request))

    @property
    def pulse(self) -> None:
        return None

    @property
    def host_names(self) -> Mapping[NodeId, str]:
        return {}

    @property
    def joining(self) -> tuple[NodeId, ...]:
        return ()

    @property
    def wanted(self) -> int:
        return len(self.machines)

    def report_to(self, observer: NodesObserver) -> None:
        """Drivers ask (`SimDriver._hear`)."""

    def request(self, count: int) -> None:
        for _ in range(count):
            self.world.schedule(20, self.join)

    def forget(self, job: str) -> None:
        """A node that cannot be reached keeps what it has."""
        for node in self.ready:
            if not self.is_silent(node) and self.world.chance(0.8):
                self.machines[node].process = self._process()

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """They were drained: their machines end, and nobody misses them."""
        for node in nodes:
            self.world.tell("{} is released", node)
            self.machines[node].dead = True
            if node in self.ready:
                self.ready.remove(node)

    def look_for_nodes(self) -> tuple[NodeId, ...]:
        while not self.ready:  # here, where less time passes than between two looks of a run
            self.step("await")
            if self.world.chance(0.2):
                self.join()
        return tuple(self.ready)

    def step(
        self, kind: str, nodes: tuple[NodeId, ...] = (), source_tasks: int | None = None
    ) -> None:
        """Between any two calls: time passes, faults strike, losses become known; and so do calls
        of what goes on beside."""
        self.world.advance()
        if self._beside and self.world.chance(0.7):
            self.go_on_beside()
        self.faults.strike(kind, self)
        lost = tuple(n for n in nodes if n in self.lost)
        if lost:
            raise NodesLostError(lost, "gone", source_tasks)

    def _waves(
        self,
        kind: str,
        what: str,
        stages: Stages[Any],
        sent: list[list[SimParcel]],
        source_tasks: int | None,
    ) -> Work[tuple[NodeReport, ...]]:
        nodes = stages.nodes
        answers: list[Answer[Rows]] = []
        for depth, wave in enumerate(stages.waves, 1):
            calls = [
                self._wave_call(request, f"wave {depth} of {what}", self._arrived(sent, i))
                for i, request in enumerate(wave)
            ]
            answers = yield from self._stage(kind, calls, nodes, source_tasks)
            sent = [parcels for parcels, _ in answers]
            if self.world.fault(self.chances.repeated):  # a fetch failed: a task of the stage again
                i = self.world.dice.randrange(len(nodes))
                if not self.is_silent(nodes[i]):
                    sent[i], _ = self._answer(calls[i])
        yield "end", nodes, source_tasks
        return tuple(report for _, report in answers if report is not None)

    def _wave_call(
        self, request: WaveRequest | RecoverRequest, what: str, parcels: list[SimParcel]
    ) -> Call:
        if isinstance(request, WaveRequest):
            return Call(what, request.node, lambda process: process.wave(request, parcels))
        return Call(what, request.node, lambda process: process.recover(request, parcels))

    def _arrived(self, sent: list[list[SimParcel]], node: int) -> list[SimParcel]:
        """What a node gets from the stage before: in any order, some twice, rarely not at all."""
        parcels = [p[node] for p in sent]
        if self.faults.loses_packets():
            i = self.world.dice.randrange(len(parcels)) if parcels else 0
            parcels[i : i + 1] = [replace(p, bundles=()) for p in parcels[i : i + 1]]
        if parcels and self.world.fault(self.chances.repeated):
            parcels.append(self.world.dice.choice(parcels))
            self.world.dice.shuffle(parcels)
        return parcels

    def _stage(
        self, kind: str, calls: list[Call], nodes: tuple[NodeId, ...], source_tasks: int | None
    ) -> Work[list[Any]]:
        """Run the calls of a stage in any order; every one must answer."""
        left = list(range(len(calls)))
        self.world.dice.shuffle(left)
        answers: dict[int, Any] = {}
        try:
            yield kind, nodes, source_tasks
            while left:
                call = calls[left[-1]]
                while self.is_silent(call.node):
                    yield kind, nodes, source_tasks
                answers[left[-1]] = self._answer(call)
                left.pop()
                yield kind, nodes, source_tasks
        except (NodesLostError, DriverCrashedError):
            for i in left:
                if self.world.fault(self.chances.late_when_cut_short):
                    self._later(calls[i])
                else:
                    calls[i].half()
            raise
        return [answers[i] for i in range(len(calls))]

    def _answer(self, call: Call) -> Any:
        """The call's answer; it may be made twice, and a copy of it may arrive much later."""
        if call.node is not None and self.faults.may("misplaced calls", self.chances.misplaced):
            self._misplace(call)
        self.awaited = True
        answer = self._perform(call)
        if self.world.fault(self.chances.repeated):
            answer = self._perform(call)
        self.awaited = False
        if self.world.fault(self.chances.late):
            self._later(call)
        return answer

    def _misplace(self, call: Call) -> None:
        """Spark does not wait for the node that a task is pinned to: nothing must come of it."""
        for node, machine in self.machines.items():
            process = machine.process
            if self.is_silent(node) or process.node in ("", call.node) or node == call.node:
                continue
            try:
                call.work(process)
            except (ClusterError, InvariantError):
                return
            violated(f"{call.what}, which is for {call.node}, was taken by {node}")

    def _perform(self, call: Call) -> Any:
        return call.work(None if call.node is None else self.machines[call.node].process)

    def _later(self, call: Call) -> None:
        """A task attempt nobody waits for."""

        def arrive() -> None:
            if call.node is not None and self.machines[call.node].dead:
                return
            if self.is_silent(call.node):
                self.world.schedule(20, arrive)
                return
            self.world.counts["late calls"] += 1
            self.world.tell("late: {} on {}", call.what, call.node or "some machine")
            try:
                self._perform(call)
            except InvariantError:
                self.world.tell("… refused: a newer driver owns {}", call.node)

        self.world.schedule(self.world.dice.randint(1, self.chances.late_ms), arrive)

    def _function_raises(self) -> bool:
        if not self.faults.may("functions that raise", self.chances.raises):
            return False
        self.world.tell("a user's function raises")
        self.excuses.add(OperatorError)
        return True

    def _sink_moment(self, sink: str) -> None:
        if self.faults.may("sinks that refuse", self.chances.sink_refuses):
            self.world.tell("{} refuses", sink)
            self.excuses.add(StorageError)
            raise RuntimeError("the target is not there")  # a stranger's error

    def _replay_call(self, request: ReplayRequest, task: int) -> Call:
        placement, part = request.plan.placement.version, request.plan.part
        what = f"replay task {task} of recovery {placement}.{part}"
        return Call(what, None, lambda _: run_replay_task(self.carried, request, task))
