"""Source tasks of simulated jobs: two attempts at once, or killed half-way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.model.ids import NodeId
from anabranch.model.slices import Feed
from anabranch.node.protocol.exchange import Parcel
from anabranch.node.protocol.messages import SourceRequest
from anabranch.node.protocol.source_task import run_source_task
from anabranch.sim.payload import Rows
from anabranch.sim.workload import RawShare
from anabranch.sim.world import violated

if TYPE_CHECKING:
    from anabranch.sim.cluster import SimCluster

SimParcel = Parcel[Rows]


@dataclass(frozen=True)
class Call:
    """Work for one machine's node process, or (`node` is None) for any machine."""

    what: str
    node: NodeId | None
    work: Callable[[Any], Any]
    half: Callable[[], None] = lambda: None  # what is left of it when its machine dies


def _twice(
    cluster: SimCluster, request: SourceRequest, task: int, share: RawShare
) -> list[SimParcel]:
    """Another attempt of a source task, which reads its rows in another order, comes between
    two writes of the first: both must send the same."""
    dice = cluster.world.dice
    other = {s: tuple(dice.sample(rows, len(rows))) for s, rows in share.items()}
    theirs: list[SimParcel] = []

    def visit() -> None:
        theirs.extend(run_source_task(cluster.carried, request, task, other, lambda: 0.0))

    with cluster.weather.visited_after(dice.randrange(_moments(cluster, request, share)), visit):
        mine = run_source_task(cluster.carried, request, task, share, lambda: 0.0)
    failed = [p for p in (*mine, *theirs) if p.facts is not None and p.facts.failures]
    if theirs and not failed and [p.bundles for p in theirs] != [p.bundles for p in mine]:
        violated(f"two attempts of source task {task} sent different rows")
    return mine


def source_call(cluster: SimCluster, request: SourceRequest, task: int, share: RawShare) -> Call:
    def work(_: Any = None) -> list[SimParcel]:
        live = request.plan.feed is Feed.LIVE
        if live and cluster.faults.may("overlapping attempts", cluster.chances.overlapping):
            return _twice(cluster, request, task, share)
        return run_source_task(cluster.carried, request, task, share, lambda: 0.0)

    def half() -> None:
        """Its machine dies between any two of its writes."""
        if request.plan.feed is Feed.LIVE and cluster.world.chance(0.5):
            moment = cluster.world.dice.randrange(_moments(cluster, request, share))
            with cluster.weather.killed_after(moment):
                work()

    return Call(f"source task {task} of slice {request.plan.number}", None, work, half)


def _moments(cluster: SimCluster, request: SourceRequest, share: RawShare) -> int:
    """Between any two writes of a source task's log."""
    return 4 * len(cluster.job.chunks(share, request.tasks, request.plan.max_rows))
