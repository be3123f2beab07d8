"""One episode of `correlated`: most machines die, others come one by one, and all is written down.

What a sink shows is read from its files afterwards: which rows, and when their slice appeared (the
time at which its directory was renamed). Nothing is taken from the job's word but which nodes were
warm when, and what queries cost.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
STEADY_S = 20.0  # before the disaster, from the first slice on
LINGER_S = 5.0  # when all is well again
PATIENCE_S = 420.0
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
    keep: str = ""  # the chain whose node is spared; "": the one with most of what comes first


@dataclass
class Episode:
    """What came of it; times are of the wall clock."""

    plan: Plan
    killed: float = 0.0
    warm: list[float] = field(default_factory=list)  # of nodes that came
    unhurt: frozenset[str] = frozenset()  # sinks that lost nothing
    loads: Mapping[str, float] = field(default_factory=dict)  # of partitions, in nodes' worth
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
        self._thread.join()
        return len(self.times) * round(RATE * FILE_EVERY_S)


def run_episode(plan: Plan, case: Case, root: Path, deeds: Any = None) -> Episode:
    """`deeds(cluster, job, killed)` is called once per look, to do more harm."""
    writer, found = Writer(root / "in", case), Episode(plan)
    with ab.EmbeddedCluster(1) as cluster:
        cluster.make_room(plan.nodes)  # each with a worker of its own, that can die
        spark = cluster.session("correlated", SETTINGS)
        topology = case.build(root, plan.costs)
        job = topology.start(spark, checkpoint=root / "ck", **plan.options)
        writer.start()
        _await(job, lambda: len(job.recent_progress) > 3)
        time.sleep(STEADY_S)
        if inside(job).run.controller.cut is not None:
            cut = inside(job).run.controller.cut
            _await(job, lambda: inside(job).run.controller.cut is not cut, 30.0)
        _look_around(job, plan, found)
        _strike(cluster, job, found)
        threading.Thread(target=_arrive, args=(cluster, job, found), daemon=True).start()
        _watch(cluster, job, found, deeds)
        time.sleep(LINGER_S)
        found.ended = time.time()
        rows = writer.finish()
        _await(job, lambda: job.totals.read[next(iter(job.totals.read))] >= rows, 60.0)
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
    found.loads = {str(p): load for p, load in costs.loads.items()}
    queries = run.controller.plan.queries
    found.priorities = {q.sink: q.priority for q in queries}
    found.needs = {
        q.sink: frozenset(str(p) for p in placement.owners if p.chain in q.chains) for q in queries
    }
    keep = plan.keep or min(q.sink for q in queries if len(found.needs[q.sink]) == 1)
    first = min(
        p for p in placement.owners if p.chain == keep or str(p) in found.needs.get(keep, ())
    )
    spared = [placement.owners[first].node]
    spared += [n for n in placement.nodes if n not in spared][: plan.nodes - plan.killed - 1]
    found.survivors = {str(p): o.node for p, o in placement.owners.items() if o.node in spared}
    found.unhurt = frozenset(s for s, ps in found.needs.items() if ps <= found.survivors.keys())


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


def _arrive(cluster: Any, job: ab.Job, found: Episode) -> None:
    for at in found.plan.arrivals:
        time.sleep(max(0.0, found.killed + at - time.time()))
        if not job.is_active:
            return
        cluster.add_node()


def _watch(cluster: Any, job: ab.Job, found: Episode, deeds: Any) -> None:
    """Until all nodes are there and all queries are live, and for as long as they stay so."""
    left = found.plan.nodes - found.plan.killed
    deadline = time.monotonic() + PATIENCE_S
    wanted = len(found.plan.arrivals)
    while True:
        if job.exception is not None:
            raise job.exception
        warm = sum(role != "joining" for role in job.nodes.values()) - left
        known = time.time() - found.killed > 2.0  # the dead are known to be dead
        if known and warm > len(found.warm):
            found.warm += [time.time()] * (warm - len(found.warm))
            say(f"  {time.time() - found.killed:5.1f} s: node {left + len(found.warm)} is warm")
        if deeds is not None:
            deeds(cluster, job, found)
        live = all(q.state == "live" for q in job.status().queries)
        newest = job.last_progress
        soon = newest is not None and newest.seconds < 2.0
        if known and len(found.warm) >= wanted and live and soon and not job.is_recovering:
            return
        if time.monotonic() > deadline:
            say("  it does not end: measured up to here")
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
    shown = {}
    for sink, values in case.expected(rows).items():
        frames = []
        for directory in (root / "out" / sink).glob("slice=*"):
            files = [
                pl.read_parquet(f, hive_partitioning=False) for f in directory.glob("*.parquet")
            ]
            at = pl.lit(directory.stat().st_ctime)  # of the rename that showed it
            frames.append(pl.concat(files).select("number", pl.last().alias("value"), at=at))
        every = pl.concat(frames)
        lost, duplicated = wrong(values, every["number"].to_list(), every["value"].to_list())
        found.lost += lost
        found.duplicated += duplicated
        shown[sink] = (written[every["number"].to_numpy()], every["at"].to_numpy())
    found.shown = shown
    if found.lost or found.duplicated:
        say(f"{found.plan.side}: {found.lost} rows are lost, {found.duplicated} are wrong")
