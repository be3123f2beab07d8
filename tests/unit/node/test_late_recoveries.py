"""A recovery that nobody waits for any more reaches a node and cannot begin: nobody else hears of
it. One that is waited for says why it cannot."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from local_run import FaultyCluster, LocalRun
from test_local_runs import Comparison
from test_losses import DEEP

from anabranch.node.process.surroundings import new_host
from anabranch.node.protocol.host import Answer
from anabranch.node.protocol.messages import RecoverRequest, WaveRequest


class Watched(FaultyCluster):
    """Remembers what was asked of nodes."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked: list[RecoverRequest] = []

    def call(self, request: WaveRequest | RecoverRequest, parcels: list) -> Answer[pa.Table]:  # type: ignore[type-arg]
        if isinstance(request, RecoverRequest):
            self.asked.append(request)
        return super().call(request, parcels)


def test_why_a_late_recovery_could_not_begin_is_not_said_of_another(tmp_path: Path) -> None:
    cluster = Watched(1)
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), tmp_path, cluster=cluster)
    comparison.feed(run, [{"s": [(1, 1)]}])
    first, *_, last = cluster.asked
    gone = dict.fromkeys(first.plan.restored, ("checkpoints/sum/0/000000000001-1.ckpt.gone",))
    plan = replace(first.plan, files=gone)
    host = new_host(load=pickle.loads)
    host.recover(replace(first, driver="before", plan=plan), [])
    _, said = host.recover(replace(last, driver="before", plan=plan), [])
    assert said is not None
    assert [f.kind for f in said.failures] == ["restore"]
    _, said = host.recover(last, [])  # of the driver of today, whose first wave another process had
    assert said is not None
    assert said.failures == ()
    assert said.partitions == {}
