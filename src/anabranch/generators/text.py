"""Sentences and tweets: words by Zipf's law, hashtags, and words that bear a sentiment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.generators.base import TIME, Floats, Generator, Ints, pick, zipf_bounds

VOCABULARY = 10_000
# None of them can be made of the syllables below: no ordinary word bears a sentiment.
POSITIVE = ("good", "great", "happy", "best", "glad", "win")
NEGATIVE = ("bad", "awful", "sad", "worst", "poor", "fail")

_SYLLABLES = [c + v for c in "bcdfghjklmnprstvwxyz" for v in "aeiou"]
_ORDINARY = 6  # words in a tweet, before up to two feelings and two hashtags
_FELT = 0.6  # the chance of each of the two feelings


@dataclass(frozen=True)
class Sentences(Generator):
    """(ts, sentence): `words` words from a vocabulary in which the r-th has the weight 1 / r^z."""

    words: int = 8
    vocabulary: int = VOCABULARY
    z: float = 1.0

    schema: ClassVar[pa.Schema] = pa.schema([TIME, ("sentence", pa.string())])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.words >= 1, "words", "at least 1")
        self.require(self.vocabulary >= 1, "vocabulary", "at least 1 word")
        self.require(0 <= self.z < np.inf, "z", "a skew of at least 0")

    def columns(self, start: int, stop: int) -> list[pa.Array]:
        draws = self.uniforms("words", start, stop, self.words)
        ranks = pick(zipf_bounds(self.vocabulary, self.z), draws)
        lengths = np.full(stop - start, self.words)
        return [_joined(ordinary_words(self.vocabulary), ranks, lengths)]


@dataclass(frozen=True)
class Tweets(Generator):
    """(ts, user, text): ordinary words, feelings of POSITIVE and NEGATIVE, up to two hashtags.

    Hashtags (`#topic0` is the most frequent) follow Zipf with skew `z`; one tweet in four has
    none. How likely a feeling is a good one depends on the first topic, its mood.
    """

    users: int = 10_000
    topics: int = 1_000
    z: float = 1.0

    schema: ClassVar[pa.Schema] = pa.schema([TIME, ("user", pa.int64()), ("text", pa.string())])

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.users >= 1, "users", "at least 1")
        self.require(self.topics >= 1, "topics", "at least 1")
        self.require(0 <= self.z < np.inf, "z", "a skew of at least 0")

    def columns(self, start: int, stop: int) -> list[pa.Array]:
        rows = stop - start
        users = (self.uniforms("user", start, stop) * self.users).astype(np.int64)
        words = pick(
            zipf_bounds(VOCABULARY, 1.0), self.uniforms("words", start, stop, _ORDINARY)
        ).reshape(rows, _ORDINARY)
        topics = pick(
            zipf_bounds(self.topics, self.z), self.uniforms("topics", start, stop, 2)
        ).reshape(rows, 2)
        felt = self.uniforms("felt", start, stop, 4).reshape(rows, 4)
        tagged = self.uniforms("tagged", start, stop)
        parts = np.hstack([words, self._feelings(felt, topics[:, 0]), _TAGS + topics])
        # A quarter without a hashtag, half with one, a quarter with two.
        present = np.hstack(
            [
                np.ones((rows, _ORDINARY), dtype=np.bool_),
                felt[:, :2] < _FELT,
                tagged[:, None] >= np.array([0.25, 0.75]),
            ]
        )
        lengths = present.sum(axis=1)
        return [pa.array(users), _joined(_tweet_words(self.topics), parts[present], lengths)]

    def mood(self) -> Floats:
        """Per topic, how likely a feeling of its tweets is a positive one."""
        return self.uniforms("mood", 0, self.topics)

    def _feelings(self, felt: Floats, topics: Ints) -> Ints:
        """Two feelings per tweet, as positions among all words."""
        draws = felt[:, 2:]
        mood = self.mood()[topics][:, None]
        good = draws < mood
        # What is left of the draw, below or above the mood, is uniform again: it picks the word.
        with np.errstate(divide="ignore", invalid="ignore"):
            left = np.where(good, draws / mood, (draws - mood) / (1 - mood))
        which = left * np.where(good, len(POSITIVE), len(NEGATIVE))
        feelings: Ints = VOCABULARY + np.where(good, 0, len(POSITIVE)) + which.astype(np.int64)
        return feelings


@lru_cache(maxsize=4)
def ordinary_words(count: int) -> pa.Array:
    """Distinct pronounceable words of at least two syllables, the most frequent first."""
    base, length = len(_SYLLABLES), 2
    while base**length < count:
        length += 1
    return pa.array(
        "".join(_SYLLABLES[rank // base**i % base] for i in reversed(range(length)))
        for rank in range(count)
    )


_TAGS = VOCABULARY + len(POSITIVE) + len(NEGATIVE)  # where hashtags begin among a tweet's words


@lru_cache(maxsize=4)
def _tweet_words(topics: int) -> pa.Array:
    tags = [f"#topic{i}" for i in range(topics)]
    return pa.concat_arrays([ordinary_words(VOCABULARY), pa.array([*POSITIVE, *NEGATIVE, *tags])])


def _joined(vocabulary: pa.Array, words: Ints, lengths: Ints) -> pa.Array:
    """Rows of words, `lengths` of them each, with spaces between."""
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    lists = pa.ListArray.from_arrays(offsets, vocabulary.take(pa.array(words)))
    return pc.binary_join(lists, " ")
