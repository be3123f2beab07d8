"""One run of a job, on whatever cluster: from taking over its directory to letting go of it.

    run = Run(RunJob.of(opening, prepared, spec), connect)
    while not run.offer(0, rows):  # batch 0, slice by slice
        ...
    run.take(StopRequested(run.clock.now_ms()))
    run.close()

Events go in, from any thread, and everything they cause is done when `take` returns. What is held
is let go of in one place, however far the run has come.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.control.controller import Controller, Phase
from anabranch.control.remarks import Remarks
from anabranch.control.settings import ControlConfig
from anabranch.driver.clock import Clock
from anabranch.driver.cluster import Caller, Cluster
from anabranch.driver.effects import Effects, Waiting
from anabranch.driver.history import History
from anabranch.driver.holding import Holding
from anabranch.driver.opening import Opening
from anabranch.driver.preparing import Prepared, control_config, remarks_for
from anabranch.driver.queries import Queries
from anabranch.driver.showing import Showing
from anabranch.driver.starting import announce
from anabranch.driver.status import JobStatus, status
from anabranch.driver.steps import Step, Steps
from anabranch.errors import AdjustmentError, AnabranchError, InvariantError
from anabranch.model.events import (
    BatchArrived,
    DrainRequested,
    Event,
    NodesJoined,
    ScaleRequested,
    StopRequested,
)
from anabranch.model.ids import NodeId
from anabranch.model.plan import Plan
from anabranch.model.slices import SliceRecord
from anabranch.sinks import Sink
from anabranch.storage.checkpoint_store import LOCAL
from anabranch.storage.identity import Identity
from anabranch.storage.store import Store

log = logging.getLogger("anabranch")
VALIDATE = "ANABRANCH_VALIDATE"


def validates() -> bool:
    """Is every run of this process told to validate itself?"""
    return os.environ.get(VALIDATE) == "1"


@dataclass(frozen=True)
class RunJob:
    """A job as its run knows it, whatever its rows are."""

    store: Store
    identity: Identity
    plan: Plan
    config: ControlConfig
    fingerprint: Mapping[str, Any]
    sinks: Mapping[str, Sink]
    spec: bytes  # as nodes load it
    sources: tuple[str, ...]  # in the order of a batch's columns
    schema: Any  # of a batch
    watch: Remarks
    checkpoints: str = LOCAL  # the place of checkpoint files
    dead_letters: str | None = None
    dropped: Collection[str] = ()  # operators whose state is given up
    validate: bool = False  # check all invariants of the controller after every event
    node_wait_s: float | None = None  # without any node, wait for one no longer

    @staticmethod
    def of(opening: Opening, prepared: Prepared, spec: bytes) -> RunJob:
        """As it was opened and compiled."""
        parts, options, dead = opening.parts, opening.options, prepared.dead_letters
        interval_ms = None if options.available_now else options.slice_interval_ms
        wait_ms = options.node_wait_ms
        return RunJob(
            store=opening.store,
            identity=prepared.spec.identity,
            plan=parts.plan,
            config=control_config(parts, options),
            fingerprint=prepared.fingerprint,
            sinks=parts.sinks,
            spec=spec,
            sources=prepared.sources,
            schema=prepared.schema,
            watch=remarks_for(prepared.spec, interval_ms, dead),
            checkpoints=prepared.spec.checkpoints,
            dead_letters=dead,
            dropped=options.drop_state,
            validate=validates(),
            node_wait_s=None if wait_ms is None else wait_ms / 1000,
        )


class Run:
    """Made, it owns the directory, has handed out the partitions and replayed: rows may come."""

    def __init__(
        self,
        job: RunJob,
        connect: Callable[[SliceRecord | None], Cluster],
        *,
        clock: Clock | None = None,
        behind: bool = True,
        closing: Callable[[], object] = lambda: None,
    ) -> None:
        """`connect` makes the cluster, once the past (whose newest slice it is given) has been
        found fit. `behind`, old files are deleted by a thread of their own. `closing` is called
        last when the run is let go of."""
        self.clock = clock = clock or Clock()
        self._job = job
        # Called after what was brought, by others than batches, if the run is over then.
        self.when_over: Callable[[], None] = lambda: None
        self._stop_asked = threading.Event()
        self._waiting = Waiting(job.node_wait_s, self._stop_asked.is_set)
        self._held: list[Callable[[], object]] = [closing, *(s.close for s in job.sinks.values())]
        try:
            self.holding = holding = Holding(job.store, job.fingerprint, job.dropped)
            self._held.append(holding.close)
            past = holding.past
            self.controller = Controller(job.plan, job.config, past, job.validate)
            showing = Showing(job.sinks, holding, job.plan.evaluating, job.dead_letters)
            showing.take_over(job.identity)
            cut = past.cut.slice if past.cut else 0
            queries = Queries(job.plan, self.controller, clock)
            self.history = History(job.watch, clock, queries, job.dead_letters, cut)
            self.cluster = connect(self.controller.newest)
            self.caller = Caller(
                job=job.store.where(),
                spec=job.spec,
                generation=holding.generation,
                driver=uuid.uuid4().hex,
                waves=job.plan.waves,
                sources=job.sources,
                schema=job.schema,
                pulse=self.cluster.pulse,
            )
            self._held.append(self._forget)
            self.effects = self._effects(holding, showing, behind)
            self._held.append(self.effects.close)
            self.steps = Steps(self.controller, self.effects, self.history, clock)
            self.effects.on_caught_up = self.bring
            self._hand_out()
        except BaseException:
            self.close()
            raise

    def _effects(
        self,
        holding: Holding,
        showing: Showing,
        behind: bool,
        make: Callable[..., Effects] = Effects,
    ) -> Effects:
        return make(
            holding,
            showing,
            self.cluster,
            self.caller,
            self.history,
            self._job.checkpoints,
            self.clock,
            self._waiting,
            behind,
        )

    def _hand_out(self) -> None:
        newest = self.controller.newest
        told = f"restoring slice {newest.number}" if newest else "beginning with slice 1"
        announce(f"handing out the partitions, {told}")
        self.cluster.report_to(self)
        self.take(self.effects.await_nodes())

    # -- events --------------------------------------------------------------------------------

    def take(self, event: Event, wait: bool = True) -> Step | None:
        """Handle an event in its turn, with all it causes; None if that comes later (`Steps`)."""
        return self.steps.take(event, wait)

    def bring(self, event: Event, wait: bool = True) -> bool:
        """An event whose bringer does not care for the run: what ends it is kept as `error`. Has it
        been handled? Raises AdjustmentError when a request is refused."""
        try:
            return self.take(event, wait) is not None
        except AdjustmentError:
            raise
        except AnabranchError:
            return True
        finally:
            if self.over:
                self.when_over()

    def offer(self, batch: int, rows: Any) -> bool:
        """One slice of a batch, or what must come before it; True when the batch is finished.
        Offer it until then, unless the run is over: in between, others have their turn."""
        before = self.controller.newest
        step = self.take(BatchArrived(batch, self.clock.now_ms(), rows))
        if step is not None and step.finished_batch == batch:
            return True
        if not self.over and self.controller.newest is before:
            nothing = InvariantError(f"batch {batch} was offered and nothing came of it")
            self.abort(nothing.told(self.controller.story.told()))
        return False

    def nodes_lost(self, nodes: tuple[NodeId, ...], reason: str) -> None:
        """Nodes went while no job needed them: recover before the next slice does."""
        self.bring(self.effects.lost(nodes, reason))

    def nodes_joined(self, nodes: tuple[NodeId, ...]) -> None:
        self.bring(self._joined(nodes))

    def _joined(self, nodes: tuple[NodeId, ...]) -> NodesJoined:
        return NodesJoined(nodes, self.clock.now_ms(), self.cluster.host_names)

    # -- requests ------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Ask for a graceful end, also of a wait for nodes; has the request been handled?"""
        self._stop_asked.set()
        return self.bring(StopRequested(self.clock.now_ms()))

    def scale(self, operator: str, parallelism: int) -> None:
        """Ask for another parallelism; AdjustmentError says why not."""
        self.bring(ScaleRequested(operator, parallelism, self.clock.now_ms()))

    def drain(self, node: str) -> None:
        """Ask for a node to be emptied and released; AdjustmentError says why not."""
        self.bring(DrainRequested(NodeId(node), self.clock.now_ms()))

    def add_nodes(self, count: int) -> None:
        """Ask the cluster for more nodes."""
        if count < 1:
            raise AdjustmentError(f"{count} nodes cannot be added; give at least 1")
        self.cluster.request(count)

    # -- what others may know ------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        return self._job.plan

    @property
    def reads(self) -> str:
        """The sources, for messages: Spark does not say which of them it means."""
        sources = self._job.sources
        return f"the source{'s' * (len(sources) > 1)} {', '.join(map(repr, sources))}"

    @property
    def nodes(self) -> dict[NodeId, str]:
        """Every node, and why it has no work, if it has none to keep."""
        placement, draining = self.controller.placement, self.controller.draining
        found = {}
        for node in self.controller.nodes:
            spare = placement is None or not placement.hosted_by(node)
            found[node] = "draining" if node in draining else "spare" if spare else ""
        return {**dict.fromkeys(self.cluster.joining, "joining"), **found}

    @property
    def recovering(self) -> bool:
        return self.controller.phase in (Phase.RECOVERING, Phase.WAITING)

    def status(self) -> JobStatus:
        """What the job does."""
        return status(
            self.plan,
            self.controller,
            self.history,
            self._job.config.slice_interval_ms,
            self.cluster.host_names,
            self.clock.now_ms(),
        )

    # -- the end -------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Has the run come to its end, good or bad?"""
        return self.steps.over

    @property
    def error(self) -> AnabranchError | None:
        """What ended the run, if not its own end."""
        return self.steps.error

    def abort(self, error: AnabranchError) -> None:
        """End the run, unless it is over, once the step in hand is done."""
        self.steps.abort(error)

    def _forget(self) -> None:
        self.cluster.forget(self.caller.job)

    def close(self) -> None:
        """Let go of all that is held, the newest first, whatever fails on the way."""
        while self._held:
            let_go = self._held.pop()
            try:
                let_go()
            except Exception as e:
                log.warning("while the run ended, %s failed: %r", let_go.__qualname__, e)
