"""Which key group belongs to which partition: now, when older slices ran, and after a restart.

A slice is replayed under the layout it ran under. A recovery that divides partitions to be quicker
changes the layout only until the next cut, so the journal keeps the one from before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from anabranch.model.placement import Layout, Placement
from anabranch.model.plan import Plan
from anabranch.model.slices import SliceRecord


class LayoutLedger:
    """The owner of the layout of every slice that may be replayed."""

    def __init__(self, plan: Plan, by_version: Mapping[int, Layout]) -> None:
        self._feeding = [c.name for c in plan.node_chains if c.outputs]
        self.current: Layout = {}  # holds when nothing is being recovered
        self.divided: dict[str, tuple[int, ...]] = {}  # by a recovery: key groups before it
        self._by_version = dict(by_version)  # of the placement that slices ran with
        # The last adjustment: the slice it was made after, and the parallelism before it.
        self.adjusted: tuple[int, dict[str, int]] | None = None

    def used(self, placement: Placement) -> None:
        """Slices run with this placement from now on."""
        self._by_version[placement.version] = placement.groups

    def placed(self, layout: Layout) -> None:
        """By a start."""
        self.current = layout

    def adjust(self, layout: Layout, after_slice: int) -> None:
        """By an adjustment, which makes one of partitions that a recovery divided."""
        self.adjusted = after_slice, {c: max(g) + 1 for c, g in self.current.items()}
        self.current = layout
        self.divided = {c: g for c, g in self.divided.items() if g != layout[c]}

    def divide(self, layout: Layout) -> None:
        """By a recovery."""
        self.divided |= {c: g for c, g in self.current.items() if g != layout[c]}
        self.current = layout

    def reset(self, layout: Layout) -> None:
        """Every slice is replayed under this one, whatever it ran under."""
        self.current = layout
        self._by_version = dict.fromkeys(self._by_version, layout)

    def stage(self, records: Sequence[SliceRecord]) -> tuple[Sequence[SliceRecord], Layout, bool]:
        """The slices to replay first, the layout for it, and whether more is left to do before
        the current layout holds.

        Rows of several partitions come by the numbers of these, so other partitions than then
        would send the same rows in another order. Where a chain feeds no other, nobody sees it.
        """
        wanted = self.current

        def order(layout: Layout) -> list[Sequence[int]]:
            return [layout.get(c, wanted[c]) for c in self._feeding]

        then = [self._by_version.get(r.placement, wanted) for r in records]
        if all(order(layout) == order(wanted) for layout in then):
            return records, wanted, False
        first = takewhile(lambda i: order(then[i]) == order(then[0]), range(len(records)))
        known = {c: tuple(g) for c, g in then[0].items() if c in wanted}
        return [records[i] for i in first], {**wanted, **known}, True

    def journalled(
        self, records: Sequence[SliceRecord], placement: Placement
    ) -> tuple[Layout, dict[int, Layout]]:
        """What a restart needs: the layout, and by version those of slices that had another."""
        needed = {r.placement for r in records} | {placement.version}
        self._by_version = {v: x for v, x in self._by_version.items() if v in needed}
        layout = {**self.current, **self.divided}  # a restart need not divide anything
        return layout, {v: x for v, x in self._by_version.items() if x != layout}
