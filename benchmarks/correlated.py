"""Most nodes of a cluster die at once and come back one by one: which queries go on, and when the
others are back (001, figures 6 and 9 to 14; 004, figure 5).

Fifteen queries on hashtags that share their work; every operator waits for each row as for a call
to a service, so nodes are full though the machine is not. Sides: back as nodes come (incremental),
all together (blocking), all on what is left (eager), and all nodes at the mean time of arrival
(best case); the planners of the papers. Every sink is compared with plain Python, row by row.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.correlated_episode import Plan, run_episode
from benchmarks.correlated_jobs import CASES, Costs
from benchmarks.correlated_measures import AVAILABLE, Measures, median
from benchmarks.workloads import say, scratch

FULL = Plan(
    "incremental",
    "hashtags",
    nodes=8,
    killed=6,
    arrivals=(10.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    costs=Costs(0.3, 0.2),
)
QUICK = replace(FULL, nodes=5, killed=4, arrivals=(8.0, 16.0, 24.0, 32.0), costs=Costs(0.2, 0.14))


def episode(plan: Plan) -> tuple[Measures, int, int]:
    with scratch() as root:
        found = run_episode(plan, CASES[plan.case], root)
    return Measures.of(found), found.lost, found.duplicated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller, under 5 minutes")
    arguments = parser.parse_args()
    measures, lost, duplicated = episode(QUICK if arguments.quick else FULL)
    for name, line in measures.lines.items():
        due = measures.due.get(name)
        print(name, due, due and due.live, line.available, round(line.gap, 2))
    print(measures.area(measures.until), measures.ideal_area, measures.until)
    print("first", measures.first_query_s, "after", measures.after_arrival, "lost", lost, duplicated)
    live = measures.live_latency
    if len(live):
        print("live", np.median(live), np.quantile(live, 0.99), len(live))


if __name__ == "__main__":
    main()
