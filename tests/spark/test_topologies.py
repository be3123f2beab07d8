"""Topologies on real executors, compared whole with computations on the raw input."""

from __future__ import annotations

import datetime as dt
import math
import random
from pathlib import Path

import numpy as np
import polars as pl
from examples.traffic import traffic
from examples.word_count import word_count
from jobs import START, final_values, numbers, read_output, run_to_end, stream, wait_for, write_rows
from polars.testing import assert_frame_equal
from pyspark.sql import SparkSession

import anabranch as ab
from oracle import closed_word_counts, hopping


def sentences(directory: Path, files: int, rows: int) -> pl.DataFrame:
    rng = np.random.default_rng(7)
    frames = []
    for number in range(files):
        times = [
            START + dt.timedelta(seconds=10 * number, milliseconds=10_000 * i // rows)
            for i in range(rows)
        ]
        words = rng.zipf(1.5, size=(rows, 8)) % 300
        frame = pl.DataFrame(
            {"ts": times, "sentence": [" ".join(f"w{w}" for w in line) for line in words]},
            schema={"ts": pl.Datetime("us", "UTC"), "sentence": pl.String},
        )
        write_rows(directory, number, frame)
        frames.append(frame)
    return pl.concat(frames)


def test_word_count_is_right_in_every_window(spark: SparkSession, tmp_path: Path) -> None:
    raw = sentences(tmp_path / "in", files=12, rows=400)
    data = stream(tmp_path / "in", "ts timestamp, sentence string")
    run_to_end(word_count(data, ab.Parquet(str(tmp_path / "out"))), spark, tmp_path / "ck")
    expected = closed_word_counts(raw, raw["ts"].max())
    got = read_output(tmp_path / "out").select(expected.columns)
    assert expected.height > 300
    assert_frame_equal(got, expected, check_row_order=False, check_dtypes=False)


def test_traffic_with_sources_of_different_rates(spark: SparkSession, tmp_path: Path) -> None:
    rng = random.Random(5)
    locations, incidents = [], []
    for number in range(8):
        begin = START + dt.timedelta(seconds=5 * number)
        rows = [
            (begin + dt.timedelta(milliseconds=50 * i), i % 9, i % 6, rng.uniform(-5, 120))
            for i in range(100)
        ]
        schema = {"ts": pl.Datetime("us", "UTC"), "vehicle": pl.Int64, "seg": pl.Int64}
        frame = pl.DataFrame(rows, schema={**schema, "speed": pl.Float64}, orient="row")
        write_rows(tmp_path / "locations", number, frame)
        locations.append(frame)
        few = [
            (begin + dt.timedelta(milliseconds=1300 * i), rng.choice([0, 1, 4, None]), "jam")
            for i in range(3)
        ]
        some = pl.DataFrame(
            few,
            schema={"ts": pl.Datetime("us", "UTC"), "seg": pl.Int64, "kind": pl.String},
            orient="row",
        )
        write_rows(tmp_path / "incidents", number, some)
        incidents.append(some)
    outs = {n: ab.Parquet(str(tmp_path / n)) for n in ("speeds", "counts", "joined")}
    topology = traffic(
        stream(tmp_path / "locations", "ts timestamp, vehicle long, seg long, speed double"),
        stream(tmp_path / "incidents", "ts timestamp, seg long, kind string", files=2),
        *outs.values(),
    )
    run_to_end(topology, spark, tmp_path / "ck")
    moving = pl.concat(locations).filter(pl.col("speed") >= 0)
    known = pl.concat(incidents).filter(pl.col("seg").is_not_null())
    watermark = min(moving["ts"].max(), pl.concat(incidents)["ts"].max())
    closed = pl.col("window_start") + pl.duration(seconds=10) <= watermark
    by = ["seg", "window_start"]
    speeds = hopping(moving, 10, 1).filter(closed).group_by(by).agg(speed=pl.col("speed").mean())
    counts = hopping(known, 10, 1).filter(closed).group_by(by).agg(incidents=pl.len())
    joined = speeds.join(counts, on=by)
    for name, expected in (("speeds", speeds), ("counts", counts), ("joined", joined)):
        got = read_output(tmp_path / name).select(expected.columns)
        assert expected.height > 20
        assert_frame_equal(got, expected, check_row_order=False, check_dtypes=False, abs_tol=1e-9)


def sums(data: object, out: Path, parallelism: int = 2) -> ab.Topology:
    topology = ab.Topology("sums")
    source = topology.source("numbers", data)
    summed = source.key_by("k").aggregate(
        "sum", parallelism=parallelism, total=ab.sum("v"), n=ab.count()
    )
    summed.to("out", ab.Parquet(str(out)))
    return topology


def expected_sums(raw: pl.DataFrame) -> dict[object, object]:
    grouped = raw.group_by("k").agg(total=pl.col("v").sum(), n=pl.len())
    return {r["k"]: {"total": r["total"], "n": r["n"]} for r in grouped.to_dicts()}


def test_a_batch_cut_into_slices_gives_the_same_totals(spark: SparkSession, tmp_path: Path) -> None:
    raw = numbers(tmp_path / "in", files=3, rows=100)
    topology = sums(stream(tmp_path / "in", "k long, v long", files=3), tmp_path / "out")
    job = run_to_end(topology, spark, tmp_path / "ck", max_rows_per_slice=60)
    assert len([p for p in job.recent_progress if p.rows_in]) >= 5
    assert all(p.rows_in <= 60 for p in job.recent_progress)
    assert final_values(read_output(tmp_path / "out")) == expected_sums(raw)


def test_restart_with_another_parallelism_keeps_state(spark: SparkSession, tmp_path: Path) -> None:
    data = stream(tmp_path / "in", "k long, v long")
    raw = [numbers(tmp_path / "in", files=2, rows=50)]
    run_to_end(sums(data, tmp_path / "out", 2), spark, tmp_path / "ck")
    for round_, parallelism in enumerate((5, 1), start=1):
        raw.append(numbers(tmp_path / "in", files=1, rows=50, start=2 * round_))
        job = run_to_end(sums(data, tmp_path / "out", parallelism), spark, tmp_path / "ck")
        nodes = job.last_progress.nodes.values()
        assert sum(partitions for _, _, partitions in nodes) == parallelism
        assert final_values(read_output(tmp_path / "out")) == expected_sums(pl.concat(raw))


def test_no_keyed_operator_at_all(spark: SparkSession, tmp_path: Path) -> None:
    raw = numbers(tmp_path / "in", files=3, rows=40)
    topology = ab.Topology("plain")
    source = topology.source("numbers", stream(tmp_path / "in", "k long, v long"))
    source.filter("even", pl.col("v") % 2 == 0).to("out", ab.Parquet(str(tmp_path / "out")))
    run_to_end(topology, spark, tmp_path / "ck")
    got = read_output(tmp_path / "out").drop("slice")
    assert_frame_equal(got, raw.filter(pl.col("v") % 2 == 0), check_row_order=False)


def test_union_and_fan_out(spark: SparkSession, tmp_path: Path) -> None:
    left = numbers(tmp_path / "left", files=2, rows=60)
    right = numbers(tmp_path / "right", files=4, rows=20, keys=5)
    topology = ab.Topology("union")
    a = topology.source("left", stream(tmp_path / "left", "k long, v long"))
    b = topology.source("right", stream(tmp_path / "right", "k long, v long"))
    both = a.filter("odd", pl.col("v") % 2 == 1).union(b)
    both.to("raw", ab.Parquet(str(tmp_path / "raw")))
    for name, aggregate in (("least", ab.min("v")), ("most", ab.max("v"))):
        found = both.key_by("k").aggregate(name, parallelism=3, x=aggregate)
        found.to(f"{name}_out", ab.Parquet(str(tmp_path / name)))
    run_to_end(topology, spark, tmp_path / "ck")
    raw = pl.concat([left.filter(pl.col("v") % 2 == 1), right])
    got = read_output(tmp_path / "raw").drop("slice")
    assert_frame_equal(got, raw, check_row_order=False)
    for name, x in (("least", pl.col("v").min()), ("most", pl.col("v").max())):
        expected = {r["k"]: {"x": r["x"]} for r in raw.group_by("k").agg(x=x).to_dicts()}
        assert final_values(read_output(tmp_path / name)) == expected


def test_null_and_nan_are_keys_like_any_other(spark: SparkSession, tmp_path: Path) -> None:
    keys = [1.5, None, math.nan, 0.0, -0.0, math.nan, None, 1.5, None]
    rows = pl.DataFrame({"k": keys, "v": [1] * 9}, schema={"k": pl.Float64, "v": pl.Int64})
    write_rows(tmp_path / "in", 0, rows)
    topology = sums(stream(tmp_path / "in", "k double, v long"), tmp_path / "out")
    run_to_end(topology, spark, tmp_path / "ck")
    got = read_output(tmp_path / "out")
    named = {("nan" if k is not None and math.isnan(k) else k): n for k, n in got["k", "n"].rows()}
    assert named == {1.5: 2, None: 3, "nan": 2, 0.0: 2}
    assert got.height == 4


def test_a_graceful_stop_and_restart_go_on(spark: SparkSession, tmp_path: Path) -> None:
    data = stream(tmp_path / "in", "k long, v long")
    raw = [numbers(tmp_path / "in", files=2, rows=30)]
    job = sums(data, tmp_path / "out").start(spark, checkpoint=tmp_path / "ck", slice="100ms")
    wait_for(lambda: sum(job.totals.read.values()) == 60)
    job.stop()
    assert not job.is_active
    assert job.exception is None
    raw.append(numbers(tmp_path / "in", files=2, rows=30, start=2))
    run_to_end(sums(data, tmp_path / "out"), spark, tmp_path / "ck")
    assert final_values(read_output(tmp_path / "out")) == expected_sums(pl.concat(raw))
