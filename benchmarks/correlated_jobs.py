"""What `correlated` runs: queries that share their work, and judges of what they show.

A row costs a wait, as a call to a service would, so nodes are full though the machine is not. Every
operator shows each row once, with a running value, so what must be shown does not depend on where
slices begin. The judges share nothing with the operators: plain Python over the rows sent.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import polars as pl

import anabranch as ab
from benchmarks.workloads import read_files

RATE = 100  # rows a second
TAGS = 61
SIZES_S = (5, 10, 15, 20, 30)
PAIRS = tuple(combinations(range(len(SIZES_S)), 2))
SEGMENTS, VEHICLES = 40, 300
EVERY = 1_000_000  # files in a batch: all there are

Values = dict[int, int]  # by the number of the row
Slices = Sequence[Sequence[int]]  # which rows each has: a batch that piled up is cut in any way


@dataclass(frozen=True)
class Costs:
    """Shares of a node that one operator takes: of the first wave, and of the second."""

    first: float
    second: float


@dataclass(frozen=True)
class Case:
    """`rows` makes those of some numbers, `expected` what each sink must show of them, with the
    slices that they were in. The sink `whole` shows every row, and so what those are."""

    build: Callable[[Path, Costs], ab.Topology]
    rows: Callable[[range], pl.DataFrame]
    expected: Callable[[Slices], Mapping[str, Values]]
    whole: str


def _waits(seconds: float, rows: int) -> None:
    """What a call to a service takes."""
    time.sleep(seconds * rows)


# -- the 15 queries on hashtags (001, figure 8) --------------------------------------------------


def _frequency(size_s: int, row_s: float) -> ab.SliceFunction:
    """How often a hashtag was used in its window so far, per minute. Its class is nested, so that
    it is sent to nodes by value."""
    window = size_s * RATE

    class Frequency(ab.SliceFunction):
        state = {"window": pl.Int64, "n": pl.Int64}  # noqa: RUF012 - as users write it
        output = {"number": pl.Int64, "rate": pl.Int64}  # noqa: RUF012

        def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
            (tag,) = given.keys
            _waits(row_s, given.rows.height)
            rows = given.rows.sort("number").with_columns(window=pl.col("number") // window)
            before = given.state.select(tag, "window", before="n")
            known = rows.join(before, [tag, "window"], "left", maintain_order="left")
            so_far = pl.int_range(1, pl.len() + 1).over(tag, "window")
            counted = known.with_columns(n=pl.col("before").fill_null(0) + so_far)
            newest = counted.group_by(tag, maintain_order=True).last()
            return ab.SliceResult(
                output=counted.select(tag, "number", rate=pl.col("n") * 60 // size_s),
                state=newest.select(tag, "window", "n"),
            )

    return Frequency()


def _peak(row_s: float) -> ab.SliceFunction:
    """The highest rate of a hashtag in two windows."""

    class Peak(ab.SliceFunction):
        state = {"peak": pl.Int64}  # noqa: RUF012
        output = {"number": pl.Int64, "peak": pl.Int64}  # noqa: RUF012

        def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
            (tag,) = given.keys
            both = given.rows.group_by(tag, "number").agg(pl.max("rate")).sort("number")
            _waits(row_s, both.height)
            before = given.state.select(tag, before="peak")
            known = both.join(before, tag, "left", maintain_order="left")
            highest = pl.max_horizontal("rate", pl.col("before").fill_null(0))
            new = known.select(tag, "number", peak=highest.cum_max().over(tag))
            newest = new.group_by(tag, maintain_order=True).last()
            return ab.SliceResult(output=new, state=newest.select(tag, "peak"))

    return Peak()


def hashtags(root: Path, costs: Costs) -> ab.Topology:
    """Source → Parser → O0 … O4, counts by windows of five sizes; O5 … O14 follow two of them each.
    Every operator is one partition and one query."""
    topology = ab.Topology("hashtags")

    def read(spark: Any) -> Any:
        return read_files(spark, root / "in", "number long, text string", EVERY)

    tag = pl.col("text").str.extract(r"#(\w+)")
    parsed = topology.source("tweets", read).select("parser", "number", tag=tag)
    rates = []
    for i, size in enumerate(SIZES_S):  # keys with names of their own, so that no two are fused
        mine = parsed.select(f"tags{i}", "number", pl.col("tag").alias(f"tag{i}"))
        function = _frequency(size, costs.first / RATE)
        counts = mine.key_by(f"tag{i}").process(f"O{i}", function, parallelism=1)
        counts.to(f"Q{i}", ab.Parquet(str(root / "out" / f"Q{i}")))
        rates.append(counts)
    for i, (one, other) in enumerate(PAIRS, start=len(SIZES_S)):
        one_rate, other_rate = (
            rates[j].select(f"rate{j}_{i}", pl.col(f"tag{j}").alias(f"tag{i}"), "number", "rate")
            for j in (one, other)
        )
        both = one_rate.union(other_rate).key_by(f"tag{i}")
        peaks = both.process(f"O{i}", _peak(costs.second / RATE), parallelism=1)
        peaks.to(f"Q{i}", ab.Parquet(str(root / "out" / f"Q{i}")))
    return topology


def _tag(number: int) -> str:
    return f"t{number * 7_919 % 1_009 % TAGS}"


def tweets(numbers: range) -> pl.DataFrame:
    return pl.DataFrame(
        {"number": list(numbers), "text": [f"so much #{_tag(n)} today" for n in numbers]},
        schema={"number": pl.Int64, "text": pl.String},
    )


def expected_hashtags(slices: Slices) -> Mapping[str, Values]:
    rates = [_rates(slices, size) for size in SIZES_S]
    found = {f"Q{i}": shown for i, shown in enumerate(rates)}
    for i, (one, other) in enumerate(PAIRS, start=len(SIZES_S)):
        peaks, shown = defaultdict[str, int](int), {}
        for number in chain.from_iterable(slices):
            tag = _tag(number)
            peaks[tag] = max(peaks[tag], rates[one][number], rates[other][number])
            shown[number] = peaks[tag]
        found[f"Q{i}"] = shown
    return found


def _rates(slices: Slices, size_s: int) -> Values:
    """A hashtag has one window at a time: what was counted in others is forgotten."""
    kept: dict[str, tuple[int, int]] = {}  # window and count of each hashtag, after a slice
    shown: Values = {}
    for numbers in slices:
        n = Counter[tuple[str, int]]({(tag, window): c for tag, (window, c) in kept.items()})
        for number in numbers:
            key = _tag(number), number // (size_s * RATE)
            n[key] += 1
            kept[key[0]] = key[1], n[key]
            shown[number] = n[key] * 60 // size_s
    return shown


# -- traffic (001, figure 1) ---------------------------------------------------------------------


def _running(column: str, row_s: float, where: str = "") -> ab.SliceFunction:
    """The running sum of a column by segment; `where` tells rows of one kind, which cost."""

    class Running(ab.SliceFunction):
        state = {"total": pl.Int64}  # noqa: RUF012
        output = {"number": pl.Int64, "value": pl.Int64}  # noqa: RUF012

        def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
            rows = given.rows.sort("number", *([where] if where else []))
            _waits(row_s, rows.height)
            before = given.state.select("seg", before="total")
            known = rows.join(before, "seg", "left", maintain_order="left")
            total = pl.col("before").fill_null(0) + pl.col(column).cum_sum().over("seg")
            new = known.select("seg", "number", value=total)
            newest = new.group_by("seg", maintain_order=True).last()
            return ab.SliceResult(output=new, state=newest.select("seg", total="value"))

    return Running()


def traffic(root: Path, costs: Costs) -> ab.Topology:
    """Locations → speeds by segment (4 partitions), incidents → their count (2), and what depends
    on both (2): three sinks, where the paper counts a query per partition of an output."""
    topology = ab.Topology("traffic")

    def read(spark: Any) -> Any:
        columns = "number long, kind long, seg long, value long"
        return read_files(spark, root / "in", columns, EVERY)

    rows = topology.source("rows", read)
    locations = rows.filter("locations", pl.col("kind") == 0)
    incidents = rows.filter("incidents", pl.col("kind") == 1)
    # A share of all partitions together; one row in four is an incident.
    speed_s, count_s = 4 * costs.first / (0.75 * RATE), 2 * costs.first / (0.25 * RATE)
    speeds = locations.key_by("seg").process("O3", _running("value", speed_s), parallelism=4)
    counts = incidents.key_by("seg").process("O4", _running("value", count_s), parallelism=2)
    both = speeds.select("s", "seg", "number", "value").union(
        counts.select("c", "seg", "number", "value")
    )
    joined = both.key_by("seg").process(
        "O5", _running("value", 2 * costs.second / RATE), parallelism=2
    )
    for name, stream, priority in (
        ("speeds", speeds, 4),
        ("counts", counts, 2),
        ("joined", joined, 2),
    ):
        stream.to(name, ab.Parquet(str(root / "out" / name)), priority=priority)
    return topology


def reports(numbers: range) -> pl.DataFrame:
    rows = [_report(n) for n in numbers]
    columns = ("kind", "seg", "value")
    return pl.DataFrame(
        {"number": list(numbers)} | {c: [r[i] for r in rows] for i, c in enumerate(columns)},
        schema=dict.fromkeys(("number", *columns), pl.Int64),
    )


def _report(number: int) -> tuple[int, int, int]:
    """Kind, segment, value."""
    return int(number % 4 == 3), number * 6_007 % 997 % SEGMENTS, number * 31 % 90


def expected_traffic(slices: Slices) -> Mapping[str, Values]:
    totals = defaultdict[tuple[str, int], int](int)
    found: dict[str, Values] = {"speeds": {}, "counts": {}, "joined": {}}
    for number in chain.from_iterable(slices):
        kind, seg, value = _report(number)
        name = "counts" if kind else "speeds"
        totals[name, seg] += value
        found[name][number] = totals[name, seg]
        totals["joined", seg] += totals[name, seg]
        found["joined"][number] = totals["joined", seg]
    return found


CASES = {
    "hashtags": Case(hashtags, tweets, expected_hashtags, whole="Q0"),
    "traffic": Case(traffic, reports, expected_traffic, whole="joined"),
}


# -- what was shown ------------------------------------------------------------------------------


def wrong(expected: Values, numbers: Sequence[int], values: Sequence[int]) -> tuple[int, int]:
    """Rows that are missing, and rows that are there twice or with another value."""
    want = Counter(expected.items())
    got = Counter(zip(numbers, values, strict=True))
    return (want - got).total(), (got - want).total()
