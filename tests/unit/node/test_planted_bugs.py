"""The checks of the other tests see the bugs they are for: each is planted here, and must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from local_run import Faults, LocalNodes, LocalRun
from test_local_runs import Comparison, _simple

import anabranch as ab
from anabranch.model.slices import Writes
from anabranch.node.host import Host
from anabranch.node.packets import Inbox
from anabranch.node.partition import Partition
from anabranch.storage.generations import Generation
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

    def apply(self: Partition, *args: Any) -> Any:
        self.outputs.clear()
        return real(self, *args)

    monkeypatch.setattr(Partition, "apply", apply)


def plant_duplicate_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Inbox, bundle: Any) -> None:
        sources = self._bundles.setdefault((bundle.slice, bundle.edge), {})
        sources[len(sources)] = bundle

    monkeypatch.setattr(Inbox, "add", add)


def plant_sealed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed is gone with the first time, of which nobody hears."""
    real = Partition.seal

    def seal(self: Partition, writes: Writes) -> Any:
        for state in self.states.values():
            state.seal()
        return real(self, writes)

    monkeypatch.setattr(Partition, "seal", seal)


def plant_lost_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Partition.seal

    def seal(self: Partition, writes: Writes) -> Any:
        full, states = real(self, writes)
        return full, {n: [t.slice(0, t.num_rows // 2) for t in ts] for n, ts in states.items()}

    monkeypatch.setattr(Partition, "seal", seal)


def plant_notes_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Host.wave

    def wave(self: Host, request: Any, blobs: Any) -> Any:
        self._notes.slice = min(self._notes.slice, request.plan.number)
        return real(self, request, blobs)

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
    run.nodes.lose = lambda blob, node, count: blob == 1
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
    hosts = LocalNodes(1, 1)
    first = LocalRun(comparison.topology(), root, hosts=hosts)
    comparison.feed(first, [{"s": [(1, 1)]}])
    stale: list[Any] = []
    hosts.lose = lambda blob, node, count: False
    real = hosts._arrived

    def keep(sent: list[list[bytes]], nodes: Any) -> Any:
        stale.append(real(sent, nodes))
        return stale[-1]

    hosts._arrived = keep  # type: ignore[method-assign]
    comparison.oracle.run({"s": []})
    try:
        hosts.lose = lambda blob, node, count: True
        first.feed([{"s": [(1, 99)]}])
    except ab.AnabranchError:
        pass
    first.kill()
    hosts.lose = lambda blob, node, count: False
    hosts._arrived = real  # type: ignore[method-assign]
    second = LocalRun(comparison.topology(), root, hosts=hosts)
    return _feed_behind(second, hosts, comparison)


def _feed_behind(run: LocalRun, hosts: LocalNodes, comparison: Comparison) -> bool:
    """Feed a batch behind a blob with the previous generation's rows of the same slice."""
    from local_run import table

    from anabranch.node.packets import Bundle, encode_blob

    newest = run.driver.controller.newest
    assert newest is not None
    rows = table([(1, 99)])
    old = Bundle(0, newest.number + 1, 0, run.driver.actions.run - 1, {0: (0, 1), 1: (0, 1)}, rows)
    real = hosts._arrived

    def behind(sent: list[list[bytes]], nodes: Any) -> Any:
        return {n: [b"".join(encode_blob([old])), *bs] for n, bs in real(sent, nodes).items()}

    hosts._arrived = behind  # type: ignore[method-assign]
    try:
        comparison.feed(run, [{"s": [(1, 5)]}])
    except (AssertionError, ab.AnabranchError):
        return False
    return True


def test_an_old_epoch_is_refused_and_its_planted_acceptance_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old_epoch(tmp_path / "a")

    def deliver(self: Host, bundle: Any) -> None:
        self._inbox.add(bundle)

    monkeypatch.setattr(Host, "_deliver", deliver)
    assert not old_epoch(tmp_path / "b")


def test_a_driver_of_an_older_generation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generation, "check", lambda self: None)  # it would end before
    comparison = Comparison(_simple())
    hosts = LocalNodes(1, 1)
    first = LocalRun(comparison.topology(), tmp_path, hosts=hosts)
    comparison.feed(first, [{"s": [(1, 1)]}])
    first.kill()
    second = LocalRun(comparison.topology(), tmp_path, hosts=hosts)
    comparison.feed(second, [{"s": [(1, 1)]}])
    with pytest.raises(ab.AnabranchError, match="generation 1 spoke to a node owned by gen"):
        first.feed([{"s": [(1, 1)]}])
