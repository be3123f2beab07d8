"""Stories told by hand: each must end well, and end badly when the rule it is for is broken."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from jobs import line
from plants import PLANTS

from anabranch.model.events import ScaleRequested
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.slices import SliceRecord
from anabranch.sim import Outcome, simulate
from anabranch.sim.cluster import SimCluster
from anabranch.sim.disk import Snapshot
from anabranch.sim.faults import Faults
from anabranch.sim.requests import Request, Requests
from anabranch.sim.workload import KEYS
from anabranch.sim.world import World

B, C = PartitionId("b", 0), PartitionId("c", 0)


class Told(Faults):
    """Does its acts one after the other, each when it says that its time has come."""

    def __init__(self, world: World, *acts: Act) -> None:
        super().__init__(world)
        self._acts = list(acts)
        self.torn: set[str] = set()  # chains whose next file of the newest cut cannot be read
        self.asks: list[Request] = []  # after the fourth slice
        self.slices = 0
        self.torn_file: Snapshot | None = None  # … and which it was

    def request(self, requests: Requests, nodes: list[NodeId]) -> Request | None:
        return self.asks.pop(0) if self.asks and self.slices >= 4 else None

    def slice_happened(self) -> None:
        self.slices += 1

    def strike(self, kind: str, cluster: SimCluster) -> None:
        if self._acts and self._acts[0](self, kind, cluster):
            self._acts.pop(0)

    def reads(self, path: str, cluster: SimCluster) -> None:
        head = cluster.disk.head
        newest = head.cut.slice if head and head.cut else None
        file = cluster.disk.snapshot(path)
        if file.partition.chain in self.torn and file.slice == newest:
            cluster.weather.torn.add(path)
            self.torn.clear()
            self.torn_file = file


Act = Callable[[Told, str, SimCluster], bool]


def host(cluster: SimCluster, partition: PartitionId) -> NodeId:
    assert cluster.disk.head is not None
    return cluster.disk.head.placement.owners[partition].node


def after(cluster: SimCluster) -> tuple[SliceRecord, ...]:
    """The slices since the journal began anew."""
    journal = cluster.disk.journal
    return journal.after if journal else ()


def is_whole(cluster: SimCluster) -> bool:
    """Two cuts, and every node of the placement runs."""
    head = cluster.disk.head
    if head is None or head.previous is None:
        return False
    return not any(cluster.machines[n].dead for n in head.placement.nodes)


def crash(
    partition: PartitionId, when: str, torn: str = ""
) -> Callable[[Told, str, SimCluster], bool]:
    """The host of the partition, at the first such step at which all is whole."""

    def act(faults: Told, kind: str, cluster: SimCluster) -> bool:
        if kind != when or not is_whole(cluster):
            return False
        faults.torn = {torn} if torn else set()
        cluster.crash(host(cluster, partition), noticed_after_ms=1)
        return True

    return act


def tell(job_seed: int, backups: list[str] | None, *acts: Act) -> Outcome:
    job = line("a", "b", "c", backups=backups, interval_ms=60, seed=job_seed)
    return simulate(job_seed, job, lambda world: Told(world, *acts), machines=6, lines=1000)


def recoveries(outcome: Outcome) -> list[str]:
    return [line for line in outcome.story if "recovery" in line and "from cut" in line]


def two_failures_one_after_the_other() -> Outcome:
    """Paper 000's gap. b is restored from the newest cut, so it has no output before it. Then c is
    lost as well, its newest checkpoint is torn, and it goes back to the older cut: it needs b's
    output of the slices in between, which only a shadow of b can give once more."""
    return tell(0, None, crash(B, "source"), crash(C, "source", torn="c"))


def test_two_failures_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    good = two_failures_one_after_the_other()
    assert good.violation is None, good.story
    *_, first, torn, again = recoveries(good)
    assert "b[0]" in first.split("slices")[0]
    assert "c[0]" in torn.split("slices")[0]
    assert "b[0]" in torn.split("senders")[1]  # enough for the newest cut
    assert "b[0]" in again.split("shadows")[1].split("senders")[0]  # but not for the older one
    PLANTS["backups_asked_for_that_begin_too_late"](monkeypatch)
    assert two_failures_one_after_the_other().violation is not None


def a_torn_file_of_a_shadow() -> Outcome:
    """Nobody backs up. c is lost, a shadow of b meets a torn file; after two more cuts, the
    partition whose shadow it was is lost."""

    def crash_after_two_more_cuts(faults: Told, kind: str, cluster: SimCluster) -> bool:
        torn = faults.torn_file
        if kind != "source" or torn is None or cluster.disk.older_cut <= torn.slice:
            return False
        cluster.crash(host(cluster, torn.partition), noticed_after_ms=1)
        return True

    return tell(5, [], crash(C, "source", torn="b"), crash_after_two_more_cuts)


def test_a_torn_file_of_a_shadow_is_not_built_upon(monkeypatch: pytest.MonkeyPatch) -> None:
    good = a_torn_file_of_a_shadow()
    assert good.violation is None, good.story
    assert sum("crashes" in line for line in good.story) == 2
    PLANTS["torn_delta_of_a_shadow_stays_in_the_chain"](monkeypatch)
    bad = a_torn_file_of_a_shadow().violation
    assert bad is not None
    assert "checkpoints/b/" in bad


def a_torn_cut_after_a_scaling() -> Outcome:
    """a is scaled at a cut. Then b is lost, and its file of that cut cannot be read: the older one
    is from before the change, when rows of a came from two partitions instead of four."""

    def crash_after_a_slice_under_it(faults: Told, kind: str, cluster: SimCluster) -> bool:
        if kind != "source" or not any(r.placement > 1 for r in after(cluster)):
            return False
        return crash(B, "source", torn="b")(faults, kind, cluster)

    def told(world: World) -> Told:
        faults = Told(world, crash_after_a_slice_under_it)
        faults.asks = [ScaleRequested("a", 4, 0)]
        return faults

    dice = random.Random(4)
    rows = [[(dice.randrange(KEYS), 100 * b + i, 0) for i in range(30)] for b in range(12)]
    job = replace(line("a", "b", interval_ms=60), batches=tuple({"s": tuple(r)} for r in rows))
    return simulate(0, job, told, machines=6, lines=1000)


def test_a_torn_cut_after_a_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    good = a_torn_cut_after_a_scaling()
    assert good.violation is None, good.story
    *_, torn, first, second = recoveries(good)
    assert "b[0]" in torn.split("slices")[0]
    assert "a[1]" in first  # under the layout from before the change …
    assert "a[2]" not in first
    assert "a[3]" in second  # … and then on under the one after it
    assert good.counts["stages"] == 1
    PLANTS["older_cut_replayed_under_the_newer_layout"](monkeypatch)
    bad = a_torn_cut_after_a_scaling().violation
    assert bad is not None
    assert "sequential evaluation" in bad
