"""A first start that cannot work: what is said before Spark is started, and what is left behind."""

from __future__ import annotations

import http.server
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli import app
from anabranch.driver.endpoint import ask
from anabranch.driver.starting import listening
from anabranch.errors import (
    AdjustmentError,
    AnabranchError,
    CheckpointLockedError,
    ClusterError,
    ConfigError,
)
from anabranch.spark import master, settings
from anabranch.spark.starting import spark_session
from anabranch.storage.journal import DirectoryLock

sys.path.insert(0, str(Path(__file__).parent / "node"))
from local_run import LocalRun


def sums(out: Path, name: str = "sums", operator: str = "sum") -> ab.Topology:
    topology = ab.Topology(name)
    keyed = topology.source("s", None).key_by("k")
    keyed.aggregate(operator, v=ab.sum("v")).to("out", ab.Parquet(str(out)))
    return topology


def leave_a_job(root: Path) -> None:
    """A checkpoint directory `ck`, its output `out`, and the offsets that Spark would have left."""
    run = LocalRun(sums(root / "out"), root / "ck")
    for _ in range(3):
        run.feed([{"s": [(1, 1), (2, 2)]}])
        run.await_cut()
    run.stop()
    (root / "ck" / "spark" / "offsets").mkdir(parents=True)
    (root / "ck" / "spark" / "offsets" / "2").write_text("")


def tree(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else b""
        for p in root.rglob("*")
        if p.name != "lock"  # which names its newest owner
    }


def no_spark() -> Any:
    raise AssertionError("Spark was started for a start that cannot work")


def lose_state(root: Path) -> None:
    for file in (root / "ck" / "checkpoints").rglob("*.ckpt"):
        file.unlink()


def lose_offsets(root: Path) -> None:
    shutil.rmtree(root / "ck" / "spark")


def be_a_file(root: Path) -> None:
    (root / "new").write_text("")


REFUSED: dict[str, tuple[Callable[[Path], object], Callable[[Path], Any], str]] = {
    "another topology": (
        lambda root: None,
        lambda root: sums(root / "out", name="other").start(no_spark, checkpoint=root / "ck"),
        "written by topology 'sums', this one is 'other'",
    ),
    "an operator that is gone": (
        lambda root: None,
        lambda root: sums(root / "out", operator="total").start(no_spark, checkpoint=root / "ck"),
        "operator 'sum' is now called 'total'",
    ),
    "state that is gone": (
        lose_state,
        lambda root: sums(root / "out").start(no_spark, checkpoint=root / "ck"),
        r"the state of the job in .* is gone: checkpoints/sum/\d/.*ckpt is missing",
    ),
    "offsets that are gone": (
        lose_offsets,
        lambda root: sums(root / "out").start(no_spark, checkpoint=root / "ck"),
        "the journal ends with batch 2, but Spark's offsets are gone",
    ),
    "another job's output": (
        lambda root: None,
        lambda root: sums(root / "out").start(no_spark, checkpoint=root / "new" / "ck"),
        "belongs to another job, topology 'sums'",
    ),
    "output into a file": (
        be_a_file,
        lambda root: sums(root / "new" / "out").start(no_spark, checkpoint=root / "n" / "ck"),
        r"Not a directory \(.*/new\)",
    ),
    "a directory in a file": (
        be_a_file,
        lambda root: sums(root / "o").start(no_spark, checkpoint=root / "new" / "ck"),
        "cannot create .*/new/ck: Not a directory",
    ),
    "a database that is away": (
        lambda root: None,
        lambda root: to_postgres().start(no_spark, checkpoint=root / "new"),
        "could not reach the PostgreSQL table t: .*refused",
    ),
    "a wrong option": (
        lambda root: None,
        lambda root: sums(root / "o").start(no_spark, checkpoint=root / "new", slice="often"),
        "'often' is not a duration",
    ),
    "a wrong operator": (
        lambda root: None,
        lambda root: sums(root / "o").start(no_spark, checkpoint=root / "new", backups=["x"]),
        "backups names x",
    ),
}


def to_postgres() -> ab.Topology:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    topology = ab.Topology("t")
    address = f"postgresql://u@127.0.0.1:{port}/d"
    topology.source("s", None).to("out", ab.Postgres(address, "t"))
    return topology


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_work_is_refused_before_spark_and_changes_nothing(
    mistake: str, tmp_path: Path
) -> None:
    prepare, start, sentence = REFUSED[mistake]
    leave_a_job(tmp_path)
    prepare(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(AnabranchError, match=sentence):
        start(tmp_path)
    assert tree(tmp_path) == before
    DirectoryLock(tmp_path / "ck").release()  # which is free


def test_a_directory_in_use_is_refused_before_spark(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path / "ck")
    with pytest.raises(CheckpointLockedError, match="is in use by process"):
        sums(tmp_path / "out").start(no_spark, checkpoint=tmp_path / "ck")
    lock.release()


def test_the_lock_is_held_while_spark_starts_and_the_job_says_that_it_does(tmp_path: Path) -> None:
    seen: list[str] = []

    def spark() -> Any:
        with pytest.raises(CheckpointLockedError):
            DirectoryLock(tmp_path / "ck")
        status = ask(tmp_path / "ck", {"do": "status"})
        seen.append(f"{status['topology']} {status['phase']}: {status['doing']}")
        shown = CliRunner().invoke(app, ["status", str(tmp_path / "ck")])
        assert shown.stdout.startswith("sums · starting (opening the checkpoint directory")
        with pytest.raises(AdjustmentError, match="still starting"):
            ask(tmp_path / "ck", {"do": "scale", "operator": "sum", "parallelism": 3})
        raise ClusterError("there is none")

    phases: list[str] = []
    with listening(phases.append), pytest.raises(ClusterError, match="there is none"):
        sums(tmp_path / "out").start(spark, checkpoint=tmp_path / "ck")
    assert phases == [f"opening the checkpoint directory {tmp_path / 'ck'}"]
    assert seen == [f"sums starting: {phases[0]}"]
    assert list(tmp_path.iterdir()) == []


def test_a_job_starts_until_its_first_slice_has_run(tmp_path: Path) -> None:
    run = LocalRun(sums(tmp_path / "out"), tmp_path / "ck")
    assert run.run.status().phase == "starting"
    assert run.run.status().doing == "handing out the partitions, beginning with slice 1"
    run.feed([{"s": [(1, 1)]}])
    assert (run.run.status().phase, run.run.status().doing) == ("running", None)
    assert set(run.run.nodes.values()) == {""}
    run.stop()


def test_a_node_without_partitions_is_a_spare(tmp_path: Path) -> None:
    run = LocalRun(sums(tmp_path / "out"), tmp_path / "ck", nodes=3)
    assert sorted(run.run.nodes.values()) == ["", "", "spare"]
    run.stop()


def test_two_refused_starts_do_not_unlock_each_other(tmp_path: Path) -> None:
    """The first lets go of a directory that it made, and removes it, after the second has opened
    the lock's file: the second must not take the removed file for the lock."""
    directory = tmp_path / "ck"
    first = DirectoryLock(directory)
    real = Path.open

    def open_late(self: Path, *arguments: Any) -> Any:
        file = real(self, *arguments)
        if self.name == "lock":
            first.release()
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_late)
        second = DirectoryLock(directory)
    with pytest.raises(CheckpointLockedError):
        DirectoryLock(directory)
    second.release()


# -- a master that is none ---------------------------------------------------------------------


@contextmanager
def listener(answer: bytes | None) -> Iterator[int]:
    """A port of something else, which says `answer` when it has heard something."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(1)
                if answer is not None:
                    caller.sendall(answer)
                caller.recv(4096)  # until the other end has had enough

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n",
            "something else listens on .* 'HTTP/1.1 400 Bad Request'",
        ),
        (b"SSH-2.0-x\r\n", "something else listens on .* 'SSH-2.0-x'"),
        (None, "something listens on .* that does not answer as Spark does"),
    ],
)
def test_a_port_of_something_else_is_no_master(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, sentence: str
) -> None:
    monkeypatch.setattr(master, "ANSWER_S", 0.2 if answer is None else 30)
    with listener(answer) as port:
        url = f"spark://127.0.0.1:{port}"
        with pytest.raises(ClusterError, match=f"no Spark master answers at {url}: {sentence}"):
            spark_session(url)


def test_a_web_server_is_no_master() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ClusterError, match="something else listens on"):
            spark_session(f"spark://127.0.0.1:{server.server_port}")


def test_nobody_is_no_master() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=f"127.0.0.1:{port}: Connection refused"):
        spark_session(f"spark://127.0.0.1:{port}")
    with pytest.raises(ClusterError, match=r"there is no host no-such-host\.invalid"):
        spark_session("spark://no-such-host.invalid:7077")


def test_a_spark_server_is_taken_for_one() -> None:
    failure = bytes([8]) + b"\0\0\0\1x\0\0\0\1y"
    with listener((8 + len(failure)).to_bytes(8, "big") + failure) as port:
        master.check_master(f"spark://127.0.0.1:{port}")


# -- settings of Spark -------------------------------------------------------------------------


def test_settings_are_taken_as_python_has_them() -> None:
    conf = {"spark.sql.shuffle.partitions": 8, "spark.sql.ansi.enabled": False, "spark.x": "y"}
    assert settings.checked_conf(conf, ["g:a:1", "g:b:2"], True) == {
        "spark.sql.shuffle.partitions": "8",
        "spark.sql.ansi.enabled": "false",
        "spark.x": "y",
        "spark.jars.packages": "g:a:1,g:b:2",
    }


@pytest.mark.parametrize("key", settings.OWNED)
def test_what_anabranch_decides_cannot_be_given(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} cannot be set: "):
        spark_session("spark://host:7077", **{key: "1"})


def test_the_users_defaults_are_found_where_spark_looks(tmp_path: Path) -> None:
    for name in ("own", "home/conf"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "spark-defaults.conf").write_text(
            f"# of {name}\n\nspark.from   {name}\nspark.a=b c\nspark.empty\nother.key 1\n"
        )
    own, home = str(tmp_path / "own"), str(tmp_path / "home")
    found = settings.users_defaults({"SPARK_CONF_DIR": own, "SPARK_HOME": home})
    assert found == {"spark.from": "own", "spark.a": "b c", "spark.empty": ""}
    assert settings.users_defaults({"SPARK_HOME": home})["spark.from"] == "home/conf"
    assert settings.users_defaults({}) == {}


@pytest.mark.parametrize(("memory", "size"), [("4g", 4096), ("1500m", 1500), ("1 GB", 1024)])
def test_memory(memory: str, size: int) -> None:
    assert settings.megabytes(memory) == size
