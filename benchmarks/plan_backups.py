"""Backup plans against paper 003: backups by each algorithm, their times, and large graphs.

Run: python -m benchmarks.plan_backups [--quick]. Writes docs/results/plan_backups.svg and .md.
Times are the best of the repeats; for the large graphs the processor's time stands beside them,
since they are long enough for a shared machine to count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from anabranch.planning.backups.cover import Effort
from anabranch.planning.backups.exact import optimal_backups
from anabranch.planning.backups.paper import (
    dag_backups,
    line_backups,
    share_based_backups,
    tree_backups,
)
from anabranch.planning.backups.plan import BackupPlan, BackupProblem, latencies
from anabranch.planning.graph import TaskGraph
from anabranch.planning.workloads import topologies
from benchmarks.report import RESULTS, figures, machine, table

Planner = Callable[[BackupProblem], BackupPlan]
ALGORITHMS: dict[str, Planner] = {
    "exact": optimal_backups,
    "dag": dag_backups,
    "share": share_based_backups,
}
LARGEST = "Senti-1050"
# Milliseconds of table III: exhaustive, tree, DAG, share-based (None: not given there).
PAPER_MS: dict[str, tuple[float, float | None, float, float]] = {
    "Line-u": (54, 0.5, 1.2, 10),
    "Line-n": (57, 0.6, 1.5, 10),
    "Tree-u": (892, 0.8, 1.6, 10),
    "Tree-n": (904, 0.9, 1.8, 10),
    "Guru-u": (1160, None, 20, 8),
    "Guru-n": (1210, None, 23, 10),
    "Senti-560-u": (12340, None, 287, 28),
    "Senti-1050-u": (108220, None, 501, 29),
}
RANDOM_TASKS, RANDOM_EDGES = 10_000, 50_000


@dataclass(frozen=True)
class Case:
    name: str
    graph: TaskGraph
    reprocess_s: float | dict[str, float]
    bounds: Sequence[float]


@dataclass(frozen=True)
class Outcome:
    """Per algorithm and bound: backups, and the best of the repeats in milliseconds."""

    case: Case
    backups: dict[str, list[int]]
    ms: dict[str, list[float]]

    def extra_pct(self, algorithm: str) -> float:
        """Mean over the bounds that need backups: how many more than the optimum."""
        pairs = zip(self.backups[algorithm], self.backups["exact"], strict=True)
        return statistics.fmean(100 * (b / best - 1) for b, best in pairs if best)


def cases(points: int) -> list[Case]:
    """Each topology with all times 1, and with times 1..10; bounds from tightest to needless."""
    graphs = {
        "Line": topologies.lines([12, 9, 7]),
        "Tree": topologies.tree(40, seed=1),
        "Guru": topologies.signal_guru(),
        "Senti-560": topologies.twitter_sentiment(50, 20, 20),
        LARGEST: topologies.twitter_sentiment(30, 30, 30),
    }
    found = []
    for name, graph in graphs.items():
        times = topologies.reprocess_times(graph, seed=1)
        for kind, reprocess in (("u", 1.0), ("n", times)):
            problem = BackupProblem.of(graph, 1.0, reprocess)
            low, high = max(problem.reprocess_s), max(latencies(problem, ()))
            step = max(1, round((high - low) / points))
            bounds = [float(b) for b in range(int(low), int(high), step)]
            found.append(Case(f"{name}-{kind}", graph, reprocess, bounds))
    return found


def measure(case: Case, repeats: int) -> Outcome:
    planners = dict(ALGORITHMS)
    if case.graph.is_forest:
        planners["tree"] = line_backups if case.name.startswith("Line") else tree_backups
    outcome = Outcome(case, {a: [] for a in planners}, {a: [] for a in planners})
    for bound in case.bounds:
        problem = BackupProblem.of(case.graph, bound, case.reprocess_s)
        for name, planner in planners.items():
            spent = []
            for _ in range(repeats):
                start = time.perf_counter()
                plan = planner(problem)
                spent.append(1000 * (time.perf_counter() - start))
            if name == "exact" and not plan.optimal:
                raise SystemExit(f"{case.name}, bound {bound}: the optimum was not proven.")
            outcome.backups[name].append(len(plan.backups))
            outcome.ms[name].append(min(spent))
    return outcome


def random_graphs(fractions: Sequence[float], kinds: str) -> list[tuple[object, ...]]:
    """Plan a random DAG of 10,000 tasks for bounds that are fractions of its worst latency."""
    graph = topologies.random_dag(RANDOM_TASKS, RANDOM_EDGES, seed=1)
    rows: list[tuple[object, ...]] = []
    for kind in kinds:
        times = 1.0 if kind == "u" else topologies.reprocess_times(graph, seed=1)
        worst = max(latencies(BackupProblem.of(graph, 1.0, times), ()))
        for fraction in fractions:
            problem = BackupProblem.of(graph, int(fraction * worst), times)
            start, busy = time.perf_counter(), time.process_time()
            plan = optimal_backups(problem, effort=Effort(3.0))
            spent, busy = time.perf_counter() - start, time.process_time() - busy
            rows.append(
                (
                    f"{kind}, {fraction:g} of {worst:g} s",
                    len(plan.backups),
                    int(plan.lower_bound),
                    plan.gap_pct,
                    spent,
                    busy,
                )
            )
    return rows


def quality_rows(outcomes: Sequence[Outcome]) -> list[list[object]]:
    rows: list[list[object]] = []
    for o in outcomes:
        tree = o.extra_pct("tree") if "tree" in o.backups else "-"
        total = sum(o.backups["exact"])
        row = [o.case.name, len(o.case.bounds), total, tree, o.extra_pct("dag")]
        rows.append([*row, o.extra_pct("share")])
    return rows


def time_rows(outcomes: Sequence[Outcome]) -> list[list[object]]:
    rows: list[list[object]] = []
    for o in outcomes:
        ours = [statistics.fmean(o.ms[a]) if a in o.ms else "-" for a in ("exact", "tree", "dag")]
        theirs: Sequence[object] = PAPER_MS.get(o.case.name, ("-",) * 4)
        share = statistics.fmean(o.ms["share"])
        rows.append([o.case.name, *ours, share, *("-" if t is None else t for t in theirs)])
    return rows


QUALITY = ("case", "bounds", "optimum, sum", "tree +%", "dag +%", "share +%")
TIMES = ("mean ms", "exact", "tree", "dag", "share", "paper: exhaustive", "tree", "dag", "share")
RANDOM = ("times, bound", "backups", "proven bound", "gap %", "seconds", "of processor")


def plot(outcomes: Sequence[Outcome]) -> None:
    """Backups by bound, one panel per case, like figures 7 and 8 of the paper."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, (len(outcomes) + 1) // 2, figsize=(16, 6))
    styles = {"exact": "k-", "dag": "C0o--", "share": "C3x:", "tree": "C2+:"}
    for axis, o in zip(axes.T.flat, outcomes, strict=False):
        for name, counts in o.backups.items():
            axis.plot(o.case.bounds, counts, styles[name], label=name, markersize=4)
        axis.set_title(o.case.name)
        axis.set_xlabel("recovery bound, s")
    axes.flat[0].set_ylabel("backups")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=4)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / "plan_backups.svg")


def write_tables(tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[object]]]]) -> None:
    lines = [
        "# Backup plans",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {machine()}; `python -m benchmarks.plan_backups`. "
        f"Load average {os.getloadavg()[0]:.0f}; times are the best of the repeats.",
        "",
        "![Backups by recovery bound](plan_backups.svg)",
    ]
    for title, columns, rows in tables:
        lines += ["", f"## {title}", "", "| " + " | ".join(columns) + " |"]
        lines.append("|" + "---|" * len(columns))
        for row in rows:
            cells = (f"{c:.3g}" if isinstance(c, float) else str(c) for c in row)
            lines.append("| " + " | ".join(cells) + " |")
    (RESULTS / "plan_backups.md").write_text("\n".join([*lines, ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer bounds and repeats")
    quick = parser.parse_args().quick
    outcomes = [measure(case, 2 if quick else 5) for case in cases(6 if quick else 25)]
    large = random_graphs((0.5,) if quick else (0.25, 0.5, 0.6, 0.75, 0.9), "u" if quick else "un")
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[object]]]] = [
        ("Backups over the optimum", QUALITY, quality_rows(outcomes)),
        ("Time of one plan, and table III of the paper", TIMES, time_rows(outcomes)),
        (f"Random DAG, {RANDOM_TASKS} tasks, {RANDOM_EDGES} edges", RANDOM, large),
    ]
    for title, columns, rows in tables:
        table(title, columns, rows)
    if not quick:
        plot(outcomes)
        write_tables(tables)
    biggest = [o for o in outcomes if o.case.name.startswith(LARGEST)]
    dags = [o for o in outcomes if "tree" not in o.backups]
    half = next(row for row in large if "u, 0.5 of" in str(row[0]))
    figures(
        {
            "heuristic_ms_largest": max(ms for o in biggest for ms in o.ms["dag"]),
            "heuristic_extra_pct": statistics.fmean(o.extra_pct("dag") for o in dags),
            "exact_s_largest": max(ms for o in biggest for ms in o.ms["exact"]) / 1000,
            "random_10k_s": float(str(half[4])),
            "random_10k_gap_pct": float(str(half[3])),
        }
    )


if __name__ == "__main__":
    main()
