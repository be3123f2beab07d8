"""A node is killed right after a scale-up between two checkpoints (paper 000, figure 14, table 9).

The heavy counter of `recovery --strategies` goes from one partition to two, half an interval after
a checkpoint; then a node that has one of them is killed. Ours recovers the state after the scaling.
R+SM has only split the checkpoint before it, and replays from there. SC rolls everything back to
that checkpoint and to one partition, replays, and scales again. In the end every count is compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anabranch as ab
from benchmarks import heavy, recovery_strategies, report
from benchmarks.recovery_strategies import COST_S, NODES, RATE, Run, Sample
from benchmarks.workloads import SETTINGS, say, scratch, spread, write_result

STRATEGIES = ("ours", "R+SM", "SC")
FULL = replace(recovery_strategies.FULL, intervals=(10, 20, 30))
QUICK = replace(recovery_strategies.QUICK, history_s=12, intervals=(10,))
UNDER_S = 2.0  # of the stream under the new placement before the kill


def measure(
    cluster: Any, spark: Any, root: Path, sizes: Any, name: str, interval_s: int
) -> tuple[Sample, tuple[int, int]]:
    run = Run(spark, root, sizes, checkpoint_interval=f"{interval_s}s", strategy=name)
    run.after_checkpoint(interval_s // 2)
    run.job.scale("counter", 2)
    run.wait_for(lambda: bool(run.job.adjustments))
    time.sleep(UNDER_S)
    sample = run.kill(cluster)
    run.wait_for(lambda: not run.job.is_adjusting)
    wrong = run.end()
    say(
        f"{name}, every {interval_s} s: on schedule after {sample.outcome.on_schedule:.1f} s, "
        f"{sample.replayed} slices replayed, {wrong[0]} counts lost, {wrong[1]} wrong"
    )
    return sample, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 MB of state, one interval")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    found: dict[tuple[str, int], Sample] = {}
    lost = duplicated = 0
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("after scaling", SETTINGS)
        for seconds in sizes.intervals:
            for name in STRATEGIES:
                where = root / f"{name}-{seconds}"
                found[name, seconds], wrong = measure(cluster, spark, where, sizes, name, seconds)
                lost, duplicated = lost + wrong[0], duplicated + wrong[1]
        spark.stop()
    columns = [
        "interval", "strategy", "detect s", "restore s", "replay s", "catch up s", "on schedule s",
        "slices replayed",
    ]  # fmt: skip
    rows = [
        [
            f"{seconds} s",
            name,
            s.phases.detect,
            s.phases.restore,
            s.phases.replay,
            s.phases.catch_up,
            s.outcome.on_schedule,
            s.replayed,
        ]
        for (name, seconds), s in found.items()
    ]
    report.table("A killed node after a scale-up", columns, rows)

    def ratio(name: str) -> list[float]:
        return [
            found["ours", i].outcome.on_schedule / found[name, i].outcome.on_schedule
            for i in sizes.intervals
        ]

    if not quick:
        note = (
            f"{NODES} nodes, slices of 1 s; {sizes.words * heavy.NOTE_BYTES / 1e6:.0f} MB of "
            f"state, {RATE:,} words/s at {COST_S * 1e6:.0f} µs each. "
            f"Ours ÷ SC {spread(ratio('SC'))}, ours ÷ R+SM {spread(ratio('R+SM'))}."
        )
        write_result(
            "recovery_after_scaling", "A killed node after a scale-up", note, columns, rows
        )
    report.figures(
        {
            "vs_sc": statistics.median(ratio("SC")),
            "vs_rsm": statistics.median(ratio("R+SM")),
            "lost": lost,
            "duplicated": duplicated,
        }
    )


if __name__ == "__main__":
    main()
