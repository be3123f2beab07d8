"""A function that never returns ends the run in time, by name, and leaves no process behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import polars as pl
import pytest
from jobs import final_values, numbers, read_output, run_to_end, stream, wait_for
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.errors import OperatorError

LIMIT_S = 5


def topology(root: Path, hangs: str) -> ab.Topology:
    """The function of one operator does not return: before the shuffle, in a worker of Spark's, or
    behind it, in a node process. With "nothing", each does."""

    def function(frame: pl.DataFrame, name: str) -> pl.DataFrame:
        if hangs == name and frame.height:
            (root / "pid").write_text(str(os.getpid()))
            while True:
                pass
        return frame

    made = ab.Topology("hanging", parallelism=2)
    rows = made.source("numbers", stream(root / "in", "k long, v long"))
    rows = rows.map("before", lambda f: function(f, "before"))
    totals = rows.key_by("k").aggregate("sum", total=ab.sum("v"))
    totals.map("behind", lambda f: function(f, "behind")).to("out", ab.Parquet(str(root / "out")))
    return made


@pytest.mark.parametrize(
    ("hangs", "where"), [("before", r"source task \d"), ("behind", r"sum\[[01]\]")]
)
def test_a_function_that_never_returns_is_named_and_ended(
    spark: SparkSession, tmp_path: Path, hangs: str, where: str
) -> None:
    raw = numbers(tmp_path / "in", files=1, rows=20)
    told = "no node was in an operator"
    while "no node was in an operator" in told:  # a starved machine had not come that far: again
        job = topology(tmp_path, hangs).start(
            spark, checkpoint=tmp_path / "ck", available_now=True, slice_timeout=f"{LIMIT_S}s"
        )
        with pytest.raises(OperatorError) as ended:
            job.await_termination(240)
            pytest.fail("it has not ended")
        told = ended.value.message
    named = rf"node \d+ was in operator '{hangs}' \({where}\) for "
    assert re.match(rf"slice 1 took longer .*\({LIMIT_S} s\): {named}", told)
    process = Path("/proc") / (tmp_path / "pid").read_text()
    wait_for(lambda: not process.exists())
    run_to_end(topology(tmp_path, "nothing"), spark, tmp_path / "ck")
    wanted = raw.group_by("k").agg(total=pl.col("v").sum())
    assert final_values(read_output(tmp_path / "out")) == {
        k: {"total": t} for k, t in wanted.rows()
    }
