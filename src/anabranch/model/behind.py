"""Which chains lack slices that have happened, as the journal tells it line by line.

A journal says of every slice which chains waited, and in lines of their own what they have made up
for since. This is the one reading of that, for those who write the lines and those who read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.model.slices import Late, SliceRecord


class Behind:
    """`chains`: the first slice that each lacks; one that is not there lacks none."""

    def __init__(self, chains: Mapping[str, int] | None = None, newest: int = 0) -> None:
        """As it was with slice `newest`."""
        self.chains = dict(chains or {})
        self.newest = newest

    def happened(self, record: SliceRecord) -> None:
        """A slice more. Chains that waited lack it, and all before it that they lacked."""
        self.newest = record.number
        back = [
            c
            for c, lacks in self.chains.items()
            if lacks == record.number and c not in record.paused
        ]
        for chain in back:  # in time for this slice: it lacked nothing that had happened
            del self.chains[chain]
        for chain in record.paused:
            self.chains.setdefault(chain, record.number)

    def made_up(self, late: Late) -> None:
        """Chains have now applied everything up to and including a slice."""
        for chain in late.chains:
            if late.slice >= self.newest:
                self.chains.pop(chain, None)
            elif chain in self.chains:
                self.chains[chain] = max(self.chains[chain], late.slice + 1)

    def shown(self, chains: Iterable[str]) -> int:
        """The newest slice that a sink may show to which these chains give rows."""
        return min((self.chains.get(c, self.newest + 1) - 1 for c in chains), default=self.newest)
