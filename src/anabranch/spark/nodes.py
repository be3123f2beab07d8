"""Which nodes there are, which are lost, and which have newly joined: one owner of that view.

A thread looks at Spark's list of executors, and at the heartbeats of the nodes, many times a
second. Jobs run under a guard: when a
node they need is gone, their pinned tasks would wait for it, so they are cancelled. Executors
that join are warmed (Python started, node process up) before anybody hears of them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from anabranch.driver.cluster import NodesObserver
from anabranch.driver.heartbeats import Beat, Heartbeats
from anabranch.model.ids import NodeId
from anabranch.spark.embedded import make_room
from anabranch.spark.session import executors

log = logging.getLogger("anabranch")
LOOK_S = 0.05  # a look at the driver's list of executors takes less than a millisecond
SETTLE_S = 2.0  # a job failed: so long until Spark must have noticed that an executor is gone
END_S = 10.0  # a process that was told to end does so with its next beat


@dataclass(eq=False)
class Guard:
    """A job's nodes, while it runs; `due_s` is when it must have ended, in time as it counts for
    nodes, and `overdue` what each node was doing when it had not."""

    watch: NodeWatch
    nodes: tuple[NodeId, ...]
    tag: str
    due_s: float | None = None
    overdue: dict[NodeId, Beat] | None = None

    def lost(self) -> dict[NodeId, str]:
        """Its nodes that are gone; waits a moment, for Spark may fail the job before it knows."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            found = {n: r for n, r in self.watch.lost.items() if n in self.nodes}
            if found:
                return found
            time.sleep(LOOK_S)
        return {}


class NodeWatch:
    """Start it with the executors that are already warm."""

    def __init__(
        self,
        spark: SparkSession,
        timeout_s: float,
        warm: Callable[[NodeId], None],
    ) -> None:
        self._spark = spark
        self._sc: Any = spark.sparkContext
        self._warm = warm
        self._locations: dict[NodeId, Any] = {}
        self._hosts: dict[NodeId, str] = {}
        self._guards: set[Guard] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        host = self._sc.getConf().get("spark.driver.host")
        self._heartbeats = Heartbeats(host, timeout_s)
        self.pulse = self._heartbeats.pulse
        self.lost: dict[NodeId, str] = {}
        self.ready: tuple[NodeId, ...] = ()
        for node, host in executors(spark).items():
            self._add(NodeId(node), host)
        self.ready = tuple(self._locations)
        self._here: set[str] = set(self.ready)  # Spark's list at the last look
        # Executors that Spark is to have, those among them that it is about to replace: its list
        # of the moment would forget them.
        self.wanted = len(self._here)

    def start(self, observer: NodesObserver) -> None:
        threading.Thread(
            target=self._look_on, args=(observer,), name="anabranch-nodes", daemon=True
        ).start()

    def close(self) -> None:
        self._closed.set()
        self._heartbeats.close()

    def location(self, node: NodeId) -> Any:
        """A Scala sequence of the one location of a node."""
        return self._locations[node]

    @property
    def settled(self) -> bool:
        """Is every executor a node that is warm?"""
        return self._here <= set(self.ready)

    @property
    def joining(self) -> tuple[NodeId, ...]:
        """Executors that are being warmed."""
        known = {*self.ready, *self.lost}
        return tuple(NodeId(n) for n in sorted(self._here) if n not in known)

    @property
    def hosts(self) -> dict[NodeId, str]:
        """The machine of every node there ever was."""
        return dict(self._hosts)

    def request(self, count: int) -> None:
        """Ask Spark's cluster manager for more executors; they join when it has room."""
        with self._lock:
            self.wanted += count
        make_room(self._spark, self.wanted)
        self._ask_for(self.wanted)

    def _ask_for(self, total: int) -> None:
        nowhere = self._sc._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(
            self._sc._jvm.java.util.HashMap()
        )
        self._sc._jsc.sc().requestTotalExecutors(total, 0, nowhere)

    def release(self, nodes: tuple[NodeId, ...]) -> None:
        """Give executors back to Spark's cluster manager, which is not to replace them."""
        # Without this Spark would take the number it wants for 0, and replace no lost one either.
        self._ask_for(self.wanted)
        for node in nodes:
            self._declare_lost(node, "it was released")
            with self._lock:
                self.wanted -= 1
            self._sc._jsc.sc().killExecutor(node)  # Spark lowers its number itself

    @contextlib.contextmanager
    def guarding(self, nodes: tuple[NodeId, ...], limit_s: float | None = None) -> Iterator[Guard]:
        """Whatever jobs this thread runs inside are cancelled when one of their nodes is gone, or
        when they take longer than `limit_s`."""
        guard = Guard(self, nodes, f"anabranch-{uuid.uuid4().hex}")
        if limit_s is not None:
            guard.due_s = self._heartbeats.listened_s + limit_s
        self._sc.addJobTag(guard.tag)
        with self._lock:
            self._guards.add(guard)
        try:
            yield guard
        finally:
            with self._lock:
                self._guards.discard(guard)
            self._sc.removeJobTag(guard.tag)

    def cancel(self) -> None:
        """Every job that is guarded."""
        with self._lock:
            guards = list(self._guards)
        for guard in guards:
            self._sc.cancelJobsWithTag(guard.tag)

    def end_process(self, node: NodeId) -> bool:
        """End a node's process, which hangs; has it?"""
        self._declare_lost(node, "it was ended")
        return self._heartbeats.await_end(node, END_S)

    def _declare_lost(self, node: NodeId, reason: str) -> None:
        """This node is not used again, whatever Spark thinks of it."""
        self.ready = tuple(n for n in self.ready if n != node)
        self.lost[node] = reason
        self._heartbeats.declare_lost(node)

    def _add(self, node: NodeId, host: str) -> None:
        jvm: Any = self._sc._jvm
        where = jvm.java.util.ArrayList()
        where.add(f"executor_{host}_{node}")
        self._hosts[node] = host
        self._locations[node] = jvm.org.apache.spark.api.python.PythonUtils.toSeq(where)

    def _look_on(self, observer: NodesObserver) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self._look(observer)
            except Exception as e:
                if self._sc._jsc is None or self._sc._jsc.sc().isStopped():
                    return  # the Spark application has ended, and this with it
                log.debug("a look at the executors failed: %r", e)

    def _look(self, observer: NodesObserver) -> None:
        here = executors(self._spark)
        self._here = set(here)
        with self._lock:
            self.wanted = max(self.wanted, len(self._here - self.lost.keys()))
        gone = {
            n: "its executor is gone"
            for n in self._locations
            if n not in here and n not in self.lost
        }
        silent = self._heartbeats.silent()
        gone |= {n: f"it was silent for {s:.1f} s" for n, s in silent.items() if n not in gone}
        for node, reason in gone.items():
            self._declare_lost(node, reason)
        with self._lock:
            doomed = [g for g in self._guards if self.lost.keys() & set(g.nodes)]
            overdue = [g for g in self._guards if self._is_overdue(g)]
        for guard in (*doomed, *overdue):
            self._sc.cancelJobsWithTag(guard.tag)  # again, until it has let go
        if gone and not doomed:
            reason = "; ".join(dict.fromkeys(gone.values()))
            _behind(observer.nodes_lost, tuple(gone), reason)
        for node in silent:  # last, for it may take a while: it may be a zombie, so it must die
            self._sc._jsc.sc().killAndReplaceExecutor(node)
        for new in [NodeId(n) for n in here if n not in self._locations]:
            self._add(new, here[new])
            _behind(self._welcome, new, observer)

    def _is_overdue(self, guard: Guard) -> bool:
        """Two beats later, so that every node has said meanwhile what it is doing."""
        if guard.due_s is None:
            return False
        latest = guard.due_s + 2 * self.pulse.interval_s
        if guard.overdue is None and self._heartbeats.listened_s > latest:
            beats = self._heartbeats.newest
            guard.overdue = {n: beats[n] for n in guard.nodes if n in beats and beats[n].doing}
        return guard.overdue is not None

    def _welcome(self, node: NodeId, observer: NodesObserver) -> None:
        try:
            self._warm(node)
        except Exception as e:
            if not self._closed.is_set():  # else the run is over, and perhaps the session
                log.warning("node %s joined but could not be warmed: %s", node, e)
            return
        if node in self.lost or self._closed.is_set():
            return
        self.ready = (*self.ready, node)
        log.info("node %s joined", node)
        observer.nodes_joined((node,))


def _behind(work: Callable[..., None], *arguments: Any) -> None:
    """The watch goes on meanwhile."""
    threading.Thread(target=work, args=arguments, daemon=True).start()
