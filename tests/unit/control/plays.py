"""A controller and the answers that a healthy cluster gives to it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anabranch.control.controller import Controller
from anabranch.control.settings import ControlConfig, Past
from anabranch.model.commands import CatchUp, Command, RecoverPartitions, RunSlice, WriteHead
from anabranch.model.events import (
    BatchArrived,
    CaughtUp,
    NodesJoined,
    NodesLost,
    PartitionsRecovered,
    SliceRan,
)
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Plan, compile_plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import CheckpointWritten, NodeReport, PartitionReport, SourceReport
from anabranch.model.slices import Feed, SliceRecord

NODES = FIRST, SECOND = NodeId("1"), NodeId("2")
THIRD = NodeId("3")
COUNT = PartitionId("count", 0), PartitionId("count", 1)
NEVER = 10**12


def counting(parallelism: int = 2, deterministic: bool = True) -> Plan:
    """s → count → out"""
    count = Operator(
        "count",
        Kind.KEYED,
        (("s",),),
        keys=("k",),
        parallelism=parallelism,
        deterministic=deterministic,
    )
    operators = [Operator("s", Kind.SOURCE), count, Operator("out", Kind.SINK, (("count",),))]
    return compile_plan(Graph.checked("t", operators, key_groups=4))


def filtering() -> Plan:
    """s → out: nothing that a node would own."""
    operators = [Operator("s", Kind.SOURCE), Operator("out", Kind.SINK, (("s",),))]
    return compile_plan(Graph.checked("t", operators, key_groups=4))


def apart(priority: int = 1, odd: Collection[str] = ()) -> Plan:
    """s → a → b → out_b, and s → c → out_c, one partition each; what out_c is worth. Operators that
    are `odd` are not deterministic."""

    def keyed(name: str, reads: str) -> Operator:
        return Operator(
            name,
            Kind.KEYED,
            ((reads,),),
            keys=(f"k_{name}",),
            parallelism=1,
            deterministic=name not in odd,
        )

    sinks = [
        Operator(f"out_{name}", Kind.SINK, ((name,),), priority=worth)
        for name, worth in (("b", 1), ("c", priority))
    ]
    operators = [Operator("s", Kind.SOURCE), keyed("a", "s"), keyed("b", "a"), keyed("c", "s")]
    return compile_plan(Graph.checked("t", [*operators, *sinks], key_groups=4))


def forked() -> Plan:
    """s → a → b → out_b, and a → c → out_c, one partition each."""

    def keyed(name: str, reads: str) -> Operator:
        return Operator(name, Kind.KEYED, ((reads,),), keys=(f"k_{name}",), parallelism=1)

    operators = [Operator("s", Kind.SOURCE), keyed("a", "s"), keyed("b", "a"), keyed("c", "a")]
    sinks = [Operator(f"out_{name}", Kind.SINK, ((name,),)) for name in "bc"]
    return compile_plan(Graph.checked("t", [*operators, *sinks], key_groups=4))


def diamond() -> Plan:
    """s → a → b → d → out, and s → c → d: two waves of input for d, no chain fused with another."""

    def keyed(name: str, *reads: str) -> Operator:
        return Operator(name, Kind.KEYED, (reads,), keys=(f"k_{name}",), parallelism=2)

    return compile_plan(
        Graph.checked(
            "t",
            [
                Operator("s", Kind.SOURCE),
                keyed("a", "s"),
                keyed("b", "a"),
                keyed("c", "s"),
                keyed("d", "b", "c"),
                Operator("out", Kind.SINK, (("d",),)),
            ],
            key_groups=4,
        )
    )


class Play:
    """Hands events to a controller; `start`, `recovered` and `ran` answer its commands."""

    def __init__(
        self,
        past: Past | None = None,
        interval: int = NEVER,
        timed: bool = False,
        plan: Plan | None = None,
        backups: Collection[str] | None = None,
        nodes: Sequence[NodeId] = NODES,
        busy_s: Mapping[PartitionId, float] | None = None,
        **settings: Any,
    ) -> None:
        """`busy_s`: for how long each slice keeps a node busy with a partition."""
        delays = {"s": 0} if timed else {}
        chosen = None if backups is None else frozenset(backups)
        config = ControlConfig(interval, delays, backups=chosen, **settings)
        self.controller = Controller(plan or counting(), config, past or Past(), validate=True)
        self.nodes = tuple(nodes)
        self.busy_s = dict(busy_s or {})
        self.checkpoints: dict[NodeId, tuple[CheckpointWritten, ...]] = {}
        self.incarnations: dict[NodeId, str] = {}
        self.head: WriteHead
        self.recovery: RecoveryPlan

    @property
    def placement(self) -> Placement:
        assert self.controller.placement is not None
        return self.controller.placement

    def start(self) -> list[Command]:
        return self.recovering(self.controller.handle(NodesJoined(self.nodes, 0)))

    def recovering(self, commands: list[Command]) -> list[Command]:
        """A head and a recovery, as they must come; answered by a cluster that can do it."""
        head, recover = commands
        assert isinstance(head, WriteHead)
        assert head.placement == self.placement
        self.head = head
        return self.recovered(recover)

    def reports(self, next_slice: int, **changes: Any) -> tuple[NodeReport, ...]:
        """Every node's; `changes` are to the first one's. What waits is where it was."""
        made: list[NodeReport] = []
        waiting = self.controller.waiting
        at = {p: n for p, n in self.controller.frontier.items() if p.chain in waiting}
        for node in self.placement.nodes:
            hosted = self.placement.hosted_by(node)
            report = NodeReport(
                node,
                self.incarnations.get(node, f"i{node}"),
                next_slice - 1,
                {
                    p: PartitionReport(at.get(p, next_slice), e, busy_s=self.busy_s.get(p, 0.0))
                    for p, e in hosted.items()
                },
                checkpoints=self.checkpoints.get(node, ()),
            )
            made.append(replace(report, **changes) if not made else report)
        return tuple(made)

    def recovered(self, command: Command, now_ms: int = 0, **changes: Any) -> list[Command]:
        assert isinstance(command, RecoverPartitions)
        reports = self.restored_by(command.plan, **changes)
        return self.controller.handle(PartitionsRecovered(reports, now_ms))

    def caught_up(self, command: CatchUp, now_ms: int = 0, **changes: Any) -> list[Command]:
        plan, reports = command.plan, self.restored_by(command.plan, **changes)
        ended = CaughtUp(plan.placement.version, plan.part, reports, now_ms)
        return self.controller.handle(ended)

    def restored_by(self, plan: RecoveryPlan, **changes: Any) -> tuple[NodeReport, ...]:
        """What the nodes report after it."""
        self.recovery = plan
        if plan.reads_log:
            rows = {r.number: r.rows for r in self.controller.ledgers.slices.records}
            shares = [(s.number, t) for s in plan.slices for t in range(s.source_tasks)]
            logs = {share: rows[share[0]] for share in shares}
            changes = {"replayed": logs, **changes}
        frontier = self.controller.frontier
        reports = [r for r in self.reports(plan.next_slice) if r.node in set(plan.nodes)]
        reports[0] = replace(reports[0], **changes)
        return tuple(
            replace(
                r,
                partitions={
                    p: replace(x, next_slice=max(plan.span(p.chain)[1], frontier[p]))
                    for p, x in r.partitions.items()
                    if p in plan.restored
                },
            )
            for r in reports
        )

    def ran(
        self,
        run: Command,
        rows: int = 3,
        chunks: int = 1,
        now_ms: int | None = None,
        wall_ms: int | None = None,
        **changes: Any,
    ) -> list[Command]:
        assert isinstance(run, RunSlice)
        number, tasks = run.plan.number, 0
        if run.plan.feed is not Feed.NONE:
            tasks = 1
            sources = (SourceReport(0, chunks, {"s": rows}, {"s": 100 * number}, 0, 0.0),)
            changes = {"sources": sources, **changes}
        reports = self.reports(number + 1, **changes)
        now_ms = self.controller.schedule.began_ms if now_ms is None else now_ms  # at once
        return self.controller.handle(SliceRan(number, tasks, reports, now_ms), wall_ms)

    def written(
        self, number: int, full: bool = True, only: Collection[NodeId] | None = None
    ) -> None:
        """The nodes' checkpoint files of a slice became durable; what waits has none."""
        waiting = self.controller.waiting
        for node in only or self.placement.nodes:
            newest = {c.partition: c.slice for c in self.checkpoints.get(node, ())}
            more = tuple(
                CheckpointWritten(p, number, e, f"{p}@{number}", full, 1, newest.get(p, 0))
                for p, e in self.placement.hosted_by(node).items()
                if p.chain not in waiting
            )
            self.checkpoints[node] = (*self.checkpoints.get(node, ()), *more)


def kinds(commands: list[Command]) -> list[str]:
    return [type(c).__name__ for c in commands]


def record(number: int, batch: int | None = None, **changes: Any) -> SliceRecord:
    base = SliceRecord(
        number, "live", number - 1 if batch is None else batch, True, 1, 0, None, 7, 1, 1,
        rows={"s": 3},
    )  # fmt: skip
    return replace(base, **changes)


def lose(play: Play, *nodes: NodeId, logged: int | None = None) -> list[Command]:
    return play.controller.handle(NodesLost(nodes, "killed", logged, 0))


def feed(play: Play, batch: int, now_ms: int = 0) -> list[Command]:
    """A batch that runs through as one slice; what follows it."""
    (run,) = play.controller.handle(BatchArrived(batch, now_ms))
    return play.ran(run)


def owners(placement: Placement) -> dict[str, tuple[str, int]]:
    return {str(p): (o.node, o.epoch) for p, o in placement.owners.items()}


def names(partitions: Iterable[PartitionId]) -> set[str]:
    return {str(p) for p in partitions}
