"""Random topologies on simulated nodes, slice by slice against the oracle, under harmless faults:
repeated tasks and waves, late calls, blobs twice and in any order, restarts, other node counts."""

from __future__ import annotations

import copy
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from flows import batches, flows
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from local_run import Batch, Faults, FaultyCluster, LocalRun, rows_of

import anabranch as ab
from anabranch.driver.cluster import Ran, RecoveryJob, SliceJob
from anabranch.errors import InvariantError
from anabranch.model.slices import Cut, Feed
from anabranch.node.process.surroundings import Background
from effort import examples
from flow_topology import build
from oracle import Dataflow

SETTINGS = settings(
    max_examples=examples(10),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking a whole run takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
HARMLESS = {"repeat": 0.3, "stale": 0.3, "shuffle": True}


def united(batch: Batch) -> dict[str, list[tuple[int | None, int]]]:
    rows: dict[str, list[tuple[int | None, int]]] = {}
    for task in batch:
        for name, part in task.items():
            rows.setdefault(name, []).extend(part)
    return rows


class Comparison:
    """Feeds the same batches to a run and to the oracle and compares every slice of every sink."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.oracle = Dataflow(copy.deepcopy(flow.steps))
        self.sinks: dict[str, ab.Memory] = {}

    def topology(self, rescale: int = 0) -> ab.Topology:
        self.sinks = {}
        return build(self.flow, lambda n: self.sinks.setdefault(n, ab.Memory()), rescale)

    def feed(self, run: LocalRun, batch: Batch) -> None:
        run.feed(batch)
        newest = run.controller.newest
        assert newest is not None
        expected = self.oracle.run(united(batch))
        for name, sink in self.sinks.items():
            assert Counter(rows_of(sink, newest.number)) == expected[name], (name, newest.number)


@SETTINGS
@given(st.data(), flows(), st.integers(1, 3), st.integers(0, 10**6))
def test_every_slice_is_right_whatever_is_repeated_or_late(
    data: st.DataObject, flow: Dataflow, nodes: int, seed: int
) -> None:
    comparison = Comparison(flow)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        run = LocalRun(comparison.topology(), Path(root), nodes, Faults(seed, **HARMLESS))
        for batch in data.draw(batches(flow)):
            comparison.feed(run, batch)
        run.stop()


@SETTINGS
@given(st.data(), flows(), st.integers(0, 10**6))
def test_restarts_on_other_nodes_and_parallelism_go_on_exactly(
    data: st.DataObject, flow: Dataflow, seed: int
) -> None:
    """Between batches: a graceful stop or a kill, then other nodes, other parallelism."""
    comparison = Comparison(flow)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        for batch in data.draw(batches(flow)):
            rescale = data.draw(st.integers(0, 3))
            nodes = data.draw(st.integers(1, 3))
            try:
                topology = comparison.topology(rescale)
                run = LocalRun(
                    topology,
                    Path(root),
                    nodes,
                    Faults(seed, **HARMLESS),
                    checkpoint_interval=data.draw(st.sampled_from(["1ms", "300h"])),
                )
            except ab.AnabranchError as refused:
                assert "this topology cannot replay them" in str(refused)
                continue
            comparison.feed(run, batch)
            if data.draw(st.booleans()):
                run.stop()
            else:
                run.kill()


@SETTINGS
@given(st.data(), flows())
def test_a_new_driver_on_the_same_nodes_takes_over(data: st.DataObject, flow: Dataflow) -> None:
    """The node processes outlive the driver; what it left in them must not matter."""
    comparison = Comparison(flow)
    hosts = FaultyCluster(2)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        for batch in data.draw(batches(flow)):
            run = LocalRun(comparison.topology(), Path(root), cluster=hosts)
            comparison.feed(run, batch)
            run.kill()


@SETTINGS
@given(st.data(), flows())
def test_a_blob_that_is_lost_once_is_sent_again(data: st.DataObject, flow: Dataflow) -> None:
    """The slice runs again from its log. A blob that held nothing but a source task's report
    stops the run instead, with nothing committed."""
    comparison = Comparison(flow)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        run = LocalRun(comparison.topology(), Path(root), 2)
        lose = data.draw(st.integers(1, 6))
        for batch in data.draw(batches(flow)):
            seen = 0

            def lost(blob: int, node: str, count: int) -> bool:
                nonlocal seen
                seen += 1
                return seen == lose

            run.cluster.lose = lost
            try:
                comparison.feed(run, batch)
            except InvariantError as e:
                assert "source tasks" in str(e)
                break
        else:
            return
        run.kill()
        run = LocalRun(comparison.topology(), Path(root), 2)
        comparison.feed(run, batch)


def test_a_blob_that_is_always_lost_ends_the_run(tmp_path: Path) -> None:
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), tmp_path, 2)
    batch = [{"s": [(k, k) for k in range(9)]}]
    feeds = []
    real = run.cluster.run

    def noted(job: SliceJob | RecoveryJob) -> Ran:
        if isinstance(job, SliceJob):
            feeds.append(job.plan.feed)
        return real(job)

    run.cluster.run = noted  # type: ignore[method-assign]
    left = 1
    run.cluster.lose = lambda blob, node, count: len(feeds) <= left and node == "1"
    comparison.feed(run, batch)
    assert feeds == [Feed.LIVE, Feed.LOG]
    feeds.clear()
    left = 1000
    with pytest.raises(ab.AnabranchError, match=r"slice 2: sum\[1\] lacked input 10 times"):
        run.feed(batch)
    assert feeds == [Feed.LIVE, *[Feed.LOG] * 10]
    run.kill()
    comparison.feed(LocalRun(comparison.topology(), tmp_path, 2), batch)


def test_two_jobs_one_after_the_other_on_the_same_nodes(tmp_path: Path) -> None:
    """Nothing of the first, not even its newest checkpoint files, is taken for the second's."""
    flow = Dataflow(_simple().steps)
    comparison = Comparison(flow)
    hosts = FaultyCluster(2)
    first = LocalRun(comparison.topology(), tmp_path / "a", cluster=hosts)
    comparison.feed(first, [{"s": [(1, 5), (2, 6)]}])
    first.stop()
    again = Comparison(_simple())
    second = LocalRun(again.topology(), tmp_path / "b", cluster=hosts)
    again.feed(second, [{"s": [(1, 1)]}])
    second.stop()
    third = LocalRun(again.topology(), tmp_path / "b", nodes=1)
    again.feed(third, [{"s": [(1, 1), (2, 1)]}])


def _simple() -> Dataflow:
    from oracle import Step

    return Dataflow(
        (Step("s", "source"), Step("sum", "sum", ("s",), 2), Step("o", "sink", ("sum",)))
    )


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_a_batch_in_several_slices_gives_the_same_totals(tmp_path: Path, limit: int) -> None:
    comparison = Comparison(_simple())
    run = LocalRun(comparison.topology(), tmp_path, max_rows_per_slice=limit)
    batch = [
        {"s": [(i % 3, i) for i in range(9)]},
        {"s": [(i % 4, 1) for i in range(4)]},
        {"s": []},
    ]
    run.feed(batch)
    run.stop()
    sink = comparison.sinks["o"]
    final = {k: v for number in sorted(sink.slices) for k, v in rows_of(sink, number)}
    assert final == dict(comparison.oracle.run(united(batch))["o"].keys())
    if limit < 9:
        assert len(sink.slices) > 1


def test_synchronous_checkpoints_are_whole_and_there_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Spark Streaming; ours go on while their writer, held up here, has not begun."""
    monkeypatch.setattr(Background, "_work", lambda _: None)
    cuts: dict[str, list[Cut | None]] = {}
    for strategy in ("SC", "ours"):
        comparison = Comparison(_simple())
        run = LocalRun(comparison.topology(), tmp_path / strategy, strategy=strategy)
        for n in range(4):
            time.sleep(0.002)  # a checkpoint is due
            comparison.feed(run, [{"s": [(1, n), (2, 1)]}])
            cuts.setdefault(strategy, []).append(run.controller.cut)
        run.kill()
    assert cuts["ours"] == [None] * 4
    newest = cuts["SC"][-1]
    assert newest is not None
    assert newest.slice == 4
    assert [len(files) for files in newest.files.values()] == [1, 1]  # no chain of changes
