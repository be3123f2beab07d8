"""An episode of `correlated` in which more goes wrong: the driver is killed while queries wait, and
three more nodes are, one by one, while queries come back. Only what sinks show in the end counts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anabranch as ab
from benchmarks.correlated_episode import Episode, Plan, Writer, arrive, read_shown, shown_by
from benchmarks.correlated_jobs import Case
from benchmarks.workloads import say

KILLS = 3
BETWEEN_S = 8.0  # two kills
START_S = 150.0  # a driver on a busy machine
END_S = 240.0  # for the rest of the input, and for the rest of the job
Condition = Callable[[dict[str, Any]], bool]


class Driver:
    """One life of the driver, and what it tells."""

    def __init__(self, cluster: Any, root: Path, plan: Plan) -> None:
        self._root = root
        self._begun = len(self._lines())
        given = {
            "case": plan.case,
            "costs": [plan.costs.first, plan.costs.second],
            "options": dict(plan.options),
        }
        arguments = [str(root), cluster.master_url, str(len(cluster.workers)), json.dumps(given)]
        here = str(Path(__file__).resolve().parent.parent)
        with (root / "driver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.correlated_driver", *arguments],
                env={
                    **os.environ,
                    **cluster._variables("driver"),
                    "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _lines(self) -> list[str]:
        told = self._root / "told"
        return told.read_text().splitlines() if told.exists() else []

    @property
    def newest(self) -> dict[str, Any] | None:
        """What it told last in this life."""
        if self._process.poll() is not None:
            raise SystemExit(f"the driver ended: {self.said}")
        lines = [line for line in self._lines()[self._begun :] if line.endswith("}")]
        return dict(json.loads(lines[-1])) if lines else None

    @property
    def said(self) -> str:
        return (self._root / "driver.log").read_text()[-2000:]

    def wait_for(self, condition: Condition, seconds: float) -> None:
        if not self.comes_to(condition, seconds):
            raise SystemExit(f"it did not happen within {seconds:.0f} s: {self.said}")

    def comes_to(self, condition: Condition, seconds: float) -> bool:
        """Within this time?"""
        deadline = time.monotonic() + seconds
        while (newest := self.newest) is None or not condition(newest):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.25)
        return True

    def kill(self) -> None:
        """With its JVM, and so with all executors."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self) -> None:
        (self._root / "stop").touch()
        try:
            failed = self._process.wait(END_S) != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            raise SystemExit(f"the driver did not end well: {self.said}")


def run_harm(plan: Plan, case: Case, root: Path) -> Episode:
    """As an episode, with more harm; `lost` and `duplicated` are all that is of use of it."""
    writer, found = Writer(root / "in", case), Episode(plan)
    with writer.ending(), ab.EmbeddedCluster(1) as cluster:
        for _ in range(plan.nodes - 1):
            cluster.add_node()
        driver, ended = Driver(cluster, root, plan), threading.Event()
        try:
            driver.wait_for(lambda told: told["slice"] > 0, START_S)
            writer.start()
            time.sleep(plan.steady_s)
            driver.wait_for(lambda told: told["cut"] > 0, START_S)
            _strike(cluster, driver, found)
            arrivals = cluster, plan, found.killed, lambda: not ended.is_set()
            threading.Thread(target=arrive, args=arrivals, daemon=True).start()
            driver = _more_harm(cluster, driver, root, plan, found)
            time.sleep(max(0.0, found.killed + max(plan.arrivals) + 1 - time.time()))
            if not driver.comes_to(_well(plan.nodes), plan.patience_s):
                say("  not all queries are live: the rest comes back when the job ends")
            rows = writer.finish()
            sink = root / "out" / case.whole  # stopped earlier, it would leave rows unread
            driver.wait_for(lambda _: shown_by(sink).height >= rows, END_S)
            driver.finish()
        finally:
            ended.set()
            driver.kill()
            found.ended = time.time()
    read_shown(found, case, root, writer.times, rows)
    return found


def _strike(cluster: Any, driver: Driver, found: Episode) -> None:
    """Kill machines but those with the first partitions."""
    told, executors = driver.newest, cluster.executors()
    assert told is not None
    homes = [told["homes"][p] for p in sorted(told["homes"])]
    spared = list(dict.fromkeys([*homes, *executors]))[: found.plan.nodes - found.plan.killed]
    dying = {node: x for node, x in executors.items() if node not in spared}
    for _, worker in dying.values():
        cluster.kill(cluster.workers[worker])
    for pid, _ in dying.values():
        cluster.kill(pid)
    found.killed = time.time()
    say(f"{found.plan.side}: {len(dying)} of {len(executors)} nodes are killed")


def _more_harm(cluster: Any, driver: Driver, root: Path, plan: Plan, found: Episode) -> Driver:
    """The driver, in the middle of the arrivals; then node after node."""
    middle = plan.arrivals[len(plan.arrivals) // 2]
    time.sleep(max(0.0, found.killed + middle - time.time()))
    driver.kill()
    say(f"  {time.time() - found.killed:5.1f} s: the driver is killed")
    after = Driver(cluster, root, plan)
    try:
        for _ in range(KILLS):
            seen = 0 if (told := after.newest) is None else told["slice"]
            after.wait_for(lambda told, seen=seen: told["slice"] > seen, START_S)  # type: ignore[misc]
            time.sleep(BETWEEN_S)
            node, (pid, _) = next(iter(cluster.executors().items()))
            cluster.kill(pid)
            say(f"  {time.time() - found.killed:5.1f} s: node {node} is killed")
    except BaseException:
        after.kill()
        raise
    return after


def _well(nodes: int) -> Condition:
    """Are all queries live, on all nodes?"""

    def well(told: dict[str, Any]) -> bool:
        warm = sum(role != "joining" for role in told["nodes"].values())
        live = told["live"] == told["queries"] > 0 and not told["recovering"]
        return live and warm >= nodes and told["seconds"] < 2.0

    return well
