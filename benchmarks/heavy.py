"""A word count that is hard to recover: a large state, and a stated cost per word.

Sentences → splitter (2 partitions, an operator of its own) → counter (1 partition). Every word that
the counter knows has a note of a kilobyte beside its count; a word that is marked costs the counter
a stated time of CPU. Marked words come at a steady rate; unmarked ones fill the state before.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import anabranch as ab
from benchmarks.workloads import read_files

NOTE_BYTES = 1_000
WORDS = "sentence long, word long, costs boolean"
FILL_ROWS = 50_000  # in a file that fills the state
ALL_FILES = 1_000_000


class Split(ab.SliceFunction):
    """Passes words on; it has no state."""

    output = {"word": pl.Int64, "costs": pl.Boolean}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        return ab.SliceResult(output=given.rows.select("sentence", "word", "costs"))


class Count(ab.SliceFunction):
    """Counts words, and takes `cost_s` of CPU for each that costs."""

    state = {"n": pl.Int64, "note": pl.String}  # noqa: RUF012
    output = {"n": pl.Int64}  # noqa: RUF012

    def __init__(self, cost_s: float) -> None:
        self._cost_s = cost_s

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        until = time.process_time() + self._cost_s * int(given.rows["costs"].sum())
        counted = given.rows.group_by("word", maintain_order=True).agg(added=pl.len())
        known = counted.join(given.state, on="word", maintain_order="left")
        n = pl.col("n").fill_null(0) + pl.col("added").cast(pl.Int64)
        note = pl.col("note").fill_null(pl.lit("n" * NOTE_BYTES))
        new = known.select("word", n=n, note=note)
        while time.process_time() < until:
            pass
        return ab.SliceResult(output=new.select("word", "n"), state=new)


def topology(root: Path, cost_s: float, files: int = ALL_FILES) -> ab.Topology:
    """`files` of `root`/in go into a slice."""
    heavy = ab.Topology("heavy")
    rows = heavy.source("words", lambda s: read_files(s, root / "in", WORDS, files))
    words = rows.key_by("sentence").process("splitter", Split(), parallelism=2)
    counted = words.key_by("word").process("counter", Count(cost_s), parallelism=1)
    counted.filter("marked", pl.col("n") > 1).to("out", ab.Parquet(str(root / "out")))
    return heavy


def fill(directory: Path, words: int) -> int:
    """Write every word once, without cost; how many rows that are."""
    for number, first in enumerate(range(0, words, FILL_ROWS)):
        word = np.arange(first, min(first + FILL_ROWS, words))
        write(directory, f"fill-{number:06d}", word, costs=False)
    return words


def marked(number: int, rows: int, words: int) -> Any:
    """The words of one second, drawn evenly from all."""
    return np.random.default_rng(number).integers(0, words, rows)


def write(directory: Path, name: str, word: Any, costs: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame({"sentence": np.arange(len(word)) // 8, "word": word})
    hidden = directory / f".{name}.parquet"
    frame.with_columns(costs=pl.lit(costs)).write_parquet(hidden)
    hidden.rename(directory / f"{name}.parquet")


def expected(words: int, seconds: int, rows: int) -> dict[int, int]:
    """The final count of every word that was marked in so many seconds."""
    drawn = [marked(number, rows, words) for number in range(seconds)]
    word, n = np.unique(np.concatenate(drawn), return_counts=True)
    return dict(zip(word.tolist(), (n + 1).tolist(), strict=True))
