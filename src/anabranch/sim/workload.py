"""What a simulated job is: a random topology, its batches, and what its operators compute.

Operators are sensitive to order and to time: the state of a key is a running hash of what it got
and when, so one row too many, too few, too late or in another order shows in every later output.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anabranch.control.policies.autoscale import Autoscale
from anabranch.control.policies.balance import Balance
from anabranch.control.policies.capacity import PLANNERS
from anabranch.control.policies.strategies import Strategy
from anabranch.control.settings import RECOVERY_MODES, ControlConfig
from anabranch.model.graph import Graph, Kind, Operator
from anabranch.model.plan import Plan, compile_plan
from anabranch.node.arrow.schemas import declared
from anabranch.node.protocol.source_task import rows_per_slice

KEYS = 12
FICKLE = 1 << 40  # more than any value; what a fickle function adds is a multiple of it
# Where numbers grow wider: slices in the names of files, a 32-bit integer, ten digits.
ROW_S = (0.002, 0.005, 0.01, 0.02, 0.05)  # a slice of some rows comes every 0.06 s or so
ADAPTING = 3  # every third job backs up only after losses, where that may be
PLANNED = 5  # every fifth job has one planner or another choose what comes back
LONG_ROW_S = 0.5  # a batch of more than ten is cut
WIDE = (10**12 - 3, 2**31 - 3, 10**9 - 2)
Row = tuple[int, int]  # key, value
RawRow = tuple[int, int, int]  # key, a value no other row has, event time in microseconds
RawShare = Mapping[str, tuple[RawRow, ...]]  # a source task's rows, by source

BALANCING = 5  # one job of this number balances its keys
BALANCE = Balance(theta_max=0.02, theta_min=0.01, interval="40ms", cool_down="40ms")
AUTOSCALE = Autoscale(
    upper=0.4,
    lower=0.2,
    interval="40ms",
    cool_down="80ms",
    down_after="80ms",
    drain_after="200ms",
    max_parallelism=4,
    max_nodes=5,
)
_MASK = (1 << 61) - 1
_CLOSED = 0x5EED


def mix(a: int, b: int) -> int:
    """A hash of two numbers in which their order counts."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & _MASK
    return x ^ (x >> 31)


def moment(watermark_us: int | None, processing_ms: int) -> int:
    """The time of a slice as operators see it."""
    return mix(processing_ms, -1 if watermark_us is None else watermark_us)


def fold(state: int, edge: int, value: int, when: int) -> int:
    """What a key becomes by a row that came over an edge; it is also what is sent on."""
    return mix(mix(state, value + edge), when)


def close(state: int, watermark_us: int) -> int:
    """What a key becomes, and sends on, when the watermark passes it: like a window's end."""
    return mix(state, _CLOSED + watermark_us)


def rekey(edge: int, value: int) -> int | None:
    """The key under which a value goes over an edge; None: the edge's filter drops it."""
    x = mix(value, edge) >> 7
    return None if x % 7 == 0 else x % KEYS


@dataclass(frozen=True)
class Workload:
    """A job and all its input."""

    seed: int
    plan: Plan
    config: ControlConfig
    batches: tuple[RawShare, ...]
    max_rows_per_slice: int | None
    row_weight: int = 1  # a row counts as this many: long replays come in parts
    rechooses_backups: bool = False  # who backs up changes now and then
    fickle: bool = False  # the functions of sources make other values each time they are called
    begins_after: int = 0  # the job has run for long: its slices, generations and versions are many
    other_plans: tuple[Plan, ...] = ()  # with other parallelism, for later drivers
    # For this long a row keeps a node busy, in the nodes' own reports: time goes on without it, but
    # a batch is cut into slices where it is long, and nodes may not do for all queries.
    row_s: float = 0.0

    def read(self, batch: int, again: int) -> list[RawShare]:
        """A batch as source tasks read it. Read again, its rows may be split differently and come
        in another order: file splits follow the number of cores."""
        dice = random.Random(f"{self.seed} {batch} {again}")
        tasks: list[dict[str, list[RawRow]]]
        tasks = [{s: [] for s in self.sources} for _ in range(dice.randint(0, 3))]
        if not tasks and any(self.batches[batch].values()):
            tasks = [{s: [] for s in self.sources}]
        for source, rows in self.batches[batch].items():
            for row in dice.sample(rows, len(rows)):
                dice.choice(tasks)[source].append(row)
        return [{s: tuple(rows) for s, rows in task.items()} for task in tasks]

    def chunks(self, share: RawShare, tasks: int, max_rows: int | None) -> list[RawShare]:
        """A source task's share, cut into slices."""
        longest = max(len(rows) for rows in share.values())
        most = None if max_rows is None else max_rows // self.row_weight
        limit = rows_per_slice(longest, max(1, tasks * len(share)), self.max_rows_per_slice, most)
        starts = range(0, max(1, longest), limit)
        return [{s: rows[i : i + limit] for s, rows in share.items()} for i in starts]

    @cached_property
    def sources(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.plan.source_chains)


def fingerprint(plan: Plan) -> dict[str, Any]:
    """As a compiled job has it, without columns."""
    edges = [e for c in plan.source_chains for e in c.outputs]
    return {**declared(plan), "log": {str(e.id): f"{e.target_op}/{e.port}" for e in edges}}


def random_workload(seed: int, dice: random.Random) -> Workload:
    plan = random_plan(dice)
    sources = [c.name for c in plan.source_chains]
    timed = dice.random() < 0.5
    chains = [c.name for c in plan.node_chains]
    chosen = frozenset(c for c in chains if dice.random() < 0.5)
    config = ControlConfig(
        checkpoint_interval_ms=dice.choice((20, 100, 300, 10**9)),
        watermark_delays_us={s: dice.choice((0, 5)) for s in sources} if timed else {},
        backups=dice.choice((None, frozenset(), chosen, chosen)),
        strategy=Strategy(
            synchronous=dice.random() < 0.1,
            whole=dice.random() < 0.1,
            rollback=dice.random() < 0.05,
        ),
        parallel_recovery=dice.choice((1, 1, 2, 3)),
    )
    if dice.random() < 0.05:
        config = replace(config, recovery_bound_s=dice.choice((0.25, 1.0)), backups=None)
    interval_ms, mode = dice.choice((5, 30, 1_000)), dice.choice((*RECOVERY_MODES, "incremental"))
    config = replace(config, slice_interval_ms=interval_ms, recovery=mode)
    if dice.random() < 0.1:
        config = replace(config, autoscale=AUTOSCALE, slice_interval_ms=20)
    if seed % BALANCING == 3:
        config = replace(config, balance=BALANCE)
    copies = dice.random() < 0.2
    config = replace(config, strategy=replace(config.strategy, copies=copies))
    row_s = dice.choice((0.0, 0.0, LONG_ROW_S))
    if dice.random() < 0.4:  # chains wait when too many nodes are lost
        config = replace(config, strategy=Strategy(), parallel_recovery=1, recovery_bound_s=None)
        row_s = dice.choice((*ROW_S, LONG_ROW_S))
    job = Workload(
        seed=seed,
        plan=plan,
        config=config,
        batches=random_batches(dice, sources),
        max_rows_per_slice=dice.choice((None, None, 4, 8)),
        row_weight=dice.choice((1, 1, 500_000)),
        rechooses_backups=config.recovery_bound_s is None and dice.random() < 0.3,
        fickle=dice.random() < 0.2,
        begins_after=dice.choice((0, 0, 0, *WIDE)),
        other_plans=_other_plans(plan, dice),
        row_s=row_s,
    )
    plain = config.strategy == Strategy() and config.recovery_bound_s is None
    if plain and seed % PLANNED == 1:
        strategy = Strategy(planner=tuple(PLANNERS)[seed // PLANNED % len(PLANNERS)])
        job = replace(job, config=replace(config, strategy=strategy))
    return adapting(job) if plain and seed % ADAPTING == 0 else job


def adapting(job: Workload) -> Workload:
    """Its operators back up only after losses."""
    config = replace(job.config, backups=frozenset(), adaptive_backups=True)
    return replace(job, config=config, rechooses_backups=False)


def _other_plans(plan: Plan, dice: random.Random) -> tuple[Plan, ...]:
    """The same chains with another parallelism, where that leaves the chains as they are."""
    operators = [
        replace(o, parallelism=dice.randint(1, 3)) if o.kind is Kind.KEYED else o
        for o in plan.graph.operators
    ]
    groups = plan.graph.key_groups
    other = compile_plan(Graph.checked("simulated", operators, key_groups=groups))
    same = [(c.name, c.operators) for c in other.chains] == [
        (c.name, c.operators) for c in plan.chains
    ]
    return (other,) if same else ()


def random_plan(dice: random.Random) -> Plan:
    """A few operators, each reading from one or two of the newest streams."""
    operators = [Operator(f"s{i}", Kind.SOURCE) for i in range(dice.choice((1, 1, 2)))]
    for i in range(dice.randint(1, 7)):
        near = [o.name for o in operators[-2:]]
        reads = dice.sample(near, min(len(near), dice.choice((1, 1, 2))))
        ports = ((*reads,),) if dice.random() < 0.5 else tuple((r,) for r in reads)
        if dice.random() < 0.15:
            keeps = dice.random() < 0.5
            made = Operator(f"f{i}", Kind.STATELESS, ((*reads,),), keeps_columns=keeps)
        else:
            made = Operator(
                f"k{i}",
                Kind.KEYED,
                ports,
                keys=(dice.choice("xyz"),),
                parallelism=dice.randint(1, 3),
                # It computes the same again here, but everything must be rolled back for it.
                deterministic=dice.random() > 0.02,
            )
        operators.append(made)
    read = {p for o in operators for p in o.producers}
    shown = [o.name for o in operators if o.name not in read or dice.random() < 0.3]
    operators += [Operator(f"out_{name}", Kind.SINK, ((name,),)) for name in shown]
    return compile_plan(Graph.checked("simulated", operators, key_groups=dice.choice((4, 6))))


def random_batches(dice: random.Random, sources: list[str]) -> tuple[RawShare, ...]:
    batches = []
    number = 0
    for batch in range(dice.randint(3, 9)):
        shares: dict[str, tuple[RawRow, ...]] = {}
        for source in sources:
            rows = []
            for _ in range(dice.choice((0, 1, 3, 6, 6, 20))):
                number += 1
                rows.append((dice.randrange(KEYS), number, batch * 10 + dice.randint(0, 12)))
            shares[source] = tuple(rows)
        batches.append(shares)
    return tuple(batches)
