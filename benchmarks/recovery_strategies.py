"""`recovery --strategies`: ours against the strategies of paper 000 (table 9, figures 13a and 13b).

Measured where they differ: the counter of `heavy` has 500 MB of state and takes about 70 % of its
node, by a stated cost per word, and at least a minute of history lies behind when its node is
killed. UB and SB have no checkpoint, so they replay all of it; SC waits for its checkpoints and
takes every partition back to them. Whoever has checkpoints is killed as many slices after one. Then
ours by checkpoint interval, killed at the same shares of it. In the end every count is compared.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anabranch as ab
from anabranch.api.job import inside
from anabranch.control.policies.strategies import STRATEGIES
from benchmarks import heavy, report
from benchmarks.kill_cases import by_slice
from benchmarks.recovery import Outcome, Phases, Writer, batches, outcome, phases, usual_lag
from benchmarks.workloads import SETTINGS, say, scratch, spread, write_result

NODES = 3
RATE = 1_000  # words a second
COST_S = 0.0007  # of CPU for each: 70 % of a node
INTERVAL_S = 5
QUIET_S = 30  # executors are warm; with a checkpoint, history is only what came after it
LOOK_S = 0.25  # to look takes CPU, which the stream shall have
PATIENCE_S = 900.0  # UB and SB replay minutes, at little more than the rate of the stream
IN_TWO = "ours, in two"  # with a parallel recovery


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    words: int  # in the state, a kilobyte each
    history_s: int
    strategies: tuple[str, ...]
    intervals: tuple[int, ...]  # seconds
    # Of an interval, in slices after a checkpoint: when the node is killed.
    shares: tuple[float, ...] = (0.2, 0.4, 0.8)


FULL = Sizes(500_000, 60, ("ours", "R+SM", "SC", "UB", "SB", "AR"), (1, 5, 10, 30))
QUICK = Sizes(50_000, 10, ("ours", "UB"), (), (0.4,))


@dataclass(frozen=True)
class Sample:
    """One kill."""

    outcome: Outcome
    phases: Phases
    replayed: int  # slices


class Run:
    """A job under load, from the filling of its state to the comparison of its output."""

    def __init__(self, spark: Any, root: Path, sizes: Sizes, **options: Any) -> None:
        self._root, self._words = root, sizes.words
        before = self._filled = heavy.fill(root / "in", sizes.words)
        self.job = heavy.topology(root, COST_S).start(spark, checkpoint=root / "ck", **options)
        self._query = inside(self.job).query
        self.wait_for(lambda: self.rows >= before)
        self._writer = Writer(self._write)
        strategy = STRATEGIES[options.get("strategy", "ours")]
        self.checkpoints = strategy.checkpoints
        history_s = QUIET_S if strategy.checkpoints else sizes.history_s
        self.wait_for(lambda: bool(self.batches) and self.batches[-1].newest_file >= history_s)
        self.wait_for(lambda: not strategy.checkpoints or self.checkpoint_slice > 0)
        self.wait_for(lambda: not strategy.copies or self._is_copied)
        self.wait_for(self._is_steady)
        self._usual = usual_lag(self.batches)  # not of later ones: they may still be catching up

    def _write(self, number: int) -> None:
        word = heavy.marked(number, RATE, self._words)
        heavy.write(self._root / "in", f"{number:06d}", word, costs=True)

    @property
    def rows(self) -> int:
        return sum(p.rows_in for p in self.job.recent_progress)

    @property
    def batches(self) -> list[Any]:
        return batches(
            self._query, self._writer.times, self._root / "ck" / "spark" / "sources" / "0"
        )

    @property
    def checkpoint_slice(self) -> int:
        newest = self.job.last_progress
        return newest.checkpoint_slice if newest is not None else 0

    def _is_steady(self) -> bool:
        """Has the lag stopped falling, after the filling of the state and the start of a JVM?"""
        found = self.batches
        return len(found) > 20 and usual_lag(found) > 0.8 * usual_lag(found[:-10])

    @property
    def _is_copied(self) -> bool:
        placement = inside(self.job).run.controller.placement
        return placement is not None and len(placement.copies) == len(placement.owners)

    @property
    def used(self) -> float:
        """The share of a core that the counter took lately."""
        newest = self.job.recent_progress[-10:]
        span = (newest[-1].processing_ms - newest[0].processing_ms) / 1000
        return sum(p.cpu_s for p in newest[1:]) / span

    def wait_for(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.job.exception is not None:
                raise self.job.exception
            if time.monotonic() > deadline:
                raise SystemExit(f"it did not happen within {PATIENCE_S:.0f} s")
            time.sleep(LOOK_S)

    def after_checkpoint(self, slices: int) -> None:
        """Wait for so many slices after the next checkpoint, if there are any: all strategies and
        intervals shall have as much to replay."""

        def uncut() -> int:
            newest = self.job.last_progress
            return newest.slice - newest.checkpoint_slice if newest is not None else 0

        newest = self.checkpoint_slice
        if self.checkpoints:
            self.wait_for(lambda: self.checkpoint_slice > newest)
            self.wait_for(lambda: uncut() >= slices)

    def kill(self, cluster: Any) -> Sample:
        """Kill a node of the counter, and wait until all is as usual."""
        placement = inside(self.job).run.controller.placement
        assert placement is not None
        node = next(o.node for p, o in placement.owners.items() if p.chain == "counter")
        before = len(self.job.recoveries)
        cluster.kill(cluster.executors()[node][0], signal.SIGKILL)
        killed = time.time()
        self.wait_for(lambda: len(self.job.recoveries) > before)
        self.wait_for(
            lambda: (last := self.batches[-1]).began > killed and last.lag <= self._usual + 0.5
        )
        found = outcome(self.batches, killed, time.time(), self._usual)
        recovery = self.job.recoveries[before]
        replayed = recovery.to_slice - recovery.from_slice
        return Sample(found, phases(found, killed, self.job.recoveries[before:]), replayed)

    def settle(self) -> None:
        """Wait for the node that replaces the killed one, and for batches that are as usual."""
        self.wait_for(lambda: sum(r != "joining" for r in self.job.nodes.values()) >= NODES)
        self.wait_for(lambda: usual_lag(self.batches) <= self._usual + 0.5)

    def end(self) -> tuple[int, int]:
        """Stop; how many counts are missing, and how many are there that should not."""
        files = self._writer.finish()
        # Not until the newest file is read: a listing may have missed one that came just before.
        rows = self._filled + files * RATE
        self.wait_for(lambda: self.job.totals.read["words"] >= rows)
        self.job.stop()
        if self.job.exception is not None:
            raise self.job.exception
        expected = heavy.expected(self._words, files, RATE)
        shown = by_slice(self._root / "out").group_by("word").last().select("word", "n")
        want, got = Counter(expected.items()), Counter(map(tuple, shown.rows()))
        return (want - got).total(), (got - want).total()


def measure(
    cluster: Any, spark: Any, root: Path, sizes: Sizes, name: str, interval_s: int, **options: Any
) -> tuple[list[Sample], float]:
    interval = f"{interval_s}s"
    run = Run(spark, root, sizes, checkpoint_interval=interval, **options)
    used = run.used
    # Without checkpoints one kill says it all, and takes minutes.
    shares = sizes.shares if run.checkpoints else (0.0,)
    samples: list[Sample] = []
    for share in shares:
        if samples:
            run.settle()
        run.after_checkpoint(max(1, round(share * interval_s)))
        samples.append(run.kill(cluster))
    lost, duplicated = run.end()
    for s in samples:
        say(f"{name}: on schedule {s.outcome.on_schedule:.1f} s, {s.replayed} slices, {s.phases}")
    if lost or duplicated:
        raise SystemExit(f"{name}: {lost} counts were lost, {duplicated} are wrong")
    return samples, used


def run(quick: bool) -> None:
    sizes = QUICK if quick else FULL
    found: dict[str, list[Sample]] = {}
    used: list[float] = []
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("strategies", SETTINGS)
        for name in sizes.strategies:
            where = root / f"strategy-{name}"
            found[name], share = measure(
                cluster, spark, where, sizes, name, INTERVAL_S, strategy=name
            )
            used.append(share)
        name = IN_TWO
        found[name], _ = measure(
            cluster, spark, root / "in-two", sizes, name, INTERVAL_S, parallel_recovery=2
        )
        for seconds in sizes.intervals:
            name = f"every {seconds} s"
            if seconds == INTERVAL_S:
                found[name] = found["ours"]
            else:
                where = root / f"interval-{seconds}"
                found[name], _ = measure(cluster, spark, where, sizes, name, seconds)
        spark.stop()
    _report(sizes, found, statistics.median(used), quick)


def _report(sizes: Sizes, found: dict[str, list[Sample]], used: float, quick: bool) -> None:
    columns = [
        "strategy", "kills", "detect s", "restore s", "replay s", "catch up s", "on schedule s",
        "slices replayed", "lag before s",
    ]  # fmt: skip

    def median(samples: list[Sample], value: Any) -> float:
        return float(statistics.median(value(s) for s in samples))

    rows = [
        [
            name,
            len(samples),
            median(samples, lambda s: s.phases.detect),
            median(samples, lambda s: s.phases.restore),
            median(samples, lambda s: s.phases.replay),
            median(samples, lambda s: s.phases.catch_up),
            spread([s.outcome.on_schedule for s in samples]),
            median(samples, lambda s: s.replayed),
            median(samples, lambda s: s.outcome.usual_lag),
        ]
        for name, samples in found.items()
    ]
    report.table("A killed counter", columns, rows)
    figures = {
        f"{name}_s": median(found[name], lambda s: s.outcome.on_schedule)
        for name in found
        if not name.startswith("every")
    }
    if not quick:
        size = f"{sizes.words * heavy.NOTE_BYTES / 1e6:.0f} MB"
        note = (
            f"{NODES} nodes, slices of 1 s, a checkpoint every {INTERVAL_S} s "
            f"unless stated; {size} of state, {RATE:,} words/s at {COST_S * 1e6:.0f} µs each "
            f"({used:.0%} of a core in all), {sizes.history_s} s of history. Medians. Replay has "
            "the Spark job around it, too. On two cores, catching up competes with the start of "
            "the node that replaces the killed one: mind the range. On schedule is as it was just "
            "before the kill (the last column): SC, which waits for checkpoints, was late by then."
        )
        rest = (
            "![by strategy and by interval](recovery_strategies.svg)",
            f"`{json.dumps(figures)}`",
        )
        title = "A killed counter, by strategy"
        how = "recovery --strategies"
        write_result("recovery_strategies", title, note, columns, rows, *rest, how=how)
        _plot(sizes, found, report.RESULTS / "recovery_strategies.svg")
    report.figures(figures)


def _plot(sizes: Sizes, found: dict[str, list[Sample]], path: Path) -> None:
    """Bars of phases by strategy, and by checkpoint interval."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    groups = ([*sizes.strategies, IN_TWO], [f"every {i} s" for i in sizes.intervals])
    for axis, names in zip(axes, groups, strict=True):
        bottom = [0.0] * len(names)
        for phase in ("detect", "restore", "replay", "catch_up"):
            height = [statistics.median(getattr(s.phases, phase) for s in found[n]) for n in names]
            axis.bar(names, height, bottom=bottom, label=phase.replace("_", " "))
            bottom = [a + b for a, b in zip(bottom, height, strict=True)]
        axis.set_ylabel("seconds until on schedule")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    axes[1].set_title("ours, by checkpoint interval", fontsize=10)
    for axis in axes:
        axis.tick_params(axis="x", labelrotation=30)
    figure.tight_layout()
    figure.savefig(path)
