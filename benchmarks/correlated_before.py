"""The throughput of a healthy job, beside that of an earlier commit: pairs of fresh applications,
in processes of their own, and neither always first.

`python -m benchmarks.correlated_before INPUT` is one of them; whose source it runs is said by
PYTHONPATH. The word count of `throughput`, on the same files.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anabranch as ab
from benchmarks.workloads import (
    SETTINGS,
    Shape,
    our_word_count,
    run_ours,
    say,
    scratch,
    write_sentences,
)

ROOT = Path(__file__).resolve().parent.parent
NODES = 2
SHAPE = Shape(batches=20, rows=100_000, files=4, seconds=10.0)
WARMUP = 10
PAIRS = 9
OUTSIDE = 1  # pairs that lie outside of the interval on either side: of 9, 96 % confidence
LIMIT_S = 300.0


@dataclass(frozen=True)
class Pairs:
    """Rows a second of each: then, now."""

    rates: Sequence[tuple[float, float]]

    @property
    def ratios(self) -> list[float]:
        return sorted(now / then for then, now in self.rates)

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the median: what the order of the pairs says, whatever their distribution."""
        skip = OUTSIDE if len(self.ratios) > 2 * OUTSIDE else 0
        return self.ratios[skip], self.ratios[len(self.ratios) - 1 - skip]


def compare(commit: str, pairs: int = PAIRS) -> Pairs:
    with scratch() as root, _worktree(commit, root / "before") as before:
        write_sentences(root / "in", SHAPE, vocabulary=10_000)
        rates = []
        for number in range(pairs):
            sides = [before / "src", ROOT / "src"]
            order = sides if number % 2 == 0 else sides[::-1]
            found = {side: _sample(side, root / "in") for side in order}
            then, now = (found[side] for side in sides)
            rates.append((then, now))
            say(f"pair {number + 1}/{pairs}: {then:,.0f}/s before, {now:,.0f}/s now")
    return Pairs(rates)


@contextmanager
def _worktree(commit: str, path: Path) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", "--quiet", str(path), commit], check=True)
    try:
        yield path
    finally:
        subprocess.run([*git, "remove", "--force", str(path)], check=True)


def _sample(source: Path, given: Path) -> float:
    paths = os.pathsep.join([str(source), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.correlated_before", str(given)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=ROOT,
    )
    if done.returncode:
        raise SystemExit(f"a sample of {source} failed: {done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if not Path(told["source"]).is_relative_to(source):
        raise SystemExit(f"{source} was to be measured, and {told['source']} was")
    return float(told["rate"])


def main() -> None:
    with scratch() as root, ab.EmbeddedCluster(NODES) as cluster:
        spark = cluster.session("before", SETTINGS)
        topology = our_word_count(Path(sys.argv[1]), SHAPE, root / "out", NODES)
        run = run_ours(cluster, spark, topology, root / "checkpoint", SHAPE, WARMUP)
        spark.stop()
    print(json.dumps({"rate": SHAPE.rows / run.mean, "source": ab.__file__}))


if __name__ == "__main__":
    main()
