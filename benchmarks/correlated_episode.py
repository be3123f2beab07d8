"""One episode of `correlated`: most machines die, others come one by one, and all is written down.

What a sink shows is read from its files afterwards: which rows, and when their slice appeared (the
time at which its directory was renamed). Nothing is taken from the job's word but which nodes were
warm when, and what queries cost.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

import anabranch as ab
from anabranch.api.job import inside
from benchmarks.correlated_jobs import RATE, Case, Costs, wrong
from benchmarks.workloads import SETTINGS, say

FILE_EVERY_S = 0.25
INTERVAL_S = 2.0  # between slices
LINGER_S = 12.0  # when all is well again: so long latency takes to settle
STEADY = 3  # slices
NICE = 5  # a third of the share of others
DRAIN_S = 240.0  # for the rest of the input, when nobody measures: a full cluster is slow
USUAL_S = 15.0  # before the disaster: what latency usually is

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """What happens in an episode. Seconds from the disaster on."""

    side: str
    case: str
    nodes: int
    killed: int
    arrivals: tuple[float, ...]  # when machines are started
    costs: Costs
    options: Mapping[str, Any] = field(default_factory=dict)
    hit: str = ""  # "most" or "fewest": how many queries lose something; "": one sink is spared
    steady_s: float = 15.0  # before the disaster, from the first slice on
    patience_s: float = 110.0  # after the disaster: then it is measured up to here


@dataclass
class Episode:
    """What came of it; times are of the wall clock."""

    plan: Plan
    killed: float = 0.0
    usual_s: float = 0.0  # what a slice takes at most, usually
    warm: list[float] = field(default_factory=list)  # of nodes that came
    unhurt: frozenset[str] = frozenset()  # sinks that lost nothing
    loads: Mapping[str, float] = field(default_factory=dict)  # of partitions, in nodes' worth
    fixed: float = 0.0  # share of an interval that a slice takes beside the work of nodes
    survivors: Mapping[str, str] = field(default_factory=dict)  # partition → node that is left
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)  # sink → partitions
    priorities: Mapping[str, int] = field(default_factory=dict)
    shown: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)  # written, shown
    ended: float = 0.0
    lost: int = 0
    duplicated: int = 0


class Writer:
    """A file every quarter of a second; remembers when each was there."""

    def __init__(self, directory: Path, case: Case) -> None:
        self._directory, self._case = directory, case
        self.times: list[float] = []
        self._ended = threading.Event()
        directory.mkdir(parents=True)
        self._write()
        self._thread = threading.Thread(target=self._work, daemon=True)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """With its block, whatever happens there: it writes nothing after that."""
        try:
            yield
        finally:
            self.finish()

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        due = time.time()
        while not self._ended.wait(max(0.0, due - time.time())):
            self._write()
            due += FILE_EVERY_S

    def _write(self) -> None:
        number, rows = len(self.times), round(RATE * FILE_EVERY_S)
        hidden = self._directory / f".{number:06d}.parquet"
        self._case.rows(range(number * rows, (number + 1) * rows)).write_parquet(hidden)
        hidden.rename(self._directory / f"{number:06d}.parquet")
        self.times.append(time.time())

    def finish(self) -> int:
        """How many rows there are in all."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        return len(self.times) * round(RATE * FILE_EVERY_S)


def run_episode(plan: Plan, case: Case, root: Path) -> Episode:
    writer, found = Writer(root / "in", case), Episode(plan)
    with writer.ending(), ab.EmbeddedCluster(1) as cluster:
        cluster.make_room(plan.nodes)  # each with a worker of its own, that can die
        spark = cluster.session("correlated", SETTINGS)
        topology = case.build(root, plan.costs)
        job = topology.start(spark, checkpoint=root / "ck", **plan.options)
        writer.start()
        _await(job, lambda: len(job.recent_progress) > 3)
        time.sleep(plan.steady_s)
        cut = inside(job).run.controller.cut
        _await(job, lambda: inside(job).run.controller.cut is not cut)  # so that replays are short
        _look_around(job, plan, found)
        _strike(cluster, job, found)
        arrivals = cluster, plan, found.killed, lambda: job.is_active
        threading.Thread(target=arrive, args=arrivals, daemon=True).start()
        _watch(job, found)
        time.sleep(LINGER_S)
        found.ended = time.time()
        rows = writer.finish()
        _await(job, lambda: sum(job.totals.read.values()) >= rows, DRAIN_S)
        job.stop()
        if job.exception is not None:
            raise job.exception
        spark.stop()
    read_shown(found, case, root, writer.times, rows)
    return found


# -- what is done --------------------------------------------------------------------------------


def _look_around(job: ab.Job, plan: Plan, found: Episode) -> None:
    """Who will be left, with what."""
    run = inside(job).run
    placement = run.controller.placement
    assert placement is not None
    costs = run.controller.ledgers.costs.costs(placement)
    usual = statistics.median(p.seconds for p in job.recent_progress[-10:])
    found.usual_s = 1.2 * max(INTERVAL_S, usual)  # more where the machine is busy
    found.loads = {str(p): load for p, load in costs.loads.items()}
    found.fixed = run.controller.ledgers.costs.fixed_s / INTERVAL_S
    queries = run.controller.plan.queries
    found.priorities = {q.sink: q.priority for q in queries}
    found.needs = {
        q.sink: frozenset(str(p) for p in placement.owners if p.chain in q.chains) for q in queries
    }
    homes = {str(p): str(o.node) for p, o in placement.owners.items()}
    spared = _spared(plan, homes, found.needs, list(map(str, placement.nodes)))
    found.survivors = {p: node for p, node in homes.items() if node in spared}
    found.unhurt = frozenset(s for s, ps in found.needs.items() if ps <= found.survivors.keys())


def _spared(
    plan: Plan, homes: Mapping[str, str], needs: Mapping[str, frozenset[str]], nodes: list[str]
) -> tuple[str, ...]:
    """The nodes that are not killed."""

    def hurt(spared: tuple[str, ...]) -> int:
        return sum(any(homes[p] not in spared for p in needed) for needed in needs.values())

    choices = list(combinations(nodes, plan.nodes - plan.killed))
    if plan.hit:
        return (max if plan.hit == "most" else min)(choices, key=hurt)
    # The home of the first sink that has one: it loses nothing.
    single = sorted(s for s, needed in needs.items() if len({homes[p] for p in needed}) == 1)
    home = next((homes[p] for s in single[:1] for p in needs[s]), nodes[0])
    return next(c for c in choices if home in c)


def _strike(cluster: Any, job: ab.Job, found: Episode) -> None:
    spared = set(found.survivors.values())
    executors = cluster.executors()
    dying = {node: pid for node, (pid, _) in executors.items() if node not in spared}
    workers = {worker for node, (_, worker) in executors.items() if node not in spared}
    for worker in workers:  # first: else they would start executors in the place of these
        cluster.kill(cluster.workers[worker])
    for pid in dying.values():
        cluster.kill(pid, signal.SIGKILL)
    found.killed = time.time()
    said = f"{len(dying)} of {len(executors)} nodes are killed; nothing lost by"
    say(f"{found.plan.side}: {said} {', '.join(sorted(found.unhurt)) or 'none'}")


def arrive(cluster: Any, plan: Plan, killed: float, active: Callable[[], bool]) -> None:
    """Start machines one by one, on a thread of its own. They share cores with those that run,
    which other machines would not: they step back a little."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # what it starts inherits it
    for at in plan.arrivals:
        time.sleep(max(0.0, killed + at - time.time()))
        if not active():
            return
        cluster.add_node()


def _watch(job: ab.Job, found: Episode) -> None:
    """Until all nodes are there, all queries are live and slices are as fast as they were."""
    left = found.plan.nodes - found.plan.killed
    deadline = found.killed + found.plan.patience_s
    wanted = len(found.plan.arrivals)
    while True:
        if job.exception is not None:
            raise job.exception
        warm = sum(role != "joining" for role in job.nodes.values()) - left
        known = time.time() - found.killed > 2.0  # the dead are known to be dead
        if known and warm > len(found.warm):
            found.warm += [time.time()] * (warm - len(found.warm))
            say(f"  {time.time() - found.killed:5.1f} s: node {left + len(found.warm)} is warm")
        live = all(q.state == "live" for q in job.status().queries)
        fast = all(p.seconds < found.usual_s for p in job.recent_progress[-STEADY:])
        if known and len(found.warm) >= wanted and live and fast and not job.is_recovering:
            return
        if time.time() > deadline:
            say("  not all queries are live: measured up to here")
            return
        time.sleep(0.1)


def _await(job: ab.Job, condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if job.exception is not None:
            raise job.exception
        if time.monotonic() > deadline:
            raise SystemExit(f"it did not happen within {seconds:.0f} s")
        time.sleep(0.1)


# -- what was shown ------------------------------------------------------------------------------


def read_shown(found: Episode, case: Case, root: Path, times: list[float], rows: int) -> None:
    """When each row was written and shown; compares every sink with what it had to show."""
    written = np.repeat(np.array(times), round(RATE * FILE_EVERY_S))
    shown, slices = {}, _slices(shown_by(root / "out" / case.whole), rows)
    for sink, values in case.expected(slices).items():
        every = shown_by(root / "out" / sink)
        lost, duplicated = wrong(values, every["number"].to_list(), every["value"].to_list())
        found.lost += lost
        found.duplicated += duplicated
        shown[sink] = (written[every["number"].to_numpy()], every["at"].to_numpy())
    found.shown = shown
    if found.lost or found.duplicated:
        say(f"{found.plan.side}: {found.lost} rows are lost, {found.duplicated} are wrong")


def _slices(whole: pl.DataFrame, rows: int) -> list[list[int]]:
    """The rows of each slice; those that are missing would be in one of their own."""
    first = whole.sort("slice", "number").unique("number", keep="first", maintain_order=True)
    found = first.group_by("slice", maintain_order=True).agg("number")["number"].to_list()
    return [*found, sorted(set(range(rows)) - set(first["number"]))]


def shown_by(directory: Path) -> pl.DataFrame:
    """All rows of a sink so far."""
    schema = {"number": pl.Int64, "value": pl.Int64, "at": pl.Float64, "slice": pl.Int64}
    frames = [pl.DataFrame(schema=schema)]
    for one in directory.glob("slice=*"):
        files = [pl.read_parquet(f, hive_partitioning=False) for f in one.glob("*.parquet")]
        what = {
            "at": pl.lit(one.stat().st_ctime),  # of the rename that showed it
            "slice": pl.lit(int(one.name.removeprefix("slice=")), pl.Int64),
        }
        frames += [f.select("number", pl.last().alias("value"), **what) for f in files]
    return pl.concat(frames)
