"""The direction of imports, and that only spark/ needs pyspark."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anabranch

PACKAGE = Path(anabranch.__file__).parent
# A package imports only what stands to its left.
ORDER = (
    "errors",
    "model",
    "planning",
    "control",
    "operators",
    "generators",
    "storage",
    "upgrade",
    "sinks",
    "node",
    "driver",
    "spark",
    "api",
    "testing",
    "terminal",
    "demos",
    "cli",
)
# The simulator runs all that needs no Spark; nothing imports it but the command line.
SIM_MAY = {*ORDER[: ORDER.index("spark")]}

BLOCKED_IMPORT = """
import importlib, json, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyspark", "py4j"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import anabranch
failed, done = {}, []

def load(package):
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if info.name in ("anabranch.spark", "anabranch.cli") or info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError as error:
            failed[info.name] = str(error)
            continue
        done.append(info.name)
        if info.ispkg:
            load(module)

load(anabranch)
print(json.dumps([failed, done]))
"""


def test_everything_outside_spark_imports_without_pyspark() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    failed, done = json.loads(ran.stdout.splitlines()[-1])
    assert failed == {}
    assert "anabranch.errors" in done


def imported(source: Path, top_level_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, first name below anabranch) of every import of our own packages in a file."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["anabranch", *source.relative_to(PACKAGE).parts[:-1]]
            start = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "anabranch" and len(parts) > 1:
                yield node.lineno, parts[1]


def owner(source: Path) -> str:
    return source.relative_to(PACKAGE).parts[0].removesuffix(".py")


def may_import(importer: str, target: str) -> bool:
    if importer == target or target not in {*ORDER, "sim"}:
        return True
    if importer == "sim":
        return target in SIM_MAY
    if target == "sim":
        return importer == "cli"
    return ORDER.index(target) < ORDER.index(importer)


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE] + [
        path for path in sorted(PACKAGE.glob("*.py")) if not path.name.startswith("__")
    ]


def test_every_package_has_its_place() -> None:
    assert {owner(source) for source in sources()} <= {*ORDER, "sim"}


def test_imports_go_only_downward() -> None:
    wrong = [
        f"{source.relative_to(PACKAGE)}:{line} imports {target}"
        for source in sources()
        for line, target in imported(source)
        if not may_import(owner(source), target)
    ]
    assert wrong == []


def test_the_api_imports_spark_only_inside_functions() -> None:
    files = list((PACKAGE / "api").glob("*.py"))
    assert len(files) > 3
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in files
        for line, target in imported(file, top_level_only=True)
        if target == "spark"
    ]
    assert wrong == []


# Decisions are pure: whatever they depend on comes with an event.
IMPURE = {"time", "threading", "os", "socket", "secrets", "uuid", "subprocess", "asyncio"}


def module_file(name: str) -> Path | None:
    """The file of one of our modules; None for a name inside a module."""
    path = PACKAGE.joinpath(*name.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def names_imported(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached_from(package: str) -> set[Path]:
    """The files of a package, and all of ours that they import, directly or not."""
    todo = list((PACKAGE / package).rglob("*.py"))
    found = set(todo)
    while todo:
        for name in names_imported(todo.pop()):
            file = module_file(name) if name.startswith("anabranch.") else None
            if file is not None and file not in found:
                found.add(file)
                todo.append(file)
    return found


def test_control_and_all_it_calls_are_pure() -> None:
    reached = reached_from("control")
    assert PACKAGE / "planning" / "backups" / "exact.py" in reached
    wrong = [
        f"{source.relative_to(PACKAGE)} imports {name}"
        for source in sorted(reached)
        for name in names_imported(source)
        if name.split(".")[0] in IMPURE
    ]
    assert wrong == []


def test_an_upward_import_is_seen() -> None:
    assert not may_import("control", "spark")
    assert not may_import("model", "planning")
    assert not may_import("sim", "spark")
    assert may_import("spark", "errors")
    assert may_import("api", "spark")


def test_what_a_node_decides_does_not_know_what_it_carries() -> None:
    """Else the simulator could not run it; nor do tables know of sockets."""
    node = PACKAGE / "node"
    known = {
        target for source in (node / "protocol").glob("*.py") for _, target in imported(source)
    }
    assert known == {"errors", "model", "node"}
    wrong = [
        f"{source.parent.name}/{source.name}: {word}"
        for room, words in {
            "protocol": ("node.arrow", "node.process", "pyarrow", "numpy", "polars"),
            "arrow": ("node.process",),
        }.items()
        for source in (node / room).glob("*.py")
        for word in words
        if word in source.read_text(encoding="utf-8")
    ]
    assert wrong == []
