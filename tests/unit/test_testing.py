"""The test driver for users: steps in, what reached the sinks out."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.testing import Idle, Lose, Restart, Step, play


def running_sums(parallelism: int = 2) -> ab.Topology:
    topology = ab.Topology("sums")
    rows = topology.source("rows", None)
    sums = rows.key_by("k").aggregate("sum", total=ab.sum("v"), parallelism=parallelism)
    sums.to("out", ab.Parquet("/nowhere"))
    return topology


def rows(*pairs: tuple[str, int]) -> list[dict[str, object]]:
    return [{"k": k, "v": v} for k, v in pairs]


def totals(output: dict[str, pl.DataFrame]) -> dict[str, int]:
    return dict(output["out"].select("k", "total").rows())


def test_rows_in_rows_out() -> None:
    first, second = play(
        running_sums(), [{"rows": rows(("a", 1), ("b", 2), ("a", 3))}, {"rows": rows(("a", 10))}]
    )
    assert totals(first) == {"a": 4, "b": 2}
    assert totals(second) == {"a": 14}


@pytest.mark.parametrize(
    "mishap",
    [Lose(), Lose(2), Restart(), Restart(nodes=3), Restart(topology=running_sums(parallelism=4))],
)
def test_whatever_happens_between_slices_changes_nothing(mishap: Step) -> None:
    steps: list[Step] = [{"rows": rows(("a", n), ("b", 1), (f"k{n}", n))} for n in range(6)]
    calm = play(running_sums(), steps)
    stormy = play(running_sums(), [*steps[:3], mishap, *steps[3:4], mishap, *steps[4:]])
    happened = [totals(o) for i, o in enumerate(stormy) if i not in (3, 5)]
    assert happened == [totals(o) for o in calm]
    assert totals(stormy[3]) == {}


def test_windows_close_when_time_moves() -> None:
    topology = ab.Topology("words")
    words = topology.source("words", None, time="ts", watermark="1s")
    counted = words.key_by("word").window(ab.tumbling("10s"), time="ts")
    counted.aggregate("count", n=ab.count()).to("out", ab.Memory())

    def at(second: int, word: str) -> pl.DataFrame:
        when = dt.datetime(2026, 1, 1, 0, 0, second, tzinfo=dt.UTC)
        return pl.DataFrame({"ts": [when], "word": [word]})

    outputs = play(
        topology,
        [{"words": at(1, "x")}, {"words": at(2, "x")}, {"words": at(12, "y")}, Lose(), Idle()],
    )
    assert [o["out"].height for o in outputs] == [0, 0, 0, 0, 1]
    assert outputs[-1]["out"].select("word", "n").rows() == [("x", 2)]


def test_several_sources_and_arrow_tables() -> None:
    topology = ab.Topology("two")
    left = topology.source("left", None)
    right = topology.source("right", None)
    joined = left.union(right)
    joined.key_by("k").aggregate("sum", total=ab.sum("v")).to("out", ab.Memory())
    table = pa.table({"k": ["a", "b"], "v": [1, 2]})
    steps: list[Step] = [{"left": table}, {"right": table, "left": table}, Lose(), {"right": table}]
    outputs = play(topology, steps)
    assert totals(outputs[0]) == {"a": 1, "b": 2}
    assert totals(outputs[1]) == {"a": 3, "b": 6}
    assert totals(outputs[3]) == {"a": 4, "b": 8}


def test_what_a_function_raises_is_told() -> None:
    def fail(frame: pl.DataFrame) -> pl.DataFrame:
        if frame.height:
            raise ValueError("seven is not allowed")
        return frame

    topology = ab.Topology("broken")
    topology.source("rows", None).map("picky", fail).to("out", ab.Memory())
    with pytest.raises(ab.AnabranchError, match=r"'picky'.*seven is not allowed"):
        play(topology, [{"rows": rows(("a", 7))}])


def test_refusals() -> None:
    with pytest.raises(ab.AnabranchError, match="no rows were given for source 'rows'"):
        play(running_sums(), [Idle()])
    with pytest.raises(ab.AnabranchError, match="there is no source 'row'; the topology has rows"):
        play(running_sums(), [{"rows": rows(("a", 1))}, {"row": rows(("a", 1))}])
    with pytest.raises(ab.AnabranchError, match="these rows are no table"):
        play(running_sums(), [{"rows": [{"k": "a", "v": 1}, {"k": "a", "v": "x"}]}])


def test_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "testing.md", "exec"), names)
    names["test_sums_survive_everything"]()
