"""Every kind of stateful operator at once on real executors, against plain computations."""

from __future__ import annotations

import datetime as dt
import random
from pathlib import Path
from typing import Any

import polars as pl
from jobs import START, final_values, read_output, run_to_end, stream, write_rows
from pyspark.sql import SparkSession

import anabranch as ab

Row = tuple[dt.datetime, int, int]


def visits(directory: Path, files: int, rows: int) -> list[Row]:
    """Files of (ts, user, page) in event-time order; returns all rows."""
    rng = random.Random(3)
    now = START
    everything: list[Row] = []
    for number in range(files):
        batch: list[Row] = []
        for _ in range(rows):
            now += dt.timedelta(milliseconds=rng.choice([10, 40, 400]))
            batch.append((now, rng.randrange(9), rng.randrange(40)))
        schema = {"ts": pl.Datetime("us", "UTC"), "user": pl.Int64, "page": pl.Int64}
        write_rows(directory, number, pl.DataFrame(batch, schema=schema, orient="row"))
        everything += batch
    return everything


def sessions(rows: list[Row], gap: dt.timedelta, watermark: dt.datetime) -> set[Any]:
    """(user, first, last + gap, visits) of every session that ended by the watermark."""
    found: dict[int, list[list[Any]]] = {}
    for ts, user, _ in rows:
        mine = found.setdefault(user, [])
        if mine and ts <= mine[-1][1] + gap:
            mine[-1][1], mine[-1][2] = ts, mine[-1][2] + 1
        else:
            mine.append([ts, ts, 1])
    return {
        (user, first, last + gap, n)
        for user, mine in found.items()
        for first, last, n in mine
        if last + gap <= watermark
    }


def test_stateful_operators_agree_with_plain_computations(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = visits(tmp_path / "in", files=6, rows=200)
    topology = ab.Topology("visits")
    source = topology.source(
        "visits", stream(tmp_path / "in", "ts timestamp, user long, page long"), time="ts"
    )
    by_user = source.key_by("user")

    def out(name: str) -> ab.Parquet:
        return ab.Parquet(str(tmp_path / name))

    by_user.aggregate("pages", n=ab.count_distinct("page")).to("distinct", out("distinct"))
    source.key_by("user", "page").deduplicate("first_visit").to("firsts", out("firsts"))
    source.top_k("highest", 3, by="page").to("top", out("top"))
    by_user.window(ab.session("2s"), time="ts").aggregate("stay", n=ab.count()).to(
        "sessions", out("sessions")
    )
    run_to_end(topology, spark, tmp_path / "ck")

    pages: dict[int, set[int]] = {}
    firsts: dict[tuple[int, int], dt.datetime] = {}
    for ts, user, page in rows:
        pages.setdefault(user, set()).add(page)
        firsts.setdefault((user, page), ts)
    distinct = final_values(read_output(tmp_path / "distinct"), "user")
    assert {u: d["n"] for u, d in distinct.items()} == {u: len(p) for u, p in pages.items()}

    passed = read_output(tmp_path / "firsts")
    assert passed.height == len(firsts)
    assert {(r["user"], r["page"]): r["ts"] for r in passed.to_dicts()} == firsts

    ranking = final_values(read_output(tmp_path / "top"), "rank")
    highest = sorted(rows, key=lambda r: -r[2])[:3]
    assert [(ranking[i]["page"], ranking[i]["ts"]) for i in (1, 2, 3)] == [
        (page, ts) for ts, _, page in highest
    ]

    got = read_output(tmp_path / "sessions").to_dicts()
    expected = sessions(rows, dt.timedelta(seconds=2), rows[-1][0])
    assert len(expected) > 10
    assert {(r["user"], r["window_start"], r["window_end"], r["n"]) for r in got} == expected
    assert len(got) == len(expected)
