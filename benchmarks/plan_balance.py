"""Balance planners: plan time, migration, table and skew (002, figures 8 and 9).

Zipf keys (z = 0.8) on 10 tasks shift from interval to interval (f = 0.1); every planner keeps
its own assignment through the same history, starting from the plain hash. Once with every key
single (RN = 1) and once with one replica each (RN = 2). Migration is the share of all state
that moved, mean over intervals. A baseline counts as one to beat when in every interval it
kept the most loaded task below (1 + θ_max) times the mean and its table in the limit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from anabranch.planning.balance.baselines import (
    plan_hash,
    plan_min_table,
    plan_mixed,
    plan_readj,
    plan_task_backup,
    task_backups,
)
from anabranch.planning.balance.ftlb import plan_ftlb
from anabranch.planning.balance.load import BalanceProblem, Limits, Planner
from anabranch.planning.balance.routing import Assignment, Sla, home_assignment
from anabranch.planning.workloads.key_histories import Interval, key_history
from benchmarks import report

TASKS, SKEW, SHIFT, WINDOW = 10, 0.8, 0.1, 3
TABLE_MAX, SMALL_TABLE = 3000, 100
PLANNERS: dict[str, Planner] = {
    "FTLB": plan_ftlb,
    "Mixed": plan_mixed,
    "MinTable": plan_min_table,
    "Readj": plan_readj,
    "TaskB": plan_task_backup,
    "hash": plan_hash,
}
THETAS = [0.02, 0.05, 0.1, 0.2, 0.3]
SIZES = [5_000, 20_000, 100_000, 300_000, 1_000_000]


@dataclass
class Run:
    """What one planner did over one history."""

    seconds: list[float] = field(default_factory=list)
    migration: list[float] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    skew: list[float] = field(default_factory=list)
    theta_misses: int = 0

    def beaten_by_limits(self, limits: Limits) -> bool:
        return max(self.skew) > 1 + limits.theta_max + 1e-9 or max(self.table) > limits.table


def run(planner: Planner, home: Assignment, history: list[Interval], limits: Limits) -> Run:
    result, current = Run(), task_backups(home) if planner is plan_task_backup else home
    for interval in history:
        problem = BalanceProblem(interval.counts, interval.state, current, home, limits)
        start = time.thread_time()
        plan = planner(problem)
        result.seconds.append(time.thread_time() - start)
        result.migration.append(100 * plan.migration.cost / float(interval.state.sum()))
        result.table.append(plan.table)
        result.skew.append(plan.skew)
        missed = plan.theta > limits.theta_max + 1e-9
        result.theta_misses += missed and problem.oversized_key() is None
        current = plan.assignment
    return result


def settings(sizes: list[int]) -> Iterator[tuple[str, int, Limits]]:
    middle = 100_000 if 100_000 in sizes else sizes[1]
    for theta in THETAS:
        yield "fig 8", middle, Limits(theta_max=theta, table=min(TABLE_MAX, middle // 5))
    for keys in sizes:
        yield "fig 9", keys, Limits(theta_max=0.02, table=min(TABLE_MAX, keys // 5))
    yield "small table", middle, Limits(theta_max=0.05, table=SMALL_TABLE)


def measure(sizes: list[int], intervals: int) -> tuple[list[list[object]], dict[str, float]]:
    rows: list[list[object]] = []
    figures = {"million_keys_s": 0.0, "migration_vs_best_baseline_max": 0.0, "theta_misses": 0.0}
    histories: dict[int, tuple[Assignment, list[Interval]]] = {}
    for copies in (1, 2):
        histories.clear()
        for figure, keys, limits in settings(sizes):
            if keys not in histories:
                histories[keys] = _history(keys, copies, intervals)
            home, history = histories[keys]
            runs = {name: run(p, home, history, limits) for name, p in PLANNERS.items()}
            ours = runs["FTLB"]
            for name, result in runs.items():
                rows.append(
                    [
                        f"{figure} RN={copies} K={keys:,} θ={limits.theta_max}",
                        name,
                        float(np.mean(result.seconds)),
                        float(np.mean(result.migration)),
                        max(result.table),
                        max(result.skew),
                        "no" if result.beaten_by_limits(limits) else "yes",
                    ]
                )
                if name != "FTLB" and not result.beaten_by_limits(limits):
                    ratio = _ratio(sum(ours.migration), sum(result.migration))
                    key = "migration_vs_best_baseline_max"
                    figures[key] = max(figures[key], ratio)
            figures["theta_misses"] += ours.theta_misses
            if keys == max(sizes):
                figures["million_keys_s"] = max(figures["million_keys_s"], *ours.seconds)
    return rows, figures


def _ratio(ours: float, theirs: float) -> float:
    if ours == 0:
        return 0.0
    return ours / theirs if theirs else float("inf")


def _history(keys: int, copies: int, intervals: int) -> tuple[Assignment, list[Interval]]:
    home = home_assignment(np.arange(keys, dtype=np.uint64), TASKS, Sla({"normal": copies}))
    rng = np.random.default_rng(keys)
    history = key_history(
        rng, home.active, TASKS, z=SKEW, f=SHIFT, intervals=intervals, window=WINDOW
    )
    return home, list(history)


COLUMNS = ["setting", "planner", "plan s", "migration %", "table", "skew", "in limits"]


def write(rows: list[list[object]], figures: dict[str, float], intervals: int) -> None:
    def line(row: list[object]) -> str:
        cells = (f"{c:.4g}" if isinstance(c, float) else str(c) for c in row)
        return "| " + " | ".join(cells) + " |"

    text = [
        "# Balance planners",
        "",
        f"{time.strftime('%Y-%m-%d')}, {report.machine()}, `python -m benchmarks.plan_balance`. "
        f"{TASKS} tasks, Zipf {SKEW}, shift f = {SHIFT}, state of {WINDOW} intervals, table limit "
        f"min({TABLE_MAX:,}, K/5), in the last setting {SMALL_TABLE}; {intervals} intervals. "
        "Plan time is CPU seconds of one thread, "
        "mean; migration the mean share of all state that moved per interval; table and skew "
        "(largest load over the mean) the worst interval.",
        "",
        line(list(COLUMNS)),
        line(["---"] * len(COLUMNS)),
        *map(line, rows),
        "",
        "![plan time and migration](plan_balance.svg)",
        "",
        ", ".join(f"{k} {v:.4g}" for k, v in figures.items()),
        "",
    ]
    report.RESULTS.mkdir(parents=True, exist_ok=True)
    (report.RESULTS / "plan_balance.md").write_text("\n".join(text))


def plot(rows: list[list[object]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    for column, (start, label, values) in enumerate(
        [("fig 8 RN=2", "θ_max", THETAS), ("fig 9 RN=2", "keys", SIZES)]
    ):
        for line, (index, what) in enumerate([(2, "plan time, s"), (3, "migration, %")]):
            axis = axes[line][column]
            for name in ("FTLB", "Mixed", "MinTable", "Readj"):
                mine = [r for r in rows if str(r[0]).startswith(start) and r[1] == name]
                axis.plot(values, [r[index] for r in mine], marker="o", markersize=3, label=name)
            axis.set_xlabel(label)
            axis.set_ylabel(what)
            axis.set_xscale("log" if column else "linear")
            axis.set_yscale("log" if line == 0 else "linear")
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(report.RESULTS / "plan_balance.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and intervals")
    quick = parser.parse_args().quick
    sizes = [5_000, 20_000, 1_000_000] if quick else SIZES
    intervals = 3 if quick else 8
    rows, figures = measure(sizes, intervals)
    report.table("Balance planners", COLUMNS, rows)
    if not quick:
        write(rows, figures, intervals)
        plot(rows)
    report.figures({**figures, "theta_misses": int(figures["theta_misses"])})


if __name__ == "__main__":
    main()
