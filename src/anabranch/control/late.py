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
    plan: Plan, ledgers: Ledgers, done: RecoveryPlan, reports: Sequence[NodeReport]
) -> list[Command]:
    """A part of a replay is done: what its chains lacked before the slices that they are at now may
    be shown."""
    behind, slices, newest = ledgers.behind, ledgers.slices, ledgers.newest_slice
    ends = {c: done.span(c)[1] for c in sorted(done.chains_restored) if c in behind.first}
    if not ends:
        return []
    sinks = [s for s, by in plan.evaluating.items() if by & ends.keys()]
    staged: dict[int, list[Staged]] = {}
    for one in (s for r in reports for s in r.staged):
        if one.slice is not None:
            staged.setdefault(one.slice, []).append(one)
    commands: list[Command] = []
    for number in range(min(behind.first[c] for c in ends), max(ends.values())):
        chains = tuple(c for c, end in ends.items() if behind.first.get(c, end) <= number < end)
        if not chains:
            continue  # some are ahead of the others
        mine = tuple(sorted(staged.get(number, ()), key=lambda s: (s.sink, s.writer)))
        before = {s: behind.shown(s, newest) for s in sinks}
        files: dict[str, list[str]] = {}
        for one in mine:
            if one.path is not None:
                files.setdefault(one.sink, []).append(one.path)
        late = Late(number, chains, files)
        behind.made_up(late)
        record = slices.complete(late)
        shown = frozenset(s for s in sinks if before[s] < number <= behind.shown(s, newest))
        ended = any(ends[c] == number + 1 for c in chains)
        if mine or ended or any(record.staged.get(s) for s in shown):
            commands += [WriteLate(late), ExposeLate(record, shown, mine)]
    # Also where nothing was lacking but the state; unless one that they need still waits.
    there = {c for c, end in ends.items() if end > newest}
    needed = {c: (plan.above[c] | plan.together[c]) & behind.chains for c in there}
    behind.return_to_slices([c for c, some in needed.items() if some <= there])
    return commands
