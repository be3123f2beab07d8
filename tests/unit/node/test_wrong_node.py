"""A task that Spark ran on another node than the one it is for changes nothing there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_run import LocalRun
from test_local_runs import Comparison, _simple

from anabranch.errors import ClusterError
from anabranch.model.ids import NodeId
from anabranch.node.arrow.packets import decode_blob
from anabranch.node.protocol.messages import (
    PollRequest,
    PrepareRequest,
    RecoverRequest,
    WaveRequest,
)

A, B = NodeId("0"), NodeId("1")


def batch(n: int) -> list[dict[str, list[tuple[int | None, int]]]]:
    return [{"s": [(k, n + k) for k in range(6)]}]


def test_what_is_meant_for_another_node_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), tmp_path, nodes=2)
    comparison.feed(run, batch(0))
    # The next slice's wave for one node, and a recovery, which come to the other first.
    past, host = run.cluster._past, run.cluster.hosts[B]
    wave, blobs = next((w, b) for w, b in reversed(past) if w.node == A)
    assert isinstance(wave, WaveRequest)
    following = replace(wave, plan=replace(wave.plan, number=2))
    recovery = next(w for w, _ in past if isinstance(w, RecoverRequest) and w.node == A)
    another = replace(recovery, plan=replace(recovery.plan, part=1))
    wrong: list[Any] = [
        lambda: host.wave(following, [decode_blob(b) for b in blobs]),
        lambda: host.recover(another, []),
        lambda: host.prepare(PrepareRequest("", b"", 1, A, recovery.plan)),
        lambda: host.poll(PollRequest("", 1, A)),
    ]
    for call in wrong:
        with pytest.raises(ClusterError, match="a task for node 0 was run on node 1"):
            call()
    comparison.feed(run, batch(1))
    comparison.feed(run, batch(2))
