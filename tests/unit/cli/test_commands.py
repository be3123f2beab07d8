"""What a command prints and returns, as far as it gets without Spark."""

from __future__ import annotations

import errno
import importlib.util
import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli import app
from anabranch.cli.main import _backups, run
from anabranch.driver.options import Given, RunOptions
from anabranch.errors import InvariantError, OperatorError, StorageError
from anabranch.spark import java
from anabranch.terminal.running import StopSignal

ROOT = Path(__file__).parents[3]
RUN = ["run", "examples.word_count:topology", "--checkpoint", "never-made"]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_describe() -> None:
    result = CliRunner().invoke(app, ["describe", "examples.word_count:topology"])
    assert result.exit_code == 0
    for part in ("topology word_count", "splitter", "counter", "by word", "sink"):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["describe", "nowhere:topology"], "there is no module 'nowhere'"),
        (["describe", "examples.word_count:nothing"], "has no attribute 'nothing'"),
        (["describe", "examples.word_count:INPUT"], "is a str; name an anabranch.Topology"),
        ([*RUN, "--slice", "1 fortnight"], "'1 fortnight' is not a duration"),
        ([*RUN, "--checkpoint-interval", "often"], "'often' is not a duration"),
        ([*RUN, "--nodes", "0"], "a cluster needs at least one node"),
        ([*RUN, "--node-timeout", "0s"], "node_timeout is 0s"),
        ([*RUN, "--slice-timeout", "soon"], "'soon' is not a duration"),
        ([*RUN, "--parallel-recovery", "0"], "parallel_recovery is 0"),
        ([*RUN, "--backups", "nobody"], "backups names nobody, which is no operator"),
        ([*RUN, "--state-url", "somewhere"], "state_url is 'somewhere'"),
        ([*RUN, "--strategy", "hope"], "strategy is 'hope'"),
        ([*RUN, "--recovery", "hope"], "recovery is 'hope'; there are incremental, blocking, ea"),
        (
            [*RUN, "--backups", "adaptive", "--recovery-bound", "2s"],
            'backups is "adaptive", but with a recovery_bound',
        ),
        ([*RUN, "--conf", "spark.ui.port"], "--conf is 'spark.ui.port'; write key=value"),
        ([*RUN, "--conf", "driver.memory=1g"], "'driver.memory' is no setting of Spark"),
        ([*RUN, "--conf", "spark.executor.cores=4"], "spark.executor.cores cannot be set: a node"),
        ([*RUN, "--conf", "spark.executor.memory=4g"], "give memory (--memory) instead"),
        ([*RUN, "--conf", "spark.authenticate.secret=x"], "the cluster of this machine decides"),
        ([*RUN, "--packages", "kafka"], "the package 'kafka' is not one of Maven"),
        ([*RUN, "--memory", "much"], "memory is 'much'"),
        ([*RUN, "--memory", "100m"], "a Spark executor needs 512m or more"),
        ([*RUN, "--master", "local[*]"], "master local[*] has no executors"),
        ([*RUN, "--master", "sparkk://host:7077"], "which is no Spark master; give spark://"),
        ([*RUN, "--master", "spark://host"], "which is no Spark master; give spark://"),
        ([*RUN, "--master", "local-cluster[3]"], "write local-cluster[nodes,1,megabytes]"),
        (["demo", "--seconds", "0"], "--seconds is 0"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_1(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert sentence in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert not Path("never-made").exists()


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"anabranch {ab.__version__}\n")


def test_the_command_line_has_every_option_of_start_with_its_default() -> None:
    """`spark` is what the others below `only_here` make; operators are given by repetition."""
    only_here = {"topology", "nodes", "master", "memory", "packages", "conf", "max_nodes"}
    start = {field.name: field.default for field in fields(RunOptions)}
    assert list(Given.__annotations__) == list(start)  # … as `start`, `run` and `play` have them
    here = dict(inspect.signature(run).parameters)
    assert here.keys() - only_here - {"verbose", "checkpoint"} == start.keys()
    for name in start.keys() - {"drop_state", "backups"}:
        assert here[name].default == start[name], name
    assert _backups(None) == start["backups"]
    assert [_backups([w]) for w in ("sources", "adaptive")] == ["sources", "adaptive"]
    assert _backups(["count"]) == ["count"]
    session = inspect.signature(ab.spark_session).parameters
    for name in ("master", "nodes", "memory"):
        assert here[name].default == session[name].default, name


@pytest.mark.parametrize(
    ("problem", "status", "said"),
    [
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (KeyboardInterrupt(), 130, "interrupted; started again, a job goes on where it was\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/full/x"),
            1,
            "error: No space left on device (/full/x); free some space and start again\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root/x"),
            1,
            "error: Permission denied (/root/x); check whose it is, and the rights of this user\n",
        ),
    ],
)
def test_what_is_no_bug_is_not_called_one(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException, status: int, said: str
) -> None:
    def fail(*arguments: object, **options: object) -> bool:
        raise problem

    monkeypatch.setattr("anabranch.cli.main.run_demo", fail)
    result = CliRunner().invoke(app, ["demo"])
    assert (result.exit_code, result.stderr) == (status, said)


def test_a_bug_tells_its_story(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> bool:
        raise InvariantError("never").told(["5 ms NodesLost 1 => AwaitNodes", "7 ms [x] joined"])

    monkeypatch.setattr("anabranch.cli.main.run_demo", fail)
    told = CliRunner().invoke(app, ["demo"]).stderr.splitlines()
    assert told[:3] == ["error: never", "  5 ms NodesLost 1 => AwaitNodes", "  7 ms [x] joined"]
    assert "a bug in Anabranch" in told[3]


def test_a_reader_that_leaves_early() -> None:
    """As `anabranch describe … | head`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = "from anabranch.cli import app; app()"
    with os.fdopen(writing, "wb") as out:
        ran = subprocess.run(
            [sys.executable, "-c", command, "describe", "examples.word_count:topology"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert "bug" not in ran.stderr, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr


def test_no_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, RUN)
    assert result.exit_code == 1
    assert "this Python has no pyspark: pip install 'pyspark>=4.0,<5'" in result.stderr
    assert "bug" not in result.output


def test_a_bug_is_one_sentence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> bool:
        raise KeyError("surprise")

    monkeypatch.setattr("anabranch.cli.main.run_demo", fail)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unexpected KeyError: 'surprise'")
    assert "bug in Anabranch" in result.stderr
    assert "Traceback" not in result.output
    verbose = CliRunner().invoke(app, ["demo", "--verbose"])
    assert "in fail" in verbose.stderr


def test_an_unknown_option_is_explained() -> None:
    result = CliRunner().invoke(app, ["demo", "--speed", "3"])
    assert result.exit_code == 2
    assert "--speed" in result.output


def test_plan_errors_are_sentences(tmp_path: Path) -> None:
    problem = tmp_path / "problem.json"
    problem.write_text("{")
    result = CliRunner().invoke(app, ["plan", "backups", str(problem)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(java.find_java, "__defaults__", ({}, tmp_path))
    result = CliRunner().invoke(app, RUN)
    assert result.exit_code == 1
    assert "Spark needs Java 17 or newer and none was found" in result.stderr
    assert "Traceback" not in result.output


def test_max_nodes_needs_the_autoscaler() -> None:
    result = CliRunner().invoke(app, [*RUN, "--max-nodes", "4"])
    assert result.exit_code == 1
    assert result.stderr == "error: --max-nodes is for --autoscale; give that, too\n"


@pytest.mark.parametrize("arguments", [["--verbose", "describe"], ["describe", "--verbose"]])
def test_verbose_shows_the_trace_after_the_sentence(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "nowhere:topology"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: there is no module")
    assert "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("error", "verbose", "wanted", "unwanted"),
    [
        (StorageError("disk [full]"), False, "disk [full]", "Traceback"),
        (OperatorError("it raised", detail="line 3 of [f]"), False, "it raised", "line 3"),
        (OperatorError("it raised", detail="line 3 of [f]"), True, "line 3 of [f]", "a bug"),
        (InvariantError("never"), False, "a bug in Anabranch", "Traceback"),
    ],
)
def test_report(
    capsys: pytest.CaptureFixture[str],
    error: StorageError | OperatorError | InvariantError,
    verbose: bool,
    wanted: str,
    unwanted: str,
) -> None:
    from anabranch.cli.errors import report

    report(error, verbose)
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {error.message}")
    assert wanted in printed
    assert unwanted not in printed


def test_the_first_interrupt_asks_and_the_second_insists() -> None:
    import signal

    stop = StopSignal()
    before = signal.getsignal(signal.SIGINT)
    with stop.installed():
        signal.raise_signal(signal.SIGINT)
        assert stop.requested.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
