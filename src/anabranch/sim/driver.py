"""A simulated driver: the real one, on the simulated cluster and the simulated store.

What is left here is what is around a driver: Spark, which offers batches, somebody who asks for
things, news of nodes. It may crash between any two commands and at every write. The next one knows
nothing but the disk.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from functools import partial

from anabranch.control.remarks import Remarks
from anabranch.driver.clock import Clock
from anabranch.driver.effects import Effects
from anabranch.driver.holding import Holding
from anabranch.driver.run import Run, RunJob
from anabranch.driver.showing import Showing
from anabranch.errors import (
    AdjustmentError,
    AnabranchError,
    CheckpointMismatchError,
    StorageError,
)
from anabranch.model.commands import Command
from anabranch.model.events import (
    Event,
    Idled,
    NodesLost,
    StopRequested,
)
from anabranch.model.ids import NodeId
from anabranch.model.slices import SliceRecord
from anabranch.sim.backups import DicedBackups
from anabranch.sim.checkers import Checkers
from anabranch.sim.cluster import SimCluster
from anabranch.sim.effects import SimEffects
from anabranch.sim.faults import DriverCrashedError
from anabranch.sim.payload import JOB, SPEC
from anabranch.sim.requests import Requests
from anabranch.sim.sinks import bound_sinks
from anabranch.sim.workload import fingerprint
from anabranch.sim.world import violated
from anabranch.storage.identity import Identity
from anabranch.storage.spark_offsets import refuse_misfit

IDLE_MS = 25


class SimDriver:
    """One life of the driver."""

    def __init__(self, cluster: SimCluster, checkers: Checkers, number: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.disk = cluster.disk
        self.job = cluster.job
        self.checkers = checkers
        self.requests = Requests(self.world, self.job)
        self._number = number
        self._impatient = self.world.chance(0.1)  # stops although something was asked for
        self._heard_joined: dict[NodeId, None] = {}  # in this order
        self._heard_lost: set[NodeId] = set(cluster.lost)
        self.run: Run | None = None  # once it has replayed
        self.must_be_refused = False
        self.stopping = False  # somebody has asked for it from within
        dice, faults = self.world.dice, cluster.faults
        self.plan = cluster.wanted_plan or self.job.plan
        if self.job.other_plans and faults.may("another parallelism", faults.chances.rescaled):
            self.plan = dice.choice(self.job.other_plans)
        if self.job.other_plans:  # chains that wait, or have just come back, go on as they were
            self.cluster.excuses.add(CheckpointMismatchError)
        self.fingerprint = fingerprint(self.plan)
        self.offsets = (self.disk.offered_batch, self.disk.committed_batch)
        if faults.may("misfits", faults.chances.misfit):
            self._misfit(dice)

    @property
    def nodes(self) -> list[NodeId]:
        """As this driver knows them."""
        return [n for n in self._heard_joined if n not in self._heard_lost]

    def live(self) -> AnabranchError | None:
        """From the start to the end; what ended it, if not its own end."""
        self.world.tell("driver {} starts: slices up to {}", self._number, self.disk.newest_slice)
        before, cluster = self.disk.store.changes["journal"], self.cluster
        try:
            run = self.run = SimRun(self)
        except AnabranchError as e:
            changed = self.disk.store.changes["journal"] != before
            if isinstance(e, CheckpointMismatchError) and changed:
                violated("a driver that was refused has written to the journal")
            if isinstance(e, CheckpointMismatchError):
                cluster.wanted_plan = cluster.ran_plan  # then it is started as it was before
            return e
        cluster.ran_plan, cluster.wanted_plan = self.plan, None
        if self.must_be_refused:
            violated(f"a driver was not refused whose offsets are {self.offsets}")
        run.steps.on_progress.append(lambda progress: self._call_back("an observer"))
        for target in self.disk.targets.values():
            target.function = self._call_back if target.forgets else lambda sink: None
        try:
            while not run.over:
                self._go_on(run)
        except AnabranchError:
            if run.error is None:
                raise
        finally:
            run.close()
        return run.error

    def _misfit(self, dice: random.Random) -> None:
        """Somebody starts what does not belong together; whether it is refused is checked."""
        if dice.random() < 0.3 and self.disk.journal is not None:
            self.fingerprint = {**self.fingerprint, "key_groups": 99}
            self.cluster.excuses.add(CheckpointMismatchError)
            self.must_be_refused = True
        else:
            offered, committed = (max(-1, n + dice.randint(-2, 2)) for n in self.offsets)
            self.offsets = (offered, committed)
            self.must_be_refused = self.offsets_misfit()
            if self.must_be_refused:
                self.cluster.excuses.add(StorageError)

    def offsets_misfit(self) -> bool:
        """Would rows be skipped, or read again as others? Spark reads what it offered and did not
        commit once more, and nothing before it."""
        offered, committed = self.offsets
        slices = self.disk.slices
        begun = max((s.batch for s in slices if s.batch is not None), default=-1)
        whole = begun if not slices or slices[-1].batch_end else begun - 1
        again = committed + 1  # the batch that Spark offers next
        return not (again - 1 <= whole and begun <= offered <= whole + 1 and committed <= offered)

    def connect(self, newest: SliceRecord | None) -> SimCluster:
        offered, committed = (n if n >= 0 else None for n in self.offsets)
        refuse_misfit("the simulated store", newest, offered, committed)
        return self.cluster

    def run_job(self) -> RunJob:
        """The job as every driver finds it; sinks are new, their targets are not."""
        plan, store = self.plan, self.disk.store
        sinks = bound_sinks(self.disk.targets, plan.graph.name, store)
        return RunJob(
            store=store,
            identity=Identity(JOB),
            plan=plan,
            config=self.job.config,
            fingerprint=self.fingerprint,
            sinks=sinks,
            spec=SPEC,
            sources=self.job.sources,
            schema=None,
            watch=Remarks(interval_ms=None),
            validate=True,
        )

    def _call_back(self, who: str) -> None:
        """A user's function, called in the middle of a step or after it, asks for something."""
        faults, run = self.cluster.faults, self.run
        if run is None or not faults.may("calls back", faults.chances.calls_back):
            return
        self.world.tell("{} asks for something", who)
        if self.world.chance(0.5):
            self.stopping = True
            run.bring(StopRequested(self.world.now_ms))
        else:
            with contextlib.suppress(AdjustmentError):
                run.scale("nobody", 2)

    # -- what comes to it ----------------------------------------------------------------------

    def _go_on(self, run: Run) -> None:
        self.cluster.step("idle")
        self._hear(run)
        if run.over:
            return
        if self.world.chance(0.25):
            self.world.advance(IDLE_MS)
            run.bring(Idled(self.world.now_ms))
        elif self.disk.committed_batch + 1 < len(self.job.batches):
            self._ask(run)
            self._offer(run, self.disk.committed_batch + 1)
        elif self.requests.pending(self.nodes) and not (self._impatient or run.controller.waiting):
            run.bring(Idled(self.world.now_ms))  # what was accepted must come true
        elif self.world.chance(0.3):
            run.bring(StopRequested(self.world.now_ms))

    def _hear(self, run: Run) -> None:
        """Of nodes that came or went while no job needed them."""
        lost = tuple(n for n in self.cluster.lost if n not in self._heard_lost)
        if lost:
            self.lost(lost)
            run.nodes_lost(lost, "gone")
        joined = tuple(n for n in self.cluster.ready if n not in self._heard_joined)
        if joined:
            self.joined(joined)
            run.nodes_joined(joined)

    def lost(self, nodes: tuple[NodeId, ...]) -> None:
        self._heard_lost.update(nodes)
        self.requests.gone(nodes)

    def joined(self, nodes: tuple[NodeId, ...]) -> None:
        self._heard_joined |= dict.fromkeys(nodes)

    def released(self, nodes: tuple[NodeId, ...]) -> None:
        self.requests.gone(nodes)
        for node in nodes:
            del self._heard_joined[node]

    def _ask(self, run: Run) -> None:
        """Before a batch the user may ask for something."""
        request = self.cluster.faults.request(self.requests, self.nodes)
        if request is None or run.over:
            return
        placement = run.controller.placement
        assert placement is not None
        possible = self.requests.may(request, self.nodes)
        if run.controller.waiting:
            possible = None  # it depends on what waits by then
        self.world.tell("asked for: {}", request)
        self.requests.ask(request, placement)
        try:
            run.bring(request)
        except AdjustmentError as e:
            self.world.counts["requests refused"] += 1
            self.world.tell("… refused: {}", e)
            self.requests.refused()
            self.checkers.answered(request, possible, accepted=False)
        else:
            if run.error is None:
                self.checkers.answered(request, possible, accepted=True)

    def _offer(self, run: Run, batch: int) -> None:
        """Spark offers a batch; when it is finished, Spark commits it. It writes a file for each: a
        driver that was replaced meanwhile takes back nothing."""
        disk = self.disk
        disk.offered_batch = max(disk.offered_batch, batch)
        while not run.offer(batch, batch):
            if run.over or not self._between(run):
                return
        self.cluster.step("commit")
        disk.committed_batch = max(disk.committed_batch, batch)

    def _between(self, run: Run) -> bool:
        """Between two slices of a batch others have their turn, also somebody who stops the run;
        does it go on?"""
        self._hear(run)
        self._ask(run)
        if self.world.fault(0.05) and not run.over:
            self.world.counts["stops in a batch"] += 1
            run.bring(StopRequested(self.world.now_ms))
        return not run.over


class SimRun(Run):
    """The real run; what it does is struck by faults and told to the checkers."""

    def __init__(self, driver: SimDriver) -> None:
        self._driver = driver
        world = driver.world
        clock = Clock(
            monotonic_ns=lambda: world.now_ms * 1_000_000,
            wall_ms=lambda: world.wall_ms,
            pause=lambda seconds: world.advance(round(seconds * 1000)),
        )
        super().__init__(driver.run_job(), driver.connect, clock=clock, behind=False)

    def _effects(
        self,
        holding: Holding,
        showing: Showing,
        behind: bool,
        make: Callable[..., Effects] = Effects,
    ) -> Effects:
        if self._driver.job.rechooses_backups:
            self.controller.ledgers.backups.bound = DicedBackups(self._driver.world)
        handle = self.controller.handle

        def handled(event: Event, wall_ms: int | None = None) -> list[Command]:
            if isinstance(event, NodesLost):  # also where what goes on beside slices met the loss
                self._driver.lost(event.nodes)
            commands = handle(event, wall_ms)
            self._driver.requests.handled(event)
            return commands

        self.controller.handle = handled  # type: ignore[method-assign]
        make = partial(SimEffects, driver=self._driver)
        return super()._effects(holding, showing, behind, make)

    def close(self) -> None:
        """A process that is killed lets go of nothing."""
        if not isinstance(sys.exception(), DriverCrashedError):
            super().close()

    def _hand_out(self) -> None:
        driver = self._driver
        driver.cluster.step("start")
        driver.joined(self.effects.await_nodes().nodes)
        super()._hand_out()
