"""Generators again, one row at a time in plain Python, from the definition of Philox up.

Shares no code with the generators but the frequencies of `planning.key_histories`, which have
tests of their own.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.generators import NEGATIVE, POSITIVE, SkewedKeys
from anabranch.model.placement import even_groups
from anabranch.operators.rows.hashing import key_groups
from anabranch.planning.workloads.key_histories import shifted, zipf_counts

MASK = 2**64 - 1
START_US = 1_767_225_600_000_000  # 2026-01-01 00:00 UTC


def philox(seed: int, stream: int, position: int) -> int:
    """One 64-bit word of Philox4x64-10 (Salmon et al. 2011); NumPy steps before it draws."""
    counter, word = divmod(position, 4)
    a, b, c, d = counter + 1, 0, 0, 0
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ seed, right & MASK, (left >> 64) ^ d ^ stream, left & MASK
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        stream = (stream + 0xBB67AE8584CAA73B) & MASK
    return (a, b, c, d)[word]


def draw(generator: Any, column: str, position: int) -> float:
    stream = zlib.crc32(f"{type(generator).__name__}.{column}".encode())
    return (philox(generator.seed, stream, position) >> 11) / 2**53


def time_us(generator: Any, row: int) -> int:
    return START_US + row * 1_000_000 // int(generator.rate)


@lru_cache(maxsize=8)
def zipf_ends(count: int, z: float) -> list[float]:
    ends = list(accumulate(r**-z for r in range(1, count + 1)))
    return [end / ends[-1] for end in ends]


def word(rank: int, vocabulary: int) -> str:
    syllables = [c + v for c in "bcdfghjklmnprstvwxyz" for v in "aeiou"]
    text = ""
    while len(text) < 4 or 100 ** (len(text) // 2) < vocabulary:
        rank, syllable = divmod(rank, 100)
        text = syllables[syllable] + text
    return text


def sentence(g: Any, row: int) -> tuple[str]:
    draws = [draw(g, "words", row * g.words + i) for i in range(g.words)]
    ranks = [bisect_right(zipf_ends(g.vocabulary, g.z), d) for d in draws]
    return (" ".join(word(r, g.vocabulary) for r in ranks),)


def tweet(g: Any, row: int) -> tuple[int, str]:
    parts = [
        word(bisect_right(zipf_ends(10_000, 1.0), draw(g, "words", row * 6 + i)), 10_000)
        for i in range(6)
    ]
    topics = [
        bisect_right(zipf_ends(g.topics, g.z), draw(g, "topics", row * 2 + i)) for i in (0, 1)
    ]
    mood = draw(g, "mood", topics[0])
    for i in (0, 1):
        if draw(g, "felt", row * 4 + i) < 0.6:
            d = draw(g, "felt", row * 4 + 2 + i)
            if d < mood:
                parts.append(POSITIVE[int(d / mood * 6)])
            else:
                parts.append(NEGATIVE[int((d - mood) / (1 - mood) * 6)])
    tagged = draw(g, "tagged", row)
    tags = 0 if tagged < 0.25 else 1 if tagged < 0.75 else 2
    parts += [f"#topic{t}" for t in topics[:tags]]
    return int(draw(g, "user", row) * g.users), " ".join(parts)


def position(g: Any, row: int) -> tuple[int, int, float]:
    vehicle = row % g.vehicles
    home = int(draw(g, "home", vehicle) * g.segments)
    driven = row / g.rate * (0.02 + 0.08 * draw(g, "pace", vehicle))
    segment = (home + int(driven)) % g.segments
    if draw(g, "speed", row * 2 + 1) < 0.02:
        return vehicle, segment, -1.0
    limit = 30.0 + 100.0 * draw(g, "limit", segment)
    return vehicle, segment, limit * (0.6 + 0.5 * draw(g, "speed", row * 2))


def incident(g: Any, row: int) -> tuple[int | None, str]:
    spread = sorted(range(g.segments), key=lambda s: draw(g, "order", s))
    segment = spread[bisect_right(zipf_ends(g.segments, 0.8), draw(g, "seg", row * 3))]
    kind = ("crash", "jam", "works")[int(draw(g, "seg", row * 3 + 2) * 3)]
    return None if draw(g, "seg", row * 3 + 1) < 0.02 else segment, kind


@lru_cache(maxsize=64)
def key_frequencies(g: SkewedKeys, interval: int) -> Any:
    if interval == 0:
        return zipf_counts(np.random.default_rng([g.seed, 0]), g.keys, g.z, 1.0)
    groups = key_groups(pa.table({"key": list(range(g.keys))}), ["key"], 128)
    partitions = np.array([even_groups(128, g.partitions)[group] for group in groups])
    rng = np.random.default_rng([g.seed, interval])
    return shifted(rng, key_frequencies(g, interval - 1), partitions, g.partitions, g.f)


def keyed(g: Any, row: int) -> tuple[int, int]:
    ends = list(accumulate(key_frequencies(g, row // g.shift_every).tolist()))
    key = bisect_right([end / ends[-1] for end in ends], draw(g, "key", row))
    return key, int(draw(g, "value", row) * 1000)
