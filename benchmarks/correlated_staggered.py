"""Losses one after the other, in this process: what each costs, and how many a recovery survives.

Every node dies just before the recovery from the loss before is done. What is then replayed should
be what was lost, each time it was lost: not all that was lost so far, again and again (001,
figure 9). Sinks are compared with sums in plain Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

import anabranch as ab
from anabranch.errors import AnabranchError
from anabranch.model.ids import PartitionId
from anabranch.node.protocol.partition import Partition
from anabranch.testing import LocalJob
from benchmarks.correlated_jobs import wrong
from benchmarks.workloads import say, scratch

CHAINS = ("a", "b", "c", "d")  # each behind the one before
PARTITIONS = 7  # of each: four to a node
NODES, MANY_NODES = 7, 24
SLICES = 20  # since the beginning: there is no checkpoint
KEYS = 40
LOSSES = (1, 2, 3, 4)
MOST = 22


@dataclass(frozen=True)
class Replays:
    """Slices of partitions that were replayed, beside those that had to be."""

    losses: int
    replayed: int
    needed: int

    @property
    def ratio(self) -> float:
        return self.replayed / self.needed


class Striker:
    """Kills a node in every recovery, just before it is done: the one with the partition that was
    lost least often."""

    def __init__(self, job: LocalJob, losses: int) -> None:
        self.times: Counter[PartitionId] = Counter()  # that a partition was lost
        self.struck = 0
        self._job, self._losses = job, losses
        self._replaying = False
        self._kill()
        job.cluster.before = self._look

    def _kill(self) -> None:
        placement = self._job.controller.placement
        assert placement is not None
        rarest = min(placement.owners, key=lambda p: (self.times[p], p))
        node = placement.owners[rarest].node
        self.struck += 1
        self.times.update(placement.hosted_by(node).keys())
        self._job.cluster.kill(node)

    def _look(self, step: str, depth: int) -> None:
        self._replaying = step in ("replay", "recovery") or (self._replaying and step == "end")
        if self._replaying and step == "end" and self.struck < self._losses:
            self._kill()


def measure() -> tuple[list[Replays], int]:
    """By number of losses; and how many one recovery survives."""
    found = [_replays(losses) for losses in LOSSES]
    for one in found:
        say(f"{one.losses} staggered losses: {one.replayed} replayed, {one.needed} needed")
    survived = _survived()
    say(f"{survived} losses in one recovery are survived")
    return found, survived


def _replays(losses: int) -> Replays:
    with scratch() as root, _job(root, NODES) as job, _applied() as applied:
        shown = [_feed(job, number) for number in range(SLICES)]
        applied.clear()
        striker = Striker(job, losses)
        shown.append(_feed(job, SLICES))
        _check(shown, striker, losses)
        live = len(CHAINS) * PARTITIONS  # apply the slice itself
        return Replays(losses, len(applied) - live, SLICES * striker.times.total())


def _survived() -> int:
    with scratch() as root, _job(root, MANY_NODES) as job:
        shown = [_feed(job, number) for number in range(SLICES)]
        striker = Striker(job, MOST)
        try:
            shown += [_feed(job, SLICES + n) for n in range(2)]
            _check(shown, striker, MOST)
        except AnabranchError as error:
            say(f"not survived: {error}")
            return striker.struck - 1
        return striker.struck


@contextmanager
def _job(root: Path, nodes: int) -> Iterator[LocalJob]:
    schemas = {"numbers": _rows(0).to_arrow().schema}
    job = LocalJob(_topology(root), root / "ck", schemas, nodes, checkpoint_interval="300h")
    try:
        yield job
    finally:
        job.close()


@contextmanager
def _applied() -> Iterator[list[str]]:
    """The partitions that compute a slice, one by one."""
    found: list[str] = []
    real = Partition.apply

    def apply(self: Partition[Any], plan: Any, packets: Any) -> Any:
        if plan.number not in self.outputs:
            found.append(str(self.id))
        return real(self, plan, packets)

    Partition.apply = apply  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Partition.apply = real  # type: ignore[method-assign]


class Sums(ab.SliceFunction):
    """For every row the sum of its key so far."""

    state = {"before": pl.Int64}  # noqa: RUF012
    output = {"number": pl.Int64, "value": pl.Int64}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        (key,) = given.keys
        rows = given.rows.sort("number").join(given.state, key, "left", maintain_order="left")
        so_far = pl.col("before").fill_null(0) + pl.col("value").cum_sum().over(key)
        shown = rows.select(key, "number", value=so_far)
        newest = shown.group_by(key, maintain_order=True).last()
        return ab.SliceResult(output=shown, state=newest.select(key, before="value"))


def _topology(root: Path) -> ab.Topology:
    topology = ab.Topology("staggered")
    stream: Any = topology.source("numbers", lambda spark: None)
    for name in CHAINS:
        key = f"key_{name}"  # of its own, so that no two are fused
        keyed = stream.select(f"to_{name}", "number", "value", pl.first().alias(key)).key_by(key)
        stream = keyed.process(name, Sums(), parallelism=PARTITIONS)
        stream.to(f"out_{name}", ab.Parquet(str(root / name)))
    return topology


def _rows(number: int) -> pl.DataFrame:
    """Of a slice; every key once."""
    numbers = pl.int_range(number * KEYS, (number + 1) * KEYS, eager=True)
    return pl.DataFrame({"key": numbers % KEYS, "number": numbers, "value": numbers % 7})


def _feed(job: LocalJob, number: int) -> dict[str, pl.DataFrame]:
    return job.step({"numbers": _rows(number)})


def _check(shown: list[dict[str, pl.DataFrame]], striker: Striker, losses: int) -> None:
    if striker.struck < losses:
        raise SystemExit(f"only {striker.struck} of {losses} losses came to be")
    values = {n: n % 7 for n in range(len(shown) * KEYS)}
    for chain in CHAINS:
        totals = Counter[int]()
        for n in values:
            totals[n % KEYS] += values[n]
            values[n] = totals[n % KEYS]
        got = pl.concat(frames[f"out_{chain}"] for frames in shown)
        bad = wrong(values, got["number"].to_list(), got["value"].to_list())
        if any(bad):
            raise SystemExit(f"after {losses} losses: {bad[0]} rows lost, {bad[1]} wrong")
