"""Rows that fail and rows that are late, on real executors, with a killed node process and a
restart: each is in exactly one place."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
from jobs import START, read_output, run_to_end, stream, write_rows
from pyspark.sql import SparkSession

import anabranch as ab

FILES, ROWS, WINDOW = 6, 120, 10
Row = tuple[int | None, int, int]  # second, key, value


def files_of_rows() -> list[list[Row]]:
    """A minute each; some rows have no time, some have an old one."""
    files = []
    for number in range(FILES):
        rows: list[Row] = []
        for i in range(ROWS):
            value = number * ROWS + i
            second: int | None = 60 * number + i // 2
            if i % 40 == 5:
                second = None
            elif i % 30 == 9:
                second = i
            rows.append((second, value % 5, value))
        files.append(rows)
    return files


def refuse_sevens(frame: pl.DataFrame) -> pl.DataFrame:
    if (frame["v"] % 50 == 7).any():
        raise ValueError("a seven")
    return frame


def topology(inputs: Path, out: Path) -> ab.Topology:
    made = ab.Topology("records")
    rows = made.source(
        "rows", stream(inputs, "ts timestamp, k long, v long"), time="ts", on_error="dead_letter"
    )
    sound = rows.map("sound", refuse_sevens, on_error="dead_letter")
    keyed = sound.key_by("k").window(ab.tumbling(f"{WINDOW}s"), time="ts")
    counts = keyed.aggregate("count", n=ab.count())
    counts.to("counts", ab.Parquet(str(out / "counts")))
    counts.late("late").to("too_late", ab.Parquet(str(out / "late")))
    made.dead_letters("dead", ab.Parquet(str(out / "dead")))
    return made


def expected(files: list[list[Row]]) -> tuple[Counter[Any], list[int], dict[int, str]]:
    """Rows by key and window that closed, values of late rows, operators by dead value."""
    counts: Counter[Any] = Counter()
    late, dead = [], {}
    watermark: int | None = None
    for rows in files:
        for second, key, value in rows:
            if second is None:
                dead[value] = "rows"
            elif value % 50 == 7:
                dead[value] = "sound"
            elif watermark is not None and second // WINDOW * WINDOW + WINDOW <= watermark:
                late.append(value)
            else:
                counts[key, second // WINDOW * WINDOW] += 1
        watermark = max(s for s, _, _ in rows if s is not None)
    assert watermark is not None
    closed = {(k, start): n for (k, start), n in counts.items() if start + WINDOW <= watermark}
    return Counter(closed), sorted(late), dead


def test_every_row_is_in_one_place(spark: SparkSession, tmp_path: Path) -> None:
    files = files_of_rows()

    def write(numbers: range) -> None:
        for number in numbers:
            times = [
                None if s is None else START + dt.timedelta(seconds=s) for s, *_ in files[number]
            ]
            keys, values = ([row[i] for row in files[number]] for i in (1, 2))
            schema = {"ts": pl.Datetime("us", "UTC"), "k": pl.Int64, "v": pl.Int64}
            frame = pl.DataFrame({"ts": times, "k": keys, "v": values}, schema=schema)
            write_rows(tmp_path / "in", number, frame)

    def run(kill_at: int | None) -> Any:
        made = topology(tmp_path / "in", tmp_path / "out")
        job = made.start(spark, checkpoint=tmp_path / "ck", available_now=True)
        if kill_at is not None:

            def kill(progress: Any) -> None:
                if progress.slice == kill_at:
                    os.kill(next(iter(progress.nodes.values()))[0], signal.SIGKILL)

            job.on_progress(kill)
        assert job.await_termination(240), "the job did not end"
        return job.totals

    write(range(4))
    first = run(kill_at=2)
    write(range(4, FILES))
    second = run(kill_at=None)

    counts, late, dead = expected(files)
    shown = read_output(tmp_path / "out" / "counts")
    windows = shown["window_start"].map_elements(
        lambda t: (t - START) // dt.timedelta(seconds=1), return_dtype=pl.Int64
    )
    assert dict(zip(zip(shown["k"], windows, strict=True), shown["n"], strict=True)) == counts
    assert sorted(read_output(tmp_path / "out" / "late")["v"]) == late
    letters = read_output(tmp_path / "out" / "dead")
    found = [(json.loads(r)["v"], o) for r, o in letters.select("record", "operator").rows()]
    assert sorted(found) == sorted(dead.items())
    assert (letters["slice"] == letters["slice_number"]).all()
    for name, rows in (("read", FILES * ROWS), ("late", len(late)), ("dead", len(dead))):
        assert sum(sum(getattr(t, name).values()) for t in (first, second)) == rows, name


def test_the_error_shows_the_record(spark: SparkSession, tmp_path: Path) -> None:
    frame = pl.DataFrame({"ts": [START] * 40, "k": range(40), "v": range(40)})
    write_rows(tmp_path / "in", 0, frame)
    made = ab.Topology("failing")
    rows = made.source("rows", stream(tmp_path / "in", "ts timestamp, k long, v long"))
    rows.map("sound", refuse_sevens).to("out", ab.Memory())
    try:
        run_to_end(made, spark, tmp_path / "ck").await_termination()
    except ab.AnabranchError as e:
        assert "operator 'sound'" in str(e)
        assert '"k": 7, "v": 7}' in str(e)
    else:
        raise AssertionError("it should have failed")
