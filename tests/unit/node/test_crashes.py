"""A driver killed before any single file operation, then restarted, gives the same rows once.

The kill is an exception that nothing catches, raised instead of the n-th write, sync, rename or
directory creation of the driver's thread; what the process had written stays. Node processes die
with it or stay. The sink is Parquet, read back without the product's code.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from local_run import Batch, FaultyCluster, LocalRun

import anabranch as ab
from effort import LONG
from flow_topology import build
from oracle import Dataflow, Step

STEPS = (
    Step("s", "source"),
    Step("odd", "filter", ("s",), 2),
    Step("sum", "sum", ("odd",), 2),
    Step("spread", "map", ("sum",), 3),
    Step("max", "max", ("spread",), 3),
    Step("raw", "sink", ("odd",)),
    Step("out", "sink", ("max",)),
)
BATCHES: list[Batch] = [
    [{"s": [(i % 5, i + b) for i in range(6)]}, {"s": [(None, b), (7, 2 * b + 1)]}]
    for b in range(4)
]


class Killed(BaseException):
    """Not an Exception: nothing in the product may catch it."""


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, operation: int) -> Iterator[list[str]]:
    """Raise Killed instead of the n-th file operation of this thread; lists those before it."""
    done: list[str] = []
    main = threading.get_ident()

    def guard(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == main:
                if len(done) == operation:
                    raise Killed(name)
                done.append(name)
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", guard("write", os.write))
        patch.setattr(os, "fsync", guard("sync", os.fsync))
        for name in ("replace", "rename", "mkdir", "unlink"):
            patch.setattr(Path, name, guard(name, getattr(Path, name)))
        yield done


# `make test-long`: a crash at many more of the operations.


def topology(root: Path) -> ab.Topology:
    return build(Dataflow(STEPS), lambda name: ab.Parquet(str(root / name)))


def work(root: Path, hosts: FaultyCluster | None, limit: int | None) -> None:
    """Go on from wherever the directory is, to the end."""
    run = LocalRun(topology(root), root / "ck", cluster=hosts, max_rows_per_slice=limit)
    try:
        # Spark offers the batch again whose end it was not told about.
        for number in range(max(0, run.next_batch - 1), len(BATCHES)):
            run.feed(BATCHES[number], number)
        run.stop()
    finally:
        run.kill()


def output(root: Path, sink: str) -> Counter[tuple[Any, ...]]:
    files = sorted((root / sink).glob("slice=*/*.parquet"))
    assert not [p for f in files for p in f.parent.iterdir() if p.suffix != ".parquet"]
    return Counter(
        (f.parent.name, *row) for f in files for row in pl.read_parquet(f, glob=False).rows()
    )


@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("nodes_survive", [False, True])
def test_killed_at_file_operations_all_over_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, nodes_survive: bool
) -> None:
    with killed_at(monkeypatch, -1) as operations:
        work(tmp_path / "calm", None, limit)
    rows = {s: rows_of(output(tmp_path / "calm", s)) for s in ("raw", "out")}
    assert len(operations) > 60
    where: Counter[str] = Counter()
    # Some of every kind; each of the four variants takes its own.
    variant = 2 * (limit is None) + nodes_survive
    kinds = sorted(set(operations))
    for kind in kinds if LONG or variant % 3 == 0 else ("rename", "write"):
        places = [i for i, name in enumerate(operations) if name == kind]
        chosen = places[variant % len(places) :: max(1, len(places) // (12 if LONG else 1))]
        where.update(crash_at(chosen, tmp_path, monkeypatch, limit, nodes_survive, rows))
    assert where.keys() >= {"write", "rename"}, where


def crash_at(
    chosen: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    nodes_survive: bool,
    rows: dict[str, Counter[Any]],
) -> Counter[str]:
    """Crash at each of these operations, restart, compare; what the crashes hit."""
    where: Counter[str] = Counter()
    for operation in chosen:
        root = tmp_path / f"{operation}"
        hosts = FaultyCluster(2) if nodes_survive else None
        try:
            with killed_at(monkeypatch, operation):
                work(root, hosts, limit)
        except Killed as e:
            where[str(e)] += 1
        work(root, hosts, limit)
        for sink, wanted in rows.items():
            assert rows_of(output(root, sink)) == wanted, operation
    return where


def rows_of(found: Counter[tuple[Any, ...]]) -> Counter[Any]:
    """Without the slice: a stop's last slice may get another number; the rows are the same."""
    rows: Counter[Any] = Counter()
    for row, times in found.items():
        rows[row[1:]] += times
    return rows
