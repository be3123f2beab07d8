"""The state of a running job as plain data, for whoever asks through the endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anabranch.control.controller import Controller, Phase
from anabranch.driver.actions import Actions
from anabranch.driver.progress import Progress
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


def status(
    plan: Plan,
    controller: Controller,
    actions: Actions,
    slice_interval_ms: int,
    hosts: Mapping[NodeId, str],
    now_ms: int,
) -> dict[str, Any]:
    """Everything. It may be asked in the middle of a slice: what it shows is that of the last.
    CPU is in shares of a core, and None before the first measurement under a mapping."""
    slices = list(actions.progress)
    newest = slices[-1] if slices else None
    decision = actions.decisions[-1] if actions.decisions else None
    return {
        "topology": plan.topology.name,
        "phase": _PHASES[controller.phase],
        "adjusting": controller.adjusting,
        "slice": newest.slice if newest else None,
        "rows_per_s": _rate(slices, now_ms),
        "slice_s": newest.seconds if newest else None,
        "interval_s": slice_interval_ms / 1000,
        "operators": _operators(plan, controller, newest),
        "nodes": _nodes(controller, newest, hosts),
        "adjustments": [str(a) for a in actions.adjustments[-SHOWN:]],
        "recoveries": [str(r) for r in actions.recoveries[1:][-SHOWN:]],
        "decision": None if decision is None else str(decision),
    }


def _rate(slices: Iterable[Progress], now_ms: int) -> float:
    recent = [s for s in slices if s.ended_ms >= now_ms - RATE_WINDOW_MS]
    if not recent:
        return 0.0
    seconds = max(1.0, (now_ms - recent[0].ended_ms) / 1000 + recent[0].seconds)
    return sum(s.rows_in for s in recent) / seconds


def _operators(plan: Plan, controller: Controller, newest: Progress | None) -> list[dict[str, Any]]:
    mapping, measured = controller.mapping, list(controller.load.measured)
    found = []
    for chain in plan.node_chains:
        partitions = mapping.partitions(chain.name) if mapping else []
        state = newest.state_by_operator.get(chain.name) if newest else None
        found.append(
            {
                "operators": list(chain.operators),
                "partitions": len(partitions),
                "state_rows": state[0] if state else 0,
                "state_bytes": state[1] if state else 0,
                "cpu": measured[-1].of_chain(chain.name) if measured else None,
            }
        )
    return found


def _nodes(
    controller: Controller, newest: Progress | None, hosts: Mapping[NodeId, str]
) -> list[dict[str, Any]]:
    mapping, measured = controller.mapping, list(controller.load.measured)
    found = []
    for node in controller.nodes:
        pid, memory, _ = newest.nodes.get(node, (None, 0, 0)) if newest else (None, 0, 0)
        found.append(
            {
                "node": node,
                "host": hosts.get(node, ""),
                "pid": pid,
                "partitions": len(mapping.hosted_by(node)) if mapping else 0,
                "memory_bytes": memory,
                "cpu": measured[-1].nodes.get(node, 0.0) if measured else None,
                "draining": node in controller.draining,
            }
        )
    return found
