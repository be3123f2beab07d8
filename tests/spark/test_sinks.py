"""All sinks below one driver that is killed with SIGKILL in the middle of exposing a slice.

The function of one sink kills its driver after it has written slice 3 and before that is noted: by
then one sink has shown the slice and others have not. The next driver finishes the job. The
functions are the ones of docs/sinks.md; only where they write is changed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from jobs import stream, write_rows
from killed_driver import session

import anabranch as ab
from anabranch.spark.embedded import EmbeddedCluster
from postgres_server import Server, find_binaries

FILES = 5
KILLED = 3
START_TIMEOUT_S = 900  # on a starved machine; each of two drivers takes seconds on a free one
DOCS = Path(__file__).parents[2] / "docs" / "sinks.md"


def documented(name: str, *changes: tuple[str, str]) -> Callable[[Any, int], None]:
    """A function of the documentation, with these words replaced."""
    blocks = DOCS.read_text().split("```")[1::2]
    code = next(b for b in blocks if f"def {name}(" in b).removeprefix("python\n")
    code = code.partition("\ncounts.to(")[0]
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {}
    exec(code, names)
    function: Callable[[Any, int], None] = names[name]
    return function


def killing(function: Callable[[Any, int], None], root: Path) -> Callable[[Any, int], None]:
    def call(rows: Any, slice_number: int) -> None:
        function(rows, slice_number)
        with (root / "calls").open("a") as calls:
            calls.write(f"{slice_number}\n")
        if slice_number == KILLED and not (root / "killed").exists():
            (root / "killed").touch()
            os.killpg(0, signal.SIGKILL)

    return call


def topology(root: Path, address: str) -> ab.Topology:
    to_json = documented("to_json", ("/data/json", str(root / "json")))
    to_kafka = documented(
        "to_kafka",
        ('format("kafka")', f'format("json").mode("append").option("path", "{root}/kafka")'),
    )
    job = ab.Topology("sinks", parallelism=2)
    words = job.source("words", stream(root / "in", "word string, n long"))
    totals = words.key_by("word").aggregate("totals", n=ab.sum("n"))
    words.to("lake", ab.Delta(str(root / "lake")))
    words.to("json", ab.ForEachSlice(killing(to_json, root)))
    words.to("kafka", ab.ForEachSlice(to_kafka))
    if address:
        words.to("rows", ab.Postgres(address, "words"))
        totals.to("totals_now", ab.Postgres(address, "totals", keys=["word"]))
    totals.to("totals_lake", ab.Delta(str(root / "totals")))
    return job


def main() -> None:
    root, master, address = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    spark = session(master, 1)
    topology(root, address).run(spark, checkpoint=root / "ck", available_now=True)


def life(root: Path, cluster: EmbeddedCluster, address: str) -> int:
    """Run one driver to its end; its exit status."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *(p for p in sys.path if p)]
    with (root / "driver.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(root), cluster.master_url, address],
            env={**os.environ, **cluster._variables("driver"), "PYTHONPATH": ":".join(paths)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        return process.wait(START_TIMEOUT_S)


@pytest.fixture
def server() -> Iterator[Server | None]:
    """Where there is none, the other sinks are tested all the same."""
    if find_binaries() is None:
        yield None
        return
    server = Server()
    yield server
    server.remove()


@pytest.mark.timeout(2000)
def test_a_driver_killed_while_it_exposes_a_slice(tmp_path: Path, server: Server | None) -> None:
    address = server.address if server else ""
    rows = []
    for number in range(FILES):
        frame = pl.DataFrame({"word": [f"w{i % 3}" for i in range(9)], "n": range(9)})
        write_rows(tmp_path / "in", number, frame.with_columns(n=pl.col("n") + 10 * number))
        rows += [(f"w{i % 3}", i + 10 * number) for i in range(9)]
    with EmbeddedCluster(nodes=1, memory_mb=512) as cluster:
        log = tmp_path / "driver.log"
        assert life(tmp_path, cluster, address) == -signal.SIGKILL, log.read_text()[-3000:]
        assert life(tmp_path, cluster, address) == 0, log.read_text()[-3000:]
    calls = [int(line) for line in (tmp_path / "calls").read_text().split()]
    assert calls == [1, 2, 3, 3, 4, 5]  # the newest at the kill, and no other, came twice
    lake = DeltaTable(tmp_path / "lake").to_pyarrow_table().to_pylist()
    assert Counter((r["word"], r["n"]) for r in lake) == Counter(rows)
    files = [json.loads(line) for line in lines(tmp_path / "json")]
    assert Counter((r["word"], r["n"]) for r in files) == Counter(rows)
    messages = [json.loads(json.loads(line)["value"]) for line in lines(tmp_path / "kafka")]
    assert {(r["slice"], r["word"], r["n"]) for r in messages} == {
        (i // 9 + 1, *row) for i, row in enumerate(rows)
    }
    totals = {w: sum(n for word, n in rows if word == w) for w in ("w0", "w1", "w2")}
    changes = DeltaTable(tmp_path / "totals").to_pyarrow_table().to_pylist()
    assert len(changes) == 3 * FILES
    assert {w: max(r["n"] for r in changes if r["word"] == w) for w in totals} == totals
    if server:
        assert Counter(server.query("SELECT word, n FROM words")) == Counter(rows)
        assert dict(server.query("SELECT word, n FROM totals")) == totals


def lines(directory: Path) -> list[str]:
    return [line for f in directory.rglob("*.json") for line in f.read_text().splitlines()]


if __name__ == "__main__":
    main()
