"""Which queries come back, and where, when the nodes that are left are not enough for all.

A query comes back when all chains that it needs have their partitions placed; together they are
chosen for the most priority that fits (001, section 5). A slice runs wave after wave, each as long
as its fullest node, and may take `FILL` of an interval, which leaves time for making up for what
was missed; unless there is room for all: then nobody waits. One query always runs, be it on a node
that is too small for it. The paper's planners know no waves: what can be placed of their plans is
compared with what is chosen wave by wave.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.control.policies.shortage import APART, FULL, WAYS, KnownLoads, Shortage, queries_of
from anabranch.errors import ConfigError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.plan import Query
from anabranch.planning.recovery.order import (
    Planner,
    RecoveryOrder,
    by_density,
    plan_best_density,
    plan_dp,
    plan_operator_centric,
    plan_progressive,
)
from anabranch.planning.recovery.placing import DIGITS, SLACK, Placing
from anabranch.planning.recovery.queries import RecoveryProblem
from anabranch.planning.recovery.solver import solve

SEARCH_ROUNDS = 300  # of the search, where queries are too tangled for a proof
EXACT_MAX = 40  # waiting queries: beyond, BestDensity takes less time
DENSITY_MAX = 50  # … and PRG beyond this number


@dataclass(frozen=True, slots=True)
class NextUp:
    """The query that is nearest to coming back, and what it lacks: shares of a node."""

    query: str
    missing: float


@dataclass(frozen=True, slots=True)
class Return:
    """Chains that come back now, where their partitions go that have no home, and the sinks of the
    queries that are complete with them; why, for people."""

    chains: frozenset[str]
    homes: Mapping[PartitionId, NodeId]
    queries: tuple[str, ...]
    why: str
    next_up: NextUp | None = None


def is_short(
    loads: Mapping[PartitionId, float],
    nodes: Sequence[NodeId],
    source_share: float = 0.0,
    partitions: Iterable[PartitionId] = (),
) -> bool:
    """Do all partitions together take more than the nodes have? `partitions` are those there are,
    where the load of some is not known: they count as the mean of the others."""
    if not loads:
        return False
    known = KnownLoads(loads)
    every = dict.fromkeys((*loads, *partitions))
    return math.fsum(map(known.of, every)) > len(nodes) * (FULL - source_share) + SLACK


def choose(
    queries: Sequence[Query],
    down: frozenset[str],
    placed: Mapping[PartitionId, NodeId],
    unplaced: Iterable[PartitionId],
    loads: Mapping[PartitionId, float],
    nodes: Sequence[NodeId],
    *,
    source_share: float = 0.0,
    fixed_share: float = 0.0,
    planner: str = "exact",
    hosts: Mapping[NodeId, str] | None = None,
    blocking: bool = False,
    moves: bool = False,
    free: frozenset[str] = frozenset(),
    depths: Mapping[str, int] | None = None,
    patient: bool = False,
) -> Return:
    """What comes back now, of the chains that are `down` (they wait, and all below them do).

    `placed` are partitions with state on a living node, those of chains that wait included;
    `unplaced` those of chains that wait that have none. `blocking`: all or nothing. With `moves`,
    a partition that waits where there is no room for it gets another home, which is among `homes`
    then; without, its queries wait for room there. Chains that are `free` do so where a slice is
    shorter with it. `fixed_share`: what a slice takes of an interval
    beside the work of nodes. `patient`: more nodes may come, so none is filled up. `depths`: the
    waves that chains run in; without them, only nodes have a limit, as if there were one wave.
    Sinks of source chains only, which need no chain, are always live.
    """
    if planner not in PLANNERS:
        raise ConfigError(f"there is no planner {planner!r}; there are {', '.join(PLANNERS)}")
    short = Shortage(
        tuple(queries),
        down,
        dict(placed),
        tuple(sorted(unplaced)),
        KnownLoads(loads),
        tuple(nodes),
        source_share,
        fixed_share,
        hosts or {},
        moves,
        free,
        depths or {},
    )
    short.check()
    if not down:
        return Return(frozenset(), {}, (), "no query waits")
    if not nodes:
        return Return(frozenset(), {}, (), "there is no node")
    if short.fits_in_full:
        return _everything(short, patient) or _some(short, planner, blocking)
    return _some(short, planner, blocking)


def _some(short: Shortage, planner: str, blocking: bool) -> Return:
    if blocking:
        return _all_or_nothing(short)
    return _best(short, planner)


def _everything(short: Shortage, patient: bool) -> Return | None:
    """Those who are patient leave room, as if it did not all fit: more nodes may come."""
    placing, every = short.placing(), short.partitions(short.down)
    if not placing.place_whole(every, APART):
        if patient and short.known.mean:
            return None
        placing = short.placing(full=True)
        if not placing.place_whole(every, APART):
            placing.force(every)
    total = f"{short.demand:.2f} of {short.capacity(FULL):.2f}"
    why = f"all {queries_of(len(short.queries))} fit on {short.on}: {total}"
    if not short.known.mean:
        why = "what partitions cost is not known: everything comes back"
    return _result(short, placing, short.down, why)


def _all_or_nothing(short: Shortage) -> Return:
    placing = short.placing()
    every: frozenset[str] = frozenset().union(*short.needs.values())
    if placing.place_whole(short.partitions(every), WAYS):
        chains = every | short.last(placing)
        return _result(short, placing, chains, short.fitting(placing, len(short.queries)))
    total = f"{short.demand:.2f} of {short.capacity(FULL):.2f}"
    why = f"not all {queries_of(len(short.queries))} fit on {short.on}: {total}"
    return _result(short, placing, frozenset(), why, together=True)


def _best(short: Shortage, planner: str) -> Return:
    problem = short.problem
    room = math.fsum(short.placing().rooms.values())
    fill = planner != "operator_centric"
    tried = [_placed(short, plan(problem, room).queries, fill) for plan in PLANNERS[planner]]
    if planner == "exact" and short.depths and len(problem.queries) <= EXACT_MAX:
        tried.append(_by_slice(short))
    placing, chains = min(tried, key=lambda found: _rank(short, *found))
    done = len(short.complete(chains))
    apart = short.placing()
    if apart.place_whole(short.partitions(chains), APART):
        placing = apart
    if done == len(short.waiting):
        chains |= short.last(placing)
    if chains:
        return _result(short, placing, chains, short.fitting(placing, len(short.live) + done))
    if not short.live:
        return _one(short)
    return _result(short, placing, chains, short.fitting(placing, len(short.live)))


def _rank(short: Shortage, placing: Placing, chains: frozenset[str]) -> tuple[object, ...]:
    """Most priority, then the shortest slice, then least load, then waves that are alike, which
    leaves work of all waves to nodes that come; then the first queries."""
    done = short.complete(chains)
    order = tuple(i for i, q in enumerate(short.waiting) if q in done)
    sums = (round(x, DIGITS) for x in (placing.length, placing.load, placing.longest))
    return -_priority(short, chains), *sums, order


def _placed(short: Shortage, planned: Sequence[str], fill: bool) -> tuple[Placing, frozenset[str]]:
    """A plan placed, as far as it can be; `fill`: and others in the room that it leaves."""
    needs, placing = short.needs, short.placing()
    chains: frozenset[str] = frozenset().union(*(needs[q] for q in planned))
    if not placing.place_whole(short.partitions(chains), WAYS):
        chains = frozenset()
    others = [q for q in short.problem.queries if fill and q not in planned]
    for query in (*by_density(short.problem, planned), *by_density(short.problem, others)):
        if placing.place_whole(short.partitions(needs[query]), WAYS):
            chains |= needs[query]
    return placing, chains


def _by_slice(short: Shortage) -> tuple[Placing, frozenset[str]]:
    """Query by query, the next one that brings most priority for what a slice gets longer by."""
    placing, chains, left = short.placing(), frozenset[str](), list(short.problem.queries)
    while left:
        found = []
        for query in left:
            then, among = placing.copy(), chains | short.needs[query]
            if then.place_whole(short.partitions(among), WAYS):
                found.append((query, among, then))
        if not found:
            break
        before = placing, chains
        _, chains, placing = min(found, key=lambda x: _worth(short, before, (x[2], x[1])))
        left = [query for query, among, _ in found if not among <= chains]
    return placing, chains


def _worth(
    short: Shortage,
    before: tuple[Placing, frozenset[str]],
    after: tuple[Placing, frozenset[str]],
) -> tuple[float, ...]:
    """Most priority for what a slice gets longer by, then for its load, then most priority, then
    waves that are alike."""
    (placing, chains), (then, among) = before, after
    gain = _priority(short, among) - _priority(short, chains)
    longer, load = then.length - placing.length, then.load - placing.load
    return -_per(gain, longer), -_per(gain, load), -gain, round(then.longest, DIGITS)


def _priority(short: Shortage, chains: frozenset[str]) -> int:
    return sum(q.priority for q in short.complete(chains))


def _per(gain: int, cost: float) -> float:
    return round(gain / cost, DIGITS) if cost > SLACK else math.inf


def _one(short: Shortage) -> Return:
    """The densest query, though there is no room for it."""
    chains, name = short.last_chains, "nothing but dead letters"
    if short.waiting:
        name = by_density(short.whole, short.needs)[0]
        chains = short.needs[name]
        name = repr(name)
    placing = short.placing()
    placing.force(short.partitions(chains))
    why = f"no query fits on {short.on}, and one always runs, {name}: {short.taken(placing)}"
    return _result(short, placing, chains, why)


def _exactly(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    """The best plan, without a clock: the work is bounded by the size of the problem."""
    if len(problem.queries) > EXACT_MAX:
        return _densely(problem, resources)
    rounds = itertools.count()
    return solve(problem, resources, lambda: next(rounds) < SEARCH_ROUNDS).plan


def _densely(problem: RecoveryProblem, resources: float) -> RecoveryOrder:
    many = len(problem.queries) > DENSITY_MAX
    return (plan_progressive if many else plan_best_density)(problem, resources)


#: What is tried; what can be placed of the best of it comes back.
PLANNERS: Mapping[str, tuple[Planner, ...]] = {
    "exact": (_exactly, _densely, plan_progressive),
    "dp": (plan_dp,),
    "best_density": (plan_best_density,),
    "progressive": (plan_progressive,),
    "operator_centric": (plan_operator_centric,),
}


def _result(
    short: Shortage,
    placing: Placing,
    chains: frozenset[str],
    why: str,
    together: bool = False,
) -> Return:
    came = {short.names[name]: NodeId(node) for name, node in placing.placed.items()}
    homes = {p: n for p, n in sorted(came.items()) if short.homes.get(p) != n}
    done = tuple(q.sink for q in short.complete(chains))
    return Return(chains, homes, done, why, _next_up(short, placing, chains, together))


def _next_up(
    short: Shortage, placing: Placing, chains: frozenset[str], together: bool
) -> NextUp | None:
    """`together`: it lacks what all lack. Uses up what is left of the nodes."""
    lacks = {q: needs - chains for q, needs in short.needs.items() if needs - chains}
    if not lacks:
        return None
    query = by_density(short.problem_of(lacks), lacks)[0]
    wanted = frozenset[str]().union(*lacks.values()) if together else lacks[query]
    names = placing.largest_first(short.partitions(wanted))
    missing = math.fsum(short.costs[name] for name in names if not placing.place(name))
    return NextUp(query, missing)
