"""The driver is killed with SIGKILL again and again and started again on the same directory; in the
end every slice has the rows of an uninterrupted computation, once.

Every life is a process of its own with its own Spark application on one or two nodes, killed
together with its JVM at a seeded moment between restore and the end of some slice. What the kill
hit is read from the files it left; the test prints how often.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from jobs import numbers, read_output

from anabranch.spark.embedded import EmbeddedCluster
from effort import LONG
from oracle import Dataflow, Step

KILLS = 20 if LONG else 2
FILES = 130 if LONG else 40
START_TIMEOUT_S = 300
STEPS = (
    Step("numbers", "source"),
    Step("odd", "filter", ("numbers",), 2),
    Step("sum", "sum", ("odd",), 3),
    Step("spread", "map", ("sum",), 3),
    Step("most", "max", ("spread",), 2),
    Step("raw", "sink", ("odd",)),
    Step("sums", "sink", ("sum",)),
    Step("out", "sink", ("most",)),
)


def life(root: Path, cluster: EmbeddedCluster, nodes: int) -> subprocess.Popen[bytes]:
    variables = cluster._variables("driver")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit" / "node")]
    paths += [str(Path(__file__).parents[1]), *(p for p in sys.path if p)]
    return subprocess.Popen(
        [sys.executable, "-m", "killed_driver", str(root), cluster.master_url, str(nodes)],
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=(root / "driver.log").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


class Files:
    """What a dead driver left, read without the product's code."""

    def __init__(self, root: Path) -> None:
        self.root = root
        segments = (root / "ck" / "journal").glob("*.jsonl")
        by_number = lambda path: [int(n) for n in path.stem.split("-")]  # noqa: E731
        self.segment = max(segments, key=by_number, default=None)
        slices = self.journal()[1] if self.segment else []
        self.newest = int(slices[-1]["number"]) if slices else 0

    def journal(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        assert self.segment is not None
        lines = [line for line in self.segment.read_bytes().split(b"\n") if line]
        parsed: list[dict[str, Any]] = []
        for line in lines:
            try:
                parsed.append(json.loads(line.partition(b" ")[2]))
            except ValueError:
                break
        return parsed[0], [*parsed[0]["slices"], *parsed[1:]]

    def is_ahead(self, before: Files, slices: int) -> bool:
        """Has another life begun, and finished so many slices?"""
        return self.segment != before.segment and self.newest >= before.newest + slices

    def phase(self) -> str:
        head, slices = self.journal()
        newest = slices[-1] if slices else {"number": 0, "batch": -1, "staged": {}}
        number, generation = newest["number"], head["generation"]
        following = f"{number + 1:012d}-{generation}"
        logged = any((self.root / "ck" / "source-log").glob(f"{following}-*/[0-9]*.log"))
        staged = any(self.root.glob(f"*/.anabranch/staged/{number + 1}-{generation}"))
        exposed = all((self.root / s / f"slice={number}").exists() for s in newest["staged"])
        cut = head["cut"]["slice"] if head["cut"] else 0
        sealed = (self.root / "ck" / "checkpoints").glob("*/*/*.ckpt")
        in_flight = any(int(p.name.partition("-")[0]) > cut for p in sealed)
        if not exposed:
            hit = "journalled, not exposed"
        elif staged:
            hit = "staged"
        elif logged:
            hit = "logged"
        elif newest.get("generation") != generation:
            hit = "restoring or replaying"
        elif _newest_batch(self.root / "ck" / "spark" / "commits") < newest["batch"]:
            hit = "exposed, Spark not told"
        elif _newest_batch(self.root / "ck" / "spark" / "offsets") > newest["batch"]:
            hit = "reading"
        else:
            hit = "between slices"
        return hit + (", checkpoint in flight" if in_flight else "")


def _newest_batch(directory: Path) -> int:
    return max((int(p.name) for p in directory.glob("[0-9]*")), default=-1)


@pytest.mark.timeout(1800)
def test_killed_again_and_again_every_slice_is_right(tmp_path: Path) -> None:
    raw = numbers(tmp_path / "in", files=FILES, rows=20)
    chance = random.Random(20_26)
    hits: Counter[str] = Counter()
    with EmbeddedCluster(nodes=2, memory_mb=512) as cluster:
        for _ in range(KILLS):
            before = Files(tmp_path)
            process = life(tmp_path, cluster, chance.choice([1, 2]))
            slices = chance.randint(0, 5)  # to finish before the kill; none: while it restores
            deadline = time.monotonic() + START_TIMEOUT_S
            while not Files(tmp_path).is_ahead(before, slices):
                assert process.poll() is None, (tmp_path / "driver.log").read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.4))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            hit = Files(tmp_path).phase()
            hits[hit] += 1
            print(f"kill {sum(hits.values())}: {hit}", flush=True)
        last = life(tmp_path, cluster, 2)
        assert last.wait(1200) == 0, (tmp_path / "driver.log").read_text()[-3000:]
    for hit, times in hits.most_common():
        print(f"{times:4} kills: {hit}")
    check_output(tmp_path, raw)
    if LONG:
        assert len(hits) >= 4, hits


def check_output(root: Path, raw: pl.DataFrame) -> None:
    """Every row once, and in every slice exactly what the slices before it make of its rows.

    A kill while Spark plans a batch leaves it a file more for the next one, so which rows make a
    slice is read from the sink that gets them as they are; the rest is recomputed from there.
    """
    oracle = Dataflow(STEPS)
    found = {sink: slices_of(root / sink) for sink in ("raw", "sums", "out")}
    seen = sum(found["raw"].values(), Counter())
    assert seen == Counter(row for row in raw.rows() if row[1] % 2)
    for number in sorted(found["raw"]):
        rows = list(found["raw"][number].elements())
        for sink, expected in oracle.run({"numbers": rows}).items():
            assert found[sink].get(number, Counter()) == expected, (sink, number)
    assert found["sums"].keys() <= found["raw"].keys()
    assert found["out"].keys() <= found["raw"].keys()


def slices_of(directory: Path) -> dict[int, Counter[Any]]:
    frames = read_output(directory).partition_by("slice", as_dict=True)
    return {k[0]: Counter(f.select("k", "v").rows()) for k, f in frames.items()}
