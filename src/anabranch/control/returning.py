"""How chains come back: from which cut, which of their partitions go on with what they have, which
slices come with the next part, and who may take part in slices again. Read off the ledgers, nothing
is changed here.

Chains that come back are not as far as each other: those that came later have more to make up for.
So each goes at the pace of its nodes, and no chain gets further than those above it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.capacity import is_short
from anabranch.control.policies.shortage import FILL
from anabranch.control.portion import Limits, Work
from anabranch.control.recovery import plan_recovery
from anabranch.control.settings import ControlConfig
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement, partitions_of
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan, Span
from anabranch.model.slices import Cut

# Intervals that a part keeps nodes that have no part in slices: it is to be worth its overhead, and
# joins may wait for its end.
ALONE = 1.0, 4.0
EARLY = 0.25  # of what chains have to make up for: what is done is not worth much


@dataclass(frozen=True)
class Group:
    """Chains that begin to come back together, from the newest cut that covers them."""

    chains: frozenset[str]
    cut: Cut | None  # None: the beginning
    going_on: frozenset[PartitionId]  # keep the state that they have
    anew: frozenset[PartitionId]  # are restored from the cut


class Returning:
    """What the ledgers say about coming back."""

    def __init__(self, plan: Plan, config: ControlConfig, ledgers: Ledgers) -> None:
        self._plan = plan
        self._config = config
        self._interval_ms = config.slice_interval_ms
        self._ledgers = ledgers

    @property
    def is_possible(self) -> bool:
        """Where everything goes back together, or partitions are divided or copied, chains do not
        wait for each other."""
        config = self._config
        plain = config.strategy.is_ours and config.parallel_recovery == 1
        return config.recovery != "eager" and plain and config.recovery_bound_s is None

    def is_short(self, nodes: Sequence[NodeId], placement: Placement) -> bool:
        costs = self._ledgers.costs
        every = [p for c in self._plan.node_chains for p in partitions_of(placement.groups, c.name)]
        loads = costs.costs(placement).loads
        return is_short(loads, nodes, costs.source_share(len(nodes)), every)

    @property
    def all_need_older_layout(self) -> bool:
        return self.needs_older_layout(self._plan.above)

    def at(self, chain: str, placement: Placement) -> int:
        """The slice that it is at."""
        frontier = self._ledgers.owners.frontier
        return min(frontier[p] for p in partitions_of(placement.groups, chain))

    def group(
        self,
        chains: frozenset[str],
        homes: Collection[PartitionId],
        coming: frozenset[str] = frozenset(),
        ahead: frozenset[PartitionId] = frozenset(),
    ) -> Group:
        """Of chains that are to come back, beside those that do, the first group: those with the
        newest cut. Partitions that get other `homes` leave behind what they have; others keep it,
        if they can repeat what is needed of them again. Of some it is not known how far they are:
        they may be `ahead`."""
        placement = self._ledgers.owners.placement
        cuts = {c: self._ledgers.checkpoints.covering(c) for c in sorted(chains)}
        cut = max(cuts.values(), key=_slice_of, default=None)
        mine = frozenset(c for c, other in cuts.items() if _slice_of(other) == _slice_of(cut))
        every = {c: partitions_of(placement.groups, c) for c in sorted(mine | coming)}
        frontier, begin = self._ledgers.owners.frontier, _slice_of(cut) + 1
        anew = {
            p
            for c in sorted(mine)
            for p in every[c]
            if p in homes or p not in placement.owners or frontier[p] < begin
        }
        while True:
            back = self._plan.going_back(p.chain for p in anew)
            begun_again = sorted(mine | {p.chain for p in anew})
            begins = {
                c: min(begin if p in anew else frontier[p] for p in every[c]) for c in begun_again
            }
            more = {
                p
                for c, some in every.items()
                for p in some
                if p not in anew
                and (c in back or not self._can_repeat(p, begins, placement, ahead))
            }
            if not more:
                break
            anew |= more
        going_on = frozenset(p for c in mine for p in every[c]) - anew
        return Group(mine, cut, going_on, frozenset(anew))

    def _can_repeat(
        self,
        partition: PartitionId,
        begins: Mapping[str, int],
        placement: Placement,
        ahead: Collection[PartitionId],
    ) -> bool:
        """Has it kept what chains right below may need of it that begin, or begin again?"""
        below = {e.target for e in self._plan.by_name[partition.chain].outputs} & begins.keys()
        if not below:
            return True
        first = min(begins[c] for c in below)
        if self._ledgers.owners.frontier[partition] <= first and partition not in ahead:
            return True
        return self._ledgers.backups.covers(partition, first, placement)

    def needs_older_layout(self, chains: Collection[str]) -> bool:
        """Would a replay from the cuts of these chains need another layout than today's?"""
        covering, ledgers = self._ledgers.checkpoints.covering, self._ledgers
        first = min((_slice_of(covering(c)) for c in chains), default=ledgers.newest_slice)
        return ledgers.layouts.stage(ledgers.slices.after(first))[2]

    # -- parts -----------------------------------------------------------------------------------

    def beginning(
        self, coming: frozenset[str], cut: Cut | None, placement: Placement
    ) -> RecoveryPlan:
        """Partitions of these chains that are to have state get it. Who sends, and who is needed
        as a shadow, is said; nothing is replayed yet."""
        ledgers = self._ledgers
        spans = {c: (at, at) for c in sorted(coming) for at in [self.at(c, placement)]}
        first = min((at for at, _ in spans.values()), default=ledgers.slices.next_slice)
        records = ledgers.slices.after(first - 1)
        planned = plan_recovery(
            self._plan,
            placement,
            frozenset(p for p in placement.owners if p.chain in coming),
            cut,
            [r.plan(placement.version) for r in records],
            lambda p: ledgers.backups.covers(p, first, placement),
            ledgers.backups.chosen(placement),
        )
        return self.replaying(replace(planned, slices=()), spans, more=True)

    def part(
        self,
        before: RecoveryPlan,
        coming: Collection[str],
        spans: Mapping[str, Span],
        more: bool,
    ) -> RecoveryPlan:
        """The next one: these chains, of those that come back, replay what `spans` says."""
        restored = frozenset(p for p in before.placement.owners if p.chain in spans)
        rebuilt = spans.keys() | {p.chain for p in before.shadows}
        sources = {e.source for c in rebuilt for e in self._plan.by_name[c].inputs}
        senders = frozenset(p for p in before.placement.owners if p.chain in sources)
        after = replace(
            before,
            part=before.part + 1,
            restored=restored,
            senders=senders - restored - before.shadows,
            reads_log=any(self._plan.by_name[c].is_source for c in sources),
            kept=self._needed_below(coming, before.placement),
            backups=self._ledgers.backups.chosen(before.placement),
        )
        shadows_at = before.next_slice if before.shadows else None
        return self.replaying(after, spans, more, shadows_at)

    def _needed_below(self, coming: Collection[str], placement: Placement) -> Mapping[str, int]:
        """Per chain that comes back, the first slice that those right below it have to make up."""
        below = {c: {e.target for e in self._plan.by_name[c].outputs} & set(coming) for c in coming}
        return {
            c: min(self.at(b, placement) for b in sorted(some)) for c, some in below.items() if some
        }

    def replaying(
        self,
        plan: RecoveryPlan,
        spans: Mapping[str, Span],
        more: bool,
        shadows_at: int | None = None,
    ) -> RecoveryPlan:
        """With these slices, and those that shadows lack before them."""
        numbers = {n for span in spans.values() for n in range(*span)}
        if shadows_at is not None and numbers:  # they go through all of them
            numbers |= set(range(shadows_at, max(numbers)))
        behind, version = self._ledgers.behind.first, plan.placement.version
        records = [r for r in self._ledgers.slices.records if r.number in numbers]
        return replace(
            plan,
            slices=tuple(r.plan(version) for r in records),
            spans=spans,
            late={c: behind[c] for c in spans if c in behind},
            more=more,
        )

    # -- how much there is time for --------------------------------------------------------------

    def spans(
        self, before: RecoveryPlan, coming: Collection[str], shared_s: float
    ) -> Mapping[str, Span]:
        """What there is time for, one slice of each chain at least. A node that has a part in
        slices gives `shared_s`. Shadows go through all slices: with them, the chains that are
        ahead wait for the others."""
        work = self._work(before.placement, coming)
        starts = {c: self.at(c, before.placement) for c in work.order}
        left = work.costs({c: (at, work.end) for c, at in starts.items()})
        limits = self._limits(before.placement, shared_s, left)
        ends = work.portion(starts, limits, together=bool(before.shadows))
        # Chains that have nothing to do, and are not needed by others, are left alone.
        some = {c for c in work.order if starts[c] < ends[c]}
        some |= {u for c in some for u in work.above[c]}
        return {c: (starts[c], ends[c]) for c in sorted(some)}

    def near(
        self, before: RecoveryPlan, coming: Collection[str], limit_s: float, slices: int
    ) -> Mapping[str, Span]:
        """Chains that have so little left to make up for that slices may wait for it: a node needs
        no longer than this for it, or it is no more than the newest `slices`. All chains on a node
        are near, or none: while it has no part in slices, it is fast."""
        placement, found = before.placement, set(coming)
        while found:
            work = self._work(placement, found)
            spans = {c: (self.at(c, placement), work.end) for c in work.order}
            costs = work.costs(spans)
            far = {c for c, (begin, end) in spans.items() if end - begin > work.most}
            for node in (n for n, s in costs.items() if s > limit_s):
                mine = {c for c in spans if node in work.nodes[c]}
                far |= mine if any(spans[c][1] - spans[c][0] > slices for c in mine) else set()
            apart = set(coming) - found
            far |= {c for c in found if (self._plan.above[c] | self._plan.together[c]) & apart}
            far |= {c for c in found - far if not self._serves(c, set(coming) - found, placement)}
            if before.shadows and (far or found != set(coming)):
                return {}
            if not far:
                return spans
            found -= far
        return {}

    def _serves(self, chain: str, others: Collection[str], placement: Placement) -> bool:
        """Once it takes part in slices, does it still have what these need of it?"""
        covers = self._ledgers.backups.covers
        below = {e.target for e in self._plan.by_name[chain].outputs} & set(others)
        first = min((self.at(c, placement) for c in below), default=None)
        mine = partitions_of(placement.groups, chain)
        return first is None or all(covers(p, first, placement) for p in mine)

    def rows_left(self, coming: Collection[str], placement: Placement) -> int:
        """Of sources, for all of these chains."""
        records = self._ledgers.slices.records
        starts = [self.at(c, placement) for c in coming]
        return sum(sum(r.rows.values()) for at in starts for r in records if r.number >= at)

    def alone(self, coming: Collection[str], placement: Placement) -> frozenset[NodeId]:
        """Nodes that have nothing but these."""
        of_others = {o.node for p, o in placement.owners.items() if p.chain not in coming}
        return frozenset(o.node for o in placement.owners.values()) - of_others

    def busy(self, coming: Collection[str]) -> frozenset[NodeId]:
        """Nodes that have nothing to do but to make up for what was missed: slices go without
        them, but for one that tells what they were."""
        placement = self._ledgers.owners.in_force
        if placement is None:
            return frozenset()
        alone = self.alone(coming, placement)
        return alone - {placement.nodes[0]} if alone >= set(placement.nodes) else alone

    def crowded(self, coming: Collection[str]) -> frozenset[str]:
        """Chains that come back to nodes which are too full with them: the largest of them, and
        what is below these."""
        placement = self._ledgers.owners.placement
        loads = self._ledgers.costs.costs(placement).loads
        found: set[str] = set()
        for node in placement.nodes:
            mine = {p: loads.get(p, 0.0) for p in placement.hosted_by(node) if p.chain not in found}
            over = sum(mine.values()) - FILL
            for partition in sorted(mine, key=lambda p: (-mine[p], p)):
                if over > 0 and partition.chain in coming:
                    found.add(partition.chain)
                    over -= mine[partition]
        found |= self._plan.going_back(found)
        return self._plan.below(found) & frozenset(coming)

    def early(self, coming: Collection[str]) -> frozenset[str]:
        """Chains that have hardly begun: where nodes come, some are quicker there, though they
        begin again."""
        placement, found = self._ledgers.owners.placement, set[str]()
        for chain in coming:
            cut = _slice_of(self._ledgers.checkpoints.covering(chain))
            done, all_in_all = self.at(chain, placement) - cut, self._ledgers.newest_slice - cut
            if done < EARLY * all_in_all:
                found.add(chain)
        found |= self._plan.going_back(found)
        return self._plan.below(found) & frozenset(coming)

    def slow(self, coming: Collection[str]) -> frozenset[str]:
        """Chains that come back to nodes which have a part in slices, too, and so little time."""
        placement, waits = self._ledgers.owners.placement, self._ledgers.behind.chains
        alone = self.alone(waits, placement)
        shared = {p.chain for p, o in placement.owners.items() if o.node not in alone}
        return frozenset(coming) & shared

    def _limits(
        self, placement: Placement, shared_s: float, left: Mapping[NodeId, float]
    ) -> Limits:
        """A node that has a part in slices, too, gives half of what these leave, if that is more
        than `shared_s`. Of the others, those that have not much `left` do not wait for those that
        have."""
        interval_s = self._interval_ms / 1000
        loads, waits = self._ledgers.costs.costs(placement).loads, self._ledgers.behind.chains
        live = {
            n: sum(loads.get(p, 0.0) for p in placement.hosted_by(n) if p.chain not in waits)
            for n in placement.nodes
        }
        alone = self.alone(waits, placement)
        some = [s for n, s in left.items() if n in alone and s > 0]
        most_s = math.inf
        if some:
            most_s = min(ALONE[1] * interval_s, max(ALONE[0] * interval_s, min(some)))
        nodes = {
            n: max((1 - live[n]) / 2 * interval_s, shared_s)
            for n in placement.nodes
            if n not in alone
        }
        return Limits(nodes, max(most_s, shared_s))

    def _work(self, placement: Placement, coming: Collection[str]) -> Work:
        ledgers, chains = self._ledgers, self._plan.by_name
        order = sorted(coming, key=lambda c: (chains[c].depth, c))
        return Work(
            order=tuple(order),
            above={c: {e.source for e in chains[c].inputs} & set(order) for c in order},
            nodes={
                c: {placement.owners[p].node for p in partitions_of(placement.groups, c)}
                for c in order
            },
            row_s={c: ledgers.costs.node_row_s(placement, {c}) for c in order},
            depth={c: chains[c].depth for c in order},
            rows={r.number: sum(r.rows.values()) for r in ledgers.slices.records},
            end=ledgers.slices.next_slice,
        )


def _slice_of(cut: Cut | None) -> int:
    return cut.slice if cut is not None else 0
