"""Which mutants do the simulator and the unit tests kill?

    .venv/bin/python -m tests.mutants --sample 500 --seed 1 --jobs 2 --file mutants.jsonl

A mutant is the control plane or the node's protocol with one small change (points.py), drawn by
the seed. Each is tried in a process of its own: some seeds of the simulator, the tests near the
changed code, more seeds; those that survive, in the end, by tests that take longer. Whatever
fails, hangs or does not end kills it. The file has a line per try: a later call goes on where it
ended, and tries those again whose file has changed. Survivors that are known, with the reason why
they do no harm or cannot be seen, are in known.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

# What every mutant imports, so that each is a fork of this. Nothing of anabranch.
import hypothesis  # noqa: F401
import numpy as np  # noqa: F401
import polars as pl  # noqa: F401
import pyarrow.compute as pc  # noqa: F401
import pytest
import rich.progress  # noqa: F401
import typer.testing  # noqa: F401
from tests.mutants.points import Point, changed, points

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "anabranch"
ROOMS = ("control", "node/protocol")
LIMIT_S = 300.0
UNIT = "tests/unit"
SLOW = (
    "node",
    *("test_copies.py", "test_elasticity.py", "test_parallel_recovery.py"),
    *("test_idle_sources.py", "test_cascades.py", "test_event_times.py", "test_job_remarks.py"),
)
KNOWN = Path(__file__).parent / "known.txt"


def all_points() -> list[Point]:
    found: list[Point] = []
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            found += points(path, path.relative_to(SOURCE).as_posix())
    return found


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a change."""

    def __init__(self, point: Point) -> None:
        self._point = point
        parts = Path(point.file).with_suffix("").parts
        self._module = ".".join(("anabranch", *(p for p in parts if p != "__init__")))

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        file = SOURCE / self._point.file
        package = file.name == "__init__.py"
        return importlib.util.spec_from_file_location(
            name,
            file,
            loader=self,
            submodule_search_locations=[str(file.parent)] if package else None,
        )

    def exec_module(self, module: ModuleType) -> None:
        file = SOURCE / self._point.file
        exec(compile(changed(file, self._point), str(file), "exec"), module.__dict__)


def draw(every: Sequence[Point], count: int, seed: int) -> list[Point]:
    """The same ones as before, where code has changed elsewhere."""
    met: Counter[str] = Counter()
    lots: list[tuple[bytes, Point]] = []
    for point in every:
        if not is_formal(point):
            what = signature(point)
            met[what] += 1
            lot = hashlib.sha256(f"{seed} {met[what]} {what}".encode()).digest()
            lots.append((lot, point))
    return [point for _, point in sorted(lots)[:count]]


def _seeds(first: int, last: int) -> Callable[[], str | None]:
    def run() -> str | None:
        from anabranch.sim import simulate

        for seed in range(first, last):
            why = simulate(seed, lines=0).violation
            if why is not None:
                return f"seed {seed}: {why}"
        return None

    return run


def _tests(*where: str) -> Callable[[], str | None]:
    def run() -> str | None:
        failed: list[str] = []

        class First:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed:
                    failed.append(report.nodeid)

            def pytest_collectreport(self, report: pytest.CollectReport) -> None:
                if report.failed:
                    failed.append(report.nodeid)

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        status = pytest.main([*options, *(f"{UNIT}/{w}" for w in where)], [First()])
        return None if status == 0 else failed[0] if failed else f"pytest: {status}"

    return run


STAGES = {
    "quick": (
        _seeds(0, 30),
        _tests("control", "model", "sim/test_scenarios.py", "node/test_writing.py"),
        _seeds(30, 200),
    ),
    "slow": (_tests(*SLOW),),
}


def try_mutant(point: Point, pace: str) -> tuple[str | None, float]:
    """What kills it, None if nothing does; and the seconds that took."""
    started = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        with contextlib.suppress(BaseException):
            said = _in_child(point, pace)
            os.write(writing, json.dumps(said and said[:300]).encode())
        os._exit(0)
    os.close(writing)
    said = _read(reading, started + LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with whatever it has started
    os.waitpid(child, 0)
    return said, time.monotonic() - started


def _in_child(point: Point, pace: str) -> str | None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    sys.meta_path.insert(0, Changed(point))
    os.environ["ANABRANCH_VALIDATE"] = os.environ["ANABRANCH_MUTANT"] = "1"
    try:
        for stage in STAGES[pace]:
            why = stage()
            if why is not None:
                return why
    except BaseException as e:  # also what keeps it from being imported
        return f"{type(e).__name__}: {e}"
    return None


def _read(pipe: int, deadline: float) -> str | None:
    import select

    with os.fdopen(pipe, "rb") as file:
        ready, _, _ = select.select([file], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return f"no end within {LIMIT_S:.0f} s"
        data = file.read()
    return json.loads(data) if data else "it ended its process"


def digest(point: Point) -> str:
    return hashlib.sha256((SOURCE / point.file).read_bytes()).hexdigest()[:12]


def known() -> dict[str, str]:
    """Survivors that were looked at: what was changed, in whose line, and why it survives."""
    found = {}
    for line in KNOWN.read_text().splitlines() if KNOWN.exists() else ():
        if line.strip() and not line.startswith("#"):
            what, _, why = line.partition(" | ")
            found[what.strip()] = why.strip()
    return found


def signature(point: Point) -> str:
    """Names a mutant by the text of its line, which may move."""
    return f"{point.file} [{point.change}] {_line(point)}"


def is_formal(point: Point) -> bool:
    """Does it change only what a value refuses (frozen, slots), or an assertion (strict)?"""
    line = _line(point)
    return line.startswith("@dataclass") or (point.change == "other bool" and "strict=" in line)


def _line(point: Point) -> str:
    return _lines(point.file)[point.line - 1].strip()


@cache
def _lines(file: str) -> list[str]:
    return (SOURCE / file).read_text().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description="Which mutants are killed?")
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes that try mutants")
    parser.add_argument("--file", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--only", default="", help="those whose name has this in it")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(SOURCE.parent))  # of this tree, whatever is installed
    every = all_points()
    drawn = [p for p in draw(every, options.sample, options.seed) if options.only in p.name]
    print(f"{len(every):,} mutants, {len(drawn)} drawn", flush=True)
    for pace in STAGES:
        left = [p for p in drawn if _is_left(p, pace, _results(options.file))]
        print(f"{len(left)} to try by what is {pace}", flush=True)
        children = [
            _child(left[i :: options.jobs], pace, options.file) for i in range(options.jobs)
        ]
        for child in children:
            os.waitpid(child, 0)
    found = _results(options.file)
    report([found[key] for p in drawn if (key := (p.name, digest(p))) in found])


def _results(file: Path) -> dict[tuple[str, str], dict[str, str | None]]:
    """The newest of every mutant."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {(r["name"], r["digest"]): r for r in map(json.loads, lines)}


def _is_left(
    point: Point, pace: str, results: dict[tuple[str, str], dict[str, str | None]]
) -> bool:
    found = results.get((point.name, digest(point)))
    if found is None:
        return True
    return pace == "slow" and found["killed"] is None and found["pace"] == "quick"


def _child(mine: Sequence[Point], pace: str, file: Path) -> int:
    """A process that tries some; the file is appended to line by line."""
    child = os.fork()
    if child:
        return child
    for i, point in enumerate(mine, 1):
        why, seconds = try_mutant(point, pace)
        line = {
            "name": point.name,
            "digest": digest(point),
            "signature": signature(point),
            "pace": pace,
            "killed": why,
            "seconds": round(seconds, 1),
        }
        with file.open("a") as f:
            print(json.dumps(line), file=f, flush=True)
        print(f"{i}/{len(mine)} {point.name}: {why or 'survives'}"[:160], flush=True)
    os._exit(0)


def report(results: Sequence[dict[str, str | None]]) -> None:
    survivors = [r for r in results if r["killed"] is None]
    harmless = known()
    excused = [r for r in survivors if str(r["signature"]) in harmless]
    by = Counter(
        "simulator" if str(r["killed"]).startswith("seed") else "tests"
        for r in results
        if r["killed"] is not None
    )
    for r in survivors:
        print(f"survives: {r['name']}  {str(r['signature']).partition('] ')[2]}")
        print(f"          {harmless.get(str(r['signature']), 'not looked at')}")
    killed = len(results) - len(survivors)
    print(
        json.dumps(
            {
                "mutants": len(results),
                "killed": killed,
                "killed_share": round(killed / max(len(results), 1), 4),
                "killed_by": by,
                "without_harm": len(excused),
            }
        )
    )


if __name__ == "__main__":
    main()
