"""Few keys have most of the rows, and in the middle of the run others do (002, figures 7 to 10).

Zipf keys on four nodes; every row waits for a millisecond, as for a call to a service, so nodes are
full though the machine is not. Rows are there before they are read, so slices follow each other as
fast as the busiest node allows. Sides: keys where the hash puts them, keys that the job balances,
and keys that are as frequent as each other (ideal). The classic planners are asked about the same
loads: how much state would they move? What balancing costs where there is nothing to balance is
measured in alternated pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

import anabranch as ab
from anabranch.api.job import inside
from anabranch.model.placement import count_of, even_groups
from anabranch.operators.rows.hashing import key_groups
from anabranch.planning.balance.baselines import plan_min_table, plan_mixed, plan_readj
from anabranch.planning.balance.load import BalanceProblem, Limits, migration
from anabranch.planning.balance.routing import Assignment
from benchmarks import report
from benchmarks.workloads import SETTINGS, read_files, remove, say, scratch, write_result

NODES, KEYS, GROUPS, ZIPF = 4, 10_000, 128, 1.2
ROW_S = 0.001
ROWS = 4_000  # of a file, which is a slice: a second on four nodes, if they get the same
BALANCE = ab.Balance()
WITHIN_S = 30.0  # after the shift
WARM = 5  # slices

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    calm_s: float  # before the shift, and after it
    steady_s: float  # of a side that does not change
    pairs: int  # with and without, of even keys


FULL, QUICK = Sizes(90.0, 30.0, 9), Sizes(40.0, 20.0, 1)


# -- input -----------------------------------------------------------------------------------------


def keys_of(kind: str, file: int) -> Ints:
    """Of a file; the ranks of keys are by `kind`, "even" or the number of a shift."""
    dice = np.random.default_rng([file, sum(map(ord, kind))])
    if kind == "even":
        return np.asarray(dice.permutation(KEYS)[: min(ROWS, KEYS)].repeat(-(-ROWS // KEYS))[:ROWS])
    ranks = np.random.default_rng(int(kind)).permutation(KEYS)
    share = np.arange(1, KEYS + 1) ** -ZIPF
    return np.asarray(ranks[dice.choice(KEYS, ROWS, p=share / share.sum())])


@dataclass
class Input:
    """Files that are read one by one."""

    directory: Path
    keys: list[Ints] = field(default_factory=list)

    def write(self, kind: str, files: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(files):
            keys = keys_of(kind, len(self.keys))
            hidden = self.directory / f".{len(self.keys):05d}.parquet"
            pl.DataFrame({"k": keys, "v": np.arange(ROWS)}).write_parquet(hidden)
            # Spark takes files in the order of their times, in milliseconds.
            os.utime(hidden, (1_700_000_000 + len(self.keys),) * 2)
            hidden.rename(self.directory / hidden.name.removeprefix("."))
            self.keys.append(keys)


def counted(keys: Sequence[Ints]) -> Floats:
    """Rows by key group."""
    table = pa.table({"k": np.concatenate(keys)})
    return np.bincount(key_groups(table, ["k"], GROUPS), minlength=GROUPS).astype(np.float64)


# -- a side ----------------------------------------------------------------------------------------


def _slow() -> ab.SliceFunction:
    class Slow(ab.SliceFunction):
        state = {"total": pl.Int64}  # noqa: RUF012 - as users write it
        output = {"total": pl.Int64}  # noqa: RUF012

        def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
            time.sleep(ROW_S * given.rows.height)
            sums = given.rows.group_by("k", maintain_order=True).agg(pl.col("v").sum())
            known = sums.join(given.state, on="k", how="left", maintain_order="left")
            new = known.select("k", total=pl.col("total").fill_null(0) + pl.col("v"))
            return ab.SliceResult(output=new, state=new)

    return Slow()


@dataclass
class Side:
    """What a run of it has shown; times in seconds from its first slice."""

    ended: list[float] = field(default_factory=list)  # of slices
    layouts: list[tuple[int, ...]] = field(default_factory=list)  # in force after each
    pauses: list[float] = field(default_factory=list)  # of changes of the placement
    decisions: list[str] = field(default_factory=list)
    lost: int = 0
    wrong: int = 0

    @property
    def slice_s(self) -> float:
        return statistics.median(b - a for a, b in zip(self.ended, self.ended[1:], strict=False))

    def rate(self, begin: float, end: float) -> float:
        """Rows per second, in the slices that ended in this time."""
        some = [t for t in self.ended if begin <= t <= end]
        return ROWS * (len(some) - 1) / (some[-1] - some[0]) if len(some) > 2 else 0.0

    def layout_at(self, at: float) -> tuple[int, ...]:
        return next(x for t, x in zip(reversed(self.ended), reversed(self.layouts), strict=True)
                    if t <= at)  # fmt: skip


def run_side(
    spark: Any, root: Path, given: Input, seconds: float, balance: ab.Balance | bool
) -> Side:
    """Until so long after the first slices that the machine is warm."""
    found = Side()
    topology = ab.Topology("balance")
    source = topology.source("rows", lambda s: read_files(s, given.directory, "k long, v long", 1))
    sums = source.key_by("k").process("sum", _slow(), parallelism=NODES)
    sums.to("out", ab.Parquet(str(root / "out")))
    job = topology.start(spark, checkpoint=root / "ck", slice="50ms", balance=balance)
    began: list[float] = []

    def tell(progress: ab.Progress) -> None:
        placement = inside(job).run.controller.placement
        if progress.rows_in and placement is not None and progress.slice > WARM:
            began.append(time.monotonic())
            found.ended.append(began[-1] - began[0])
            found.layouts.append(placement.groups["sum"])

    inside(job).run.steps.on_progress.append(tell)
    try:
        while not began or time.monotonic() - began[0] < seconds:
            if job.exception is not None:
                raise job.exception
            time.sleep(0.1)
    finally:
        job.stop()
    if job.exception is not None:
        raise job.exception
    found.pauses = [a.seconds for a in job.adjustments]
    found.decisions = [str(d) for d in job.decisions]
    files = sum(job.totals.read.values()) // ROWS
    found.lost, found.wrong = _compared(root / "out", given.keys[:files])
    remove(root)
    return found


def _compared(out: Path, keys: Sequence[Ints]) -> tuple[int, int]:
    """Keys whose last total is missing, or not that of plain NumPy."""
    every = np.concatenate(keys)
    wanted = np.bincount(every, np.tile(np.arange(ROWS), len(keys)), KEYS).astype(np.int64)
    frames = [pl.DataFrame(schema={"k": pl.Int64, "total": pl.Int64, "slice": pl.Int64})]
    for one in out.glob("slice=*"):
        number = pl.lit(int(one.name.removeprefix("slice=")), pl.Int64)
        frames += [
            pl.read_parquet(f, hive_partitioning=False).select("k", "total", slice=number)
            for f in one.glob("*.parquet")
        ]
    newest = pl.concat(frames).sort("slice").group_by("k").last()
    shown = dict(newest.select("k", "total").rows())
    seen = np.unique(every).tolist()
    lost = sum(k not in shown for k in seen)
    return lost, sum(shown[k] != int(wanted[k]) for k in seen if k in shown)


# -- figures ---------------------------------------------------------------------------------------


def skew(layout: Sequence[int], rows: Floats) -> tuple[float, float]:
    """The load that is farthest from the mean, as a share of that (θ); and the largest, as a
    multiple of it."""
    loads = np.bincount(layout, rows, count_of(layout))
    return float(np.abs(loads / loads.mean() - 1).max()), float(loads.max() / loads.mean())


def _assigned(layout: Sequence[int]) -> Assignment:
    return Assignment(np.array(layout), np.empty((GROUPS, 0), dtype=np.int64), NODES)


def moved(before: Sequence[int], after: Sequence[int], rows: Floats, state: Floats) -> Any:
    """The share of the state that moves: ours; and that of the classic planner which moves least
    of those that keep θ, None: none does."""
    limits = Limits(BALANCE.theta_max, GROUPS)
    home = _assigned(even_groups(GROUPS, NODES))
    problem = BalanceProblem(rows, state, _assigned(before), home, limits)
    ours = migration(_assigned(before), _assigned(after), state).cost / state.sum()
    plans = [plan(problem) for plan in (plan_mixed, plan_min_table, plan_readj)]
    kept = [p.migration.cost / state.sum() for p in plans if p.theta <= BALANCE.theta_max]
    return ours, min(kept, default=None)


def measure(spark: Any, root: Path, sizes: Sizes) -> tuple[list[list[Any]], Mapping[str, Any]]:
    files = round(2.5 * sizes.calm_s)
    even = Input(root / "even")
    even.write("even", files)
    shifted, later = Input(root / "shifted"), Input(root / "later")
    later.write("2", files)
    say("keys that the job balances, with a shift")
    before_shift = round(0.75 * sizes.calm_s)  # slices, which take something more than a second
    shifted.write("1", before_shift)
    shifted.write("2", files)
    ours = run_side(spark, root / "ours", shifted, 2.2 * sizes.calm_s, BALANCE)
    say("keys where the hash puts them")
    hashed = run_side(spark, root / "hash", later, sizes.steady_s, False)
    say("even keys")
    ideal = run_side(spark, root / "ideal", even, sizes.steady_s, False)
    pairs = []
    for number in range(sizes.pairs):
        say(f"even keys, with and without: {number + 1} of {sizes.pairs}")
        rates = {}
        for on in (True, False) if number % 2 else (False, True):
            side = run_side(spark, root / "pair", even, sizes.steady_s, BALANCE if on else False)
            rates[on] = side.rate(0, sizes.steady_s)
        pairs.append(rates[True] / rates[False])

    end = ours.ended[-1]
    shift = ours.ended[max(0, before_shift - WARM)]
    rows = counted(shifted.keys[before_shift:])
    state = counted([np.unique(np.concatenate(shifted.keys))])
    changes = [
        (a, b)
        for t, a, b in zip(ours.ended[1:], ours.layouts, ours.layouts[1:], strict=False)
        if a != b and t > shift
    ]
    compared = [moved(a, b, rows, state) for a, b in changes]
    theta, largest = skew(ours.layout_at(shift + WITHIN_S), rows)
    hash_theta, hash_largest = skew(even_groups(GROUPS, NODES), rows)
    steady = (max(shift + WITHIN_S, end - sizes.steady_s), end)
    best = ideal.rate(0, sizes.steady_s)
    table = [
        ["hash", hash_theta, hash_largest, hashed.rate(0, sizes.steady_s), hashed.slice_s, 0.0],
        ["balance", theta, largest, ours.rate(*steady), ours.slice_s, max(ours.pauses, default=0)],
        ["ideal", 0.0, 1.0, best, ideal.slice_s, 0.0],
    ]
    for line in ours.decisions:
        say(line)
    kept = [c for c in compared if c[1]]
    return table, {
        "theta_after_shift": theta,
        "theta_hash": hash_theta,
        "vs_ideal": ours.rate(*steady) / best,
        "hash_vs_ideal": hashed.rate(0, sizes.steady_s) / best,
        "state_moved": sum(c[0] for c in compared),
        "moved_vs_best_baseline": sum(c[0] for c in kept) / sum(c[1] for c in kept)
        if kept
        else None,
        "idle_cost": statistics.median(pairs),
        "idle_cost_low": min(pairs),
        "idle_cost_high": max(pairs),
        "pause_slices": max(ours.pauses, default=0.0) / ours.slice_s,
        "lost": ours.lost + hashed.lost + ideal.lost,
        "wrong": ours.wrong + hashed.wrong + ideal.wrong,
    }


COLUMNS = ["side", "θ", "busiest ÷ mean", "rows/s", "s/slice", "longest pause s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under 5 minutes")
    given = parser.parse_args()
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("balance", SETTINGS)
        table, figures = measure(spark, root, QUICK if given.quick else FULL)
    report.table("Hot keys", COLUMNS, table)
    if not given.quick:
        note = (
            f"{KEYS:,} keys, Zipf {ZIPF}, {NODES} nodes, {GROUPS} key groups, {ROW_S * 1000:g} ms "
            f"a row; θ {WITHIN_S:.0f} s after other keys became the hot ones. Ideal: all keys are "
            "as frequent as each other."
        )
        write_result("balance", "Hot keys", note, COLUMNS, table)
    report.figures(figures)


if __name__ == "__main__":
    main()
