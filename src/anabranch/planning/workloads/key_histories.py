"""Key frequencies that are skewed and that shift, as in 002, section 5.1.

Draws how often each key occurs per interval: Zipf with skew z, then, from interval to interval,
frequencies swapped between random keys until some task's load has changed by the share f. The
state of a key is what its last `window` intervals brought. Seeded: the same generator gives the
same history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from anabranch.errors import PlanningError
from anabranch.planning.balance.routing import Floats, Ints

#: Batches of swaps per shift; an f that they cannot reach is an error.
SWAP_BATCHES_MAX = 10_000


@dataclass(frozen=True)
class Interval:
    """How often each key occurred, and the size of its state over the window."""

    counts: Floats
    state: Floats


def zipf_counts(rng: np.random.Generator, keys: int, z: float, tuples: float) -> Floats:
    """Expected occurrences of `keys` keys under Zipf(z), in random order, `tuples` in sum."""
    if keys < 1 or not np.isfinite(z) or z < 0:
        raise PlanningError(f"{keys} keys with skew {z}; give at least one key and z >= 0")
    weights = np.arange(1, keys + 1, dtype=np.float64) ** -z
    return rng.permutation(weights * (tuples / weights.sum()))


def shifted(
    rng: np.random.Generator, counts: Floats, tasks_of: Ints, tasks: int, f: float
) -> Floats:
    """Swap frequencies of random keys until a task's load differs by the share `f` of the mean."""
    before = np.bincount(tasks_of, counts, tasks)
    counts = counts.copy()
    pairs = max(1, len(counts) // 100)
    for _ in range(SWAP_BATCHES_MAX):
        after = np.bincount(tasks_of, counts, tasks)
        if np.abs(after - before).max() >= f * before.mean():
            return counts
        picked = rng.permutation(np.unique(rng.integers(len(counts), size=2 * pairs)))
        left, right = np.split(picked[: len(picked) // 2 * 2], 2)
        counts[left], counts[right] = counts[right], counts[left]
    raise PlanningError(
        f"swapping keys {SWAP_BATCHES_MAX} times did not change a task's load by {f}; lower f",
        f=f,
    )


def key_history(
    rng: np.random.Generator,
    tasks_of: Ints,
    tasks: int,
    *,
    z: float,
    f: float,
    intervals: int,
    window: int,
    tuples: float = 1e6,
) -> Iterator[Interval]:
    """`intervals` intervals after one full window of history; `tasks_of` is h(k)."""
    if window < 1 or intervals < 1:
        raise PlanningError(f"{intervals} intervals, window {window}; give at least 1 of each")
    recent = [zipf_counts(rng, len(tasks_of), z, tuples)]
    while len(recent) < window + intervals:
        recent.append(shifted(rng, recent[-1], tasks_of, tasks, f))
        if len(recent) > window:
            yield Interval(recent[-1], np.sum(recent[-window:], axis=0))
