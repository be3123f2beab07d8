"""A node is killed under load: how long until the stream is on schedule again, side by side.

The windowed word count (G3) on 3 nodes, a slice a second, a file of sentences every second; the
executor that holds a part of the counter gets SIGKILL. Both sides are watched in the same way,
through the progress of Spark's own query: a batch is out when it is committed, and on schedule when
its newest rows were written as shortly before as in the batches before the first kill. Structured
Streaming runs once with Spark's default locality wait and once with none; its better one counts.
Our output is counted again from the raw files. `--strategies` is an experiment of its own, see
recovery_strategies.py.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

import anabranch as ab
from anabranch.api.job import inside
from anabranch.model.recovery import Recovery
from benchmarks import peers, report
from benchmarks.kill_cases import check_words, words_topology
from benchmarks.workloads import SETTINGS, START, Shape, say, scratch, spread, write_result

NODES = 3
WORDS = 8
VOCABULARY = 5_000
FILES = 1_000_000  # per batch: all there are
AFTER_S = 15.0  # a kill's effects are looked for this long
LATELY_S = 3.1  # time for three batches
QUIET_S = 5.0  # on three nodes again, before the next kill
SETTLE = 12  # batches, until a fresh application is warm
SIDES = ("ours", "theirs", "theirs, no locality wait")


@dataclass(frozen=True)
class Batch:
    """Written by the source's clock, committed by the query's; seconds since the epoch."""

    began: float
    committed: float
    newest_row: float
    newest_file: int = 0
    number: int = 0  # the query's

    @property
    def lag(self) -> float:
        return self.committed - self.newest_row


@dataclass(frozen=True)
class Outcome:
    """What one kill did. Seconds after the kill, and slices."""

    first_output: float
    on_schedule: float
    worst_slice: float
    slices_late: int
    usual_lag: float  # before the kill: what being on schedule is measured by


@dataclass(frozen=True)
class Phases:
    """Where the time went, one after the other; replaying has the Spark job around it, too."""

    detect: float
    restore: float
    replay: float
    catch_up: float


Times = Sequence[float] | Mapping[int, float]  # when each file was there, by its number


class Writer:
    """A file every second, or more often, named by its number; remembers when each was there."""

    def __init__(self, write: Callable[[int], None], every_s: float = 1.0) -> None:
        self._write, self._every_s = write, every_s
        self.times: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        due = time.time()
        while not self._ended.wait(max(0.0, due - time.time())):
            self._write(len(self.times))
            self.times.append(time.time())
            due += self._every_s

    def finish(self) -> int:
        """How many files there are in all."""
        self._ended.set()
        self._thread.join()
        return len(self.times)


def sentences(number: int, rows: int) -> pl.DataFrame:
    """One second of event time."""
    dice = random.Random(number)
    start = int(START.timestamp() * 1e6) + number * 1_000_000
    ts = pl.int_range(start, start + 1_000_000, 1_000_000 // rows, eager=True)
    words = [f"w{min(int(dice.paretovariate(0.7)), VOCABULARY)}" for _ in range(WORDS * 50)]
    said = [" ".join(dice.sample(words, WORDS)) for _ in range(rows)]
    return pl.DataFrame({"ts": ts[:rows].cast(pl.Datetime("us", "UTC")), "sentence": said})


def write_sentences(directory: Path, number: int, rows: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    hidden = directory / f".{number:06d}.parquet"
    sentences(number, rows).write_parquet(hidden)
    hidden.rename(directory / f"{number:06d}.parquet")


def batches(query: Any, times: Times, sources: Path) -> list[Batch]:
    """All batches with new files, from the query's progress and its log of files in `sources`.

    Not from its count of rows: a batch that is read again counts twice.
    """
    newest: dict[int, int] = {}
    for log in sources.glob("[0-9]*"):
        for line in log.read_text().splitlines()[1:]:
            entry = json.loads(line)
            number = Path(entry["path"]).stem
            if number.isdigit():
                newest[entry["batchId"]] = max(newest.get(entry["batchId"], 0), int(number))
    found, seen = [], -1
    for text in query._jsq.recentProgress():
        progress = json.loads(text.json())
        offset = (progress["sources"][0]["endOffset"] or {"logOffset": -1})["logOffset"]
        if offset == seen or offset not in newest:
            continue
        seen = offset
        began = pl.Series([progress["timestamp"]]).str.to_datetime(time_zone="UTC")[0].timestamp()
        took = progress["durationMs"]["triggerExecution"] / 1000
        file = newest[offset]
        found.append(Batch(began, began + took, times[file], file, progress["batchId"]))
    return found


def usual_lag(found: list[Batch]) -> float:
    return max(b.lag for b in found[-10:])


def outcome(found: list[Batch], killed: float, until: float, usual: float) -> Outcome:
    """Compare the batches after a kill with what was usual before the first one: those just before
    a later kill may still be catching up."""
    after = [b for b in found if killed <= b.committed <= until]
    late = [b for b in after if b.lag > usual + 0.5]
    end = max((b.committed for b in late), default=killed)
    back = min((b.committed for b in after if b.committed > end), default=until)
    worst = max((b.committed - b.began for b in after), default=until - killed)
    extra = max((b.lag - usual for b in after), default=until - killed)
    first = min((b.committed for b in after), default=until)
    return Outcome(first - killed, back - killed, worst, max(0, round(extra)), usual)


def phases(outcome: Outcome, killed: float, recoveries: Sequence[Recovery]) -> Phases:
    """Split the way back to schedule by what the recoveries of this kill say."""
    mine = [r for r in recoveries if 0 <= r.known_ms / 1000 - killed + 0.01 < outcome.on_schedule]
    if not mine:
        return Phases(0.0, 0.0, 0.0, outcome.on_schedule)
    detect = max(0.0, mine[0].known_ms / 1000 - killed)
    restore = sum(r.restore_s for r in mine)
    replay = sum(r.total_s for r in mine) - restore
    left = outcome.on_schedule - detect - restore - replay
    return Phases(detect, restore, replay, max(0.0, left))


def run_side(
    side: str, rate: int, kills: int, root: Path
) -> tuple[list[Outcome], list[Phases], tuple[int, int]]:
    """One application with several kills; for ours also its phases, and what was lost and
    duplicated."""
    where = root / "in" / "sentences"
    writer = Writer(lambda number: write_sentences(where, number, rate))
    settings = SETTINGS if side == "ours" else peers.settings(NODES)
    if side.endswith("wait"):
        settings = {**settings, "spark.locality.wait": "0", "spark.locality.wait.process": "0"}
    with ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("recovery", settings)
        job: ab.Job | None = None
        query: Any
        if side == "ours":
            topology = words_topology(root, FILES)
            job = topology.start(spark, checkpoint=root / "ck", checkpoint_interval="5s")
            query, sources = inside(job).query, root / "ck" / "spark" / "sources" / "0"
        else:
            query, sources = _peer(spark, root), root / "ck" / "sources" / "0"
        _await(lambda: len(batches(query, writer.times, sources)) >= SETTLE, 180.0)
        moments = []
        for number in range(kills):
            _await(lambda: _nodes(cluster, job) == NODES)
            time.sleep(QUIET_S if number else 0.0)
            cluster.kill(_victim(cluster, spark, job, number), signal.SIGKILL)
            moments.append(time.time())
            time.sleep(AFTER_S)
        files = writer.finish()
        _await(lambda: batches(query, writer.times, sources)[-1].newest_file == files - 1)
        time.sleep(2.0)  # a listing may have missed a file that came just before the newest
        found = batches(query, writer.times, sources)
        job.stop() if job is not None else query.stop()
        spark.stop()
    usual = usual_lag([b for b in found if b.committed < moments[0]])
    outcomes = [outcome(found, t, t + AFTER_S, usual) for t in moments]
    if job is None:
        return outcomes, [], (0, 0)
    split = [phases(o, t, job.recoveries) for o, t in zip(outcomes, moments, strict=True)]
    raw = pl.concat(sentences(number, rate) for number in range(files))
    expected, got = check_words(root, {"sentences": raw})
    return outcomes, split, ((expected - got).total(), (got - expected).total())


def _peer(spark: Any, root: Path) -> Any:
    frame = peers.word_count(spark, root / "in" / "sentences", Shape(0, 0, FILES, 0.0))
    writer = frame.writeStream.format("parquet").option("path", str(root / "out"))
    writer = writer.option("checkpointLocation", str(root / "ck"))
    return writer.trigger(processingTime="1 second").start()


def _nodes(cluster: Any, job: ab.Job | None) -> int:
    """How many there are that take work."""
    if job is None:
        return len(cluster.executors())
    return sum(role != "joining" for role in job.nodes.values())


def _victim(cluster: Any, spark: Any, job: ab.Job | None, number: int) -> int:
    """The process of a node with a part of the counter: ours, or the executor that had most to do
    lately."""
    executors = cluster.executors()
    if job is not None:
        placement = inside(job).run.controller.placement
        assert placement is not None
        counters = [o.node for p, o in placement.owners.items() if p.chain == "counter"]
        return int(executors[counters[number % len(counters)]][0])
    before = _tasks(spark)
    time.sleep(LATELY_S)
    done = {node: n - before.get(node, 0) for node, n in _tasks(spark).items() if node in executors}
    return int(executors[max(done, key=done.__getitem__)][0])


def _tasks(spark: Any) -> dict[str, int]:
    """How many tasks each executor has finished."""
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    found = [listed.apply(i) for i in range(listed.size())]
    return {e.id(): e.completedTasks() for e in found}


def _await(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 kills a side at one rate")
    parser.add_argument("--strategies", action="store_true", help="ours against UB, SB, SC, R+SM")
    arguments = parser.parse_args()
    if arguments.strategies:
        from benchmarks.recovery_strategies import run

        run(arguments.quick)
        return
    rates, kills = ((1_000,), 2) if arguments.quick else ((500, 1_000, 2_000), 4)
    samples: dict[tuple[int, str], list[Outcome]] = {}
    split: list[Phases] = []
    lost = duplicated = 0
    with scratch() as root:
        for rate in rates:
            for side in SIDES:
                say(f"{side} at {rate:,} sentences/s")
                where = root / f"{rate}-{SIDES.index(side)}"
                samples[rate, side], own, wrong = run_side(side, rate, kills, where)
                split += own
                lost, duplicated = lost + wrong[0], duplicated + wrong[1]
                for o in samples[rate, side]:
                    say(f"  first {o.first_output:.2f} s, on schedule {o.on_schedule:.2f} s")
    _report(samples, split, lost, duplicated, arguments.quick)


def _report(
    samples: dict[tuple[int, str], list[Outcome]],
    split: list[Phases],
    lost: int,
    duplicated: int,
    quick: bool,
) -> None:
    columns = ["rate", "side", "kills", "first output s", "on schedule s", "worst slice s", "late"]
    rows = [
        [
            f"{rate:,}",
            side,
            len(found),
            spread([o.first_output for o in found]),
            spread([o.on_schedule for o in found]),
            spread([o.worst_slice for o in found]),
            statistics.median(o.slices_late for o in found),
        ]
        for (rate, side), found in samples.items()
    ]
    report.table("A killed node", columns, rows)
    where = ", ".join(
        f"{name} {spread([getattr(p, name) for p in split])} s"
        for name in ("detect", "restore", "replay", "catch_up")
    ).replace("_", " ")
    print(f"ours, by phase: {where}")
    side = {s: [o for (_, x), found in samples.items() if x == s for o in found] for s in SIDES}
    median = {s: statistics.median(o.on_schedule for o in found) for s, found in side.items()}
    theirs = min(median[s] for s in SIDES[1:])
    ours = side["ours"]
    figures = {
        "vs_structured_streaming": median["ours"] / theirs,
        "seconds_median": median["ours"],
        "first_output_median": statistics.median(o.first_output for o in ours),
        "worst_slice_s": max(o.worst_slice for o in ours),
        "slices_late_median": statistics.median(o.slices_late for o in ours),
        "lost": lost,
        "duplicated": duplicated,
    }
    if not quick:
        note = "3 nodes, slices of 1 s, a checkpoint every 5 s; median [least–most] over the kills."
        rest = (f"Ours, by phase: {where}.", f"`{json.dumps(figures)}`")
        write_result("recovery", "A killed node", note, columns, rows, *rest)
    report.figures(figures)


if __name__ == "__main__":
    main()
