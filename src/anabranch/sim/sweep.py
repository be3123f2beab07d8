"""Many seeds, on several cores, with a file that a later call goes on from.

Seeds are run in blocks. The file has a line of JSON per block that is done, and a first line that
names the code: results of one version say nothing of another.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import anabranch
from anabranch.errors import ConfigError, StorageError
from anabranch.sim.run import simulate

BLOCK = 100
FORMAT = 1


@dataclass
class Tally:
    """What seeds have shown."""

    seeds: int = 0
    slices: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # how often something happened
    met: Counter[str] = field(default_factory=Counter)  # in how many seeds
    failed: dict[int, str] = field(default_factory=dict)  # what each of them violates

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.slices += other.slices
        self.counts.update(other.counts)
        self.met.update(other.met)
        self.failed.update(other.failed)

    def to_json(self) -> dict[str, Any]:
        failed = {str(seed): why for seed, why in self.failed.items()}
        return {
            "seeds": self.seeds,
            "slices": self.slices,
            "counts": self.counts,
            "met": self.met,
            "failed": failed,
        }

    @staticmethod
    def from_json(data: Any) -> Tally:
        failed = {int(seed): str(why) for seed, why in data["failed"].items()}
        return Tally(
            data["seeds"], data["slices"], Counter(data["counts"]), Counter(data["met"]), failed
        )


def sweep(seeds: range, jobs: int, file: Path | None) -> Iterator[Tally]:
    """Run the seeds that `file` does not have yet; a tally of all there is, block by block."""
    total = Tally()
    done = _read(file) if file is not None else {}
    blocks = [seeds[i : i + BLOCK] for i in range(0, len(seeds), BLOCK)]
    for block in blocks:
        if _name(block) in done:
            total.add(done[_name(block)])
    yield total
    for block, tally in _run([b for b in blocks if _name(b) not in done], jobs):
        if file is not None:
            _write(file, block, tally)
        total.add(tally)
        yield total


def _run(blocks: Sequence[range], jobs: int) -> Iterator[tuple[range, Tally]]:
    if jobs == 1:
        for block in blocks:
            yield block, _tally(block)
        return
    with ProcessPoolExecutor(jobs, get_context("forkserver")) as pool:
        asked = {pool.submit(_tally, block): block for block in blocks}
        try:
            for future in as_completed(asked):
                yield asked.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tally(seeds: range) -> Tally:
    tally = Tally(seeds=len(seeds))
    for seed in seeds:
        outcome = simulate(seed, lines=0)
        tally.slices += outcome.slices
        tally.counts.update(outcome.counts)
        tally.met.update(what for what, often in outcome.counts.items() if often)
        if outcome.violation:
            tally.failed[seed] = outcome.violation
    return tally


def _read(file: Path) -> dict[str, Tally]:
    """The blocks that are done. A last line that was cut short does not count, and goes."""
    if not file.exists():
        return {}
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    first, *lines = whole.splitlines() or [""]
    try:
        if first and json.loads(first) != {"format": FORMAT, "code": _code()}:
            raise ConfigError(
                f"{file} has results of another version of the code; name another file, or remove "
                "this one"
            )
        found = [json.loads(line) for line in lines]
        return {block["block"]: Tally.from_json(block) for block in found}
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{file} has no results of seeds ({e}); name another file") from e


def _write(file: Path, block: range, tally: Tally) -> None:
    try:
        with file.open("a") as f:
            if not f.tell():
                print(json.dumps({"format": FORMAT, "code": _code()}), file=f)
            print(json.dumps({"block": _name(block), **tally.to_json()}), file=f)
    except OSError as e:
        raise StorageError(f"cannot write {file}: {e.strerror or e}", path=str(file)) from e


def _name(block: range) -> str:
    return f"{block[0]}..{block[-1]}"


def _code() -> str:
    """A digest of all of our code."""
    digest = hashlib.sha256()
    package = Path(anabranch.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
