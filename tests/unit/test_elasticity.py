"""A running job is scaled, its nodes come and go: the results stay what they were."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.control.policies.strategies import Strategy
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement, adjust, evenly, place
from anabranch.node.arrow.state import ArrowState
from anabranch.testing import Drain, Idle, Join, LocalJob, Lose, Restart, Scale, Step, play
from effort import examples

KEYS = [f"k{n}" for n in range(20)]


def topology() -> ab.Topology:
    """Two waves, a sum and the newest total per bucket, and a query that is not involved."""
    made = ab.Topology("elastic", key_groups=16)
    rows = made.source("rows", None)
    sums = rows.key_by("k").aggregate("sum", total=ab.sum("v"), n=ab.count())
    sums.to("sums", ab.Memory())
    by_n = sums.changes().key_by("n")
    by_n.aggregate("by_n", keys=ab.count(), top=ab.max("total")).to("tops", ab.Memory())
    rows.key_by("v").deduplicate("once").to("firsts", ab.Memory())
    return made


def feed(seed: int) -> Step:
    return {
        "rows": [{"k": KEYS[(seed * 7 + i * i) % 20], "v": seed * 10 + i % 4} for i in range(12)]
    }


def told(outputs: list[dict[str, pl.DataFrame]], sink: str) -> Counter[tuple[object, ...]]:
    return Counter(row for o in outputs for row in o[sink].rows())


CHANGES: list[Step] = [
    Scale("sum", 1),
    Scale("sum", 4),
    Scale("by_n", 3),
    Scale("once", 16),
    Join(),
    Join(2),
    Drain(),
    Lose(),
    Restart(),
    Idle(),
]


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.sampled_from([*range(6), *CHANGES]), min_size=4, max_size=14))
def test_results_are_those_of_a_job_left_alone(plan: list[int | Step]) -> None:
    joined, steps = 2, list[Step]()
    for step in plan:
        if isinstance(step, Join):
            joined += step.nodes
        if isinstance(step, Drain):
            if joined == 1:
                continue
            joined -= 1
        steps.append(feed(step) if isinstance(step, int) else step)
    calm = [s for s in steps if isinstance(s, dict)]
    if not calm:
        return
    stormy, still = play(topology(), steps), play(topology(), calm)
    for sink in ("sums", "tops", "firsts"):
        assert told(stormy, sink) == told(still, sink)


@pytest.mark.parametrize("mishap", [Lose(), Restart(), Lose(2), Restart(nodes=3)])
def test_a_loss_right_after_a_scaling_keeps_it(mishap: Step) -> None:
    steps: list[Step] = [feed(n) for n in range(8)]
    stormy = [*steps[:3], Scale("sum", 4), mishap, *steps[3:5], Scale("sum", 1), mishap, *steps[5:]]
    assert told(play(topology(), stormy), "sums") == told(play(topology(), steps), "sums")


def test_windows_and_sessions_move_with_their_time() -> None:
    def made() -> ab.Topology:
        topology = ab.Topology("times", key_groups=8)
        rows = topology.source("rows", None, time="at", watermark="2s")
        keyed = rows.key_by("k")
        keyed.window(ab.tumbling("5s"), time="at").aggregate("win", n=ab.count()).to(
            "wins", ab.Memory()
        )
        keyed.window(ab.session("3s"), time="at").aggregate("ses", n=ab.count()).to(
            "sess", ab.Memory()
        )
        return topology

    def at(second: int) -> Step:
        when = dt.datetime(2026, 1, 1, 0, 0, second, tzinfo=dt.UTC)
        return {"rows": [{"k": k, "at": when} for k in KEYS[: 5 + second % 7]]}

    steps = [at(s) for s in (1, 2, 4, 7, 8, 15, 16, 17, 30)]
    stormy: list[Step] = [
        *steps[:3], Scale("win", 5), *steps[3:5], Join(), Scale("win", 1), *steps[5:7], Drain(),
        *steps[7:], Idle(),
    ]  # fmt: skip
    calm = play(made(), [*steps, Idle()])
    moved = play(made(), stormy)
    assert told(moved, "wins") == told(calm, "wins")
    assert told(moved, "sess") == told(calm, "sess")
    assert sum(told(calm, "sess").values()) > 10


def test_refusals() -> None:
    def refused(change: Step, sentence: str) -> None:
        with pytest.raises(ab.AnabranchError, match=sentence):
            play(topology(), [feed(1), change])

    refused(Scale("sum", 17), "'sum' cannot run at parallelism 17: the topology has 16 key groups")
    refused(Scale("sum", 0), "'sum' cannot run at parallelism 0; give at least 1")
    refused(Scale("summ", 2), "there is no operator 'summ'; operators that can be scaled: sum, ")
    refused(Scale("rows", 2), "'rows' runs in Spark's own source tasks")
    with pytest.raises(ab.AnabranchError, match="cannot be drained: no other node is left"):
        play(topology(), [feed(1), Drain()], nodes=1)


class Said(ab.RowFunction):
    """Everything a key has got, in this order."""

    state = {"all": pl.String}  # noqa: RUF012
    output = {"b": pl.Int64, "said": pl.String}  # noqa: RUF012

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> list[dict[str, Any]]:
        said = f"{state.get('all', '')}{row['said'][-3:]},"
        state.set(all=said)
        return [{"b": len(row["said"]) % 2, "said": said}]


class SaidInTheEnd(Said):
    output = {"said": pl.String}  # noqa: RUF012

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> list[dict[str, Any]]:
        return [{"said": r["said"]} for r in super().on_row(row, state)]


@pytest.mark.parametrize("mishap", [Restart(), Lose(), Restart(nodes=3)])
def test_a_torn_checkpoint_after_a_scaling_keeps_the_order_of_rows(
    tmp_path: Path, mishap: Step
) -> None:
    """Slices from before the change are replayed as they ran: their rows came from two partitions,
    and come in another order from five."""
    made = ab.Topology("order", key_groups=16)
    words = made.source("rows", None).key_by("k").process("first", Said())
    words.key_by("b").process("second", SaidInTheEnd()).to("said", ab.Memory())
    schema = {"rows": pa.schema([("k", pa.int64()), ("said", pa.string())])}
    rows = [{"k": i * 7 % 19, "said": f"{'x' * (i % 3)}{i}"} for i in range(240)]
    steps: list[Step] = [{"rows": rows[i : i + 40]} for i in range(0, 240, 40)]

    def played(root: Path, torn: bool) -> list[Counter[tuple[object, ...]]]:
        job = LocalJob(made, root, schema)
        for step in (*steps[:2], Scale("first", 5), steps[2]):
            job.step(step)
        assert job.controller.cut is not None
        assert job.controller.cut.slice == job.controller.newest.number - 1  # type: ignore[union-attr]
        if torn:
            for files in job.controller.cut.files.values():
                (root / files[-1]).write_bytes(b"torn")
        shown = [told([job.step(step)], "said") for step in (mishap, *steps[3:])]
        assert len(job.controller.placement.partitions("first")) == 5  # type: ignore[union-attr]
        job.stop()
        return shown

    assert played(tmp_path / "torn", True) == played(tmp_path / "whole", False)


NODES = [NodeId(n) for n in "abcdef"]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from(["c0", "c1"]), st.integers(1, 9)),
                  st.sets(st.sampled_from(NODES), min_size=1)),
        max_size=5,
    ),
)  # fmt: skip
def test_adjusted_placements(
    sizes: list[int], nodes: int, changes: list[tuple[dict[str, int], set[NodeId]]]
) -> None:
    """Even, complete, on the given nodes only; what did not change keeps its epoch, what did gets
    one that was never there before."""
    placement = placement_of(sizes, NODES[:nodes])
    epochs = {p: o.epoch for p, o in placement.owners.items()}
    for wanted, allowed in changes:
        parallelism = {c: n for c, n in wanted.items() if c in placement.groups}
        after = adjust(placement, evenly(placement.groups, parallelism), sorted(allowed), epochs)
        loads = Counter(o.node for o in after.owners.values())
        assert set(loads) <= allowed
        assert max(loads.values()) - min(loads.get(n, 0) for n in allowed) <= 1
        for chain, groups in after.groups.items():
            assert set(groups) == {p.index for p in after.partitions(chain)}
            assert len(set(groups)) == parallelism.get(chain, len(placement.partitions(chain)))
        for partition, owner in after.owners.items():
            before = placement.owners.get(partition)
            if before is not None and owner.epoch == before.epoch:
                assert owner == before
                assert groups_of(placement, partition) == groups_of(after, partition)
            else:
                assert owner.epoch > epochs.get(partition, 0)
        again = adjust(after, {}, sorted(allowed), epochs)
        assert again.owners == after.owners
        placement, epochs = after, epochs | {p: o.epoch for p, o in after.owners.items()}


def placement_of(
    sizes: list[int], nodes: list[NodeId], hosts: dict[NodeId, str] | None = None
) -> Placement:
    made = ab.Topology("many", key_groups=16)
    rows = made.source("rows", None)
    for i, size in enumerate(sizes):
        keyed = rows.key_by(f"k{i}").aggregate(f"c{i}", parallelism=size, n=ab.count())
        keyed.to(f"out{i}", ab.Memory())
    return place(made.plan(), nodes, 1, {}, hosts=hosts)


def groups_of(placement: Placement, partition: PartitionId) -> list[int]:
    return [g for g, p in enumerate(placement.groups[partition.chain]) if p == partition.index]


def test_a_scaling_is_prepared_ahead_and_replays_nothing(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
    job = LocalJob(topology(), tmp_path, {"rows": schema}, nodes=2)
    for n in range(4):
        job.step(feed(n))
    job.step(Scale("sum", 5))
    job.step(Join())
    placement = job.controller.placement
    assert placement is not None
    assert len(placement.partitions("sum")) == 5
    assert len(placement.nodes) == 3
    first, second = job.history.adjustments
    assert first.what == "sum from 2 to 5 partitions"
    assert set(first.partitions) == {PartitionId("sum", n) for n in range(5)}
    assert "moved to node 3" in second.what
    assert len(job.history.recoveries) == 1  # the start


@pytest.mark.parametrize("rollback", [False, True])
def test_other_systems_look_behind_a_scaling(tmp_path: Path, rollback: bool) -> None:
    """R+SM replays from the checkpoint before it; SC undoes it first. The results are the same."""
    schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
    other = Strategy(behind_scaling=True, rollback=rollback)
    job = LocalJob(topology(), tmp_path, {"rows": schema}, nodes=2, strategy=other)
    steps: list[Step] = [feed(n) for n in range(9)]
    outputs = [job.step(s) for s in steps[:6]]
    outputs += [job.step(s) for s in (Scale("sum", 4), steps[6], Lose())]
    recovery = job.history.recoveries[-1]
    assert recovery.from_slice < job.history.adjustments[0].slice
    outputs += [job.step(s) for s in steps[7:]]
    for _ in range(20_000):  # state is loaded ahead in the background
        if job.controller.placement and len(job.controller.placement.partitions("sum")) == 4:
            break
        outputs.append(job.step(Idle()))
    assert told(outputs, "sums") == told(play(topology(), steps), "sums")
    assert job.controller.placement is not None
    assert len(job.controller.placement.partitions("sum")) == 4
    assert len([a for a in job.history.adjustments if "sum from 2 to 4" in a.what]) == 1 + rollback


def test_scaled_again_and_again_between_two_checkpoints() -> None:
    """What was split is merged before anything was checkpointed whole in between."""
    steps: list[Step] = [feed(n) for n in range(6)]
    sizes = (4, 1, 3, 2, 5)
    stormy = [s for n, size in enumerate(sizes) for s in (steps[n], Scale("sum", size))]
    for end in ([], [Lose()], [Restart()]):
        outputs = play(topology(), [*stormy, *end, steps[5]])
        assert told(outputs, "sums") == told(play(topology(), steps), "sums")


def test_partitions_of_a_chain_spread_over_machines() -> None:
    hosts = {n: "x" if n in "abc" else "y" for n in NODES}
    placement = placement_of([4, 2], NODES, hosts)
    after = adjust(
        placement,
        evenly(placement.groups, {"c0": 6, "c1": 3}),
        [*NODES[:2], *NODES[3:5]],
        {},
        hosts,
    )
    for placed in (placement, after):
        for chain in ("c0", "c1"):
            machines = Counter(hosts[placed.owners[p].node] for p in placed.partitions(chain))
            assert machines["x"] - machines["y"] in (0, 1)


def test_state_that_cannot_be_loaded_ahead_does_not_hold_a_change_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the loading thread meets: the installation loads the state itself."""
    real = ArrowState.restore

    def restore(self: ArrowState, *given: Any, gently: bool = False) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("for once")
        real(self, *given, gently)

    monkeypatch.setattr(ArrowState, "restore", restore)
    steps: list[Step] = [feed(n) for n in range(4)]
    outputs = play(topology(), [*steps[:2], Scale("sum", 4), *steps[2:]])
    assert told(outputs, "sums") == told(play(topology(), steps), "sums")
