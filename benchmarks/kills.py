"""Nodes of running jobs are killed and stopped at seeded moments; every output is compared.

Two jobs on 3 nodes, one after the other: the windowed word count (G3), and running sums whose
output feeds a running maximum (every slice depends on all before it, in order). Input arrives as
files while executors, node processes and Python workers get SIGKILL or SIGSTOP, one or two at a
time, most of them aimed at a slice, a checkpoint or a recovery that is under way. In the end every
row is counted again from the raw files.
"""

from __future__ import annotations

import argparse
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
from examples.word_count import word_count

import anabranch as ab
from anabranch.model.commands import RecoverPartitions, RunSlice
from anabranch.spark import watchdog
from benchmarks import report
from benchmarks.workloads import (
    SENTENCES,
    SETTINGS,
    START,
    read_files,
    say,
    scratch,
    write_result,
)

NODES = 3
ROWS = 400  # in a file
FILE_EVERY_S = 0.5
KILLS, QUICK_KILLS = 104, 14
NODE_TIMEOUT = "3s"
# What happens, and how often of all.
DEEDS = {"executor": 9, "node process": 4, "executor stopped": 3, "worker": 2, "two executors": 2}
AIMS = {"slice": 5, "checkpoint": 3, "recovery": 4, "any time": 3}
PATIENCE_S = 60.0


@dataclass
class Feed:
    """Writes files of seeded rows as time goes by, never far ahead of the job."""

    directory: Path
    make: Callable[[int], pl.DataFrame]
    frames: list[pl.DataFrame] = field(default_factory=list)
    done_rows: Callable[[], int] = lambda: 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self.directory.mkdir(parents=True)
        self._write()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(FILE_EVERY_S):
            if self.rows - self.done_rows() < 8 * ROWS:
                self._write()

    def _write(self) -> None:
        number = len(self.frames)
        frame = self.make(number)
        hidden = self.directory / f".{number:06d}.parquet"
        frame.write_parquet(hidden)
        os.utime(hidden, (START.timestamp() + number, START.timestamp() + number))
        hidden.rename(self.directory / f"{number:06d}.parquet")
        self.frames.append(frame)

    @property
    def rows(self) -> int:
        return sum(f.height for f in self.frames)

    def finish(self) -> pl.DataFrame:
        self._ended.set()
        self._thread.join()
        return pl.concat(self.frames)


def sentences(number: int) -> pl.DataFrame:
    """One second of event time per file."""
    dice = random.Random(number)
    words = [" ".join(f"w{dice.randrange(200)}" for _ in range(8)) for _ in range(ROWS)]
    start = int(START.timestamp() * 1e6) + number * 1_000_000
    ts = pl.int_range(start, start + 1_000_000, 1_000_000 // ROWS, eager=True)
    return pl.DataFrame({"ts": ts.cast(pl.Datetime("us", "UTC")), "sentence": words})


def pairs(number: int) -> pl.DataFrame:
    v = pl.int_range(number * ROWS, (number + 1) * ROWS, eager=True)
    return pl.DataFrame({"k": v * 31 % 97, "v": v})


def words_topology(root: Path) -> ab.Topology:
    return word_count(
        lambda spark: read_files(spark, root / "in", SENTENCES, 2),
        ab.Parquet(str(root / "out")),
        NODES,
    )


def sums_topology(root: Path) -> ab.Topology:
    topology = ab.Topology("sums")
    rows = topology.source("rows", lambda s: read_files(s, root / "in", "k long, v long", 2))
    rows.to("raw", ab.Parquet(str(root / "raw")))
    sums = rows.key_by("k").aggregate("sum", v=ab.sum("v"), parallelism=4)
    sums.to("sums", ab.Parquet(str(root / "sums")))
    spread = sums.select("spread", (pl.col("k") % 11).alias("k"), "v")
    most = spread.key_by("k").aggregate("most", v=ab.max("v"), n=ab.count(), parallelism=3)
    most.to("out", ab.Parquet(str(root / "out")))
    return topology


def by_slice(directory: Path) -> pl.DataFrame:
    frames = [
        pl.read_parquet(f, glob=False, hive_partitioning=False).with_columns(
            slice=pl.lit(int(f.parent.name.removeprefix("slice=")))
        )
        for f in sorted(directory.glob("slice=*/*.parquet"))
    ]
    return pl.concat(frames)


Rows = Counter[tuple[Any, ...]]


def check_words(root: Path, raw: pl.DataFrame) -> tuple[Rows, Rows]:
    """Expected and found (window, word, n), for the windows that the input has closed."""
    words = raw.select("ts", word=pl.col("sentence").str.split(" ")).explode("word")
    counted = words.group_by(start=pl.col("ts").dt.truncate("30s"), word="word").agg(n=pl.len())
    closed = counted.filter(pl.col("start") + pl.duration(seconds=30) <= raw["ts"].max())
    expected = Counter(
        (int(s.timestamp()), w, n) for s, w, n in closed.select("start", "word", "n").rows()
    )
    out = by_slice(root / "out").select("window_start", "word", "n")
    return expected, Counter((int(s.timestamp()), w, n) for s, w, n in out.rows())


def check_sums(root: Path, raw: pl.DataFrame) -> tuple[Rows, Rows]:
    """Every slice of every sink, recomputed in order from the rows that the slice got."""
    got = by_slice(root / "raw")
    expected: Rows = Counter(("raw", *row) for row in raw.rows())
    found: Rows = Counter(("raw", k, v) for k, v in got.select("k", "v").rows())
    sums: dict[int, int] = {}
    most: dict[int, tuple[int, int]] = {}
    for (number,), rows in sorted(got.partition_by("slice", as_dict=True).items()):
        for k, v in rows.select("k", "v").rows():
            sums[k] = sums.get(k, 0) + v
        touched = {k: sums[k] for k in rows["k"].unique()}
        for k, v in touched.items():
            largest, n = most.get(k % 11, (v, 0))
            most[k % 11] = (max(v, largest), n + 1)
        expected.update(("sums", number, k, v) for k, v in touched.items())
        expected.update(("out", number, k, *most[k]) for k in {k % 11 for k in touched})
    found.update(
        ("sums", s, k, v) for s, k, v in by_slice(root / "sums").select("slice", "k", "v").rows()
    )
    found.update(("out", *r) for r in by_slice(root / "out").select("slice", "k", "v", "n").rows())
    return expected, found


CASES = {
    "word_count": (words_topology, sentences, check_words),
    "sums": (sums_topology, pairs, check_sums),
}


class Killer:
    """Does one deed at a time and writes down what it hit."""

    def __init__(self, cluster: Any, job: ab.Job, dice: random.Random) -> None:
        self.cluster, self.job, self.dice = cluster, job, dice
        self.hits: Counter[tuple[str, str]] = Counter()

    @property
    def phase(self) -> str:
        driver = self.job._driver
        if driver.recovering or isinstance(driver.actions.doing, RecoverPartitions):
            return "recovery"
        if isinstance(driver.actions.doing, RunSlice):
            return "slice"
        return "checkpoint" if driver.controller._checkpoints.in_flight else "between slices"

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
        mapping = self.job._driver.controller.mapping
        return mapping.nodes if mapping is not None else ()

    def _below(self, executor: int, deed: str) -> int | None:
        mark = "anabranch.node.server" if deed == "node process" else "anabranch.spark.worker_d"
        for pid in watchdog.members(str(self.cluster.directory)):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            server = deed == "node process" and command.rstrip("\0").endswith(f"\0{executor}")
            if mark in command and (server or (deed == "worker" and parent != executor)):
                return pid
        return None

    def _settle(self) -> None:
        """Until slices go on, on at least two nodes: the next one shall hit a running job."""
        newest = self.job.last_progress
        goal = (newest.slice if newest else 0) + 2
        self._wait_for(lambda: (p := self.job.last_progress) is not None and p.slice >= goal)
        self._wait_for(lambda: self._ready() >= 2)

    def _ready(self) -> int:
        watch = self.job._driver._watch
        return len(watch.ready) if watch is not None else 0

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
    cluster: Any, spark: Any, name: str, root: Path, kills: int, seed: int
) -> tuple[Counter[tuple[str, str]], int, int]:
    """What was hit, and the rows lost and duplicated."""
    build, make, check = CASES[name]
    feed = Feed(root / "in", make)
    feed.start()
    job = build(root).start(
        spark,
        checkpoint=root / "ck",
        slice="300ms",
        checkpoint_interval="2s",
        node_timeout=NODE_TIMEOUT,
    )
    read = [0]
    job.on_progress(lambda p: read.__setitem__(0, read[0] + p.rows_in))
    feed.done_rows = lambda: read[0]
    killer = Killer(cluster, job, random.Random(seed))
    killer._settle()
    while sum(killer.hits.values()) < kills:
        killer.strike()
        if sum(killer.hits.values()) % 5 == 0:
            say(f"{name}: {sum(killer.hits.values())} of {kills}, {len(job.recoveries)} recoveries")
    raw = feed.finish()
    killer._wait_for(lambda: read[0] >= raw.height)
    job.stop()
    if job.exception is not None:
        raise job.exception
    expected, found = check(root, raw)
    return killer.hits, (expected - found).total(), (found - expected).total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KILLS} kills")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    kills = (QUICK_KILLS if arguments.quick else KILLS) // len(CASES)
    hits: Counter[tuple[str, str]] = Counter()
    lost = duplicated = 0
    with scratch() as root:
        for number, name in enumerate(CASES):
            with ab.EmbeddedCluster(NODES) as cluster:
                spark = cluster.session(name, SETTINGS)
                found = run_case(
                    cluster, spark, name, root / name, kills, arguments.seed * 100 + number
                )
                spark.stop()
            hits += found[0]
            lost, duplicated = lost + found[1], duplicated + found[2]
    phases = list(dict.fromkeys(phase for _, phase in sorted(hits)))
    rows = [
        [deed, *(hits[(deed, phase)] for phase in phases)]
        for deed in dict.fromkeys(deed for deed, _ in sorted(hits))
    ]
    report.table("Kills by what was hit and during what", ["killed", *phases], rows)
    total = hits.total()
    inside = sum(n for (_, phase), n in hits.items() if phase != "between slices")
    if not arguments.quick:
        note = f"{total} kills, {inside} inside work; lost {lost}, duplicated {duplicated}."
        write_result("kills", "Kills", note, ["killed", *phases], rows)
    report.figures({"kills": total, "inside_work": inside, "lost": lost, "duplicated": duplicated})
    if lost or duplicated:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
