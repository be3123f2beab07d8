"""The command line against real Spark processes, each command in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.driver import endpoint
from anabranch.spark import watchdog
from effort import LONG

TIMEOUT_S = 600  # on a starved machine; seconds on a free one
COMMAND = [sys.executable, "-c", "from anabranch.cli import app; app()"]

JOB = """
from pathlib import Path

import anabranch as ab

HERE = Path(__file__).parent

def read(spark):
    return spark.readStream.schema("k long, v long").parquet(f"{HERE}/in")

topology = ab.Topology("sums")
topology.source("rows", read).key_by("k").aggregate("sum", v=ab.sum("v")).to(
    "out", ab.Parquet(f"{HERE}/out")
)

def broken():
    topology = ab.Topology("broken")
    def fail(frame):
        if len(frame):
            raise ValueError("no such luck")
        return frame
    topology.source("rows", read).map("fail", fail).to("out", ab.Parquet(f"{HERE}/broken"))
    return topology
"""


started: list[subprocess.Popen[str]] = []


@pytest.fixture
def job() -> Iterator[Path]:
    """A directory with a job and its input; also for temporary files, hence a short path."""
    with tempfile.TemporaryDirectory(prefix="job-") as name:
        (Path(name) / "sums_job.py").write_text(JOB)
        (Path(name) / "in").mkdir()
        yield Path(name)
        for process in started:
            if process.poll() is None:  # the test failed; its cluster ends with it
                process.kill()
                process.communicate()
        started.clear()


def put_rows(job: Path, number: int, rows: int = 100) -> None:
    table = pa.table({"k": [i % 10 for i in range(rows)], "v": [1] * rows})
    pq.write_table(table, job / "in" / f".{number}.parquet")
    (job / "in" / f".{number}.parquet").rename(job / "in" / f"{number}.parquet")


def start(job: Path, *arguments: str) -> subprocess.Popen[str]:
    # A session of its own, so that a Ctrl-C can be sent to the group, as a terminal does.
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=job,
        env={**os.environ, "TMPDIR": str(job), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def sums(job: Path) -> dict[int, int]:
    """The newest value of every key."""
    frames = [
        pl.read_parquet(f, hive_partitioning=False).with_columns(s=int(f.parent.name[6:]))
        for f in (job / "out").glob("slice=*/*.parquet")
    ]
    if not frames:
        return {}
    newest = pl.concat(frames).sort("s").group_by("k").last()
    return dict(newest.select("k", "v").sort("k").iter_rows())


def test_a_function_that_raises_is_one_sentence(job: Path) -> None:
    put_rows(job, 1)
    arguments = ("run", "sums_job:broken", "--nodes", "1", "--checkpoint", "ck", "--available-now")
    process = start(job, *arguments)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "operator 'fail'" in stderr
    assert "ValueError: no such luck" in stderr
    assert "Traceback" not in stdout + stderr
    assert len(stderr.splitlines()) == 1, stderr


def test_ctrl_c_while_the_cluster_starts_leaves_nothing(job: Path) -> None:
    process = start(job, "run", "sums_job:topology", "--nodes", "1", "--checkpoint", "new/ck")
    assert process.stdout is not None
    said = ""
    while "starting a cluster" not in said:
        said = process.stdout.readline()
        assert said, process.communicate()
    while not (found := list(job.glob("anabranch-*/master.log"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, len(stderr.splitlines())) == (130, 1), stderr
    assert stderr.startswith("interrupted")
    assert watchdog.members(str(found[0].parent)) == []
    assert sorted(p.name for p in job.iterdir() if p.name != "__pycache__") == ["in", "sums_job.py"]


DEMO = (
    "import sys; from rich.console import Console; from anabranch.demos.words import run_demo; "
    "sys.exit(not run_demo(Console(), seconds=4, nodes=2, window='2s'))"
)


def test_the_demo_loses_and_duplicates_nothing(job: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", DEMO],
        env={**os.environ, "TMPDIR": str(job), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "lost 0, duplicated 0" in process.stdout
    assert "from the start of the command to the first counted window" in process.stdout
    output = next(line for line in process.stdout.splitlines() if line.startswith("output: "))
    kept = Path(output.removeprefix("output: "))
    assert list(kept.glob("slice=*/*.parquet"))
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]


def ask(job: Path, *arguments: str) -> tuple[int, str]:
    ran = start(job, *arguments)
    stdout, stderr = ran.communicate(timeout=TIMEOUT_S)
    return ran.returncode, stdout + stderr


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_running_job_is_asked_scaled_given_another_node_and_goes_on_after_ctrl_c(
    job: Path,
) -> None:
    put_rows(job, 1)
    process = start(
        job, "run", "sums_job:topology", "--nodes", "2", "--checkpoint", "ck", "--slice", "200ms"
    )

    def await_sums(total: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while sums(job) != dict.fromkeys(range(10), total):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    deadline = time.monotonic() + TIMEOUT_S
    while not (job / "ck" / "control.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    status = endpoint.ask(job / "ck", {"do": "status"})
    assert status["phase"] == "starting"  # its cluster is
    await_sums(10)
    put_rows(job, 2)
    code, said = ask(job, "scale", "ck", "sum", "3")
    assert (code, said.splitlines()[0]) == (0, "done: sum at parallelism 3")
    assert "sum from 2 to 3 partitions" in said
    code, said = ask(job, "scale", "ck", "sum", "100000")
    assert (code, "key groups" in said, len(said.splitlines())) == (1, True, 1)
    assert ask(job, "nodes", "ck", "add", "1")[0] == 0
    put_rows(job, 3)
    nodes: list[dict[str, object]] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(nodes) < 3 or not all(n["partitions"] for n in nodes):
        assert time.monotonic() < deadline
        code, said = ask(job, "nodes", "ck", "--json")
        assert code == 0, said
        nodes = json.loads(said)
    assert ask(job, "nodes", "ck", "drain", str(nodes[0]["node"]))[0] == 0
    status = json.loads(ask(job, "status", "ck", "--json")[1])
    assert [n["node"] for n in status["nodes"]] == [n["node"] for n in nodes[1:]]
    assert status["operators"][0]["partitions"] == 3
    await_sums(30)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, stderr) == (0, "")
    assert "adjusted after slice" in stdout
    assert sums(job) == dict.fromkeys(range(10), 30)
    assert list((job / "ck" / "checkpoints").rglob("*.ckpt"))
    code, said = ask(job, "status", "ck")
    assert (code, said.startswith("error: no job is running on ck")) == (1, True)

    put_rows(job, 4)
    again = start(
        job, "run", "sums_job:topology", "--nodes", "1", "--checkpoint", "ck", "--available-now",
        "--autoscale",
    )  # fmt: skip
    stdout, stderr = again.communicate(timeout=TIMEOUT_S)
    assert (again.returncode, stderr) == (0, "")
    assert "100 rows in" in stdout
    assert sums(job) == dict.fromkeys(range(10), 40)
    assert not list(job.glob("anabranch-*/master.log"))


ELASTIC = (
    "import sys; from rich.console import Console; from anabranch.demos.elastic import "
    "run_elastic_demo; sys.exit(not run_elastic_demo(Console(), seconds=12, nodes=2))"
)


@pytest.mark.skipif(not LONG, reason="a cluster of its own, for more than a minute")
def test_the_elastic_demo_loses_and_duplicates_nothing(job: Path) -> None:
    """Too short for decisions, or for a kill, that could be relied on."""
    process = subprocess.run(
        [sys.executable, "-c", ELASTIC],
        env={**os.environ, "TMPDIR": str(job), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "lost 0, duplicated 0, wrong scores 0, wrong rankings 0" in process.stdout
