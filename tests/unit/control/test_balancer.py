"""Keys move from partitions that get more than their share to those that get less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from plays import Play, counting

from anabranch.control.policies.balance import Balance
from anabranch.control.policies.balancer import Balancer
from anabranch.control.wishes import Wishes
from anabranch.errors import ConfigError
from anabranch.model.commands import NoteDecision
from anabranch.model.events import BatchArrived
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement, place
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.reports import NodeReport, PartitionReport
from anabranch.model.scaling import Decision

Layouts = Mapping[str, tuple[int, ...]]
GROUPS = 8
NODES = [NodeId("1"), NodeId("2")]
BALANCE = Balance(theta_max=0.1, theta_min=0.05, interval="5s", cool_down="30s")
EVEN = (10, 10, 10, 10, 10, 10, 10, 10)
HOT = (40, 20, 10, 10, 10, 10, 10, 10)  # of the first half 80, of the second 40


def plan_of(parallelism: int = 2) -> Plan:
    count = Operator("count", Kind.KEYED, (("s",),), keys=("k",), parallelism=parallelism)
    operators = [Operator("s", Kind.SOURCE), count, Operator("out", Kind.SINK, (("count",),))]
    return compile_plan(Graph.checked("t", operators, key_groups=GROUPS))


class Job:
    """Rows come once a second, so many for each key group."""

    def __init__(
        self, rows: Sequence[int], balance: Balance = BALANCE, parallelism: int = 2
    ) -> None:
        self.placement = place(plan_of(parallelism), NODES, 1, {})
        self.balancer = Balancer(balance)
        self.rows, self.now_ms, self.busy_s = rows, 0, 0.9
        self.said: list[Decision] = []

    def reports(self) -> list[NodeReport]:
        groups = self.placement.groups["count"]
        total = sum(self.rows)
        made = []
        for node in self.placement.nodes:
            partitions = {}
            for partition, epoch in self.placement.hosted_by(node).items():
                mine = {g: n for g, n in enumerate(self.rows) if groups[g] == partition.index and n}
                busy_s = self.busy_s * sum(mine.values()) / total
                partitions[partition] = PartitionReport(
                    2, epoch, busy_s=busy_s, state_bytes=1_000, rows_by_group=mine
                )
            made.append(NodeReport(node, "i", 1, partitions))
        return made

    def second(self) -> None:
        self.now_ms += 1_000
        self.balancer.observe(self.placement, self.reports(), self.now_ms)
        found = self.balancer.decide(self.placement, self.now_ms, self.now_ms)
        if found is None:
            return
        decision, layouts = found
        self.said.append(decision)
        if layouts:
            groups = {**self.placement.groups, **layouts}
            self.placement = replace(
                self.placement, version=self.placement.version + 1, groups=groups
            )

    def seconds(self, count: int) -> list[Decision]:
        before = len(self.said)
        for _ in range(count):
            self.second()
        return self.said[before:]

    @property
    def loads(self) -> list[int]:
        got = Counter[int]()
        for group, index in enumerate(self.placement.groups["count"]):
            got[index] += self.rows[group]
        return [got[i] for i in sorted(got)]


def test_keys_that_are_even_stay_where_they_are() -> None:
    assert Job(EVEN).seconds(60) == []


def test_keys_move_until_partitions_get_the_same() -> None:
    job = Job(HOT)
    assert job.loads == [80, 40]
    (decision,) = job.seconds(20)
    assert job.loads == [60, 60]
    assert (decision.kind, decision.by) == ("balance", "balancer")
    assert decision.what == "1 key group of count moves"
    assert "1.33 times the mean" in decision.why
    assert "limit 1.10), 1.00 then" in decision.why
    assert job.seconds(100) == []


def test_two_measurements_must_say_so() -> None:
    job = Job(HOT)
    assert job.seconds(6) == []  # the first slice starts the clock: one measurement
    job.rows = EVEN
    assert job.seconds(5) == []
    job.rows = HOT
    assert job.seconds(6) == []
    assert len(job.seconds(5)) == 1


def test_after_a_change_it_waits_for_its_cool_down() -> None:
    job = Job(HOT)
    job.seconds(11)
    assert len(job.said) == 1
    job.rows = tuple(reversed(HOT))
    assert job.seconds(29) == []
    assert len(job.seconds(6)) == 1


def test_partitions_that_do_little_are_left_alone() -> None:
    job = Job(HOT)
    job.busy_s = 0.1
    assert job.seconds(60) == []


def test_one_partition_cannot_be_balanced() -> None:
    assert Job(HOT, parallelism=1).seconds(60) == []


def test_a_key_that_is_most_of_it_is_told_of_once() -> None:
    job = Job((200, 0, 0, 0, 10, 0, 0, 0))
    (decision,) = job.seconds(200)
    assert (decision.kind, decision.what) == ("none", "the keys of count stay where they are")
    assert "one key, or the keys of one group" in decision.why
    assert job.loads == [200, 10]


def test_a_dry_run_only_says_what_it_would_do() -> None:
    job = Job(HOT, replace(BALANCE, dry_run=True))
    (decision,) = job.seconds(100)
    assert str(decision).startswith("balancer: would do: 1 key group of count moves, because")
    assert job.loads == [80, 40]


def test_every_partition_keeps_a_key_group() -> None:
    """Its number is part of what it is."""
    job = Job((100, 0, 0, 0, 0, 0, 0, 1), parallelism=4)
    job.seconds(60)
    assert set(job.placement.groups["count"]) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"theta_max": 0}, "theta_max=0"),
        ({"theta_max": 0.01}, "theta_min=0.05 and theta_max=0.01"),
        ({"theta_max": 1.5}, "theta_max=1.5"),
        ({"interval": "0s"}, "interval=0s"),
        ({"cool_down": "0s"}, "cool_down=0s"),
    ],
)
def test_limits_that_mean_nothing_are_refused(given: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Balance(**given)  # type: ignore[arg-type]


def epochs_of(placement: Placement) -> dict[PartitionId, int]:
    return {p: o.epoch for p, o in placement.owners.items()}


# -- in a run --------------------------------------------------------------------------------------


def test_another_layout_is_a_change_of_the_placement_like_any_other() -> None:
    plan = counting()
    placement = place(plan, NODES, 1, {})
    wishes = Wishes(plan)
    wishes.lay_out("count", (0, 0, 0, 1), placement)
    change = wishes.change(placement, NODES, epochs_of(placement), {})
    assert change is not None
    assert change.placement.groups == {"count": (0, 0, 0, 1)}
    assert change.moved == {PartitionId("count", 0), PartitionId("count", 1)}
    assert change.what == "keys of count moved between its partitions"


def test_a_parallelism_that_is_asked_for_comes_before_balance() -> None:
    plan = counting()
    placement = place(plan, NODES, 1, {})
    wishes = Wishes(plan)
    wishes.scale("count", 3, placement)
    wishes.lay_out("count", (0, 0, 0, 1), placement)
    change = wishes.change(placement, NODES, epochs_of(placement), {})
    assert change is not None
    assert set(change.placement.groups["count"]) == {0, 1, 2}


def test_a_layout_that_holds_is_no_wish() -> None:
    plan = counting()
    placement = place(plan, NODES, 1, {})
    wishes = Wishes(plan)
    wishes.lay_out("count", placement.groups["count"], placement)
    assert not wishes.wanted


def test_a_recovery_does_not_divide_what_is_to_be_laid_out_anew() -> None:
    plan = counting()
    placement = place(plan, NODES, 1, {})
    wishes = Wishes(plan)
    assert not wishes.is_scaling("count")
    wishes.lay_out("count", (0, 0, 0, 1), placement)
    assert wishes.is_scaling("count")


def test_a_recovery_in_parts_gives_back_the_layout_that_there_was() -> None:
    """A partition that a recovery divides is put together again as the balancer had made it."""
    play = Play(plan=counting(), parallel_recovery=2, interval=10)
    play.start()
    layouts = play.controller.ledgers.layouts
    uneven = (0, 0, 0, 1)
    layouts.current = {"count": uneven}
    layouts.divide({"count": (0, 2, 0, 1)})
    play.controller.adjustment.unite()
    change = play.controller.wishes.change(play.placement, NODES, epochs_of(play.placement), {})
    assert change is not None
    assert change.placement.groups["count"] == uneven


def test_a_job_that_balances_itself_moves_keys_while_it_runs() -> None:
    play = Play(plan=counting(), balance=Balance(interval="2s", cool_down="1s"), interval=1_000)
    play.start()
    told, decisions = play.reports, list[Decision]()
    rows = {0: 70, 1: 10, 2: 10, 3: 10}

    def skewed(next_slice: int, **changes: object) -> tuple[NodeReport, ...]:
        groups = play.placement.groups["count"]

        def counted(p: PartitionId, x: PartitionReport) -> PartitionReport:
            mine = {g: n for g, n in rows.items() if groups[g] == p.index}
            return replace(x, busy_s=0.5, rows_by_group=mine)

        reports = told(next_slice, **changes)
        return tuple(
            replace(r, partitions={p: counted(p, x) for p, x in r.partitions.items()})
            for r in reports
        )

    play.reports = skewed  # type: ignore[method-assign]
    for batch in range(8):
        commands = play.controller.handle(BatchArrived(batch, 1_000 * batch))
        if not play.controller.adjustment.settled:
            break
        said = play.ran(commands[-1], now_ms=1_000 * batch + 500)
        decisions += [c.decision for c in said if isinstance(c, NoteDecision)]
    assert [d.kind for d in decisions] == ["balance"]
    change = play.controller.adjustment.change
    assert change is not None
    groups = change.placement.groups["count"]
    assert groups.count(groups[0]) == 1  # the hot group is alone
