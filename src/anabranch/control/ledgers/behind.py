"""Which chains wait, and what they lack: the first slice each has not made up for.

A chain that waits is in no slice; whatever is below it waits, too. Its sinks show what it makes up
for later, in order: a sink is as far as the chains that give it rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.model.plan import Plan
from anabranch.model.slices import Late


class BehindLedger:
    """The owner of what is lacking. A chain that is not in it takes part in every slice."""

    def __init__(self, plan: Plan, behind: Mapping[str, int]) -> None:
        self._plan = plan
        self.first: dict[str, int] = dict(behind)

    @property
    def chains(self) -> frozenset[str]:
        return frozenset(self.first)

    def pause(self, chains: Iterable[str], next_slice: int) -> None:
        """These wait from the next slice on, if they do not yet."""
        for chain in self._plan.below(chains):
            self.first.setdefault(chain, next_slice)

    def made_up(self, late: Late) -> None:
        """They have caught up to this slice."""
        for chain in late.chains:
            self.first[chain] = late.slice + 1

    def return_to_slices(self, chains: Iterable[str]) -> None:
        """They lack nothing, what they lost is restored, and what they need is there."""
        for chain in chains:
            self.first.pop(chain, None)

    def journalled(self, newest: int) -> dict[str, int]:
        """Those that lack a slice that has happened."""
        return {c: n for c, n in self.first.items() if n <= newest}

    def shown(self, sink: str, newest: int) -> int:
        """The newest slice that a sink may show."""
        chains = self._plan.evaluating[sink]
        return min((self.first[c] - 1 for c in chains if c in self.first), default=newest)
