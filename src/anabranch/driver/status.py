"""What a running job does, as values: for `Job.status`, and for those who ask its endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from anabranch.control.controller import Controller, Phase
from anabranch.driver.history import History
from anabranch.driver.progress import Progress
from anabranch.driver.queries import CapacityStatus, QueryStatus
from anabranch.driver.starting import newest_phase
from anabranch.model.ids import NodeId
from anabranch.model.plan import Plan

RATE_WINDOW_MS = 10_000
SHOWN = 5  # of the newest adjustments and recoveries

_PHASES = {
    Phase.WAITING: "waiting for a node",
    Phase.RECOVERING: "recovering",
    Phase.RUNNING: "running",
    Phase.STOPPING: "stopping",
    Phase.ENDED: "ended",
}


@dataclass(frozen=True, slots=True)
class OperatorStatus:
    """Operators that run in one place, as a chain. `cpu` is in shares of a core, of all partitions
    together; None before the first measurement under a placement."""

    operators: tuple[str, ...]
    partitions: int
    state_rows: int
    state_bytes: int
    cpu: float | None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node that is ready; `pid` is that of its process, once a slice has run."""

    node: str
    host: str
    pid: int | None
    partitions: int
    memory_bytes: int
    cpu: float | None
    draining: bool


@dataclass(frozen=True, slots=True)
class JobStatus:
    """What a job does. Asked in the middle of a slice, it says what was true of the last one."""

    topology: str
    phase: str  # starting, running, recovering, waiting for a node, stopping or ended
    doing: str | None = None  # while it starts
    adjusting: bool = False
    slice: int | None = None  # the newest
    rows_per_s: float = 0.0  # of the last ten seconds
    slice_s: float | None = None  # that the newest slice took
    interval_s: float = 0.0  # of slices
    operators: tuple[OperatorStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    adjustments: tuple[str, ...] = ()  # the newest few, in words
    recoveries: tuple[str, ...] = ()
    decision: str | None = None  # of the job about itself, the newest
    queries: tuple[QueryStatus, ...] = ()
    capacity: CapacityStatus | None = None  # None: what partitions cost is not known yet
    partial_plan: str | None = None  # while queries wait: what comes back, and why no more does


def status(
    plan: Plan,
    controller: Controller,
    history: History,
    slice_interval_ms: int,
    hosts: Mapping[NodeId, str],
    now_ms: int,
) -> JobStatus:
    """Everything."""
    slices = list(history.progress)
    newest = slices[-1] if slices else None
    starting = newest is None and controller.phase in (Phase.RECOVERING, Phase.RUNNING)
    decision = history.decisions[-1] if history.decisions else None
    return JobStatus(
        topology=plan.graph.name,
        phase="starting" if starting else _PHASES[controller.phase],
        doing=newest_phase() if starting else None,
        adjusting=controller.adjusting,
        slice=newest.slice if newest else None,
        rows_per_s=_rate(slices, now_ms),
        slice_s=newest.seconds if newest else None,
        interval_s=slice_interval_ms / 1000,
        operators=_operators(plan, controller, newest),
        nodes=_nodes(controller, newest, hosts),
        adjustments=tuple(str(a) for a in history.adjustments[-SHOWN:]),
        recoveries=tuple(str(r) for r in history.recoveries[1:][-SHOWN:]),
        decision=None if decision is None else str(decision),
        queries=history.queries.statuses,
        capacity=history.queries.capacity,
        partial_plan=history.queries.partial_plan,
    )


def _rate(slices: Iterable[Progress], now_ms: int) -> float:
    recent = [s for s in slices if s.ended_ms >= now_ms - RATE_WINDOW_MS]
    if not recent:
        return 0.0
    seconds = max(1.0, (now_ms - recent[0].ended_ms) / 1000 + recent[0].seconds)
    return sum(s.rows_in for s in recent) / seconds


def _operators(
    plan: Plan, controller: Controller, newest: Progress | None
) -> tuple[OperatorStatus, ...]:
    placement, measured = controller.placement, list(controller.load.measured)
    state = newest.state_by_operator if newest else {}
    return tuple(
        OperatorStatus(
            chain.operators,
            len(placement.partitions(chain.name)) if placement else 0,
            *state.get(chain.name, (0, 0)),
            cpu=measured[-1].of_chain(chain.name) if measured else None,
        )
        for chain in plan.node_chains
    )


def _nodes(
    controller: Controller, newest: Progress | None, hosts: Mapping[NodeId, str]
) -> tuple[NodeStatus, ...]:
    placement, measured = controller.placement, list(controller.load.measured)
    found = []
    for node in controller.nodes:
        pid, memory, _ = newest.nodes.get(node, (None, 0, 0)) if newest else (None, 0, 0)
        found.append(
            NodeStatus(
                node=node,
                host=hosts.get(node, ""),
                pid=pid,
                partitions=len(placement.hosted_by(node)) if placement else 0,
                memory_bytes=memory,
                cpu=measured[-1].nodes.get(node, 0.0) if measured else None,
                draining=node in controller.draining,
            )
        )
    return tuple(found)
