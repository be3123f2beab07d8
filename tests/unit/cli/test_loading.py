"""Every way to name a topology wrongly gets its own sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.cli.loading import load_topology
from anabranch.errors import ConfigError, TopologyError, UserError

MODULE = """
import anabranch as ab

topology = ab.Topology("first")
def make(): return ab.Topology("made")
def wants(argument): return ab.Topology("never")
def clashes():
    topology = ab.Topology("twice")
    topology.source("a", None)
    topology.source("a", None)
number = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "job_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    (tmp_path / "needy_module.py").write_text("import no_such_package\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_module"):
            del sys.modules[name]


def test_loads_a_topology_or_calls_a_function(here: Path) -> None:
    assert load_topology("job_module:topology").name == "first"
    assert load_topology("job_module:make").name == "made"


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("job_module", "write module:attribute"),
        (":topology", "write module:attribute"),
        ("nowhere:topology", "there is no module 'nowhere'"),
        ("nowhere.deep:topology", "there is no module 'nowhere.deep'"),
        ("needy_module:topology", "imports 'no_such_package', which is not installed"),
        ("broken_module:topology", "raised ZeroDivisionError"),
        ("job_module:topologie", "its topologies are: topology"),
        ("job_module:number", "is a int; name an anabranch.Topology"),
        ("job_module:wants", "called without arguments and raised TypeError"),
    ],
)
def test_refuses(here: Path, reference: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_topology(reference)
    assert sentence in caught.value.message


def test_an_error_of_ours_inside_the_module_is_not_wrapped(here: Path) -> None:
    with pytest.raises(TopologyError, match="two operators are named 'a'"):
        load_topology("job_module:clashes")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "\n\nab.Topology('t').source('in', None).filter('v > 1')",
            "filter takes a name and a predicate.* \\(mine\\.py, line 4\\)$",
        ),
        (
            "\nab.Topology('t').source('in', None).groupBy('k')",
            "mine' raised AttributeError .*write \\.key_by.* \\(mine\\.py, line 3\\)$",
        ),
        (
            "\ndef topology():\n    return ab.Topology('my job')",
            "used.* \\(mine\\.py, line 4\\)$",
        ),
        ("\ntopology = (", "SyntaxError .* \\(mine\\.py, line 3\\)$"),
    ],
)
def test_a_mistake_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, sentence: str
) -> None:
    (tmp_path / "mine.py").write_text(f"import anabranch as ab\n{code}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(UserError, match=sentence):
        load_topology("mine:topology")
