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


class Visits(ab.RowFunction):
    """Counts visits, and says how many there were when none came for two seconds."""

    state = {"n": pl.Int64}  # noqa: RUF012
    output = {"n": pl.Int64}  # noqa: RUF012

    def on_row(self, row: dict[str, Any], state: ab.KeyState) -> None:
        state.set(n=state.get("n", 0) + 1)
        state.event_timer = row["ts"] + dt.timedelta(seconds=2)

    def on_timer(self, timer: str, at: dt.datetime, state: ab.KeyState) -> list[dict[str, Any]]:
        n = state.get("n")
        state.clear()
        return [{"n": n}]


def quiet_users(batches: list[list[Row]]) -> list[tuple[int, int]]:
    """What `Visits` says: a timer is looked at once per batch, before the batch's rows."""
    held: dict[int, tuple[int, dt.datetime]] = {}
    said = []
    watermark = START
    for batch in [*batches, []]:
        for user, (n, last) in list(held.items()):
            if last + dt.timedelta(seconds=2) <= watermark:
                said.append((user, n))
                del held[user]
        for ts, user, _ in batch:
            held[user] = held.get(user, (0, ts))[0] + 1, ts
            watermark = ts
    return sorted(said)


class Pages(ab.SliceFunction):
    """All pages a user has seen, in one string."""

    state = {"pages": pl.String}  # noqa: RUF012
    output = {"pages": pl.String}  # noqa: RUF012

    def process(self, given: ab.KeyedSlice) -> ab.SliceResult:
        seen = given.rows.group_by("user", maintain_order=True).agg(pl.col("page").cast(pl.String))
        new = seen.join(given.state, on="user").select(
            "user", pages=pl.col("pages").fill_null("") + pl.col("page").list.join("") + "|"
        )
        return ab.SliceResult(output=new, state=new)


def test_functions_and_static_tables_on_real_executors(spark: SparkSession, tmp_path: Path) -> None:
    rows = visits(tmp_path / "in", files=4, rows=150)
    topology = ab.Topology("functions")
    source = topology.source(
        "visits", stream(tmp_path / "in", "ts timestamp, user long, page long"), time="ts"
    )
    even = [(n, f"page {n}") for n in range(0, 40, 2)]
    titles = spark.createDataFrame(even, "page int, title string")

    def out(name: str) -> ab.Parquet:
        return ab.Parquet(str(tmp_path / name))

    source.enrich("titled", titles, on="page", how="inner").to("titles", out("titles"))
    by_user = source.key_by("user")
    by_user.process("quiet", Visits(), time="ts").to("stays", out("stays"))
    by_user.process("history", Pages()).to("histories", out("histories"))
    by_user.aggregate("recent", ttl="1h", time="ts", n=ab.count()).to("recents", out("recents"))
    run_to_end(topology, spark, tmp_path / "ck")

    titled = read_output(tmp_path / "titles")
    expected = sorted((ts, page, f"page {page}") for ts, _, page in rows if page % 2 == 0)
    assert sorted(titled.select("ts", "page", "title").iter_rows()) == expected

    by_pages: dict[int, str] = {}
    for _, user, page in rows:
        by_pages[user] = by_pages.get(user, "") + str(page)
    histories = final_values(read_output(tmp_path / "histories"), "user")
    assert {u: v["pages"].replace("|", "") for u, v in histories.items()} == by_pages

    counts = final_values(read_output(tmp_path / "recents"), "user")
    totals = {user: sum(u == user for _, u, _ in rows) for _, user, _ in rows}
    assert {u: v["n"] for u, v in counts.items()} == totals
    stays = sorted(read_output(tmp_path / "stays").select("user", "n").iter_rows())
    assert stays == quiet_users([rows[i : i + 150] for i in range(0, 600, 150)])
    assert len(stays) > 5


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
