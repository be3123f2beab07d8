"""Seeded input for the demo: the same seed gives the same sentences."""

from __future__ import annotations

import numpy as np

_SYLLABLES = [c + v for c in "bcdfghjklmnprstvwxyz" for v in "aeiou"]


def zipf_words(vocabulary: int) -> list[str]:
    """Distinct pronounceable words, the most frequent first."""
    base, length = len(_SYLLABLES), 2
    while base**length < vocabulary:
        length += 1
    return [
        "".join(_SYLLABLES[rank // base**i % base] for i in reversed(range(length)))
        for rank in range(vocabulary)
    ]


class Sentences:
    """Sentences whose words follow Zipf's law: the r-th word has a weight of 1 / r^exponent."""

    def __init__(
        self, seed: int, vocabulary: int = 10_000, words: int = 8, exponent: float = 1.0
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._words = np.array(zipf_words(vocabulary), dtype=object)
        weights = 1.0 / np.arange(1, vocabulary + 1) ** exponent
        self._below = np.cumsum(weights) / weights.sum()
        self._length = words

    def take(self, count: int) -> list[str]:
        """The next `count` sentences."""
        draws = self._random.random((count, self._length))
        # The last bound may fall short of 1 by rounding.
        ranks = np.minimum(np.searchsorted(self._below, draws, side="right"), len(self._words) - 1)
        return [" ".join(row) for row in self._words[ranks]]
