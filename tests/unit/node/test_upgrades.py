"""A job goes on with another topology: state follows an operator's name, whatever changed around
it, and what cannot be carried over is refused before anything is touched.

The model: the oracle of the new topology with the remembered values of operators that stayed.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from flows import FOLDS, batches, flows
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from local_run import Batch, LocalRun, rows_of
from test_local_runs import united

import anabranch as ab
from anabranch.errors import CheckpointMismatchError, StorageError
from effort import LONG
from flow_topology import build
from oracle import Dataflow, Step

S, SUM = Step("s", "source"), Step("sum", "sum", ("s",), 2)
PLAIN = (S, SUM, Step("o", "sink", ("sum",)))


def batch(n: int) -> list[dict[str, list[tuple[int | None, int]]]]:
    return [{"s": [(k, n + k) for k in range(20)]}, {"s": [(None, n), (3, 1)]}]


class Upgraded:
    """One directory, the topology that runs on it now, and what it must give."""

    def __init__(self, root: Path, steps: Sequence[Step]) -> None:
        self.root = root
        self.oracle = Dataflow(tuple(copy.deepcopy(list(steps))))
        self.sinks: dict[str, ab.Memory] = {}

    def change(self, steps: Sequence[Step]) -> None:
        folds = {s.name for s in steps if s.what in FOLDS}
        kept = {n: v for n, v in self.oracle._values.items() if n in folds}
        self.oracle = Dataflow(tuple(steps), kept)

    def start(self, drop: Sequence[str] = (), interval: str = "1ms") -> LocalRun:
        self.sinks = {}
        topology = build(self.oracle, lambda n: self.sinks.setdefault(n, ab.Memory()))
        return started(topology, self.root, drop, checkpoint_interval=interval)

    def feed(self, run: LocalRun, given: Batch) -> None:
        run.feed(given)
        newest = run.controller.newest
        assert newest is not None
        expected = self.oracle.run(united(given))
        for name, sink in self.sinks.items():
            assert Counter(rows_of(sink, newest.number)) == expected[name], (name, newest.number)


def started(topology: ab.Topology, root: Path, drop: Sequence[str] = (), **options: Any) -> Any:
    return LocalRun(topology, root, drop_state=drop, **options)


def with_reads(steps: Sequence[Step], **reads: str) -> list[Step]:
    return [replace(s, reads=(reads[s.name],)) if s.name in reads else s for s in steps]


CHANGES: dict[str, tuple[Step, ...]] = {
    "a new independent branch": (*PLAIN, Step("n", "count", ("s",), 3), Step("p", "sink", ("n",))),
    "a stateless operator before": (
        S,
        Step("keep", "keep", ("s",)),
        *with_reads([SUM], sum="keep"),
        PLAIN[2],
    ),
    "a filter before": (S, Step("f", "filter", ("s",), 3), *with_reads([SUM], sum="f"), PLAIN[2]),
    "another parallelism": (S, replace(SUM, number=4), PLAIN[2]),
    "the same key behind": (
        S,
        SUM,
        Step("max", "max", ("sum",), 2),
        Step("o", "sink", ("max",)),
    ),
    "the same key in front": (
        S,
        Step("max", "max", ("s",), 2),
        *with_reads([SUM], sum="max"),
        PLAIN[2],
    ),
    "another key in front": (
        S,
        Step("max", "max", ("s",), 3),
        Step("m", "map", ("max",), 5),
        *with_reads([SUM], sum="m"),
        PLAIN[2],
    ),
    "in front, and another parallelism": (
        S,
        Step("max", "max", ("s",), 3),
        replace(SUM, reads=("max",), number=3),
        PLAIN[2],
    ),
    "a renamed sink": (S, SUM, Step("renamed", "sink", ("sum",))),
    "declared after another": (
        S,
        Step("n", "count", ("s",), 2),
        Step("p", "sink", ("n",)),
        *PLAIN[1:],
    ),
}


@pytest.mark.parametrize(
    ("name", "back"),
    [(n, b) for i, n in enumerate(CHANGES) for b in (False, True) if LONG or b == bool(i % 2)],
)
def test_state_survives(tmp_path: Path, name: str, back: bool) -> None:
    """There, and with `back` to the first topology again."""
    job = Upgraded(tmp_path, PLAIN)
    run = job.start()
    for n in range(4):
        job.feed(run, batch(n))
    run.stop()
    job.change(CHANGES[name])
    run = job.start()
    for n in range(3):
        job.feed(run, batch(10 + n))
    run.stop()
    if back:
        gone = {s.name for s in CHANGES[name] if s.what in FOLDS} - {"sum"}
        job.change(PLAIN)
        run = job.start(drop=sorted(gone))
        job.feed(run, batch(20))
        run.kill()
    run = job.start()
    job.feed(run, batch(30))


def test_changed_code_goes_on_also_after_a_crash(tmp_path: Path) -> None:
    """Rows that were logged stay as the old code made them; new rows meet the new code."""
    sink = ab.Memory()

    def topology(function: Callable[[pl.DataFrame], pl.DataFrame]) -> ab.Topology:
        made = ab.Topology("t")
        mapped = made.source("s", None).map("m", function)
        mapped.key_by("k").aggregate("sum", v=ab.sum("v")).to("o", sink)
        return made

    run = LocalRun(topology(lambda f: f), tmp_path, checkpoint_interval="300h")
    run.feed([{"s": [(1, 5)]}])
    run.kill()
    run = LocalRun(topology(lambda f: f.with_columns(v=pl.col("v") * 100)), tmp_path)
    run.feed([{"s": [(1, 7)]}])
    assert rows_of(sink, 2) == [(1, 705)]


@pytest.mark.parametrize("name", ["a stateless operator before", "another parallelism"])
def test_after_a_crash_what_can_be_replayed_is(tmp_path: Path, name: str) -> None:
    job = Upgraded(tmp_path, PLAIN)
    run = job.start(interval="300h")
    job.feed(run, batch(0))
    run.kill()
    job.change(CHANGES[name])
    job.feed(job.start(), batch(1))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a new independent branch", "operator 'n' is new"),
        ("the same key behind", "operator 'max' is new"),
        ("the same key in front", "operator 'max' is new"),
        ("a renamed sink", "the sink 'o' is not in the topology any more"),
    ],
)
def test_after_a_crash_what_cannot_be_replayed_is_refused(
    tmp_path: Path, name: str, why: str
) -> None:
    job = Upgraded(tmp_path, PLAIN)
    run = job.start(interval="300h")
    job.feed(run, batch(0))
    job.feed(run, batch(1))
    run.kill()
    job.change(CHANGES[name])
    with pytest.raises(CheckpointMismatchError, match="2 slices were committed after") as refused:
        job.start()
    assert why in refused.value.message
    assert (
        "start the topology that wrote them once more with available_now=True"
        in refused.value.message
    )
    job.change(PLAIN)  # as the sentence says
    job.start().stop()
    job.change(CHANGES[name])
    job.feed(job.start(), batch(2))


def test_other_rows_to_a_stateful_operator_cannot_be_fed_from_the_log(tmp_path: Path) -> None:
    job = Upgraded(tmp_path, [*PLAIN, Step("max", "max", ("s",), 2), Step("p", "sink", ("max",))])
    run = job.start(interval="300h")
    job.feed(run, batch(0))
    run.kill()
    job.change(
        [
            S,
            Step("max", "max", ("s",), 2),
            *with_reads(PLAIN[1:], sum="max"),
            Step("p", "sink", ("max",)),
        ]
    )
    with pytest.raises(CheckpointMismatchError, match="other rows go from the sources to"):
        job.start()


def test_a_removed_operator_is_dropped_only_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = [*PLAIN, Step("max", "max", ("sum",), 2), Step("p", "sink", ("max",))]
    job = Upgraded(tmp_path, both)
    run = job.start()
    job.feed(run, batch(0))
    run.stop()
    job.change(PLAIN)
    with pytest.raises(CheckpointMismatchError, match=r"holds state of operator 'max'.*drop_state"):
        job.start()
    with caplog.at_level(logging.INFO, "anabranch"):
        run = job.start(drop=["max"])
    assert "the state of operator 'max' is dropped" in caplog.text
    job.feed(run, batch(1))
    run.stop()
    job.change(both)  # it comes back empty
    with caplog.at_level(logging.INFO, "anabranch"):
        run = job.start()
    assert "operator 'max' is new: it starts empty with slice" in caplog.text
    job.feed(run, batch(2))


def test_a_damaged_checkpoint_is_found_before_the_older_one_is_given_up(tmp_path: Path) -> None:
    job = Upgraded(tmp_path, PLAIN)
    run = job.start()
    for n in range(3):
        job.feed(run, batch(n))
    run.stop()
    files = sorted((tmp_path / "checkpoints").glob("*/*/*.ckpt"), key=lambda p: p.name)
    victim = files[-1]
    victim.write_bytes(victim.read_bytes()[:-1])
    job.change(CHANGES["a new independent branch"])
    before = {p: p.read_bytes() for p in (tmp_path / "journal").iterdir()}
    with pytest.raises(StorageError, match="goes on from the checkpoint before") as refused:
        job.start()
    assert str(victim) in refused.value.message
    assert {p: p.read_bytes() for p in (tmp_path / "journal").iterdir()} == before
    job.change(PLAIN)
    job.start().stop()
    job.change(CHANGES["a new independent branch"])
    job.feed(job.start(), batch(9))


def test_changed_aggregates_are_refused_one_by_one(tmp_path: Path) -> None:
    def topology(**aggregates: Any) -> ab.Topology:
        made = ab.Topology("t")
        made.source("s", None).key_by("k").aggregate("agg", **aggregates).to("o", ab.Memory())
        return made

    LocalRun(topology(a=ab.sum("v"), b=ab.count()), tmp_path).stop()
    with pytest.raises(CheckpointMismatchError) as refused:
        LocalRun(topology(a=ab.mean("v"), c=ab.count()), tmp_path)
    for part in ("'agg'", "'aggregates.c' (Count) is new", "'aggregates.b' (Count) is gone"):
        assert part in refused.value.message


def test_the_same_state_with_another_meaning_is_refused(tmp_path: Path) -> None:
    def topology(k: int) -> ab.Topology:
        made = ab.Topology("t")
        made.source("s", None).key_by("k").top_k("best", k, by="v").to("o", ab.Memory())
        return made

    LocalRun(topology(3), tmp_path).stop()
    with pytest.raises(CheckpointMismatchError, match="setting 'k' was 3, is 5"):
        LocalRun(topology(5), tmp_path)


@st.composite
def changes(draw: st.DrawFn, flow: Dataflow, tag: str) -> tuple[Step, ...]:
    """The flow with a step put before or behind another, a parallelism or a sink's name changed,
    a fold or a branch added, or an operator removed."""
    steps = list(flow.steps)
    at = draw(st.integers(sum(s.what == "source" for s in steps), len(steps) - 1))
    step = steps[at]
    what = draw(st.sampled_from(["before", "branch", "scale", "remove", "sink"]))
    if what == "before":
        kind = draw(st.sampled_from(("filter", "map", "keep", *FOLDS)))
        new = Step(f"new{tag}", kind, step.reads[:1], draw(st.integers(2, 5)))
        steps[at : at + 1] = [new, replace(step, reads=(new.name, *step.reads[1:]))]
    elif what == "branch":
        new = Step(f"new{tag}", draw(st.sampled_from(FOLDS)), step.reads, draw(st.integers(2, 5)))
        steps[at:at] = [new, Step(f"shown{tag}", "sink", (new.name,))]
    elif what == "scale" and step.what in FOLDS:
        steps[at] = replace(step, number=draw(st.integers(2, 5)))
    elif what == "remove" and step.what != "sink":
        del steps[at]
        instead = step.reads[0]
        steps = [
            replace(
                s, reads=tuple(dict.fromkeys(instead if r == step.name else r for r in s.reads))
            )
            for s in steps
        ]
    elif what == "sink" and step.what == "sink":
        steps[at] = replace(step, name=f"shown{tag}")
    return tuple(steps)


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data(), flows())
def test_any_change_goes_on_exactly_or_is_refused(data: st.DataObject, flow: Dataflow) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        job = Upgraded(Path(root), flow.steps)
        run = job.start(interval=data.draw(st.sampled_from(["1ms", "300h"])))
        for number, given_batch in enumerate(data.draw(batches(flow))):
            job.feed(run, given_batch)
            clean = data.draw(st.booleans())
            if clean:
                run.stop()
            else:
                run.kill()
            before, after = job.oracle.steps, data.draw(changes(job.oracle, str(number)))
            folds = {s.name for s in after if s.what in FOLDS}
            gone = [s.name for s in before if s.what in FOLDS and s.name not in folds]
            values = job.oracle._values
            job.change(after)
            try:
                run = job.start(drop=gone)
            except CheckpointMismatchError as refused:
                assert not clean
                assert "committed after the last checkpoint" in refused.message
                job.oracle = Dataflow(before, values)
                job.start().stop()
                job.change(after)
                run = job.start(drop=gone)
        run.kill()
