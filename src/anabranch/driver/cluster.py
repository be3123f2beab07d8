"""The seam between the driver and whatever carries out its work: Spark's executors, hosts in this
process, simulated machines.

What a slice or a recovery asks of its source tasks and of every node, wave by wave, is decided here
and once. A cluster only carries it out: stage by stage, or chained ahead as Spark does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from anabranch.model.commands import RunSlice
from anabranch.model.ids import NodeId
from anabranch.model.placement import Placement
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.protocol.messages import (
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    ReplayRequest,
    SourceRequest,
    WaveRequest,
)

Source = TypeVar("Source", SourceRequest, ReplayRequest)


class NodesLostError(Exception):
    """Raised by a `Cluster` instead of an answer: nodes it needs are gone, nothing runs any more.
    `source_tasks` are those of the job that was running, where it had come so far."""

    def __init__(
        self, nodes: Sequence[NodeId], reason: str, source_tasks: int | None = None
    ) -> None:
        super().__init__(f"{', '.join(nodes)}: {reason}")
        self.nodes = tuple(nodes)
        self.reason = reason
        self.source_tasks = source_tasks


@dataclass(frozen=True)
class Stages(Generic[Source]):
    """A job as every cluster carries it out: first the source tasks, each of which sends one parcel
    to every node; then wave after wave, each with one request per node, in the order of `nodes`.
    The answers to the last wave are the reports."""

    nodes: tuple[NodeId, ...]
    tasks: int
    source: Source
    waves: tuple[tuple[WaveRequest | RecoverRequest, ...], ...]


@dataclass(frozen=True)
class SliceJob:
    """One slice to run. A live one takes the `rows` that its batch came with."""

    caller: Caller
    command: RunSlice
    placement: Placement
    confirmed: int  # slices up to this one are journalled

    @property
    def plan(self) -> SlicePlan:
        return self.command.plan

    @property
    def rows(self) -> Any:
        return self.command.rows

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return self.command.nodes(self.placement)

    def stages(self, live_tasks: int) -> Stages[SourceRequest]:
        """With as many source tasks as a live batch has; the log knows its own number."""
        by, plan, nodes = self.caller, self.plan, self.nodes
        tasks = {Feed.LIVE: live_tasks, Feed.LOG: plan.source_tasks, Feed.NONE: 0}[plan.feed]
        source = SourceRequest(
            by.generation, nodes, self.placement, plan, tasks, by.sources, by.schema
        )
        told = (self.confirmed, self.command.trim, self.command.backups, self.command.beside)
        waves = tuple(
            tuple(
                WaveRequest(
                    by.job, by.generation, n, nodes, plan, tasks, depth, depth == by.waves, *told
                )
                for n in nodes
            )
            for depth in range(1, by.waves + 1)
        )
        return Stages(nodes, tasks, source, waves)


@dataclass(frozen=True)
class RecoveryJob:
    """A recovery, or a part of it: the waves of several slices at once."""

    caller: Caller
    plan: RecoveryPlan

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return self.plan.nodes

    def stages(self) -> Stages[ReplayRequest]:
        """As many replay tasks as there are nodes, or logs if these are fewer."""
        by, plan, nodes = self.caller, self.plan, self.nodes
        logs = sum(s.source_tasks for s in plan.slices) if plan.reads_log else 0
        tasks = min(len(nodes), logs)
        waves = tuple(
            tuple(
                RecoverRequest(
                    job=by.job,
                    spec=by.spec if depth == 1 else None,
                    driver=by.driver,
                    pulse=by.pulse,
                    generation=by.generation,
                    node=node,
                    nodes=nodes,
                    plan=plan,
                    depth=depth,
                    last=depth == by.waves,
                )
                for node in nodes
            )
            for depth in range(1, by.waves + 1)
        )
        return Stages(nodes, tasks, ReplayRequest(by.generation, nodes, plan, tasks), waves)


@dataclass(frozen=True)
class Caller:
    """Who asks: what the requests of a run say of it and of its job."""

    job: str  # its checkpoint directory
    spec: bytes  # the job, as nodes load it
    generation: int  # the driver's
    driver: str  # unique: a new job on a directory that was deleted counts from 1 again
    waves: int
    sources: tuple[str, ...]  # in the order of a batch's columns
    schema: Any  # of a batch
    pulse: object | None = None  # where nodes send their heartbeats

    def slice(self, command: RunSlice, placement: Placement, confirmed: int) -> SliceJob:
        return SliceJob(self, command, placement, confirmed)

    def recovery(self, plan: RecoveryPlan) -> RecoveryJob:
        return RecoveryJob(self, plan)

    def preparation(self, plan: RecoveryPlan) -> list[PrepareRequest]:
        """One for every node of the plan."""
        nodes = plan.placement.nodes
        return [PrepareRequest(self.job, self.spec, self.generation, n, plan) for n in nodes]

    def poll(self, nodes: Sequence[NodeId]) -> list[PollRequest]:
        return [PollRequest(self.job, self.generation, n) for n in nodes]


@dataclass(frozen=True)
class Ran:
    """A job came to its end: the number of its source tasks, and every node's report."""

    source_tasks: int
    reports: tuple[NodeReport, ...]


class NodesObserver(Protocol):
    """Hears of nodes that come and go while no job needs them."""

    def nodes_lost(self, nodes: tuple[NodeId, ...], reason: str) -> None: ...

    def nodes_joined(self, nodes: tuple[NodeId, ...]) -> None: ...


class Cluster(Protocol):
    """Nodes, and ways to have them work. `run` and `ask` may raise NodesLostError."""

    @property
    def pulse(self) -> object | None:
        """Where nodes send their heartbeats, if anybody listens."""
        ...

    @property
    def host_names(self) -> Mapping[NodeId, str]:
        """The machine of every node, where that is known."""
        ...

    @property
    def joining(self) -> tuple[NodeId, ...]:
        """Nodes that are there and not ready yet."""
        ...

    @property
    def wanted(self) -> int | None:
        """How many nodes there are to be, as far as that is known."""
        ...

    def report_to(self, observer: NodesObserver) -> None:
        """From now on tell of nodes that are lost or join; not in the middle of a call."""
        ...

    def run(self, job: SliceJob | RecoveryJob) -> Ran: ...

    def begin(self, job: RecoveryJob) -> Future[Ran]:
        """Run it beside others. The result may be an error, NodesLostError among them."""
        ...

    def ask(self, requests: Sequence[PrepareRequest | PollRequest]) -> list[NodeReport]:
        """A report of every node that is asked, in this order."""
        ...

    def request(self, count: int) -> None:
        """Ask for this number of further nodes, if the cluster can be asked."""
        ...

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """Give nodes back that have nothing any more."""
        ...

    def look_for_nodes(self) -> tuple[NodeId, ...]:
        """Those that are ready now; raises ClusterError where none will ever be."""
        ...

    def forget(self, job: str) -> None:
        """The job has ended: drop its state on the nodes."""
        ...
