"""When it is asked who comes back, and what of: policies/capacity.py answers.

It is asked with every loss, every node that joins, and everything that has come back; without
these, every ten slices, because what partitions cost may be another by then. Where nodes join,
chains that come back already may do so elsewhere: those on nodes that are too full with them, and
those that have hardly begun, if they are quicker there though they begin again.
"""

from __future__ import annotations

from collections.abc import Collection

from anabranch.control.ledgers import Ledgers
from anabranch.control.policies.capacity import Return, choose
from anabranch.control.returning import Returning
from anabranch.control.settings import ControlConfig
from anabranch.control.wishes import Wishes
from anabranch.model.ids import NodeId
from anabranch.model.placement import partitions_of
from anabranch.model.plan import Plan

LOOK_AGAIN = 10  # slices later


class Choosing:
    """Who comes back, and where; `newest` is the answer."""

    def __init__(
        self,
        plan: Plan,
        config: ControlConfig,
        ledgers: Ledgers,
        wishes: Wishes,
        returning: Returning,
    ) -> None:
        self._plan = plan
        self._config = config
        self._ledgers = ledgers
        self._wishes = wishes
        self._returning = returning
        self.newest: Return | None = None
        self._look_at: int | None = None  # slice; None: at once
        self._whole = 0  # nodes, before chains waited
        self._newcomers = False  # since it was asked last
        self._free: frozenset[str] = frozenset()  # chains that may begin again elsewhere

    @property
    def nodes(self) -> list[NodeId]:
        """That may be given something."""
        owners = self._ledgers.owners
        return self._wishes.allowed(owners.nodes) if owners.nodes else []

    def all_are_live(self) -> None:
        self._whole = len(self.nodes)

    def nodes_came(self) -> None:
        self._look_at, self._newcomers = None, True

    def again(self) -> None:
        """There may be room, or somebody for it, that there was not before."""
        self._look_at = None

    def released(self, coming: Collection[str]) -> frozenset[str]:
        """Chains that come back and are to be among those that are chosen from."""
        if not self._newcomers:
            return frozenset()
        self._free = self._returning.early(coming)
        return self._returning.crowded(coming) | self._free

    def is_due(self, coming: Collection[str], stops: bool) -> bool:
        """Is it time to look for room, and does anybody wait?"""
        due = self._look_at is None or self._ledgers.newest_slice >= self._look_at
        return (due or stops) and bool(self._ledgers.behind.chains - set(coming))

    def choose(self, coming: Collection[str], stops: bool) -> Return:
        """Of those that wait and are not `coming` back. If the job `stops`, all."""
        ledgers, placement, nodes = self._ledgers, self._ledgers.owners.placement, self.nodes
        down = ledgers.behind.chains - set(coming)
        missing = [p for c in sorted(down) for p in partitions_of(placement.groups, c)]
        # On nodes that are drained nothing counts, and nothing is put.
        slow = self._returning.slow(self._free)
        here = {p: o.node for p, o in placement.owners.items() if o.node in nodes}
        homes = {p: n for p, n in here.items() if p.chain not in slow}
        self.newest = choose(
            self._plan.whole_queries,
            down,
            homes,
            [p for p in missing if p not in homes],
            {} if stops else ledgers.costs.costs(placement).loads,
            nodes,
            source_share=ledgers.costs.source_share(len(nodes)),
            fixed_share=ledgers.costs.fixed_s * 1000 / self._config.slice_interval_ms,
            hosts=ledgers.owners.hosts,
            planner=self._config.strategy.planner,
            blocking=self._config.recovery == "blocking",
            moves=True,
            free=self._free,
            patient=self._look_at is None and len(nodes) < self._whole,
            depths={c.name: c.depth for c in self._plan.node_chains},
        )
        self._look_at = ledgers.newest_slice + LOOK_AGAIN
        self._newcomers, self._free = False, frozenset()
        return self.newest
