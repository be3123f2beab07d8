"""Who may see what a job keeps, and what somebody else can do with a file he put beside it."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.driver.endpoint import ENDPOINT, _write_private
from anabranch.storage.files import write_atomic
from anabranch.testing import LocalJob

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])


def run(root: Path) -> None:
    topology = ab.Topology("private", key_groups=4)
    rows = topology.source("rows", None)
    rows.key_by("k").aggregate("sum", total=ab.sum("v")).to("sums", ab.Memory())
    job = LocalJob(topology, root, {"rows": SCHEMA}, 1)
    job.step({"rows": [{"k": "a", "v": 1}]})


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_checkpoint_directory_is_its_owners(tmp_path: Path) -> None:
    run(tmp_path / "job")
    assert mode(tmp_path / "job") == 0o700


def test_a_checkpoint_directory_that_was_there_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job").chmod(0o750)
    run(tmp_path / "job")
    assert mode(tmp_path / "job") == 0o750


@pytest.mark.parametrize("name", [ENDPOINT, "1.journal"])
def test_a_link_at_a_name_that_can_be_guessed_is_not_followed(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear")
    path = tmp_path / name
    (tmp_path / f".{name}.{os.getpid()}.tmp").symlink_to(victim)
    if name == ENDPOINT:
        _write_private(path, "key")
    else:
        write_atomic(path, [b"key"])
    assert victim.read_text() == "dear"
    assert path.read_text() == "key"
    assert not path.is_symlink()


def test_nothing_that_is_read_from_a_file_is_unpickled() -> None:
    """Whoever can write to a checkpoint directory can change the job's rows, but run no code. What
    is unpickled comes from the driver, from Spark's shuffle, or over a node's own socket."""
    package = Path(ab.__file__).parent
    loads = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Attribute)
        and isinstance(call.value, ast.Name)
        and call.value.id.endswith("pickle")
        and call.attr in ("load", "loads", "Unpickler")
    }
    assert loads == {
        "node/process/surroundings.py",  # the job, from the driver
        "node/arrow/packets.py",  # a blob, from Spark's shuffle
        "node/process/wire.py",  # a message, from a process of the same user
        "spark/generated.py",  # a generator, from the driver
        "spark/tasks.py",  # a request, from the driver
        "spark/cluster.py",  # an answer, from a task
    }
