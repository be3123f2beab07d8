"""State read from a directory is the state a plain recomputation gives, and reading leaves no
trace."""

from __future__ import annotations

import datetime as dt
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "node"))

import local_run
from flows import FOLDS, batches, flows
from local_run import LocalRun
from test_local_runs import Comparison

import anabranch as ab
from anabranch.cli import app
from anabranch.errors import ConfigError, StorageError
from anabranch.storage.journal import Journal
from anabranch.storage.local import LocalStore
from anabranch.upgrade import state_reader
from anabranch.upgrade.state_reader import inspect, read_state
from oracle import FOLDS as MODEL
from oracle import Dataflow, Step

PART = {"count": "v.rows", "sum": "v.sum", "min": "v.min", "max": "v.max"}
FLOW = (Step("s", "source"), Step("sum", "sum", ("s",), 3), Step("o", "sink", ("sum",)))


def batch(n: int, keys: int = 10) -> list[dict[str, list[tuple[int | None, int]]]]:
    return [{"s": [(k, n + k) for k in range(keys)]}, {"s": [(None, n)]}]


def stopped(root: Path, batches: int = 4) -> Comparison:
    """A job that ended gracefully: a full file and deltas per partition."""
    comparison = Comparison(Dataflow(FLOW))
    run = LocalRun(comparison.topology(), root)
    for n in range(batches):
        comparison.feed(run, batch(n, 10 if n else 40))
        run.cluster.ask(run.run.caller.poll(run.cluster.nodes))
    run.stop()
    return comparison


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data(), flows())
def test_the_state_of_every_fold_is_what_the_oracle_remembers(
    data: st.DataObject, flow: Dataflow
) -> None:
    comparison = Comparison(flow)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        run = LocalRun(comparison.topology(), Path(root))
        for given_batch in data.draw(batches(flow)):
            comparison.feed(run, given_batch)
        run.stop()
        listed = {o.name: o for o in inspect(root).operators}
        assert set(listed) == {s.name for s in flow.steps if s.what in FOLDS}
        for step in flow.steps:
            if step.what in FOLDS:
                values = comparison.oracle._values.get(step.name, {})
                table = read_state(root, step.name)
                found = dict(
                    zip(
                        table.column("k").to_pylist(),
                        table.column(PART[step.what]).to_pylist(),
                        strict=True,
                    )
                )
                assert found == {k: MODEL[step.what](v) for k, v in values.items()}
                assert listed[step.name].keys == listed[step.name].rows == len(values)
                assert listed[step.name].partitions == (step.number - 1) % 4 + 1


TIMED = pa.schema([("k", pa.int64()), ("v", pa.timestamp("us", "UTC"))])
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows of local runs are (key, seconds after START)."""

    def table(rows: list[tuple[int, int]]) -> pa.Table:
        times = [START + dt.timedelta(seconds=s) for _, s in rows]
        return pa.table({"k": [k for k, _ in rows], "v": times}, TIMED)

    monkeypatch.setattr(local_run, "table", table)
    return None


def run_timed(topology: ab.Topology, root: Path, slices: list[list[tuple[int, int]]]) -> None:
    run = LocalRun(topology, root, schemas={"s": TIMED})
    for rows in slices:
        run.feed([{"s": rows}])
        run.cluster.ask(run.run.caller.poll(run.cluster.nodes))
    run.stop()


@pytest.mark.usefixtures("timed")
def test_closed_windows_and_ended_sessions_are_gone_though_no_tombstone_says_so(
    tmp_path: Path,
) -> None:
    """Many keys stay, so that files are deltas; the watermark takes the old windows away."""
    topology = ab.Topology("t", parallelism=1)
    keyed = topology.source("s", None, time="v").key_by("k")
    windows = keyed.window(ab.hopping("20s", "10s"), time="v")
    counts = {"n": ab.count(), "d": ab.count_distinct("v")}
    windows.aggregate("windows", **counts).to("a", ab.Memory())
    sessions = keyed.window(ab.session("5s"), time="v")
    sessions.aggregate("sessions", n=ab.count()).to("b", ab.Memory())
    keyed.deduplicate("once", within="10s", time="v").to("c", ab.Memory())
    future = [(k, 100) for k in range(200)]
    slices = [[*future[:100], (1, 1), (1, 2), (2, 3)], [(1, 40), *future[100:]], [(3, 101)]]
    run_timed(topology, tmp_path, slices)
    chains = Journal(LocalStore(tmp_path)).read()
    assert chains is not None
    assert any(len(f) > 1 for f in (chains[0].cut or pytest.fail()).files.values())
    micros = int(START.timestamp()) * 1_000_000

    def states(name: str, *columns: str) -> set[tuple[Any, ...]]:
        rows = read_state(tmp_path, name).to_pylist()
        return {tuple(r[c] for c in columns) for r in rows if r.get("_pair_of") is None}

    # The watermark is at 101: windows that end up to there, and what they alone hold, are closed.
    expected = {(k, micros + 100_000_000, 1) for k in range(200)}
    expected |= {(3, micros + 100_000_000, 2)}
    expected -= {(3, micros + 100_000_000, 1)}
    assert states("windows", "k", "_pane", "n.rows") == expected
    assert {k for (k,) in states("once", "k")} == set(range(200))
    listed = {o.name: o for o in inspect(tmp_path).operators}
    assert listed["windows"].keys == listed["sessions"].keys == 200
    assert listed["once"].keys == 200


def test_rankings_are_replaced_as_a_whole(tmp_path: Path) -> None:
    topology = ab.Topology("t", parallelism=2)
    ranked = topology.source("s", None).key_by("k").top_k("best", 2, by="v")
    ranked.to("o", ab.Memory())
    run = LocalRun(topology, tmp_path)
    best: dict[int | None, list[int]] = {}
    for rows in ([(k, k) for k in range(50)], [(7, 3), (7, 9)], [(7, 8), (8, 0)]):
        run.feed([{"s": rows}])
        run.cluster.ask(run.run.caller.poll(run.cluster.nodes))
        for k, v in rows:
            best[k] = sorted([*best.get(k, []), v], reverse=True)[:2]
    run.stop()
    rows = read_state(tmp_path, "best").to_pylist()
    assert {(r["k"], r["_number"], r["v"]) for r in rows} == {
        (k, i, v) for k, values in best.items() for i, v in enumerate(values)
    }
    assert inspect(tmp_path).operators[0].keys == 50


class Balance(ab.RowFunction):
    """A user's function with state of its own; the reader does not have its code."""

    state: ClassVar = {"total": pl.Int64, "names": pl.List(pl.String)}
    output: ClassVar = {"total": pl.Int64}

    def on_row(self, row: Any, state: Any) -> Any:
        total = state.get("total", 0) + row["v"]
        if total > 30:
            state.clear()
        else:
            state.set(total=total, names=[*(state.get("names") or []), str(row["v"])])


def test_the_state_of_a_function(tmp_path: Path) -> None:
    topology = ab.Topology("t", parallelism=2)
    kept = topology.source("s", None).key_by("k").process("balance", Balance(), ttl="1h")
    kept.to("o", ab.Memory())
    run = LocalRun(topology, tmp_path)
    held: dict[int | None, list[int]] = {}
    for rows in ([(k, k % 5) for k in range(40)], [(3, 7), (4, 9)], [(3, 20), (4, 9)], [(3, 1)]):
        run.feed([{"s": rows}])
        run.cluster.ask(run.run.caller.poll(run.cluster.nodes))
        for k, v in rows:
            held[k] = [*held.get(k, []), v]
            if sum(held[k]) > 30:
                held[k] = []
    run.stop()
    found = {r["k"]: r for r in read_state(tmp_path, "balance").to_pylist()}
    assert {k: (r["total"], r["names"]) for k, r in found.items()} == {
        k: (sum(v), [str(x) for x in v]) for k, v in held.items() if v
    }


def test_a_listing(tmp_path: Path) -> None:
    comparison = stopped(tmp_path)
    run = LocalRun(comparison.topology(), tmp_path, checkpoint_interval="300h")
    comparison.feed(run, batch(7))
    comparison.feed(run, batch(8))
    found = inspect(tmp_path)
    assert (found.topology, found.generation) == ("flow", 2)
    newest = run.controller.newest
    assert newest is not None
    assert found.cut == newest.number - 2
    assert found.previous is not None
    assert found.previous < found.cut
    assert [s.number for s in found.slices] == [newest.number - 1, newest.number]
    (op,) = found.operators
    files = (tmp_path / "checkpoints").glob("*/*/*.ckpt")
    assert 0 < op.bytes < sum(f.stat().st_size for f in files)
    assert (op.name, op.type, op.key, op.partitions) == ("sum", "KeyedAggregate", ("k",), 3)
    printed = CliRunner().invoke(app, ["state", str(tmp_path)]).stdout
    for part in ("topology flow", f"slice {found.cut}", "KeyedAggregate", "22 rows to replay"):
        assert part in printed


def test_reading_leaves_no_trace_while_the_job_runs(tmp_path: Path) -> None:
    comparison = stopped(tmp_path)
    run = LocalRun(comparison.topology(), tmp_path, checkpoint_interval="300h")
    comparison.feed(run, batch(7))
    before = {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))}
    read_state(tmp_path, "sum")
    inspect(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))} == before


def test_files_that_go_away_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path / "job", 2)
    old = state_reader._journal(tmp_path / "job")
    comparison = Comparison(Dataflow(FLOW))
    shutil.rmtree(tmp_path / "job" / "checkpoints")
    with pytest.raises(StorageError, match=r"cannot read .*\.ckpt"):
        read_state(tmp_path / "job", "sum")  # no newer cut: they are missing, not replaced
    run = LocalRun(comparison.topology(), tmp_path / "new")
    comparison.feed(run, batch(3))
    run.stop()
    answers = iter([old, state_reader._journal(tmp_path / "new")])
    monkeypatch.setattr(state_reader, "_journal", lambda root: next(answers))
    assert read_state(tmp_path / "new", "sum").num_rows == 11


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the checkpoint directory of a job"):
        read_state(tmp_path, "sum")
    stopped(tmp_path / "job")
    with pytest.raises(ConfigError, match=r"no operator 'o' has state .* are: sum$"):
        read_state(tmp_path / "job", "o")
    comparison = Comparison(Dataflow(FLOW))
    run = LocalRun(comparison.topology(), tmp_path / "young", checkpoint_interval="300h")
    comparison.feed(run, batch(0))
    with pytest.raises(ConfigError, match="has not completed a checkpoint yet"):
        read_state(tmp_path / "young", "sum")
    assert inspect(tmp_path / "young").operators == ()
    victim = next((tmp_path / "job" / "checkpoints").glob("sum/1/*.ckpt"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(StorageError, match="is damaged: the state of 'sum' is torn") as damaged:
        inspect(tmp_path / "job")
    assert str(victim) in damaged.value.message


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "is not the checkpoint directory of a job"),
        (["job", "words"], "no operator 'words' has state"),
        (["job", "--limit", "3"], "are for the rows of an operator"),
        (["job", "sum", "--limit", "-1"], "--limit is -1"),
        (["job", "sum", "--out", "no/such/file.parquet"], "cannot write no/such/file.parquet"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    stopped(tmp_path / "job", 1)
    result = CliRunner().invoke(app, ["state", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr


def test_rows_on_the_screen_and_in_a_file(tmp_path: Path) -> None:
    comparison = stopped(tmp_path / "job")
    result = CliRunner().invoke(app, ["state", str(tmp_path / "job"), "sum", "--limit", "3"])
    assert result.exit_code == 0
    assert "3 of 41 rows; --limit or --out for more" in result.stdout
    out = tmp_path / "sum.parquet"
    result = CliRunner().invoke(app, ["state", str(tmp_path / "job"), "sum", "--out", str(out)])
    assert f"41 rows of sum are in {out}" in result.stdout.replace("\n", "")
    sums = {r["k"]: r["v.sum"] for r in pq.read_table(out).to_pylist()}
    assert sums == {k: sum(v) for k, v in comparison.oracle._values["sum"].items()}
