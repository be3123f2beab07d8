"""`anabranch demo --disaster`: all nodes but one die at once, and come back one by one.

The one query that lost nothing goes on; of the others those come back first that have the most
priority for the nodes there are. At the end every query is compared with the raw files.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from anabranch.api import Job
from anabranch.demos.orders import (
    ORDERS_PER_S,
    QUERIES,
    OrderRecount,
    OrderWriter,
    orders,
    recount_orders,
)
from anabranch.demos.words import all_read, demo_directory
from anabranch.driver.clock import now_ms
from anabranch.driver.progress import Progress
from anabranch.driver.queries import LIVE, QueryStatus
from anabranch.errors import AnabranchError, ConfigError
from anabranch.terminal.meter import Meter
from anabranch.terminal.running import StopSignal, summarise, watch
from anabranch.terminal.starting import Startup
from anabranch.terminal.view import seconds as span

if TYPE_CHECKING:
    from anabranch.spark.embedded import EmbeddedCluster

SECONDS = 75
NODES = 4
CALM = 0.2  # of the time, before the disaster
RETURN = 0.32  # of the time, until the last node is started again
LINGER_S = 4.0  # when all is well again


class Watcher:
    """When queries paused and when they were back. Times are of the clock of `Progress`."""

    def __init__(self) -> None:
        self.began_ms: int | None = None  # the disaster
        self.paused: set[str] = set()  # at least once since then
        self.back_s: dict[str, float] = {}  # after the disaster
        self._late: frozenset[str] = frozenset()
        self._all_live_ms: int | None = None  # since when
        self._shown_ms: dict[str, int] = {}
        self._silent_ms: dict[str, int] = {}
        self._slice = 0

    def look(
        self, slices: Iterable[Progress], queries: Sequence[QueryStatus], now_ms: int
    ) -> list[str]:
        """What there is by now; returns what is news, in words."""
        for progress in slices:
            if progress.slice > self._slice:
                self._slice = progress.slice
                for query in QUERIES:
                    if query.sink not in progress.waiting:
                        self._shown(query.sink, progress.ended_ms)
        late = frozenset(q.sink for q in queries if q.state != LIVE)
        news = []
        if self.began_ms is not None:
            stopped, back = sorted(late - self._late), sorted(self._late - late)
            after_s = (now_ms - self.began_ms) / 1000
            self.paused |= late
            if stopped:
                news.append(f"{after_s:5.1f} s  paused: {', '.join(stopped)}")
            for sink in back:
                self._shown(sink, now_ms)
                self.back_s[sink] = after_s
            if back:
                news.append(f"{after_s:5.1f} s  live again: {', '.join(back)}")
        self._late = late
        self._all_live_ms = None if late else self._all_live_ms or now_ms
        return news

    def live_for_s(self, now_ms: int) -> float:
        """How long all queries have been live; negative: they are not."""
        return -1.0 if self._all_live_ms is None else (now_ms - self._all_live_ms) / 1000

    def silent_s(self, sink: str) -> float:
        """The longest time in which it showed no new rows, from the disaster on."""
        return self._silent_ms.get(sink, 0) / 1000

    def _shown(self, sink: str, at_ms: int) -> None:
        before_ms, self._shown_ms[sink] = self._shown_ms.get(sink, at_ms), at_ms
        if self.began_ms is not None and at_ms >= self.began_ms:
            self._silent_ms[sink] = max(self._silent_ms.get(sink, 0), at_ms - before_ms)


def summary(watcher: Watcher, recounts: Iterable[OrderRecount]) -> Table:
    """A line for each query, those with most priority first."""
    table = Table(title="queries", title_justify="left")
    table.add_column("query")
    for title in ("priority", "no new rows for", "live again after", "orders", "lost"):
        table.add_column(title, justify="right")
    table.add_column("duplicated", justify="right")
    table.add_column("wrong", justify="right")
    priorities = {q.sink: q.priority for q in QUERIES}
    for found in sorted(recounts, key=lambda r: -priorities[r.sink]):
        back_s = watcher.back_s.get(found.sink)
        table.add_row(
            found.sink,
            str(priorities[found.sink]),
            span(watcher.silent_s(found.sink)),
            "never paused" if found.sink not in watcher.paused else span(back_s or 0.0),
            f"{found.orders:,}",
            *(f"{number:,}" for number in (found.lost, found.duplicated, found.wrong)),
        )
    return table


# -- the disaster -----------------------------------------------------------------------------


class Disaster:
    """A thread that kills all nodes but one, and starts new ones, one after the other."""

    def __init__(
        self, console: Console, cluster: EmbeddedCluster, job: Job, nodes: int, seconds: float
    ) -> None:
        self.began_ms: int | None = None
        self.error: AnabranchError | None = None
        self._console = console
        self._cluster = cluster
        self._job = job
        self._nodes = nodes
        self._calm_s = CALM * seconds
        self._every_s = RETURN * seconds / (nodes - 1)
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._work, name="disaster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Are all nodes back?"""
        joined = [role for role in self._job.nodes.values() if role != "joining"]
        ended = self._thread.ident is not None and not self._thread.is_alive()
        return ended and (self.began_ms is None or len(joined) >= self._nodes)

    def hurry(self) -> None:
        """No disaster, if it has not begun; else all nodes come back at once."""
        self._hurried.set()

    def finish(self) -> None:
        """Ends what it does, and raises what kept it from doing that."""
        self.hurry()
        if self._thread.ident is not None:
            self._thread.join()
        if self.error is not None and self._job.is_active:
            raise self.error

    def _work(self) -> None:
        try:
            if not self._hurried.wait(self._calm_s) and self._job.is_active:
                self._strike()
                self._return()
        except AnabranchError as e:
            self.error = e

    def _strike(self) -> None:
        """All but the node with most partitions: it has that of the query that is not spread."""
        spared = max(self._job.status().nodes, key=lambda n: n.partitions).node
        executors = self._cluster.executors()
        dying = {node: pid for node, (pid, _) in executors.items() if node != spared}
        workers = {worker for node, (_, worker) in executors.items() if node != spared}
        self._console.print(
            f"killing {len(dying)} of {self._nodes} nodes with SIGKILL, all but node {spared}: "
            f"processes {', '.join(map(str, dying.values()))}",
            style="bold yellow",
            soft_wrap=True,
        )
        self.began_ms = now_ms()
        for worker in workers:  # first: else they would start executors in the place of these
            self._cluster.kill(self._cluster.workers[worker])
        for pid in dying.values():
            self._cluster.kill(pid)

    def _return(self) -> None:
        assert self.began_ms is not None
        for number in range(1, self._nodes):
            due_s = self._every_s * number - (now_ms() - self.began_ms) / 1000
            self._hurried.wait(max(0.0, due_s))
            if not self._job.is_active:
                return
            self._cluster.add_node()
            after_s = (now_ms() - self.began_ms) / 1000
            told = f"{after_s:5.1f} s  machine {number + 1} of {self._nodes} is back"
            self._console.print(told, style="yellow")


def run_disaster_demo(console: Console, seconds: float, nodes: int) -> bool:
    """Run, recount, say how it went; True when nothing was lost or duplicated."""
    if seconds <= 0:
        raise ConfigError(f"--seconds is {seconds}; give at least 1")
    if nodes < 2:
        raise ConfigError(f"--nodes is {nodes}; all but one are killed, so give at least 2")
    with demo_directory() as root:
        return _run(console, root, seconds, nodes)


def _run(console: Console, root: Path, seconds: float, nodes: int) -> bool:
    source, output = root / "in", root / "out"
    source.mkdir()
    topology = orders(source, output, nodes)
    console.print(
        f"{nodes} nodes on this machine, {len(QUERIES)} queries on {ORDERS_PER_S} orders/s. After "
        f"{CALM * seconds:.0f} s all nodes but one are killed; one comes back every "
        f"{RETURN * seconds / (nodes - 1):.0f} s (Ctrl-C ends it early)",
        soft_wrap=True,
    )
    writer, stop, watcher = OrderWriter(source), StopSignal(), Watcher()
    from anabranch.spark.embedded import EmbeddedCluster

    with contextlib.ExitStack() as stack:
        with Startup(console).shown():
            cluster = stack.enter_context(EmbeddedCluster(1))
            cluster.make_room(nodes)  # each with a worker of its own, that can die
            spark = cluster.session(topology.name)
            stack.enter_context(stop.installed())
            job = topology.start(spark, checkpoint=root / "checkpoint", checkpoint_interval="3s")
        started = time.monotonic()
        disaster = Disaster(console, cluster, job, nodes, seconds)
        is_over = _ending(console, job, writer, stop, watcher, disaster, seconds)
        writer.start()
        try:
            meter = watch(job, topology.plan(), console, is_over)
        finally:
            disaster.finish()
            writer.finish()
        elapsed = time.monotonic() - started
    writer.check()
    console.print(summarise(meter, elapsed), soft_wrap=True)
    return _judge(console, watcher, recount_orders(source, output), output)


def _ending(
    console: Console,
    job: Job,
    writer: OrderWriter,
    stop: StopSignal,
    watcher: Watcher,
    disaster: Disaster,
    seconds: float,
) -> Callable[[Meter], bool]:
    """Begins the disaster, tells what happens, and ends the input when all is well again."""
    began = 0.0

    def is_over(meter: Meter) -> bool:
        nonlocal began
        watcher.began_ms = disaster.began_ms
        for line in watcher.look(job.recent_progress, meter.queries, now_ms()):
            console.print(line, style="yellow", soft_wrap=True)
        if stop.requested.is_set():
            disaster.hurry()
        if (meter.slices or stop.requested.is_set()) and not writer.flows.is_set():
            began = time.monotonic()
            writer.flows.set()
            disaster.start()
        well_s = watcher.live_for_s(now_ms()) if disaster.is_over else -1.0
        if well_s > LINGER_S or (began and time.monotonic() - began > seconds):
            writer.finish()
        return all_read(writer, stop, meter) and well_s > 0

    return is_over


def _judge(
    console: Console, watcher: Watcher, recounts: Sequence[OrderRecount], output: Path
) -> bool:
    console.print(summary(watcher, recounts))
    unhurt = [q.sink for q in QUERIES if q.sink not in watcher.paused]
    for sink in unhurt if watcher.began_ms is not None else ():
        console.print(f"{sink} lost nothing, and never paused")
    exact = all(r.exact for r in recounts)
    console.print(
        f"recount from the raw files: {recounts[0].orders:,} orders in {len(recounts)} queries: "
        f"lost {sum(r.lost for r in recounts):,}, "
        f"duplicated {sum(r.duplicated for r in recounts):,}, "
        f"wrong totals {sum(r.wrong for r in recounts):,}",
        style="bold green" if exact else "bold red",
        soft_wrap=True,
    )
    console.print(f"output: {output}", soft_wrap=True)
    return exact
