"""`anabranch demo`: a windowed word count on generated sentences, checked by a recount.

The recount shares nothing with the operators: plain Python over the raw input files. It covers
every window that the final watermark closed, and the last file moves the watermark past the
window of the last sentence, so it covers all sentences but that file's one.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from anabranch.api import Job, Topology
from anabranch.demos.feeding import Feeder
from anabranch.errors import ConfigError
from anabranch.generators import Sentences
from anabranch.model.duration import microseconds, parse_duration
from anabranch.operators.kernels.aggregates import Count
from anabranch.operators.kernels.windows import WINDOW_START, tumbling
from anabranch.sinks import Parquet
from anabranch.terminal.meter import Meter
from anabranch.terminal.running import StopSignal, summarise, watch
from anabranch.terminal.starting import Startup

if TYPE_CHECKING:
    from anabranch.spark.embedded import EmbeddedCluster

SENTENCES_PER_S = 2_000
SEED = 1
_FILE_SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("sentence", pa.string())])

WindowedCounts = Counter[tuple[int, str]]  # (window start in µs, word) → how often


def word_count(source: Path, output: Path, window: str, parallelism: int) -> Topology:
    """Source → splitter → counter per word and window → Parquet."""

    def read(spark: Any) -> Any:
        return spark.readStream.schema("ts timestamp, sentence string").parquet(str(source))

    # Nested, so that it is sent to nodes by value and they need not import the command line.
    def split(sentences: pl.DataFrame) -> pl.DataFrame:
        return sentences.select("ts", word=pl.col("sentence").str.split(" ")).explode("word")

    topology = Topology("word_count", parallelism=parallelism)
    (
        topology.source("sentences", read, time="ts")
        .flat_map("splitter", split)
        .key_by("word")
        .window(tumbling(window), time="ts")
        .aggregate("counter", n=Count())
        .to("counts", Parquet(str(output)))
    )
    return topology


class SentenceWriter(Feeder):
    """Seeded sentences at a constant rate."""

    def __init__(self, directory: Path, duration_s: float, window_us: int) -> None:
        sentences = Sentences(seed=SEED)

        def make(times_us: list[int]) -> pa.Table:
            text = sentences.columns(self.rows, self.rows + len(times_us))
            rows = [pa.array(times_us, pa.int64()), *text]
            return pa.table(rows, names=_FILE_SCHEMA.names).cast(_FILE_SCHEMA)

        def due_by(seconds: float) -> int:
            return int(seconds * SENTENCES_PER_S)

        super().__init__(directory, duration_s, window_us, due_by, make)


@dataclass(frozen=True, slots=True)
class Recount:
    """The output against the truth, in counted words."""

    windows: int
    words: int
    lost: int
    duplicated: int


def recount(source: Path, output: Path, window_us: int) -> Recount:
    """Count the raw files again; every closed window must be there, exactly and once."""
    truth: WindowedCounts = Counter()
    watermark_us = 0
    for file in sorted(source.glob("[0-9]*.parquet")):
        table = pq.read_table(file)
        times = table.column("ts").cast(pa.int64()).to_pylist()
        for time_us, sentence in zip(times, table.column("sentence").to_pylist(), strict=True):
            watermark_us = max(watermark_us, time_us)
            start = time_us // window_us * window_us
            truth.update((start, word) for word in sentence.split(" "))
    closed: WindowedCounts = Counter(
        {k: n for k, n in truth.items() if k[0] + window_us <= watermark_us}
    )
    found = _read_counts(output)
    return Recount(
        windows=len({start for start, _ in closed}),
        words=closed.total(),
        lost=(closed - found).total(),
        duplicated=(found - closed).total(),
    )


def _read_counts(output: Path) -> WindowedCounts:
    found: WindowedCounts = Counter()
    for file in sorted(output.glob("slice=*/*.parquet")):
        table = pq.ParquetFile(file).read()
        starts = table.column(WINDOW_START).cast(pa.int64()).to_pylist()
        words, counts = table.column("word").to_pylist(), table.column("n").to_pylist()
        for start, word, n in zip(starts, words, counts, strict=True):
            found[(start, word)] += n
    return found


def run_demo(console: Console, seconds: float, nodes: int, window: str = "30s") -> bool:
    """Run, recount, say how it went; True when nothing was lost or duplicated.

    Input and checkpoint are deleted at the end; the output stays if the recount was reached.
    """
    if seconds <= 0:
        raise ConfigError(f"--seconds is {seconds}; give at least 1")
    with demo_directory() as root:
        return _run(console, root, seconds, nodes, parse_duration(window))


@contextlib.contextmanager
def demo_directory() -> Iterator[Path]:
    """For everything of a demo; if it comes to its end, the output is kept."""
    root = Path(tempfile.mkdtemp(prefix="anabranch-demo-"))
    kept = False
    try:
        yield root
        kept = True
    finally:
        for part in ("in", "checkpoint") if kept else (".",):
            shutil.rmtree(root / part, ignore_errors=True)


def _run(console: Console, root: Path, seconds: float, nodes: int, window: timedelta) -> bool:
    source, output = root / "in", root / "counts"
    source.mkdir()
    window_us = microseconds(window)
    topology = word_count(source, output, f"{window_us}us", parallelism=nodes)
    startup = Startup(console)
    console.print(
        f"{nodes} nodes on this machine and {seconds:g} s of about "
        f"{SENTENCES_PER_S:,} sentences/s, counted by word in windows of "
        f"{window.total_seconds():g} s (Ctrl-C ends it early)",
        soft_wrap=True,
    )
    writer = SentenceWriter(source, seconds, window_us)
    stop = StopSignal()
    from anabranch.spark.embedded import EmbeddedCluster

    with contextlib.ExitStack() as stack:
        with startup.shown():
            cluster = stack.enter_context(EmbeddedCluster(nodes))
            spark = cluster.session(topology.name)
            stack.enter_context(stop.installed())
            job = topology.start(spark, checkpoint=root / "checkpoint")
        started = time.monotonic()
        writer.start()
        killer = threading.Timer(seconds / 2, kill_a_node, (console, cluster, job))
        if nodes > 1:
            killer.start()

        def is_over(meter: Meter) -> bool:
            if meter.rows_to_sinks:
                startup.done()
            return all_read(writer, stop, meter)

        try:
            meter = watch(job, topology.plan(), console, is_over)
        finally:
            killer.cancel()
            writer.finish()
        elapsed = time.monotonic() - started
    writer.check()
    if meter.rows_to_sinks:
        startup.done()
    console.print(summarise(meter, elapsed), soft_wrap=True)
    console.print(startup.summary("the first counted window"), soft_wrap=True)
    return _judge(console, recount(source, output, window_us), output)


def kill_a_node(console: Console, cluster: EmbeddedCluster, job: Job) -> None:
    """SIGKILL for the executor, and with it the node process, of a node that holds state."""
    progress = job.last_progress
    for node, (pid, _) in cluster.executors().items():
        if progress is not None and node in progress.nodes and job.is_active:
            console.print(f"killing node {node} with SIGKILL, process {pid}", style="bold yellow")
            cluster.kill(pid)
            return


def all_read(writer: Feeder, stop: StopSignal, meter: Meter) -> bool:
    """Is the end of the input read? Ctrl-C brings that end forward."""
    if stop.requested.is_set():
        writer.finish()
    return writer.done.is_set() and (writer.error is not None or meter.rows >= writer.rows)


def _judge(console: Console, result: Recount, output: Path) -> bool:
    console.print(
        f"recount from the raw files: {result.words:,} words, {result.windows} closed window(s): "
        f"lost {result.lost:,}, duplicated {result.duplicated:,}",
        style="bold green" if not (result.lost or result.duplicated) else "bold red",
        soft_wrap=True,
    )
    console.print(f"output: {output}", soft_wrap=True)
    return not (result.lost or result.duplicated)
