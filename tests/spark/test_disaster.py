"""Most machines of a cluster die at once: queries that fit on what is left go on or come back, the
others follow as machines come back, and every sink shows what it must. In the middle of that the
driver is killed, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from disaster_driver import NODES, ROW_S, WHOLE
from jobs import read_output, wait_for, write_rows

from anabranch.spark.embedded import EmbeddedCluster

KEYS = 80
ROWS_PER_S = 80
EVERY_S = 8  # a machine comes back


class Feed:
    """A file every quarter of a second, until it is stopped."""

    def __init__(self, directory: Path) -> None:
        self.frames: list[pl.DataFrame] = []
        self._directory = directory
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._write()

    def _write(self) -> None:
        rows = ROWS_PER_S // 4
        v = pl.int_range(len(self.frames) * rows, (len(self.frames) + 1) * rows, eager=True)
        self.frames.append(pl.DataFrame({"k": v % KEYS, "v": v}))
        write_rows(self._directory, len(self.frames), self.frames[-1])

    def _run(self) -> None:
        while not self._stopped.wait(0.25):
            self._write()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._thread.join()


class Driver:
    """One life of the driver, and what it says of its slices."""

    def __init__(self, root: Path, cluster: EmbeddedCluster) -> None:
        self._root = root
        self._told = root / "slices"
        self._begun = len(self._lines())
        paths = [
            str(Path(__file__).parent),
            str(Path(__file__).parents[1]),
            *filter(None, sys.path),
        ]
        nodes = len(cluster.workers)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "disaster_driver", str(root), cluster.master_url, str(nodes)],
            env={
                **os.environ,
                **cluster._variables("driver"),
                "PYTHONPATH": os.pathsep.join(paths),
            },
            stdout=(root / "driver.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _lines(self) -> list[str]:
        return self._told.read_text().splitlines() if self._told.exists() else []

    @property
    def slices(self) -> list[dict[str, Any]]:
        """Of this life; a line that is being written does not count."""
        assert self._process.poll() is None, (self._root / "driver.log").read_text()[-3000:]
        lines = self._lines()[self._begun :]
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def waiting(self) -> list[frozenset[str]]:
        """Queries that waited for rows, slice by slice."""
        return [frozenset(one["waiting"]) for one in self.slices]

    def kill(self) -> None:
        """With its JVM, and so with all executors."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def finish(self) -> None:
        (self._root / "stop").touch()
        assert self._process.wait(120) == 0, (self._root / "driver.log").read_text()[-3000:]


def kill_machines(cluster: EmbeddedCluster, names: list[str]) -> None:
    """Workers first: nothing takes the place of their executors."""
    executors = cluster.executors()
    for name in names:
        cluster.kill(cluster.workers[name])
    for pid, worker in executors.values():
        if worker in names:
            cluster.kill(pid)


def expected(order: list[int]) -> list[tuple[int, int, int]]:
    """Every row with the sum of its key so far, by plain Python."""
    totals: Counter[int] = Counter()
    found = []
    for v in order:
        totals[v % KEYS] += v
        found.append((v % KEYS, v, totals[v % KEYS]))
    return found


def shown(root: Path, name: str) -> pl.DataFrame:
    """In the order of slices. A batch that piled up is cut into several, which need not have the
    order of its files."""
    return read_output(root / f"out_{name}").sort("slice", "v")


@pytest.mark.timeout(600)
def test_queries_come_back_as_machines_do(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in")
    with EmbeddedCluster(nodes=1, memory_mb=512) as cluster:
        for _ in range(NODES - 1):
            cluster.add_node()
        driver = Driver(tmp_path, cluster)
        wait_for(lambda: len(driver.slices) > 0)
        with feed.running():
            wait_for(lambda: len(driver.slices) > 20)
            spared = cluster.executors()[driver.slices[-1]["home"]][1]
            kill_machines(cluster, sorted({*cluster.workers} - {spared}))
            wait_for(lambda: any(driver.waiting))
            time.sleep(EVERY_S)
            cluster.add_node()
            time.sleep(EVERY_S)
            before = driver.waiting
            driver.kill()
            driver = Driver(tmp_path, cluster)
            wait_for(lambda: len(driver.waiting) > 3)
            after = driver.waiting
            for _ in range(NODES - 2):
                cluster.add_node()
                time.sleep(EVERY_S)
        rows = sum(frame.height for frame in feed.frames)
        wait_for(lambda: all(shown(tmp_path, name).height >= rows for name in ROW_S))
        driver.finish()
    order = shown(tmp_path, WHOLE)["v"].to_list()
    assert sorted(order) == list(range(rows))
    for name in ROW_S:
        assert shown(tmp_path, name).select("k", "v", "total").rows() == expected(order), name
    waited = {name: sum(f"out_{name}" in slices for slices in before) for name in ROW_S}
    print(f"slices that waited, of {len(before)}: {waited}")
    assert before[-1], "with two nodes of four some wait"
    assert waited[WHOLE] == 0, "it lost nothing"
    assert waited["a"] < min(waited["b"], waited["c"]), "there was room for it"
    assert after[0], "what waited waits in the next life, too"
