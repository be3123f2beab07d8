"""Every planted bug is seen by the checks, and without it the same runs hold."""

from __future__ import annotations

import pytest
from jobs import DIRECTED, run
from plants import PLANTS

from effort import LONG

MAX_SEEDS = 150  # within which each must be seen
TOLD = {"backups_asked_for_that_begin_too_late"}  # too rare: test_scenarios tells how it shows


def first_violation(name: str, seeds: range) -> tuple[int, str] | None:
    for seed in seeds:
        outcome = run(seed, *DIRECTED.get(name, ()))
        if outcome.violation:
            return seed, outcome.violation
    return None


@pytest.mark.parametrize(
    "name", [n for n in PLANTS if n != "backups_asked_for_that_begin_too_late"]
)
def test_a_planted_bug_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        PLANTS[name](patch)
        seen = first_violation(name, range(MAX_SEEDS))
    assert seen is not None
    # Random runs without a bug hold in test_simulator; those of a certain kind are checked here.
    if name in DIRECTED:
        first = 0 if LONG else max(0, seen[0] - 9)
        assert first_violation(name, range(first, seen[0] + 1)) is None
