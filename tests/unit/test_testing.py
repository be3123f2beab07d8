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
from anabranch.testing import Idle, LocalJob, Lose, Restart, Step, play


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


def one_source(keeps_firsts: bool) -> ab.Topology:
    """Sums, and the first row of every key beside them."""
    topology = ab.Topology("sums")
    keyed = topology.source("rows", None).key_by("k")
    keyed.aggregate("sum", total=ab.sum("v")).to("out", ab.Memory())
    if keeps_firsts:
        keyed.deduplicate("firsts").to("first", ab.Memory())
    return topology


def test_an_upgrade_that_drops_state() -> None:
    given: list[Step] = [{"rows": rows(("a", 1))}, {"rows": rows(("a", 2))}]
    without = one_source(keeps_firsts=False)
    with pytest.raises(ab.CheckpointMismatchError, match=r"drop_state=\['firsts'\]"):
        play(one_source(True), [*given, Restart(topology=without, stopped=True), *given])
    outputs = play(
        one_source(True),
        [
            *given,
            Restart(topology=without, stopped=True, drop_state=["firsts"]),
            *given,
            Restart(),  # there is nothing left to drop
            *given,
            Restart(topology=one_source(True), stopped=True),  # it begins empty
            *given,
        ],
    )
    assert [totals(o) for o in outputs if o["out"].height] == [
        {"a": n} for n in (1, 3, 4, 6, 7, 9, 10, 12)
    ]
    assert [o["first"].height for o in outputs if "first" in o] == [1, 0, 0, 0, 1, 0]


def two_sources() -> ab.Topology:
    topology = ab.Topology("sums")
    given = topology.source("rows", None).union(topology.source("more", None))
    given.key_by("k").aggregate("sum", total=ab.sum("v")).to("out", ab.Memory())
    return topology


def test_an_upgrade_that_is_refused_is_refused_as_in_production() -> None:
    one, two = one_source(keeps_firsts=False), two_sources()
    steps: list[Step] = [{"rows": rows(("a", 1))}, Restart(topology=two, stopped=True)]
    refused = r"its sources were \(rows\), now they are \(rows, more\)"
    with pytest.raises(ab.CheckpointMismatchError, match=refused):
        play(one, [*steps, {"more": rows(("a", 4))}])
    with pytest.raises(ab.ConfigError, match="there is no source 'mor'; the topology has rows, mo"):
        play(one, [*steps, {"mor": rows(("a", 4))}])


def test_a_stop_shows_what_it_closes() -> None:
    topology = ab.Topology("words")
    words = topology.source("words", None, time="ts")
    counted = words.key_by("word").window(ab.tumbling("10s"), time="ts")
    counted.aggregate("count", n=ab.count()).to("out", ab.Memory())
    given = [{"ts": dt.datetime(2026, 1, 1, 0, 0, s, tzinfo=dt.UTC), "word": "x"} for s in (1, 15)]
    killed, stopped = (
        play(topology, [{"words": given}, restart])
        for restart in (Restart(), Restart(stopped=True))
    )
    assert killed[1]["out"].height == 0
    assert stopped[1]["out"].select("word", "n").rows() == [("x", 1)]


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_interval": "1ms"},
        {"max_rows_per_slice": 1},
        {"backups": "sources"},
        {"backups": ["sum"]},
        {"backups": "adaptive", "recovery": "blocking"},
        {"recovery": "eager"},
        {"recovery_bound": "2s"},
        {"parallel_recovery": 3},
        {"autoscale": True},
        {"slice": "100ms"},
        {"strategy": "SC"},
        {"strategy": "UB"},
        {"state_url": "memory://played"},
    ],
    ids=str,
)
def test_options_of_a_run_change_no_result(options: Any) -> None:
    steps: list[Step] = [{"rows": rows(("a", n), ("b", 1), (f"k{n}", n))} for n in range(8)]
    calm = play(running_sums(), steps)
    storm: list[Step] = [Lose(), Restart(stopped=True), Restart(nodes=3)]
    stormy = play(running_sums(), [*steps[:5], *storm, *steps[5:]], nodes=3, **options)
    assert [totals(o) for o in (*stormy[:5], *stormy[8:])] == [totals(o) for o in calm]


def test_options_reach_the_run(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
    job = LocalJob(running_sums(), tmp_path, {"rows": schema}, slice="5s", max_rows_per_slice=2)
    job.step({"rows": rows(*((f"k{n}", n) for n in range(6)))})
    assert job.controller.newest is not None
    assert (job.controller.newest.number, job.now_ms) == (3, 5_000)
    job.step(Restart(max_rows_per_slice=1, checkpoint_interval="1ms"))
    job.step({"rows": rows(("a", 1), ("b", 1))})
    assert job.controller.newest.number == 5
    job.step(Restart())  # … and from there on
    job.step({"rows": rows(("a", 1), ("b", 1))})
    assert job.controller.newest.number == 7
    job.run.add_nodes(2)
    assert list(job.run.nodes) == ["1", "2", "3", "4"]
    job.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"slise": "1s"}, "there is no option 'slise'; did you mean slice?"),
        ({"speed": 1}, "there is no option 'speed'; there are slice, checkpoint_interval, "),
        ({"drop_state": "sum"}, "drop_state is 'sum'; give a list of operator names"),
        ({"backups": ["summ"]}, "backups names summ, which is no operator"),
        ({"checkpoint_interval": "0s"}, "checkpoint_interval is 0s; give at least one millisec"),
        ({"node_timeout": "1s"}, "node_timeout is about a cluster"),
        ({"available_now": True}, "available_now is about a cluster"),
    ],
)
def test_options_that_are_refused(options: Any, sentence: str) -> None:
    given: list[Step] = [{"rows": rows(("a", 1))}]
    with pytest.raises(ab.ConfigError, match=re.escape(sentence)):
        play(running_sums(), given, **options)
    with pytest.raises(ab.ConfigError, match=re.escape(sentence)):
        play(running_sums(), [*given, Restart(**options)])


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
