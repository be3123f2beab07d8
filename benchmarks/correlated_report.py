"""What `correlated` prints and draws of its episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.correlated_before import Pairs
from benchmarks.correlated_episode import LINGER_S
from benchmarks.correlated_measures import AVAILABLE, Floats, Measures, median
from benchmarks.correlated_staggered import Replays

STEPS = 9  # columns of a table over time
COLUMNS = [
    "episode", "nodes warm s", "first query s", "all back s", "query-s", "of ideal",
    "after arrival", "live latency", "p99", "lost", "wrong",
]  # fmt: skip
LOSSES = ["staggered losses", "replayed", "needed", "ratio"]


@dataclass(frozen=True)
class Result:
    """One episode. `measures` is missing where only what was shown in the end counts."""

    group: str
    name: str
    lost: int
    duplicated: int
    measures: Measures | None = None
    by_rows: float = math.nan  # of ideal, if slices took nothing but the work of nodes


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def live_latency(measures: Measures, share: float) -> float:
    """Of queries that lost nothing."""
    found = measures.live_latency
    return float(np.quantile(found, share)) if len(found) else math.nan


def _cell(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "–"


def row(result: Result) -> list[object]:
    m = result.measures
    if m is None:
        return [result.name, *["–"] * (len(COLUMNS) - 3), result.lost, result.duplicated]
    return [
        result.name,
        ", ".join(f"{at:.0f}" for at in m.warm),
        _cell(m.first_query_s),
        _cell(m.back_s),
        _cell(m.area(m.until)),
        _cell(m.of_ideal),
        _cell(median(m.after_arrival)),
        _cell(live_latency(m, 0.5)),
        _cell(live_latency(m, 0.99)),
        result.lost,
        result.duplicated,
    ]


def times(results: Sequence[Result], count: int) -> Floats:
    """From the disaster until the last measurement ended."""
    ends = [r.measures.measured for r in results if r.measures is not None]
    end = max(0.0, max(ends, default=0.0) - LINGER_S / 2)
    return np.asarray(np.linspace(0.0, end, count), dtype=np.float64)


def over_time(results: Sequence[Result]) -> tuple[list[str], list[list[object]]]:
    """Available queries, beside those that could be; columns are seconds after the disaster."""
    at = times(results, STEPS)
    rows: list[list[object]] = []
    for result in results:
        if (m := result.measures) is not None:
            rows.append([result.name, *_until(m, at, m.available(at))])
            rows.append(["  … could be", *(str(int(n)) for n in m.ideal(at))])
    return ["available queries", *(f"{t:.0f} s" for t in at)], rows


def latencies(results: Sequence[Result]) -> tuple[list[str], list[list[object]]]:
    """Mean relative latency of queries that lost something, and of the others."""
    at = times(results, STEPS)
    rows: list[list[object]] = []
    for result in results:
        if (m := result.measures) is not None:
            for what, sinks in (("failed", m.lost), ("normal", m.unhurt)):
                if sinks:
                    rows.append([f"{result.name}, {what}", *_until(m, at, m.latency(at, sinks))])
    return ["relative latency", *(f"{t:.0f} s" for t in at)], rows


def _until(measures: Measures, at: Floats, values: Floats) -> list[str]:
    pairs = zip(at, values, strict=True)
    return [_cell(v) if t <= measures.measured else "" for t, v in pairs]


def staggered(found: Sequence[Replays]) -> list[list[object]]:
    return [[r.losses, r.replayed, r.needed, f"{r.ratio:.3f}"] for r in found]


def before(pairs: Pairs) -> str:
    low, high = pairs.interval
    return (
        f"Healthy throughput, now ÷ before: {pairs.median:.3f} [{low:.3f}–{high:.3f}], "
        f"{len(pairs.rates)} alternated pairs"
    )


def show(groups: Mapping[str, Sequence[Result]]) -> None:
    for group, results in groups.items():
        report.table(group, COLUMNS, [row(r) for r in results])
        if any(r.measures for r in results):
            report.table(f"{group}: over time", *over_time(results))
            report.table(f"{group}: over time", *latencies(results))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# -- pictures ------------------------------------------------------------------------------------


def plot(groups: Mapping[str, Sequence[Result]], path: Path) -> None:
    """A row per group: available queries, and the relative latency of those that lost something."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    drawn = {g: rs for g, rs in groups.items() if any(r.measures for r in rs)}
    figure, axes = plt.subplots(len(drawn), 2, figsize=(11, 3.4 * len(drawn)), squeeze=False)
    for (group, results), (left, right) in zip(drawn.items(), axes, strict=True):
        _draw(left, right, [r for r in results if r.measures is not None])
        left.set_title(group, fontsize=10)
        left.set_ylabel("available queries")
        right.set_ylabel("relative latency, failed queries")
        for axis in (left, right):
            axis.set_xlabel("seconds after the disaster")
            axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _draw(left: Any, right: Any, results: Sequence[Result]) -> None:
    for number, result in enumerate(results):
        m = result.measures
        assert m is not None
        at = np.asarray(np.arange(0.0, m.measured, 0.5), dtype=np.float64)
        color = f"C{number}"
        left.step(at, m.available(at), where="post", color=color, label=result.name)
        left.step(at, m.ideal(at), where="post", color=color, alpha=0.4, linestyle=":")
        right.plot(at, m.latency(at, m.lost), color=color, label=result.name)
    right.axhline(AVAILABLE, color="gray", linewidth=0.7)
    right.set_yscale("log")
    left.legend(frameon=False, fontsize=8)
