"""From a run that fails to one that fails the same way with as few faults as possible.

Faults are numbered as the dice say them. A run in which some of them do not happen goes another way
from there on, and may fail or not: whatever fails the same way is taken, as long as it has fewer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from anabranch.sim.run import Outcome

Run = Callable[[frozenset[int]], Outcome]


def shrink(failed: Outcome, run: Run) -> tuple[frozenset[int], Outcome]:
    """The faults that are needed and what comes of them; of the same seed, no single one of them
    can be left out."""
    kind = _kind(failed)
    kept, found = list(range(failed.faults)), failed
    part = max(len(kept) // 2, 1)
    while kept:
        smaller = None
        for start in range(0, len(kept), part):
            left = kept[:start] + kept[start + part :]
            outcome = run(frozenset(left))
            if _kind(outcome) == kind:
                smaller = left
                found = outcome
                break
        if smaller is not None:
            kept = smaller
            part = max(min(part, len(kept) // 2), 1)
        elif part > 1:
            part //= 2
        else:
            break
    return frozenset(kept), found


def _kind(outcome: Outcome) -> str | None:
    """What was violated, whichever slice, partition or node it was."""
    return outcome.violation and re.sub(r"\d+|\b[a-h]/", "", outcome.violation)
