"""A rule of nodes that only few runs ever need."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.unit.node.local_run import FaultyCluster, LocalRun

import anabranch as ab
from anabranch.control import recovery
from anabranch.node.protocol.host import Answer
from anabranch.node.protocol.messages import RecoverRequest, WaveRequest
from anabranch.testing.local import Parcels


def three_waves(sink: ab.Memory) -> ab.Topology:
    topology = ab.Topology("waves", key_groups=4)
    sums = topology.source("s", lambda spark: None).key_by("k").aggregate("sum", v=ab.sum("v"))
    most = sums.changes().key_by("v").aggregate("most", k=ab.max("k"))
    most.changes().key_by("k").aggregate("count", n=ab.count()).to("out", sink)
    return topology


class Repeating(FaultyCluster):
    """Between two waves of a later part of a recovery, the first one runs once more."""

    first: tuple[RecoverRequest, Parcels] | None = None
    repeated = 0

    def call(self, request: WaveRequest | RecoverRequest, parcels: Parcels) -> Answer[pa.Table]:
        if isinstance(request, RecoverRequest) and request.plan.part > 0:
            if request.depth == 1:
                self.first = request, parcels
            elif self.first is not None:
                self.repeated += 1
                super().call(*self.first)
        return super().call(request, parcels)


def test_a_part_of_a_recovery_that_has_begun_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that began it was tried twice, and one of them is late: other waves have run, and
    what these sent on is there."""
    monkeypatch.setattr(recovery, "MAX_PART_SLICES", 2)
    cluster = Repeating(1)
    topology = three_waves(ab.Memory())
    run = LocalRun(topology, tmp_path, cluster=cluster, checkpoint_interval="300h")
    for n in range(4):
        run.feed([{"s": [(k, n) for k in range(6)]}])
    begun = len(cluster.recovered)
    cluster.replace(*cluster.nodes)
    run.feed([{"s": [(1, 1)]}])
    parts = [(plan.part, [s.number for s in plan.slices]) for plan in cluster.recovered[begun:]]
    assert parts == [(0, [1, 2]), (1, [3, 4])]
    assert cluster.repeated == 2
