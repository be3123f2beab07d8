"""Simulated machines and the jobs that run on them, as Spark would: stages of calls that may be
repeated, come late, or reach a machine that everybody else has given up.

A job ends with every node's report, or with `NodesLostError` as soon as the driver knows that one
of its nodes is gone. What was cut short may still arrive, at any later time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabranch.errors import InvariantError
from anabranch.model.commands import RunSlice
from anabranch.model.ids import NodeId
from anabranch.model.mapping import Mapping
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed
from anabranch.sim.disk import Disk
from anabranch.sim.faults import DriverCrashedError, Faults
from anabranch.sim.node import SimNode
from anabranch.sim.packets import Answer, Blob, Prepare, Recover, Wave
from anabranch.sim.partition import SimPartition
from anabranch.sim.sources import SourceJob, log_share, replay_task, source_task
from anabranch.sim.workload import Share, Workload
from anabranch.sim.world import World

POLL_PAUSE_MS = 10


class NodesLostError(Exception):
    """Nodes that a job needs are gone; `source_tasks` of the slice that was running."""

    def __init__(self, nodes: tuple[NodeId, ...], source_tasks: int | None) -> None:
        super().__init__(", ".join(nodes))
        self.nodes = nodes
        self.source_tasks = source_tasks


@dataclass
class Machine:
    """An executor: its node process, and whether it runs."""

    process: SimNode
    dead: bool = False
    hung: bool = False


@dataclass(frozen=True)
class Call:
    """Work for one machine's node process, or (`node` is None) for any machine."""

    what: str
    node: NodeId | None
    work: Callable[[Any], Any]
    half: Callable[[], None] = lambda: None  # what is left of it when its machine dies


class Cluster:
    """Owns the machines and what the driver knows about them."""

    def __init__(self, world: World, job: Workload, disk: Disk, faults: Faults) -> None:
        self.world = world
        self.job = job
        self.disk = disk
        self.faults = faults
        self.chances = faults.chances
        self.machines: dict[NodeId, Machine] = {}
        self.ready: list[NodeId] = []  # as the driver knows it
        self.lost: list[NodeId] = []  # declared; never used again
        self.on_install: Callable[[SimNode, SimPartition], None] = lambda node, partition: None
        self._incarnations = 0
        self._reads = 0
        self._awaited = False  # does the driver wait for the call in hand?
        disk.on_read = self._on_read

    # -- machines ------------------------------------------------------------------------------

    def join(self) -> None:
        node = NodeId(f"n{len(self.machines) + 1}")
        self.machines[node] = Machine(self._process())
        self.ready.append(node)
        self.world.tell("{} joins", node)

    def _process(self) -> SimNode:
        self._incarnations += 1
        return SimNode(
            f"i{self._incarnations}", self.job, self.disk, self._in_background, self.on_install
        )

    def crash(self, node: NodeId, noticed_after_ms: int) -> None:
        machine = self.machines[node]
        machine.dead = True
        self.world.tell("{} crashes", node)
        self.world.schedule(noticed_after_ms, lambda: self._declare_lost(node))

    def hang(self, node: NodeId, for_ms: int, patience_ms: int) -> None:
        """It does not answer; after a while the driver gives it up, and later it wakes."""
        machine = self.machines[node]
        machine.hung = True
        self.world.tell("{} hangs", node)

        def wake() -> None:
            machine.hung = False
            zombie = ", a zombie" if node in self.lost else ""
            self.world.tell("{} wakes{}", node, zombie)

        def give_up() -> None:
            if machine.hung:
                self._declare_lost(node)

        self.world.schedule(for_ms, wake)
        self.world.schedule(patience_ms, give_up)

    def replace_process(self, node: NodeId) -> None:
        self.machines[node].process = self._process()
        self.world.tell("the node process of {} is replaced", node)

    def _declare_lost(self, node: NodeId) -> None:
        if node in self.ready:
            self.ready.remove(node)
            self.lost.append(node)
            self.world.tell("the driver hears that {} is lost", node)
            if self.world.chance(self.chances.rejoined):
                self.world.schedule(self.world.dice.randint(1, 150), self.join)

    def is_alive(self, process: SimNode) -> bool:
        return any(m.process is process and not m.dead for m in self.machines.values())

    def driver_crashed(self) -> None:
        """With its Spark application, whose machines end too, or alone: then the next driver
        finds them as they are, also those that this one had given up."""
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

    def read_batch(self, batch: int | None) -> list[Share]:
        """A batch's rows, split among source tasks; every time they may be split differently."""
        assert batch is not None
        self._reads += 1
        return self.job.read(batch, self._reads)

    def _in_background(self, process: SimNode, work: Callable[[], None]) -> None:
        """Threads write and load files at their own pace, while their machine runs."""
        machine = next((m for m in self.machines.values() if m.process is process), None)

        def go_on() -> None:
            if machine is None or machine.dead or machine.process is not process:
                return
            if machine.hung:
                self.world.schedule(20, go_on)
            else:
                work()

        self.world.schedule(self.faults.write_delay_ms(), go_on)

    def _on_read(self, path: str) -> None:
        if self._awaited:
            self.faults.reads(path, self)

    # -- jobs ----------------------------------------------------------------------------------

    def run_slice(
        self,
        command: RunSlice,
        run: int,
        confirmed: int,
        mapping: Mapping,
        live: Sequence[Share],
    ) -> tuple[int, list[NodeReport]]:
        plan, nodes = command.plan, mapping.nodes
        count = {Feed.LIVE: len(live), Feed.LOG: plan.source_tasks, Feed.NONE: 0}[plan.feed]
        source = SourceJob(self.job, self.disk, run, mapping, plan, count, tuple(live))
        calls = [_source_call(source, t) for t in range(count)]
        sent: list[list[Blob]] = self._stage("source", calls, nodes, count)

        def wave(node: NodeId, depth: int, last: bool, blobs: list[Blob]) -> Call:
            request = Wave(
                run, nodes, plan, count, depth, last, confirmed, command.trim, command.backups
            )
            what = f"wave {depth} of slice {plan.number}"
            return Call(what, node, lambda process: process.wave(request, blobs))

        for node in nodes:
            self.machines[node].process.disk_full = self.faults.fills_disk()
        return count, self._waves("wave", wave, sent, nodes, count)

    def recover(self, plan: RecoveryPlan, run: int, driver: str) -> list[NodeReport]:
        nodes = plan.mapping.nodes
        logs = sum(s.source_tasks for s in plan.slices) if plan.reads_log else 0
        count = min(len(nodes), logs)
        calls = [_replay_call(self.job, self.disk, run, plan, t, count) for t in range(count)]
        sent: list[list[Blob]] = self._stage("replay", calls, nodes, None)

        def wave(node: NodeId, depth: int, last: bool, blobs: list[Blob]) -> Call:
            request = Recover(driver, run, node, nodes, plan, depth, last)
            what = f"wave {depth} of recovery {plan.mapping.version}.{plan.part}"
            return Call(what, node, lambda process: process.recover(request, blobs))

        return self._waves("recovery", wave, sent, nodes, None)

    def prepare(self, plan: RecoveryPlan, run: int) -> list[NodeReport]:
        """Nodes load ahead in the background: some are ready when they are asked, some later."""

        def call(node: NodeId) -> Call:
            what = f"prepare mapping {plan.mapping.version} from cut {plan.cut}"
            return Call(what, node, lambda process: process.prepare(Prepare(run, node, plan)))

        nodes = plan.mapping.nodes
        return self._stage("prepare", [call(n) for n in nodes], nodes, None)

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """They were drained: their machines end, and nobody misses them."""
        for node in nodes:
            self.world.tell("{} is released", node)
            self.machines[node].dead = True
            if node in self.ready:
                self.ready.remove(node)

    def poll(self, run: int, nodes: tuple[NodeId, ...]) -> list[NodeReport]:
        self.world.advance(POLL_PAUSE_MS)
        calls = [Call("poll", n, lambda process: process.poll(run)) for n in nodes]
        return self._stage("poll", calls, nodes, None)

    def await_nodes(self) -> tuple[NodeId, ...]:
        while not self.ready:
            self.step("await")
            if self.world.chance(0.2):
                self.join()
        return tuple(self.ready)

    def step(
        self, kind: str, nodes: tuple[NodeId, ...] = (), source_tasks: int | None = None
    ) -> None:
        """Between any two calls: time passes, faults strike, losses become known."""
        self.world.advance()
        self.faults.strike(kind, self)
        lost = tuple(n for n in nodes if n in self.lost)
        if lost:
            raise NodesLostError(lost, source_tasks)

    def _waves(
        self,
        kind: str,
        wave: Callable[[NodeId, int, bool, list[Blob]], Call],
        sent: list[list[Blob]],
        nodes: tuple[NodeId, ...],
        source_tasks: int | None,
    ) -> list[NodeReport]:
        waves = self.job.plan.waves
        answers: list[Answer] = []
        for depth in range(1, waves + 1):
            calls = [
                wave(node, depth, depth == waves, self._arrived(sent, i))
                for i, node in enumerate(nodes)
            ]
            answers = self._stage(kind, calls, nodes, source_tasks)
            sent = [blobs for blobs, _ in answers]
            if self.world.chance(
                self.chances.repeated
            ):  # a fetch failed: a task of the stage again
                i = self.world.dice.randrange(len(nodes))
                if not self.is_silent(nodes[i]):
                    sent[i], _ = self._answer(calls[i])
        self.step("end", nodes, source_tasks)
        return [report for _, report in answers if report is not None]

    def _arrived(self, sent: list[list[Blob]], node: int) -> list[Blob]:
        """What a node gets from the stage before: in any order, some twice, rarely not at all."""
        blobs = [b[node] for b in sent]
        if self.faults.loses_packets():
            i = self.world.dice.randrange(len(blobs)) if blobs else 0
            blobs[i : i + 1] = [replace(b, bundles=()) for b in blobs[i : i + 1]]
        if blobs and self.world.chance(self.chances.repeated):
            blobs.append(self.world.dice.choice(blobs))
            self.world.dice.shuffle(blobs)
        return blobs

    def _stage(
        self, kind: str, calls: list[Call], nodes: tuple[NodeId, ...], source_tasks: int | None
    ) -> list[Any]:
        """Run the calls of a stage in any order; every one must answer."""
        left = list(range(len(calls)))
        self.world.dice.shuffle(left)
        answers: dict[int, Any] = {}
        try:
            self.step(kind, nodes, source_tasks)
            while left:
                call = calls[left[-1]]
                while self.is_silent(call.node):
                    self.step(kind, nodes, source_tasks)
                answers[left[-1]] = self._answer(call)
                left.pop()
                self.step(kind, nodes, source_tasks)
        except (NodesLostError, DriverCrashedError):
            for i in left:
                if self.world.chance(self.chances.late_when_cut_short):
                    self._later(calls[i])
                else:
                    calls[i].half()
            raise
        return [answers[i] for i in range(len(calls))]

    def is_silent(self, node: NodeId | None) -> bool:
        return node is not None and (self.machines[node].dead or self.machines[node].hung)

    def _answer(self, call: Call) -> Any:
        """The call's answer; it may be made twice, and a copy of it may arrive much later."""
        self._awaited = True
        answer = self._perform(call)
        if self.world.chance(self.chances.repeated):
            answer = self._perform(call)
        self._awaited = False
        if self.world.chance(self.chances.late):
            self._later(call)
        return answer

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


def _source_call(source: SourceJob, task: int) -> Call:
    what = f"source task {task} of slice {source.plan.number}"
    return Call(
        what,
        None,
        lambda _: source_task(source, task),
        lambda: log_share(source, task, whole=False),
    )


def _replay_call(
    job: Workload, disk: Disk, run: int, plan: RecoveryPlan, task: int, count: int
) -> Call:
    what = f"replay task {task} of recovery {plan.mapping.version}.{plan.part}"
    return Call(what, None, lambda _: replay_task(job, disk, run, plan, task, count))
