"""Most nodes of a cluster die at once and come back one by one: which queries go on, and when the
others are back (001, figures 6 and 9 to 14; 004, figure 5).

Fifteen queries on hashtags that share their work; every operator waits for each row as for a call
to a service, so nodes are full though the machine is not. Sides: back as nodes come (incremental),
all together (blocking), all on what is left (eager), and all nodes at the mean time of arrival
(best case); the planners of the papers; traffic; fewer nodes that die; a driver that dies as well.
Every sink is compared with plain Python, row by row. `--before COMMIT` compares the throughput of a
healthy job with that of a commit.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import correlated_before, correlated_staggered, report
from benchmarks import correlated_report as shown
from benchmarks.correlated_before import Pairs
from benchmarks.correlated_episode import INTERVAL_S, Plan, run_episode
from benchmarks.correlated_harm import run_harm
from benchmarks.correlated_jobs import CASES, Costs
from benchmarks.correlated_measures import Measures, median
from benchmarks.correlated_report import Result, finite
from benchmarks.correlated_staggered import Replays
from benchmarks.workloads import say, scratch, write_result

# Five nodes on two cores: a slice takes half a second beside the waits of its operators, which
# would be half of the usual interval.
OPTIONS = {"checkpoint_interval": "10s", "slice": f"{INTERVAL_S:g}s"}
# Arrivals as in figure 6, 2 to 6 minutes, in seconds; each is the middle of its share.
FIRST_S, LAST_S = 120.0, 360.0
SCALE, QUICK_SCALE = 12, 24
SIDES, PLANNERS, TRAFFIC = "15 queries on hashtags", "planners", "traffic"
FEWER, HARM = "fewer nodes killed", "driver and three more nodes killed"
GROUPS = {"sides": SIDES, "planners": PLANNERS, "traffic": TRAFFIC, "fewer": FEWER, "harm": HARM}
# Nodes → operators' costs. All together need two or three nodes: what is left carries a part, some
# arrivals bring back more, and the last ones are for relief. With more than that, slices of all
# queries take nearly their whole interval on these cores, and nobody can catch up.
HASHTAGS = {5: Costs(0.15, 0.08), 8: Costs(0.20, 0.11)}
# Traffic: 6 partitions of the first wave and 2 of the second.
ROADS = {5: Costs(0.25, 0.28), 8: Costs(0.37, 0.42)}
SHORT_S = 60.0  # of patience: planners differ in who comes first
KILLED = {5: 4, 8: 6}
FEWER_KILLED = {5: 3, 8: 5}


def arrivals(count: int, scale: float) -> tuple[float, ...]:
    step = (LAST_S - FIRST_S) / count
    return tuple((FIRST_S + step * (i + 0.5)) / scale for i in range(count))


def first_plan(nodes: int, quick: bool) -> Plan:
    """The incremental side."""
    killed = KILLED[nodes]
    plan = Plan(
        "incremental",
        "hashtags",
        nodes,
        killed,
        arrivals(killed, QUICK_SCALE if quick else SCALE),
        HASHTAGS[nodes],
        OPTIONS,
    )
    return replace(plan, steady_s=10.0, patience_s=55.0) if quick else plan


def plans(nodes: int, quick: bool) -> dict[str, list[Plan]]:
    """By group. All but the first side differ from it in what their name says."""
    plan = first_plan(nodes, quick)
    blocking = replace(plan, side="blocking", options={**OPTIONS, "recovery": "blocking"})
    if quick:
        return {SIDES: [plan, blocking]}
    eager = replace(plan, side="eager", options={**OPTIONS, "recovery": "eager"})
    mean = (statistics.fmean(plan.arrivals),) * plan.killed
    best = replace(plan, side="best case", arrivals=mean)
    planned = [
        replace(plan, side=name, options={**OPTIONS, "strategy": name}, patience_s=SHORT_S)
        for name in ("DP", "BestDensity", "PRG", "OC")
    ]
    roads = [replace(p, case="traffic", costs=ROADS[nodes]) for p in (plan, blocking)]
    fewer = [
        replace(
            p,
            side=f"{p.side}, {hit} hit",
            hit=hit,
            killed=FEWER_KILLED[nodes],
            arrivals=plan.arrivals[: FEWER_KILLED[nodes]],
            patience_s=SHORT_S,
        )
        for p, hit in ((plan, "most"), (blocking, "most"), (plan, "fewest"))
    ]
    return {
        SIDES: [plan, blocking, eager, best],
        PLANNERS: planned,
        TRAFFIC: roads,
        FEWER: fewer,
        HARM: [replace(plan, side="harm")],
    }


def episode(group: str, plan: Plan) -> Result:
    """The run goes on if it fails, and says so in the end."""
    say(f"{group}: {plan.side}")
    with scratch() as root:
        run = run_harm if group == HARM else run_episode
        found = run(plan, CASES[plan.case], root)
    if group == HARM:
        return Result(group, plan.side, found.lost, found.duplicated)
    by_rows = Measures.of(found, alone=True).of_ideal
    return Result(group, plan.side, found.lost, found.duplicated, Measures.of(found), by_rows)


def run_all(given: Mapping[str, Sequence[Plan]]) -> tuple[dict[str, list[Result]], int]:
    """Results by group, and how many episodes failed."""
    groups: dict[str, list[Result]] = {}
    failed = 0
    for group, some in given.items():
        groups[group] = []
        for plan in some:
            try:
                groups[group].append(episode(group, plan))
            except (Exception, SystemExit) as problem:  # Spark's are of many kinds
                failed += 1
                say(f"{group}: {plan.side} failed: {type(problem).__name__}: {problem}")
    return groups, failed


# -- figures -------------------------------------------------------------------------------------


def figures(
    groups: Mapping[str, Sequence[Result]],
    failed: int,
    replays: Sequence[Replays],
    survived: int,
    pairs: Pairs | None,
) -> dict[str, Any]:
    """Of the last line. What was not measured is null."""
    every = [r for results in groups.values() for r in results]
    low, high = pairs.interval if pairs else (None, None)
    return {
        "lost": sum(r.lost for r in every),
        "duplicated": sum(r.duplicated for r in every),
        "episodes_failed": failed,
        **_of_incremental(_measures(groups, SIDES, "incremental")),
        "area_vs_ideal_by_rows": _by_rows(groups),
        "area_vs_blocking": _ratio(groups, SIDES),
        **_areas(groups),
        "replay_ratio": max(r.ratio for r in replays),
        "staggered_survived": survived,
        "throughput_vs_before": pairs.median if pairs else None,
        "throughput_vs_before_low": low,
        "throughput_vs_before_high": high,
    }


def _measures(groups: Mapping[str, Sequence[Result]], group: str, name: str) -> Measures | None:
    return next((r.measures for r in groups.get(group, ()) if r.name == name), None)


def _by_rows(groups: Mapping[str, Sequence[Result]]) -> float | None:
    found = [r.by_rows for r in groups.get(SIDES, ()) if r.name == "incremental"]
    return finite(found[0]) if found else None


def _of_incremental(m: Measures | None) -> dict[str, float | None]:
    values: dict[str, Callable[[Measures], float]] = {
        "first_query_s": lambda m: m.first_query_s,
        "area_vs_ideal": lambda m: m.of_ideal,
        "after_arrival_ratio": lambda m: median(m.after_arrival),
        "live_latency_median": lambda m: shown.live_latency(m, 0.5),
        "live_latency_p99": lambda m: shown.live_latency(m, 0.99),
    }
    return {name: finite(value(m)) if m else None for name, value in values.items()}


def _ratio(groups: Mapping[str, Sequence[Result]], group: str) -> float | None:
    """Available query-seconds of incremental ÷ blocking, until all could have been back."""
    ours, theirs = (_measures(groups, group, n) for n in ("incremental", "blocking"))
    if ours is None or theirs is None:
        return None
    until = min(ours.until, theirs.measured)
    area = theirs.area(until)
    return finite(ours.area(until) / area if area else math.inf)


def _areas(groups: Mapping[str, Sequence[Result]]) -> dict[str, float | None]:
    """Of ideal: the other sides, the planners, traffic."""
    named = [(SIDES, "eager"), (SIDES, "best case")]
    named += [(PLANNERS, name) for name in ("DP", "BestDensity", "PRG", "OC")]
    named += [(TRAFFIC, "incremental")]
    found = {}
    for group, name in named:
        m = _measures(groups, group, name)
        key = "traffic" if group == TRAFFIC else name.lower().replace(" ", "_")
        found[f"area_vs_ideal_{key}"] = finite(m.of_ideal) if m else None
    return found | {"area_vs_blocking_traffic": _ratio(groups, TRAFFIC)}


def write(
    groups: Mapping[str, Sequence[Result]], replays: Sequence[Replays], pairs: Pairs | None
) -> None:
    every = [r for results in groups.values() for r in results]
    rows = [shown.row(replace(r, name=f"{r.group}: {r.name}")) for r in every]
    note = (
        f"Checkpoints every 10 s; nodes arrive as in 001, figure 6, {SCALE} times as fast. Of "
        "ideal: available query-seconds, as a share of the planner's schedule with the catch-up "
        "that nobody can avoid. After arrival: median of seconds from a node being warm until a "
        "query is available, ÷ (3 s + that catch-up). Live latency: relative, of queries that "
        "lost nothing."
    )
    rest = [shown.markdown(*table(rs)) for rs in groups.values() for table in _tables(rs)]
    rest += [shown.markdown(shown.LOSSES, shown.staggered(replays))]
    rest += [shown.before(pairs)] if pairs else []
    rest += ["![available queries and latency](correlated.svg)"]
    shown.plot(groups, report.RESULTS / "correlated.svg")
    write_result("correlated", "Most nodes die at once", note, shown.COLUMNS, rows, *rest)


def _tables(results: Sequence[Result]) -> list[Any]:
    return [shown.over_time, shown.latencies] if any(r.measures for r in results) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two episodes, under 5 minutes")
    parser.add_argument("--nodes", type=int, choices=sorted(KILLED), default=5)
    parser.add_argument("--only", choices=GROUPS, nargs="+", help="these episodes; writes nothing")
    parser.add_argument("--before", metavar="COMMIT", help="compare throughput with a commit")
    given = parser.parse_args()
    replays, survived = correlated_staggered.measure()
    wanted = plans(given.nodes, given.quick)
    if given.only:
        wanted = {g: p for g, p in wanted.items() if g in {GROUPS[name] for name in given.only}}
    groups, failed = run_all(wanted)
    compares = given.before and not given.quick
    pairs = correlated_before.compare(given.before) if compares else None
    shown.show(groups)
    report.table("Staggered losses", shown.LOSSES, shown.staggered(replays))
    if pairs is not None:
        print(shown.before(pairs))
    if not (given.quick or given.only):
        write(groups, replays, pairs)
    report.figures(figures(groups, failed, replays, survived, pairs))


if __name__ == "__main__":
    main()
