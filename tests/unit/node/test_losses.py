"""Nodes die and node processes are replaced at any step of slices, recoveries and polls: every
slice of every sink is still exactly the oracle's, whichever operators back up."""

from __future__ import annotations

import errno
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from flows import FOLDS
from local_run import Batch, Faults, FaultyCluster, LocalRun
from test_local_runs import HARMLESS, Comparison

import anabranch as ab
from anabranch.driver.clock import now_ms
from anabranch.model.events import Idled
from anabranch.model.ids import NodeId
from anabranch.node.process import surroundings
from effort import LONG
from oracle import Dataflow, Step

# `make test-long`: more seeds.
# Two shuffles, a diamond and an operator without any state behind it.
DEEP = Dataflow(
    (
        Step("s", "source"),
        Step("sum", "sum", ("s",), 3),
        Step("spread", "map", ("sum",), 5),
        Step("max", "max", ("spread",), 3),
        Step("again", "map", ("max", "sum"), 4),
        Step("count", "count", ("again",), 2),
        Step("sums", "sink", ("sum",)),
        Step("out", "sink", ("count",)),
    )
)


def random_flow(dice: random.Random) -> Dataflow:
    steps = [Step(f"s{i}", "source") for i in range(dice.randint(1, 2))]
    for i in range(dice.randint(2, 6)):
        what = dice.choice(("filter", "map", "map", *FOLDS, *FOLDS))
        names = [s.name for s in steps]
        reads = dice.sample(names, min(len(names), dice.randint(1, 2)))
        steps.append(Step(f"o{i}", what, tuple(reads), dice.randint(2, 5)))
    read = {n for s in steps for n in s.reads}
    leaves = [s.name for s in steps if s.name not in read]
    steps += [Step(f"out{i}", "sink", (name,)) for i, name in enumerate(leaves)]
    return Dataflow(tuple(steps))


def random_batch(dice: random.Random, flow: Dataflow) -> Batch:
    sources = [s.name for s in flow.steps if s.what == "source"]

    def rows() -> list[tuple[int | None, int]]:
        keys = [None, *range(12)]
        return [(dice.choice(keys), dice.randint(-20, 20)) for _ in range(dice.randint(0, 10))]

    return [{n: rows() for n in sources} for _ in range(dice.randint(0, 3))]


class Mishaps:
    """Kills and replaces by chance before any step; at least one node always comes back."""

    def __init__(self, nodes: FaultyCluster, dice: random.Random, chance: float) -> None:
        self.nodes, self.dice, self.chance = nodes, dice, chance
        self.left = 6  # in a row; more would be taken for state that kills its nodes
        self.steps: dict[str, int] = {}
        self._next = 100

    def __call__(self, step: str, depth: int) -> None:
        if self.left == 0 or self.dice.random() > self.chance:
            return
        self.left -= 1
        self.steps[step] = self.steps.get(step, 0) + 1
        victims = self.dice.sample(self.nodes.nodes, self.dice.randint(1, len(self.nodes.nodes)))
        if self.dice.random() < 0.3:
            for victim in victims:
                self.nodes.replace(victim)
            return
        self.nodes.kill(*victims)
        for _ in range(self.dice.randint(0 if self.nodes.nodes else 1, 2)):
            self._next += 1
            self.nodes.replace(NodeId(str(self._next)))


def run_seed(seed: int, flow: Dataflow | None = None, spill: bool = False) -> dict[str, int]:
    """One random run; the steps at which something was lost."""
    dice = random.Random(seed)
    flow = flow or random_flow(dice)
    comparison = Comparison(flow)
    names = [s.name for s in flow.steps]
    backups = dice.choice(["all", "sources", dice.sample(names, dice.randint(1, len(names)))])
    steps: dict[str, int] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        for _ in range(dice.randint(1, 2)):  # drivers
            run = LocalRun(
                comparison.topology(),
                Path(root),
                dice.randint(1, 4),
                Faults(seed, **HARMLESS),
                checkpoint_interval=dice.choice(["1ms", "1ms", "30ms", "300h"]),
                backups=backups,
                strategy=dice.choice(["ours", "ours", "SC"]),
                recovery_bound=dice.choice([None, None, "501ms", "5s"]),
            )
            mishaps = Mishaps(run.cluster, dice, dice.choice([0.02, 0.05, 0.15]))
            run.cluster.before = mishaps
            for _ in range(dice.randint(2, 6)):
                mishaps.left = 6
                comparison.feed(run, random_batch(dice, flow))
                run.handle(Idled(now_ms()))  # asks for files under way
                if dice.random() < 0.3 and len(run.cluster.nodes) > 1:  # between two slices
                    lost = (dice.choice(run.cluster.nodes),)
                    run.cluster.kill(*lost)
                    run.run.nodes_lost(lost, "killed")
            mishaps.left = 6
            if dice.random() < 0.5:
                run.stop()
            else:
                run.kill()
            for step, count in mishaps.steps.items():
                steps[step] = steps.get(step, 0) + count
    return steps


def test_losses_at_any_step_change_nothing() -> None:
    """Which steps a seed hits depends on when files were written: it goes on until all were."""
    missed = {"source", "wave", "recovery", "replay", "end", "poll"}
    for seed in range(500 if LONG else 60):
        missed -= run_seed(seed).keys()
        if not missed and not LONG and seed >= 2:
            break
    assert not missed


def test_losses_behind_several_shuffles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "BACKUP_MEMORY_BYTES", 100)  # all backups on disk
    for seed in range(300 if LONG else 3):
        run_seed(seed, DEEP)


def test_only_what_was_lost_is_restored(tmp_path: Path) -> None:
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), tmp_path, 3, checkpoint_interval="300h")
    for n in range(4):
        comparison.feed(run, [{"s": [(k, n) for k in range(9)]}])
    victim = run.cluster.nodes[1]
    placement = run.controller.placement
    assert placement is not None
    lost = set(placement.hosted_by(victim))
    run.cluster.kill(victim)
    comparison.feed(run, [{"s": [(k, 7) for k in range(9)]}])
    plan = run.cluster.recovered[-1]
    assert plan.restored == lost
    assert not plan.shadows  # everybody backs up
    assert [s.number for s in plan.slices] == [1, 2, 3, 4]
    after = run.controller.placement
    assert after is not None
    for partition, owner in placement.owners.items():
        changed = after.owners[partition]
        assert (changed.epoch, changed.node != victim) == (owner.epoch + (partition in lost), True)


def test_without_backups_healthy_operators_are_shadowed(tmp_path: Path) -> None:
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), tmp_path, 3, checkpoint_interval="300h", backups=())
    for n in range(3):
        comparison.feed(run, [{"s": [(k, n) for k in range(9)]}])
    placement = run.controller.placement
    assert placement is not None
    victim = next(o.node for p, o in placement.owners.items() if p.chain == "count")
    run.cluster.kill(victim)
    comparison.feed(run, [{"s": [(k, 7) for k in range(9)]}])
    plan = run.cluster.recovered[-1]
    assert not plan.senders
    healthy = {p for p, o in placement.owners.items() if o.node != victim and p.chain != "count"}
    assert plan.shadows == healthy


def test_a_full_disk_slows_the_stream_down_until_checkpoints_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), tmp_path, 2, checkpoint_interval="300h")
    monkeypatch.setattr(surroundings, "BACKUP_MEMORY_BYTES", 100)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(surroundings.Surroundings, "spill", full)
        for n in range(6):
            comparison.feed(run, [{"s": [(k, n) for k in range(9)]}])
        # No interval is due, yet every slice was followed by a checkpoint, and waited for it.
        cut = run.controller.cut
        assert cut is not None
        assert cut.slice >= 4
        for host in run.cluster.hosts.values():
            for partition in host.partitions.values():
                assert len(partition.outputs) <= 4
    comparison.feed(run, [{"s": [(1, 1)]}])
    comparison.feed(run, [{"s": [(1, 1)]}])
    assert not run.controller.schedule.disk_full


def test_the_last_node_lost_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), tmp_path, 1)
    comparison.feed(run, [{"s": [(1, 1)]}])
    run.cluster.kill(*run.cluster.nodes)
    with pytest.raises(ab.AnabranchError, match="no node is left"):
        run.feed([{"s": [(1, 1)]}])
    run.kill()
    comparison.feed(LocalRun(comparison.topology(), tmp_path, 2), [{"s": [(1, 1)]}])


def test_a_state_that_kills_every_node_ends_the_run(tmp_path: Path) -> None:
    comparison = Comparison(DEEP)
    run = LocalRun(comparison.topology(), tmp_path, 2)
    comparison.feed(run, [{"s": [(1, 1)]}])

    def always(step: str, depth: int) -> None:
        for node in run.cluster.nodes:
            run.cluster.replace(node)

    run.cluster.before = always
    with pytest.raises(ab.AnabranchError, match="lost 10 times in a row"):
        run.feed([{"s": [(1, 1)]}])
