"""The rate goes 1× → 2.4× → 0.8× (paper 000, figure 12): what does adjusting online cost?

The sentiment topology (G2) on 3 nodes, one partition of each operator, with the autoscaler on,
against the same rows at the same rates without it, in interleaved pairs: CPU of every process of
the cluster, bytes through Spark's shuffle and in requests and reports, and the time of a slice by
phase. The limits of the autoscaler lie around what the busiest operator takes at the first rate,
so that it has to act at rates that leave this machine room to measure. Every output is computed
again from the raw rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from examples.twitter_sentiment import twitter_sentiment

import anabranch as ab
from anabranch.api.job import inside
from anabranch.generators import Tweets
from benchmarks import report
from benchmarks.kill_cases import TWEET, check_sentiment, sink, source
from benchmarks.recovery import FILES, _await
from benchmarks.workloads import (
    SETTINGS,
    START,
    control_bytes,
    cpu_seconds,
    say,
    scratch,
    shuffled_bytes,
    write_result,
)

NODES = 3
RATE = 1_500  # tweets per second at 1×
PROFILE = (1.0, 2.4, 0.8)
TWEETS = Tweets(seed=7, rate=RATE, users=2_000, topics=300)
SETTLE_S = 12.0
UPPER, LOWER = 1.5, 0.8  # limits of CPU, of what the busiest operator takes at 1×
SIDES = ("fixed", "elastic")


@dataclass(frozen=True)
class Sizes:
    pairs: int
    phase_s: float


FULL = Sizes(5, 20.0)
QUICK = Sizes(1, 20.0)
WARM = Sizes(1, 15.0)


class Feed:
    """A file of tweets twice a second, as many as the rate of the moment says."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.factor = PROFILE[0]
        self.rows = 0
        self._files = 0
        self._ended = threading.Event()
        directory.mkdir(parents=True)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        due = time.time()
        while not self._ended.wait(max(0.0, due - time.time())):
            count = int(RATE * self.factor / 2)
            hidden = self._directory / f".{self._files:06d}.parquet"
            frame = pl.DataFrame(pl.from_arrow(TWEETS.rows(self.rows, self.rows + count)))
            frame.write_parquet(hidden)
            at = START.timestamp() + self._files
            os.utime(hidden, (at, at))
            hidden.rename(self._directory / f"{self._files:06d}.parquet")
            self.rows, self._files = self.rows + count, self._files + 1
            due += 0.5

    def finish(self) -> pl.DataFrame:
        self._ended.set()
        self._thread.join()
        return pl.DataFrame(pl.from_arrow(TWEETS.rows(0, self.rows)))


@dataclass(frozen=True)
class Run:
    """One run of the profile: CPU seconds and bytes per row; the median slice of each phase."""

    cpu: float
    network: float
    slices: tuple[float, ...]
    busiest: float  # share of a core of the busiest operator at 1×
    changes: tuple[str, ...]
    lost: int
    duplicated: int


def autoscale(busiest: float) -> ab.Autoscale:
    return ab.Autoscale(
        upper=UPPER * busiest,
        lower=LOWER * busiest,
        interval="2s",
        cool_down="4s",
        down_after="6s",
        max_parallelism=NODES,
    )


def run_side(cluster: Any, spark: Any, root: Path, sizes: Sizes, scale: ab.Autoscale | None) -> Run:
    """With an autoscaler, or without one."""
    feed = Feed(root / "in" / "tweets")
    topology = twitter_sentiment(
        source(root, "tweets", TWEET, FILES), sink(root, "hot"), sink(root, "sentiments"), (1, 1, 1)
    )
    job = topology.start(spark, checkpoint=root / "ck", autoscale=scale or False)
    slices: dict[int, int] = {}
    job.on_progress(lambda p: slices.__setitem__(p.slice, p.rows_in))

    def read() -> int:
        return sum(slices.values())

    _await(lambda: read() > 0, 120.0)
    time.sleep(SETTLE_S)
    before = cpu_seconds(cluster), shuffled_bytes(spark) + control_bytes(job), read()
    phases: list[float] = []
    busiest = 0.0
    for factor in PROFILE:
        feed.factor = factor
        first = job.last_progress
        time.sleep(sizes.phase_s)
        assert first is not None
        busiest = busiest or max(inside(job).run.controller.load.measured[-1].cpu.values())
        seconds = [p.seconds for p in job.recent_progress if p.slice > first.slice]
        phases.append(statistics.median(seconds))
    rows = read() - before[2]
    cpu = (cpu_seconds(cluster) - before[0]) / rows
    network = (shuffled_bytes(spark) + control_bytes(job) - before[1]) / rows
    raw = feed.finish()
    _await(lambda: read() >= feed.rows)
    job.stop()
    if job.exception is not None:
        raise job.exception
    expected, found = check_sentiment(root, {"tweets": raw})
    changes = tuple(a.what for a in job.adjustments)
    lost, duplicated = (expected - found).total(), (found - expected).total()
    side = "elastic" if scale else "fixed"
    say(f"{side}: {cpu * 1e6:.1f} µs of CPU and {network:.0f} B a row; {'; '.join(changes)}")
    return Run(cpu, network, tuple(phases), busiest, changes, lost, duplicated)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Median extra in percent, and its 95 % interval by resampling the pairs."""
    extra = 100 * (np.array(ratios) - 1)
    draws = np.random.default_rng(1).choice(extra, (10_000, len(extra)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(np.median(extra)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair, shorter phases")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("elastic", SETTINGS)
        # The first run of a JVM is another thing; it says what the operators take.
        busiest = run_side(cluster, spark, root / "warm", WARM, None).busiest
        for pair in range(sizes.pairs):
            for side in SIDES if pair % 2 == 0 else reversed(SIDES):
                scale = autoscale(busiest) if side == "elastic" else None
                where = root / f"{side}-{pair}"
                runs[side].append(run_side(cluster, spark, where, sizes, scale))
        spark.stop()
    pairs = list(zip(runs["elastic"], runs["fixed"], strict=True))
    cpu = interval([e.cpu / f.cpu for e, f in pairs])
    network = interval([e.network / f.network for e, f in pairs])
    if not all(r.changes for r in runs["elastic"]):
        raise SystemExit("the autoscaler did nothing in some run: there is nothing to compare")
    columns = ["side", "CPU µs a row", "bytes a row", *(f"slice s at {f}×" for f in PROFILE)]
    columns += ["adjustments"]
    rows = [
        [
            side,
            1e6 * statistics.median(r.cpu for r in found),
            statistics.median(r.network for r in found),
            *(statistics.median(r.slices[i] for r in found) for i in range(len(PROFILE))),
            sum(len(r.changes) for r in found),
        ]
        for side, found in runs.items()
    ]
    report.table("The rate goes up and down", columns, rows)
    sentence = (
        f"Extra CPU {cpu[0]:+.2f} % [{cpu[1]:+.2f}, {cpu[2]:+.2f}], extra network "
        f"{network[0]:+.2f} % [{network[1]:+.2f}, {network[2]:+.2f}] over {sizes.pairs} pairs."
    )
    print(sentence)
    if not quick:
        changes = "\n".join(f"- {what}" for what in runs["elastic"][0].changes)
        limit = autoscale(busiest)
        note = (
            f"{NODES} nodes, slices of 1 s, {RATE:,} tweets/s at 1×; the autoscaler keeps the CPU "
            f"of a partition between {limit.lower:.3f} and {limit.upper:.3f} of a core."
        )
        write_result("elastic", "The rate goes up and down", note, columns, rows, sentence, changes)
    everything = [r for found in runs.values() for r in found]
    report.figures(
        {
            "cpu_extra_pct": cpu[0],
            "network_extra_pct": network[0],
            "lost": sum(r.lost for r in everything),
            "duplicated": sum(r.duplicated for r in everything),
        }
    )


if __name__ == "__main__":
    main()
