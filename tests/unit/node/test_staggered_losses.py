"""Nodes that die one after the other, each while the loss before is still being made good: what the
living have replayed is kept, and every slice of every sink is still the oracle's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from local_run import LocalRun
from test_local_runs import Comparison
from test_losses import DEEP

import anabranch as ab
from anabranch.model.ids import PartitionId
from anabranch.node.protocol.partition import Partition
from effort import LONG

SLICES = 20 if LONG else 8


class Staggered:
    """Kills a node in every recovery, just before it is done, until enough have died: the one with
    the partition that was lost least often."""

    def __init__(self, run: LocalRun, losses: int) -> None:
        self.run, self.left = run, losses
        self.times: Counter[PartitionId] = Counter()  # that a partition was lost
        self._replaying = False
        self._kill()
        run.cluster.before = self._strike

    def _kill(self) -> None:
        placement = self.run.controller.placement
        assert placement is not None
        rarest = min(placement.owners, key=lambda p: (self.times[p], p))
        node = placement.owners[rarest].node
        self.left -= 1
        self.times.update(placement.hosted_by(node).keys())
        self.run.cluster.kill(node)

    def _strike(self, step: str, depth: int) -> None:
        self._replaying = step in ("replay", "recovery") or (self._replaying and step == "end")
        if self.left and self._replaying and step == "end":
            self._kill()


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The partitions that computed a slice, one by one."""
    found: list[str] = []
    real = Partition.apply

    def apply(self: Partition[Any], plan: Any, packets: Any) -> Any:
        if plan.number not in self.outputs:
            found.append(str(self.id))
        return real(self, plan, packets)

    monkeypatch.setattr(Partition, "apply", apply)
    return found


def running(root: Path, nodes: int, **options: Any) -> tuple[Comparison, LocalRun]:
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), root, nodes, checkpoint_interval="300h", **options)
    for n in range(SLICES):
        comparison.feed(run, [{"s": [(k, n) for k in range(9)]}])
    return comparison, run


@pytest.mark.parametrize("losses", [1, 2, 3, 4])
def test_every_loss_costs_only_what_was_lost(
    losses: int, tmp_path: Path, applied: list[str]
) -> None:
    comparison, run = running(tmp_path, 7)
    applied.clear()
    staggered = Staggered(run, losses)
    comparison.feed(run, [{"s": [(k, 7) for k in range(9)]}])
    assert staggered.left == 0
    placement = run.controller.placement
    assert placement is not None
    replayed = len(applied) - len(placement.owners)  # of the slice itself
    assert replayed <= 1.1 * SLICES * staggered.times.total()
    comparison.feed(run, [{"s": [(k, 8) for k in range(9)]}])


@pytest.mark.parametrize("backups", [None, ()], ids=["backups", "no backups"])
def test_many_losses_in_a_row_are_survived(tmp_path: Path, backups: Any) -> None:
    options = {} if backups is None else {"backups": backups}
    comparison, run = running(tmp_path, 24, **options)
    staggered = Staggered(run, 20)
    comparison.feed(run, [{"s": [(k, 7) for k in range(9)]}])
    assert staggered.left == 0
    assert len(run.cluster.nodes) == 4
    comparison.feed(run, [{"s": [(k, 8) for k in range(9)]}])


def test_a_partition_that_dies_with_every_owner_ends_the_run(tmp_path: Path) -> None:
    comparison, run = running(tmp_path, 24)
    placement = run.controller.placement
    assert placement is not None
    victim = min(placement.owners)

    def strike(step: str, depth: int) -> None:
        now = run.controller.placement
        assert now is not None
        if step in ("wave", "recovery") and now.owners[victim].node in run.cluster.nodes:
            run.cluster.kill(now.owners[victim].node)

    run.cluster.before = strike
    with pytest.raises(ab.AnabranchError, match=r"sum\[0\].* was lost 10 times in a row|lost 10"):
        run.feed([{"s": [(1, 1)]}])
    assert comparison is not None
    assert len(run.cluster.nodes) >= 24 - 12
