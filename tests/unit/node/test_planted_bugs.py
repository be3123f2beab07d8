"""The checks of the other tests see the bugs they are for: each is planted here, and must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_run import Faults, FaultyCluster, LocalRun
from test_local_runs import Comparison, _simple

import anabranch as ab
from anabranch.model.ids import NodeId
from anabranch.model.slices import Writes
from anabranch.node.protocol.exchange import Exchange, Inbox
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.partition import Partition
from anabranch.storage.generations import Generation
from anabranch.testing.local import Parcels
from oracle import Dataflow, Step

TWO_WAVES = (
    Step("s", "source"),
    Step("sum", "sum", ("s",), 2),
    Step("spread", "map", ("sum",), 3),
    Step("max", "max", ("spread",), 3),
    Step("sums", "sink", ("sum",)),
    Step("out", "sink", ("max",)),
)


def run_with_faults(root: Path, seed: int) -> None:
    comparison = Comparison(Dataflow(TWO_WAVES))
    faults = Faults(seed, repeat=0.5, stale=0.5, shuffle=True)
    run = LocalRun(comparison.topology(), root, 2, faults)
    for i in range(6):
        comparison.feed(run, [{"s": [(k, k + i) for k in range(5)]}, {"s": [(1, i)]}])
        run.await_cut()
    run.kill()
    run = LocalRun(comparison.topology(), root, 1)
    comparison.feed(run, [{"s": [(k, 1) for k in range(5)]}])


def is_caught(root: Path) -> bool:
    for seed in range(5):
        try:
            run_with_faults(root / str(seed), seed)
        except (AssertionError, ab.AnabranchError):
            return True
    return False


def test_without_a_bug_nothing_fails(tmp_path: Path) -> None:
    assert not is_caught(tmp_path)


def plant_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Partition.apply

    def apply(self: Partition[Any], *args: Any) -> Any:
        self.outputs.clear()
        return real(self, *args)

    monkeypatch.setattr(Partition, "apply", apply)


def plant_duplicate_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Inbox[Any], bundle: Any) -> None:
        sources = self._bundles.setdefault((bundle.slice, bundle.edge), {})
        sources[len(sources)] = bundle

    monkeypatch.setattr(Inbox, "add", add)


def plant_sealed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed is gone with the first time, of which nobody hears."""
    real = Partition.seal

    def seal(self: Partition[Any], writes: Writes) -> Any:
        self.state.seal()
        return real(self, writes)

    monkeypatch.setattr(Partition, "seal", seal)


def plant_lost_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Partition.seal

    def seal(self: Partition[Any], writes: Writes) -> Any:
        full, states = real(self, writes)
        states = states or {}
        return full, {n: [t.slice(0, t.num_rows // 2) for t in ts] for n, ts in states.items()}

    monkeypatch.setattr(Partition, "seal", seal)


def plant_notes_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Host.wave

    def wave(self: Host[Any], request: Any, parcels: Any) -> Any:
        self.hands[0].notes.slice = min(self.hands[0].notes.slice, request.plan.number)
        return real(self, request, parcels)

    monkeypatch.setattr(Host, "wave", wave)


@pytest.mark.parametrize(
    "plant",
    [
        plant_applied_twice,
        plant_duplicate_blobs,
        plant_sealed_twice,
        plant_lost_seal,
        plant_notes_reset,
    ],
)
def test_a_planted_bug_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    plant(monkeypatch)
    assert is_caught(tmp_path)


def lossy(root: Path) -> Exception | None:
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), root, 2)
    run.cluster.lose = lambda blob, node, count: blob == 1
    try:
        comparison.feed(run, [{"s": [(k, k) for k in range(9)]}] * 2)
    except (AssertionError, ab.AnabranchError) as e:
        return e
    return None


def test_an_incomplete_slice_is_refused_and_its_planted_acceptance_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(lossy(tmp_path / "a"), ab.AnabranchError)
    monkeypatch.setattr(Inbox, "missing", lambda self, slice_no, sources: None)
    assert lossy(tmp_path / "b") is not None


def old_epoch(root: Path) -> bool:
    """Deliver packets of a replaced owner first; are the rows still right?"""
    comparison = Comparison(_simple())
    hosts = FaultyCluster(1)
    first = LocalRun(comparison.topology(), root, cluster=hosts)
    comparison.feed(first, [{"s": [(1, 1)]}])
    comparison.oracle.run({"s": []})
    try:
        hosts.lose = lambda blob, node, count: True
        first.feed([{"s": [(1, 99)]}])
    except ab.AnabranchError:
        pass
    first.kill()
    hosts.lose = lambda blob, node, count: False
    second = LocalRun(comparison.topology(), root, cluster=hosts)
    return _feed_behind(second, hosts, comparison)


def _feed_behind(run: LocalRun, hosts: FaultyCluster, comparison: Comparison) -> bool:
    """Feed a batch behind a blob with the previous generation's rows of the same slice."""
    from local_run import table

    from anabranch.node.arrow.packets import RowRanges
    from anabranch.node.protocol.exchange import Bundle, Parcel

    newest = run.controller.newest
    assert newest is not None
    rows = RowRanges({0: (0, 1), 1: (0, 1)}, table([(1, 99)]))
    old = Parcel([Bundle(0, newest.number + 1, 0, run.run.caller.generation - 1, rows)])
    real = hosts.arrived

    def behind(node: NodeId, parcels: Parcels) -> Parcels:
        return [old, *real(node, parcels)]

    hosts.arrived = behind  # type: ignore[method-assign]
    try:
        comparison.feed(run, [{"s": [(1, 5)]}])
    except (AssertionError, ab.AnabranchError):
        return False
    return True


def test_an_old_epoch_is_refused_and_its_planted_acceptance_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old_epoch(tmp_path / "a")

    def deliver(self: Exchange[Any], bundle: Any, inbox: Any) -> None:
        inbox.add(bundle)

    monkeypatch.setattr(Exchange, "deliver", deliver)
    assert not old_epoch(tmp_path / "b")


def test_a_driver_of_an_older_generation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generation, "check", lambda self: None)  # it would end before
    comparison = Comparison(_simple())
    hosts = FaultyCluster(1)
    first = LocalRun(comparison.topology(), tmp_path, cluster=hosts)
    comparison.feed(first, [{"s": [(1, 1)]}])
    first.kill()
    second = LocalRun(comparison.topology(), tmp_path, cluster=hosts)
    comparison.feed(second, [{"s": [(1, 1)]}])
    with pytest.raises(ab.AnabranchError, match="generation 1 spoke to a node owned by gen"):
        first.feed([{"s": [(1, 1)]}])
