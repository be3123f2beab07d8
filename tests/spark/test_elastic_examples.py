"""Every example topology is scaled up and down under load, with kills during and after: each output
is computed again from the raw files, by other means than the product's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.kill_cases import CASES
from benchmarks.kills import Feed, Killer
from jobs import wait_for
from pyspark.sql import SparkSession

from anabranch.api.job import inside
from anabranch.spark.embedded import EmbeddedCluster
from effort import LONG


@pytest.mark.skipif(not LONG, reason="each takes a minute or two")
@pytest.mark.parametrize("name", list(CASES))
def test_scaled_under_kills(
    cluster: EmbeddedCluster, spark: SparkSession, tmp_path: Path, name: str
) -> None:
    case, dice = CASES[name], random.Random(name)
    feed = Feed(tmp_path / "in", case.make)
    feed.start()
    job = case.build(tmp_path).start(
        spark,
        checkpoint=tmp_path / "ck",
        slice="300ms",
        checkpoint_interval="2s",
        node_timeout="3s",
    )
    feed.watch(job)
    killer = Killer(cluster, job, dice)
    killer._settle()
    chains = [c.name for c in inside(job).run.plan.node_chains]
    dice.shuffle(chains)
    wanted = {}
    for number, chain in enumerate(chains[:4]):
        wanted[chain] = dice.choice([1, 3, 5, 6])
        job.scale(chain, wanted[chain])
        if number % 2 == 0:  # a kill during the scaling, or right after it
            killer._do("executor" if number else "node process", "any time")
            killer._settle()
    wait_for(lambda: not job.is_adjusting)
    placement = inside(job).run.controller.placement
    assert placement is not None
    assert {c: len(placement.partitions(c)) for c in wanted} == wanted
    killer._do("executor", "any time")
    killer._settle()
    wait_for(lambda: any(job.totals.to_sinks.values()))  # a window has to close first
    raw = feed.finish()
    wait_for(lambda: feed.read >= feed.rows)
    job.stop()
    assert job.exception is None
    expected, found = case.check(tmp_path, raw)
    assert expected == found
