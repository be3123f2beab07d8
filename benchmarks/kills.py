"""Nodes of running jobs are killed and stopped at seeded moments; every output is compared.

The example topologies on 3 nodes, one after the other, and running sums whose output feeds a
running maximum (every slice depends on all before it, in order). Input arrives as files while
executors, node processes and Python workers get SIGKILL or SIGSTOP, one or two at a time, most of
them aimed at a slice, a checkpoint or a recovery that is under way. In the end every output is
computed again from the raw files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

import anabranch as ab
from anabranch.api.job import inside
from anabranch.model.commands import RecoverPartitions, RunSlice
from anabranch.node.process import client
from anabranch.spark import watchdog
from benchmarks import report
from benchmarks.kill_cases import CASES, NODES, ROWS, Case
from benchmarks.workloads import SETTINGS, START, say, scratch, write_result

FILE_EVERY_S = 0.5
KILLS = 15  # a topology
QUICK_CASES = ("word_count", "sums", "traffic")
QUICK_KILLS = 5
NODE_TIMEOUT = "3s"
# What happens, and how often of all.
DEEDS = {"executor": 9, "node process": 4, "executor stopped": 3, "worker": 2, "two executors": 2}
AIMS = {"slice": 5, "checkpoint": 3, "recovery": 4, "any time": 3}
PATIENCE_S = 60.0


@dataclass
class Feed:
    """Writes files of seeded rows as time goes by, never far ahead of the job."""

    directory: Path
    make: Callable[[int], dict[str, pl.DataFrame]]
    frames: list[dict[str, pl.DataFrame]] = field(default_factory=list)
    _read: dict[int, int] = field(default_factory=dict)  # rows by slice: one may run twice
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._write()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(FILE_EVERY_S):
            if self.rows - self.read < 8 * ROWS:
                self._write()

    def _write(self) -> None:
        number = len(self.frames)
        frames = self.make(number)
        self.frames.append(frames)
        for source, frame in frames.items():
            directory = self.directory / source
            directory.mkdir(parents=True, exist_ok=True)
            hidden = directory / f".{number:06d}.parquet"
            frame.write_parquet(hidden)
            os.utime(hidden, (START.timestamp() + number, START.timestamp() + number))
            hidden.rename(directory / f"{number:06d}.parquet")

    @property
    def rows(self) -> int:
        return sum(f.height for frames in self.frames for f in frames.values())

    def watch(self, job: ab.Job) -> None:
        job.on_progress(lambda p: self._read.__setitem__(p.slice, p.rows_in))

    @property
    def read(self) -> int:
        return sum(self._read.values())

    def finish(self) -> dict[str, pl.DataFrame]:
        """All rows by source."""
        self._ended.set()
        self._thread.join()
        return {name: pl.concat(f[name] for f in self.frames) for name in self.frames[0]}


class Killer:
    """Does one deed at a time and writes down what it hit."""

    def __init__(self, cluster: Any, job: ab.Job, dice: random.Random) -> None:
        self.cluster, self.job, self.dice = cluster, job, dice
        self.hits: Counter[tuple[str, str]] = Counter()

    @property
    def phase(self) -> str:
        run = inside(self.job).run
        if run.recovering or isinstance(run.effects.doing, RecoverPartitions):
            return "recovery"
        if isinstance(run.effects.doing, RunSlice):
            return "slice"
        return "checkpoint" if run.controller.ledgers.checkpoints.in_flight else "between slices"

    def strike(self) -> None:
        """One kill (or two at once), aimed at a phase."""
        aim = self.dice.choices(list(AIMS), list(AIMS.values()))[0]
        deed = self.dice.choices(list(DEEDS), list(DEEDS.values()))[0]
        if aim == "recovery":  # there is one only after a loss
            self._do("executor", "any time")
            self._wait_for(lambda: self.phase == "recovery", 5.0)
        elif aim != "any time":
            self._wait_for(lambda: self.phase == aim, 10.0)
            time.sleep(self.dice.uniform(0, 0.15))
        self._do(deed, aim)
        self._settle()

    def _do(self, deed: str, aim: str) -> None:
        nodes = [n for n in self._nodes() if n in self.cluster.executors()]
        if not nodes:
            return
        victims = self.dice.sample(nodes, min(len(nodes), 2 if deed == "two executors" else 1))
        phase = self.phase
        for node in victims:
            pid = self.cluster.executors()[node][0]
            if deed in ("node process", "worker"):
                pid = self._below(pid, deed) or pid
            stop = deed == "executor stopped"
            try:
                self.cluster.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
            except ab.AnabranchError:
                continue  # gone before we came
            self.hits[(deed, phase)] += 1

    def _nodes(self) -> tuple[str, ...]:
        placement = inside(self.job).run.controller.placement
        return placement.nodes if placement is not None else ()

    def _below(self, executor: int, deed: str) -> int | None:
        """The node process of an executor, or a Python worker: a child of the daemon below it."""
        if deed == "node process":
            try:
                return client.node_process(executor)
            except (ab.AnabranchError, OSError):
                return None
        for pid in watchdog.members(str(self.cluster.directory)):
            with contextlib.suppress(OSError):
                if client.parent(client.parent(pid)) == executor:
                    return pid
        return None

    def _settle(self) -> None:
        """Until slices go on, on at least two nodes: the next one shall hit a running job."""
        newest = self.job.last_progress
        goal = (newest.slice if newest else 0) + 2
        self._wait_for(lambda: (p := self.job.last_progress) is not None and p.slice >= goal)
        self._wait_for(lambda: self._ready() >= 2)

    def _ready(self) -> int:
        return sum(role != "joining" for role in self.job.nodes.values())

    def _wait_for(self, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.job.exception is not None:
                raise self.job.exception
            if time.monotonic() > deadline:
                if seconds == PATIENCE_S:
                    raise SystemExit(f"the job did not go on within {seconds:.0f} s")
                return  # an aim that does not come up is no reason to wait for ever
            time.sleep(0.002)


def run_case(
    cluster: Any, spark: Any, name: str, case: Case, root: Path, kills: int, seed: int
) -> tuple[Counter[tuple[str, str]], int, int]:
    """What was hit, and the rows lost and duplicated."""
    feed = Feed(root / "in", case.make)
    feed.start()
    job = case.build(root).start(
        spark,
        checkpoint=root / "ck",
        slice="300ms",
        checkpoint_interval="2s",
        node_timeout=NODE_TIMEOUT,
    )
    feed.watch(job)
    killer = Killer(cluster, job, random.Random(seed))
    killer._settle()
    while sum(killer.hits.values()) < kills:
        killer.strike()
    raw = feed.finish()
    killer._wait_for(lambda: feed.read >= feed.rows)
    job.stop()
    if job.exception is not None:
        raise job.exception
    expected, found = case.check(root, raw)
    lost, duplicated = (expected - found).total(), (found - expected).total()
    say(
        f"{name}: {killer.hits.total()} kills, {len(job.recoveries)} recoveries, "
        f"{expected.total():,} rows, lost {lost}, duplicated {duplicated}"
    )
    return killer.hits, lost, duplicated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer topologies and kills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    names, kills = (QUICK_CASES, QUICK_KILLS) if arguments.quick else (tuple(CASES), KILLS)
    hits: Counter[tuple[str, str]] = Counter()
    lost = duplicated = 0
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("kills", SETTINGS)
        for number, name in enumerate(names):
            seed = arguments.seed * 100 + number
            found = run_case(cluster, spark, name, CASES[name], root / name, kills, seed)
            hits += found[0]
            lost, duplicated = lost + found[1], duplicated + found[2]
        spark.stop()
    phases = list(dict.fromkeys(phase for _, phase in sorted(hits)))
    rows = [
        [deed, *(hits[(deed, phase)] for phase in phases)]
        for deed in dict.fromkeys(deed for deed, _ in sorted(hits))
    ]
    report.table("Kills by what was hit and during what", ["killed", *phases], rows)
    total = hits.total()
    within = sum(n for (_, phase), n in hits.items() if phase != "between slices")
    if not arguments.quick:
        note = (
            f"{', '.join(names)}: {total} kills, {within} inside work; "
            f"lost {lost}, duplicated {duplicated}."
        )
        write_result("kills", "Kills", note, ["killed", *phases], rows)
    report.figures({"kills": total, "inside_work": within, "lost": lost, "duplicated": duplicated})
    if lost or duplicated:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
