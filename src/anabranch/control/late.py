"""What chains that had waited make up for becomes visible: slice after slice, each by a line of its
own in the journal, so that only the newest line can be journalled and not shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.control.ledgers import Ledgers
from anabranch.model.commands import Command, ExposeLate, WriteLate
from anabranch.model.plan import Plan
from anabranch.model.recovery import RecoveryPlan
from anabranch.model.reports import NodeReport, Staged
from anabranch.model.slices import Late


def made_up(
    plan: Plan,
    ledgers: Ledgers,
    done: RecoveryPlan,
    reports: Sequence[NodeReport],
    upto: int | None = None,
) -> list[Command]:
    """A part of a replay is done, and its chains are at slice `upto`: what they lacked before it
    may be shown."""
    chains = tuple(sorted(c for c in done.chains_restored if c in ledgers.behind.first))
    if not chains:
        return []
    behind, slices, newest = ledgers.behind, ledgers.slices, ledgers.newest_slice
    sinks = [s for s, by in plan.evaluating.items() if by & set(chains)]
    staged: dict[int, list[Staged]] = {}
    for one in (s for r in reports for s in r.staged if s.slice is not None):
        staged.setdefault(one.slice or 0, []).append(one)
    commands: list[Command] = []
    last = (upto or done.next_slice) - 1
    first = min(behind.first[c] for c in chains)
    for number in range(first, last + 1):
        mine = tuple(sorted(staged.get(number, ()), key=lambda s: (s.sink, s.writer)))
        before = {s: behind.shown(s, newest) for s in sinks}
        files: dict[str, list[str]] = {}
        for one in mine:
            if one.path is not None:
                files.setdefault(one.sink, []).append(one.path)
        late = Late(number, tuple(c for c in chains if behind.first[c] <= number), files)
        behind.made_up(late, newest)
        record = slices.complete(late)
        shown = frozenset(s for s in sinks if before[s] < number <= behind.shown(s, newest))
        if mine or number == last or any(record.staged.get(s) for s in shown):
            commands += [WriteLate(late), ExposeLate(record, shown, mine)]
    if last >= newest:  # also where nothing was lacking but the state
        behind.return_to_slices(chains)
    return commands
