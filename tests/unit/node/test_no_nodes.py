"""All nodes are gone: the run waits for one, for as long as it is to, and until it is stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from local_run import FaultyCluster, LocalRun
from test_local_runs import Comparison
from test_losses import DEEP

from anabranch.driver import effects
from anabranch.errors import ClusterError
from anabranch.model.ids import NodeId

ROWS = [{"s": [(k, 1) for k in range(9)]}]


class Empty(FaultyCluster):
    """What happens when somebody looks for nodes and there is none; the number of the look is
    given."""

    def __init__(self, happens: Callable[[int], None]) -> None:
        super().__init__(2)
        self.happens = happens
        self.looks = 0

    def look_for_nodes(self) -> tuple[NodeId, ...]:
        if not self.hosts:
            self.looks += 1
            self.happens(self.looks)
        return self.nodes


def without_nodes(
    root: Path, monkeypatch: pytest.MonkeyPatch, happens: Callable[[int], None], **options: object
) -> tuple[Comparison, LocalRun, Empty]:
    monkeypatch.setattr(effects, "LOOK_S", 0.001)
    comparison, cluster = Comparison(DEEP), Empty(happens)
    run = LocalRun(comparison.topology(), root, cluster=cluster, **options)  # type: ignore[arg-type]
    comparison.feed(run, ROWS)
    cluster.kill(*cluster.nodes)
    return comparison, run, cluster


def test_a_run_waits_until_a_node_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def come(look: int) -> None:
        if look == 20:
            cluster.join(2)

    comparison, run, cluster = without_nodes(tmp_path, monkeypatch, come)
    with caplog.at_level(logging.WARNING, "anabranch"):
        comparison.feed(run, ROWS)
    assert cluster.looks == 20
    told = [r.message for r in caplog.records if "waiting for one" in r.message]
    assert told == ["no node is left: waiting for one"]  # and not with every look
    comparison.feed(run, ROWS)
    run.stop()


def test_the_wait_has_an_end_if_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison, run, _ = without_nodes(tmp_path, monkeypatch, lambda look: None, node_wait="20ms")
    with pytest.raises(ClusterError, match=r"there was no node for 0\.02 s; start it again"):
        comparison.feed(run, ROWS)


def test_a_node_that_comes_right_after_a_stop_lets_it_be_graceful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(look: int) -> None:
        if look == 3:
            run.run.stop()
        if look == 6:
            cluster.join(1)

    comparison, run, cluster = without_nodes(tmp_path, monkeypatch, stop)
    comparison.feed(run, ROWS)
    assert run.run.over
    assert run.run.error is None
    run.kill()


def test_a_stop_ends_the_wait_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(look: int) -> None:
        if look == 3:
            run.run.stop()

    monkeypatch.setattr(effects, "GRACE_S", 0.0)
    comparison, run, _ = without_nodes(tmp_path, monkeypatch, stop)
    with pytest.raises(ClusterError, match="the job was stopped while it had no node"):
        comparison.feed(run, ROWS)
    run.kill()
    again = LocalRun(comparison.topology(), tmp_path)
    assert again.next_batch == 1
    comparison.feed(again, ROWS)
    again.stop()
