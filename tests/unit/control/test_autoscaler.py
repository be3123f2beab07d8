"""Measurements in, decisions out: when it scales, how far, when it holds still, what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.autoscaler import Autoscaler
from anabranch.control.policies.load import Load, Measurement
from anabranch.errors import ConfigError
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import adjust, evenly, place
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.reports import NodeReport, PartitionReport, SourceReport
from anabranch.model.scaling import Decision
from anabranch.model.slices import Feed, SlicePlan

AHEAD_MS = 1_700_000_000_000  # the wall clock, of the one that intervals are measured by
CONFIG = Autoscale(cool_down="20s", down_after="20s", drain_after="1m")


def line(*sizes: int) -> Plan:
    """s → a → b → …, each with a key of its own."""
    operators = [Operator("s", Kind.SOURCE)]
    for name, size in zip("abc", sizes, strict=False):
        before = ((operators[-1].name,),)
        operators.append(Operator(name, Kind.KEYED, before, keys=(f"k{name}",), parallelism=size))
    operators.append(Operator("out", Kind.SINK, ((operators[-1].name,),)))
    return compile_plan(Graph.checked("t", operators, key_groups=16))


@dataclass
class Job:
    """A job of one-second slices that costs what it is told to, under an autoscaler."""

    sizes: tuple[int, ...] = (2, 2)
    nodes: int = 4
    config: Autoscale = CONFIG
    memory: Mapping[str, Any] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)  # that a chain needs in all
    other_s: float = 0.1  # of a slice, outside of operators
    fixed_s: float | None = None  # … or all of it: then CPU alone decides
    rate: float = 1_000.0
    skew: bool = False  # one key makes all the work
    drag_s: float = 0.0  # that every partition adds to a slice
    now_ms: int = 0
    said: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan = line(*self.sizes)
        self.names = [NodeId(str(i)) for i in range(self.nodes)]
        self.placement = place(self.plan, self.names, 1, {})
        self.scaler = Autoscaler(self.plan, self.config, 1_000, self.memory)
        self.measured: list[Measurement] = []

    def size(self, chain: str) -> int:
        return len(self.placement.partitions(chain))

    def measurement(self) -> Measurement:
        cpu: dict[PartitionId, float] = {}
        busy: dict[NodeId, float] = dict.fromkeys(self.names, 0.0)
        slice_s = self.other_s if self.fixed_s is None else self.fixed_s
        slice_s += self.drag_s * len(self.placement.owners)
        for chain in self.plan.node_chains:
            here = self.placement.partitions(chain.name)
            total = self.cores.get(chain.name, 0.1)
            by_node: dict[NodeId, float] = {}
            for partition in here:
                alone = total if partition.index == 0 else 0.0
                cpu[partition] = alone if self.skew else total / len(here)
                node = self.placement.owners[partition].node
                by_node[node] = by_node.get(node, 0.0) + cpu[partition]
                busy[node] += cpu[partition]
            slice_s += max(by_node.values()) if self.fixed_s is None else 0.0
        # A slice that takes longer has the rows of a longer time; CPU is per second.
        batches = 5 if slice_s <= 1 else max(1, round(5 / slice_s))
        rows = self.rate * 5 / batches
        return Measurement(5.0, batches, slice_s, rows, cpu, busy)

    def step(self, measurement: Measurement | None = None) -> Decision | None:
        """Five seconds; a decision is carried out at once."""
        self.now_ms += 5_000
        self.measured.append(measurement or self.measurement())
        made = self.scaler.decide(
            self.measured, self.placement, self.names, self.now_ms, self.now_ms + AHEAD_MS
        )
        if made is None:
            return None
        self.said.append(made)
        if made.dry_run:
            return made
        for _ in range(made.add_nodes):
            self.names.append(NodeId(str(len(self.names))))
        if made.drain is not None:
            self.names.remove(made.drain)
        if made.parallelism or made.add_nodes or made.drain:
            self.remap(made.parallelism)
        return made

    def remap(self, parallelism: Mapping[str, int]) -> None:
        epochs = {p: o.epoch for p, o in self.placement.owners.items()}
        self.placement = adjust(
            self.placement, evenly(self.placement.groups, parallelism), self.names, epochs
        )
        self.measured = []

    def run(self, measurements: int) -> list[Decision]:
        before = len(self.said)
        for _ in range(measurements):
            self.step()
        return self.said[before:]


def settled(**changes: Any) -> Job:
    """A job in the middle of its limits, past the cool-down of its start."""
    job = Job(**{"nodes": 8, **changes})
    job.cores = {c.name: 0.5 * job.size(c.name) for c in job.plan.node_chains} | job.cores
    job.fixed_s = 0.1
    assert job.run(6) == []
    return job


def test_two_measurements_in_a_row_above_the_limit_scale_up_to_the_middle() -> None:
    job = settled()
    job.cores["a"] = 1.9
    assert job.step() is None
    made = job.step()
    assert made is not None
    assert (made.kind, made.parallelism) == ("up", {"a": 4})  # 1.9 / 0.5
    assert made.what == "a from 2 to 4 partitions"
    assert made.why == "the partitions of a used 95% and 95% of a core (limit 70%)"
    assert job.run(20) == []


def test_what_was_said_rests_too() -> None:
    """Also where nothing comes of it."""
    job = settled(config=replace(CONFIG, dry_run=True))
    job.cores["a"] = 1.9
    assert job.run(2) != []
    job.cores = {"a": 1.0, "b": 1.9}
    assert job.run(3) == []  # it cools down for 20 s
    (made,) = job.run(2)
    assert made.parallelism == {"b": 4}


def test_only_what_is_quiet_is_scaled_down() -> None:
    job = Job((8, 2), nodes=8, fixed_s=0.1, cores={"a": 2.5, "b": 0.1})  # 31 % and 5 %
    (made,) = job.run(8)
    assert made.parallelism == {"b": 1}


def test_full_nodes_are_a_reason_of_their_own() -> None:
    """No chain has too few partitions, but there is too much beside each other on a node."""
    config = replace(CONFIG, min_parallelism=2, max_nodes=4)
    job = Job((2, 2, 2), nodes=2, config=config, fixed_s=0.1)
    job.cores = {"a": 0.4, "b": 0.4, "c": 0.4}
    assert job.run(6) == []
    job.cores = {"a": 0.6, "b": 0.6, "c": 0.6}
    (made,) = job.run(2)
    assert (made.kind, made.add_nodes, made.why) == ("up", 2, "2 nodes are busy at 90% (limit 70%)")


def test_a_single_spike_is_not_enough() -> None:
    job = settled()
    for _ in range(5):
        job.cores["a"] = 1.9
        assert job.step() is None
        job.cores["a"] = 1.0
        assert job.step() is None


def test_scaling_down_takes_longer_and_leaves_room() -> None:
    job = settled(sizes=(4, 2))
    job.cores, job.other_s, job.fixed_s = {"a": 0.6, "b": 0.62}, 0.05, None
    assert job.run(3) == []
    (made,) = job.run(1)
    assert (made.kind, made.parallelism) == ("down", {"a": 2})  # 0.6 / 0.5
    assert "for 20 s the partitions used little of a core (limit 30%): those of a 15%" in made.why
    assert "would take 0.66 s of 1.00 s" in made.why
    assert job.run(20) == []  # a has 30 %, b 31 %: not below


def test_no_scaling_down_that_would_make_slices_late() -> None:
    job = Job(sizes=(4, 2), cores={"a": 0.6, "b": 1.0}, other_s=0.1)
    # Slices of 0.75 s would take 0.9 s with two partitions of a, 0.8 s with three.
    assert job.run(30) == []


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(
    st.floats(0.01, 6), st.floats(0.01, 6), st.integers(1, 8), st.integers(1, 8), st.integers(1, 9),
    st.floats(0, 0.9), st.sampled_from([None, 3, 9]), st.booleans(), st.floats(0, 0.05),
)  # fmt: skip
def test_it_comes_to_rest(
    a: float, b: float, size_a: int, size_b: int, nodes: int, other_s: float, most: int | None,
    skew: bool, drag_s: float,
) -> None:  # fmt: skip
    """Whatever a job costs, if it does not change it is left alone after a few decisions."""
    most = most if most is None else max(most, nodes)
    config = replace(CONFIG, max_nodes=most)
    job = Job((size_a, size_b), nodes, config, cores={"a": a, "b": b}, other_s=other_s, skew=skew)
    job.drag_s = drag_s
    assert len(job.run(80)) <= 12
    assert len(job.run(120)) <= 6  # what was taken back is tried again, ever more rarely
    assert 1 <= job.size("a") <= 16
    for made in job.said:
        assert made.what
        assert made.why


def test_late_slices_scale_the_operator_that_takes_most_of_them() -> None:
    job = Job(sizes=(1, 1), nodes=4, cores={"a": 0.3, "b": 0.65}, other_s=0.5)
    made = job.run(6)
    assert [(m.kind, m.parallelism) for m in made] == [("up", {"b": 2})]
    assert made[0].why.startswith("slices took 1.45 s and 1.45 s of an interval of 1.00 s")
    assert "; b takes " in made[0].why


def test_batches_that_grow_are_named() -> None:
    job = settled(sizes=(1, 1))
    late = replace(job.measurement(), batch_s=1.3, batches=4)
    job.step(late)
    made = job.step(replace(late, rows=2_000.0))
    assert made is not None
    assert "batches grew from 1,000 to 2,000 rows" in made.why


def test_nothing_is_scaled_when_operators_are_not_the_reason() -> None:
    job = Job(sizes=(1, 1), cores={"a": 0.05, "b": 0.02}, other_s=1.5)
    made = job.run(30)
    assert [(m.kind, m.parallelism) for m in made] == [("none", {})]  # and said once
    assert "but operators take little of it" in made[0].why


def test_parallelism_stays_within_its_limits() -> None:
    config = replace(CONFIG, min_parallelism=2, max_parallelism=3)
    job = Job((2, 2), 8, config, cores={"a": 5.0, "b": 0.01}, fixed_s=0.1)
    assert [m.parallelism for m in job.run(30)] == [{"a": 3}, {}]
    assert job.said[-1].why.endswith("max_parallelism is 3")
    job.cores["a"] = 0.01
    assert [m.parallelism for m in job.run(30)] == [{"a": 2}]


def test_more_partitions_than_nodes_are_of_no_use() -> None:
    job = Job((1, 1), 2, cores={"a": 2.9, "b": 0.1}, fixed_s=0.1)
    first, second = job.run(30)
    assert first.parallelism == {"a": 2}
    assert second.kind == "none"
    assert "there are 2 nodes, and more partitions than nodes are of no use" in second.why
    assert "with max_nodes it could ask for more" in second.why


def test_as_many_nodes_as_it_may_have() -> None:
    job = Job((1, 1), 2, replace(CONFIG, max_nodes=2), cores={"a": 2.9, "b": 0.1}, fixed_s=0.1)
    _, second = job.run(30)
    assert second.kind == "none"
    assert second.why.endswith("of no use; max_nodes is 2")


def test_nodes_are_asked_for_where_it_may_and_drained_when_long_idle() -> None:
    job = Job((1, 1), 2, replace(CONFIG, min_nodes=2, max_nodes=5), fixed_s=0.1)
    job.cores = {"a": 1.9, "b": 0.1}
    (made,) = job.run(6)
    assert (made.parallelism, made.add_nodes) == ({"a": 4}, 2)
    assert made.what == "a from 1 to 4 partitions; 2 more nodes"
    job.run(10)
    job.cores = {"a": 0.1, "b": 0.1}
    later = job.run(60)
    assert [m.parallelism for m in later if m.parallelism] == [{"a": 1}]
    drained = [m for m in later if m.drain is not None]
    assert len(drained) == 2
    assert len(job.names) == 2  # and no fewer
    assert "nodes were busy at 5% or less (limit 30%)" in drained[0].why


def test_nodes_that_do_not_come_are_not_asked_for_all_the_time() -> None:
    job = Job((2, 2), 2, replace(CONFIG, max_nodes=4), cores={"a": 1.9, "b": 1.9}, fixed_s=0.1)
    job.names = job.names[:2]
    asked = 0
    for _ in range(100):  # 500 s
        made = job.step()
        if made is not None and made.add_nodes:
            asked += 1
            del job.names[2:]
            job.remap({})
    assert 1 <= asked <= 4


def test_a_scaling_that_makes_it_worse_is_taken_back_and_not_tried_again() -> None:
    job = settled()
    job.cores["a"] = 1.9
    up = job.run(2)
    assert [m.kind for m in up] == ["up"]
    job.drag_s = 0.5  # of every partition: two more make it a second slower
    job.cores["a"] = 1.3
    (back,) = job.run(3)
    assert (back.kind, back.parallelism) == ("back", {"a": 2})
    assert back.what == "back again: a from 4 to 2 partitions"
    assert back.why == (
        "slices take 3.10 s at 1,000 rows/s after it, and took 0.10 s at 1,000 rows/s before"
    )
    job.drag_s = 0.0
    job.cores["a"] = 1.9
    assert not [m for m in job.run(39) if "a" in m.parallelism]  # ten cool-downs
    assert job.run(5)[0].parallelism == {"a": 4}


def test_a_scaling_that_brings_nothing_is_taken_back() -> None:
    job = settled(skew=True, cores={"a": 0.6})
    job.cores["a"] = 1.9
    up, back = job.run(8)
    assert (up.kind, up.parallelism) == ("up", {"a": 4})
    assert (back.kind, back.parallelism) == ("back", {"a": 2})
    assert "it has not helped: the busiest partition uses 190% of a core" in back.why


def test_fewer_partitions_are_taken_back_when_slices_become_late() -> None:
    job = settled(sizes=(4, 2))
    job.other_s, job.cores, job.fixed_s = 0.1, {"a": 0.5, "b": 0.6}, None
    (down,) = job.run(4)
    assert down.kind == "down"
    job.other_s = 0.9  # it was more than their CPU that they shared
    (back,) = job.run(3)
    assert (back.kind, back.parallelism) == ("back", {"a": 4})
    assert back.why.endswith("(interval 1.00 s)")


def test_more_rows_or_a_lost_node_are_no_fault_of_the_scaling() -> None:
    for more_rows in (True, False):
        job = settled()
        job.cores["a"] = 1.9
        job.run(2)
        job.drag_s = 0.3
        job.cores["a"] = 1.3
        if more_rows:
            job.rate *= 2
        else:
            job.names.pop()
            job.remap({})
        assert [m for m in job.run(12) if m.kind == "back" and "a" in m.parallelism] == []


def test_a_start_begins_with_a_cool_down_and_with_what_was_learnt() -> None:
    job = settled(skew=True, cores={"a": 0.6})
    job.cores["a"] = 1.9
    assert [m.kind for m in job.run(8)] == ["up", "back"]
    memory = job.scaler.memory
    assert [d["kind"] for d in memory["decisions"]] == ["up", "back"]

    again = Job(nodes=8, cores={"a": 1.9, "b": 1.0}, memory=memory, now_ms=job.now_ms, fixed_s=0.1)
    assert again.run(20) == []  # a may not, b need not
    fresh = Job(nodes=8, cores={"a": 1.9, "b": 1.0}, fixed_s=0.1)
    assert fresh.run(4) == []
    assert len(fresh.run(1)) == 1


def test_what_was_learnt_does_not_wait_for_a_clock_that_was_wrong() -> None:
    """Holds are noted by the wall clock; set back by years, it would never come."""
    years = {"holds": {"up a": [AHEAD_MS * 2, 1], "up b": [AHEAD_MS * 2, 1]}, "decisions": []}
    job = Job(nodes=8, cores={"a": 1.9, "b": 1.0}, memory=years, fixed_s=0.1)
    assert job.run(8) == []
    made = job.run(60)
    assert made[0].kind == "up"
    assert made[0].at_ms > AHEAD_MS


def test_a_dry_run_says_what_it_would_do_once() -> None:
    job = Job((2, 2), 8, replace(CONFIG, dry_run=True), cores={"a": 1.9, "b": 1.0}, fixed_s=0.1)
    (made,) = job.run(40)
    assert job.size("a") == 2
    assert str(made) == (
        "autoscaler: would do: a from 2 to 4 partitions, because the partitions of a used "
        "95% and 95% of a core (limit 70%)"
    )


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"lower": 0.8}, "autoscale has lower=0.8 and upper=0.7; give shares of a core"),
        ({"upper": 70}, "with 0 < lower < upper <= 1"),
        ({"min_parallelism": 0}, "min_parallelism of autoscale is 0; give at least 1"),
        ({"min_nodes": 3, "max_nodes": 2}, "no less for max_nodes than for min_nodes"),
        ({"cool_down": "soon"}, "'soon' is not a duration"),
        ({"interval": "0s"}, "autoscale has interval=0s; give more than 0"),
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Autoscale(**wrong)


# -- measurements ----------------------------------------------------------------------------------

FIRST, SECOND = NodeId("1"), NodeId("2")
A0, A1 = PartitionId("a", 0), PartitionId("a", 1)


def slice_plan(number: int, feed: Feed = Feed.LIVE, placement: int = 1) -> SlicePlan:
    return SlicePlan(number, feed, number, 1, None, 1_000 * number, placement, False)


def reports(number: int, cpu_s: float = 0.2, incarnation: str = "i") -> list[NodeReport]:
    source = SourceReport(0, 1, {"s": 100}, {}, 0, 0.1)
    return [
        NodeReport(
            node, incarnation, number, {p: PartitionReport(number + 1, 1, cpu_s=cpu_s * share)},
            sources=(source,) if node == FIRST else (), cpu_s=0.3 * number,
        )
        for node, p, share in ((FIRST, A0, 1), (SECOND, A1, 2))
    ]  # fmt: skip


def observed(load: Load, numbers: range, **changes: Any) -> None:
    for number in numbers:
        plan = slice_plan(number, **changes)
        load.observe(plan, reports(number), plan.processing_ms, plan.processing_ms + 400)


def test_slices_become_measurements_of_one_interval() -> None:
    load = Load(5_000)
    observed(load, range(1, 6))
    assert not load.measure(5_400)  # the first slice started the clock at 1,400
    observed(load, range(6, 7))
    assert load.measure(6_400)
    (found,) = load.measured
    assert (found.seconds, found.batches, found.batch_s) == (5.0, 5, 0.4)
    assert (found.rows, found.rate) == (100, 100)
    assert found.cpu == pytest.approx({A0: 0.2, A1: 0.4})
    assert found.of_chain("a") == pytest.approx(0.6)
    assert found.nodes == pytest.approx({FIRST: 0.35, SECOND: 0.35})  # with half of 0.1 each
    assert load.if_moved_to(1) == pytest.approx(0.7)
    assert load.measure(11_400)  # idle
    assert load.measured[-1].rate == 0


def test_a_batch_cut_into_slices_counts_once() -> None:
    load = Load(5_000)
    observed(load, range(1, 2))
    for number in range(2, 7):
        plan = slice_plan(number, Feed.LIVE if number == 2 else Feed.LOG)
        load.observe(plan, reports(number), plan.processing_ms, plan.processing_ms + 400)
    assert load.measure(6_400)
    (found,) = load.measured
    assert (found.batches, found.batch_s, found.rows) == (1, 2.0, 500)


def test_another_placement_or_process_begins_anew() -> None:
    load = Load(5_000)
    observed(load, range(1, 7))
    load.measure(6_400)
    observed(load, range(7, 8), placement=2)
    assert list(load.measured) == []
    assert load.if_moved_to(2) is None
    load.observe(slice_plan(8, placement=2), reports(8, incarnation="another"), 8_000, 8_400)
    assert load.measure(12_400)
    assert load.measured[-1].nodes == pytest.approx({FIRST: 0.01, SECOND: 0.01})  # sources only
