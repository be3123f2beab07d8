"""Independent recomputations: what a topology must give, without any code of the product.

`Dataflow` is a tiny language of streams with the columns k (nullable int) and v (int): built once,
it can be evaluated here in plain Python, or turned into a topology by whoever tests one. The
windowed queries of the examples are recomputed from raw rows with Polars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import polars as pl

Row = tuple[int | None, int]
Slice = Mapping[str, list[Row]]  # rows per source

FOLDS: dict[str, Callable[[list[int]], int]] = {
    "count": len,
    "sum": sum,
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class Step:
    """One operator: `what` is source, filter, map, keep, sink, or the name of a fold."""

    name: str
    what: str
    reads: tuple[str, ...] = ()
    number: int = 1  # of a filter (drop multiples), a map (spread keys); parallelism of a fold


@dataclass
class Dataflow:
    """Steps in an order in which every step comes after those it reads."""

    steps: tuple[Step, ...]
    _values: dict[str, dict[int | None, list[int]]] = field(default_factory=dict)

    def run(self, rows: Slice) -> dict[str, Counter[Row]]:
        """Evaluate one slice; the rows that reach each sink."""
        streams: dict[str, list[Row]] = {}
        sinks: dict[str, Counter[Row]] = {}
        for step in self.steps:
            given = [row for name in step.reads for row in streams[name]]
            if step.what == "source":
                streams[step.name] = list(rows.get(step.name, []))
            elif step.what == "sink":
                sinks[step.name] = Counter(given)
            else:
                streams[step.name] = self._evaluate(step, given)
        return sinks

    def _evaluate(self, step: Step, given: list[Row]) -> list[Row]:
        if step.what == "filter":
            return [(k, v) for k, v in given if v % step.number]
        if step.what == "map":
            return [(None if k is None else k * 7 % step.number, v + 1) for k, v in given]
        if step.what == "keep":
            return given
        values = self._values.setdefault(step.name, {})
        for k, v in given:
            values.setdefault(k, []).append(v)
        touched = dict.fromkeys(k for k, _ in given)
        return [(k, FOLDS[step.what](values[k])) for k in touched]


def closed_word_counts(sentences: pl.DataFrame, watermark: object) -> pl.DataFrame:
    """G3: words per window of 30 s, for the windows that end at or before the watermark."""
    words = sentences.select("ts", word=pl.col("sentence").str.split(" ")).explode("word")
    counted = words.group_by(window_start=pl.col("ts").dt.truncate("30s"), word="word").agg(
        n=pl.len().cast(pl.Int64)
    )
    return counted.filter(pl.col("window_start") + pl.duration(seconds=30) <= watermark)


def hopping(rows: pl.DataFrame, size_s: int, hop_s: int) -> pl.DataFrame:
    """Each row once per window that contains it, with the window's start."""
    copies = [
        rows.with_columns(
            window_start=pl.col("ts").dt.truncate(f"{hop_s}s") - pl.duration(seconds=hop_s * i)
        )
        for i in range(size_s // hop_s)
    ]
    return pl.concat(copies)


def last_values(rows: Iterable[tuple[int, int | None, int]]) -> dict[int | None, int]:
    """From (slice, key, value): the value of each key in the newest slice that has it."""
    newest: dict[int | None, tuple[int, int]] = {}
    for number, key, value in rows:
        if key not in newest or number > newest[key][0]:
            newest[key] = (number, value)
    return {key: value for key, (_, value) in newest.items()}
