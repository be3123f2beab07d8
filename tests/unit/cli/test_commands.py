"""What a command prints and returns, as far as it gets without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.cli.running import StopSignal
from anabranch.errors import InvariantError, OperatorError, StorageError
from anabranch.spark import java

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
