"""The archive of classes: where it lives, what it is called, and whose it must be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.spark import archive
from anabranch.spark.archive import ClassArchive, Making
from anabranch.spark.java import JavaInfo

ARCHIVES = "spark-4.0.0-java-17.0.15+6-"


@pytest.fixture
def java(tmp_path: Path) -> JavaInfo:
    home = tmp_path / "jvm"
    (home / "lib/server").mkdir(parents=True)
    (home / "lib/server/classes.jsa").touch()
    (home / "release").write_text('JAVA_VERSION="17.0.15"\nJAVA_RUNTIME_VERSION="17.0.15+6"\n')
    return JavaInfo(home, 17)


@pytest.fixture
def jars(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("spark-core.jar", "scala-library.jar")]
    for jar in found:
        jar.write_text("classes")
    return found


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    return tmp_path / "caches"


def at(java: JavaInfo, jars: list[Path], caches: Path) -> ClassArchive:
    return ClassArchive(java, jars, "4.0.0", {"XDG_CACHE_HOME": str(caches)})


def made(java: JavaInfo, jars: list[Path], caches: Path) -> Path:
    """An archive that is there."""
    path = at(java, jars, caches).path
    assert path is not None
    path.write_text("archive")
    path.chmod(0o444)
    return path


def written_by(making: Making, code: str) -> subprocess.Popen[bytes]:
    """A process that ends like a JVM which had these options."""
    file = making.options[-1].removeprefix("-XX:ArchiveClassesAtExit=")
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code, file])


WRITES = "import sys; open(sys.argv[1], 'w').write('archive')"


def test_it_lives_in_the_users_cache_directory_which_is_private(
    java: JavaInfo, jars: list[Path], caches: Path, tmp_path: Path
) -> None:
    found = at(java, jars, caches).path
    assert found is not None
    assert found.parent == caches / "anabranch"
    assert found.parent.stat().st_mode & 0o777 == 0o700
    assert found.name.startswith(ARCHIVES)
    at_home = ClassArchive(java, jars, "4.0.0", {"HOME": str(tmp_path), "XDG_CACHE_HOME": "caches"})
    assert at_home.path == tmp_path / ".cache/anabranch" / found.name


def test_another_java_spark_jar_or_order_is_another_archive(
    java: JavaInfo, jars: list[Path], caches: Path
) -> None:
    names = [at(java, jars, caches).path, at(java, jars[::-1], caches).path]
    names.append(ClassArchive(java, jars, "4.0.1", {"XDG_CACHE_HOME": str(caches)}).path)
    jars[0].write_text("other classes")
    names.append(at(java, jars, caches).path)
    (java.home / "release").write_text('JAVA_RUNTIME_VERSION="17.0.16+8"\n')
    names.append(at(java, jars, caches).path)
    assert None not in names
    assert len(set(names)) == 5


def test_it_is_made_once_and_then_used(java: JavaInfo, jars: list[Path], caches: Path) -> None:
    first = at(java, jars, caches)
    assert first.use() == ()
    making = first.make()
    assert making is not None
    making.finish(written_by(making, WRITES))
    assert list((caches / "anabranch").iterdir()) == [first.path]
    second = at(java, jars, caches)
    assert second.make() is None
    assert f"-XX:SharedArchiveFile={first.path}" in second.use()


@pytest.mark.parametrize("code", ["", f"{WRITES}; sys.exit(1)"], ids=["nothing", "a part of it"])
def test_what_a_jvm_did_not_complete_is_not_kept(
    code: str, java: JavaInfo, jars: list[Path], caches: Path
) -> None:
    making = at(java, jars, caches).make()
    assert making is not None
    making.finish(written_by(making, code))
    assert list((caches / "anabranch").iterdir()) == []


def test_what_the_disk_did_not_take_is_not_kept(
    java: JavaInfo, jars: list[Path], caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "fsync", fails)
    making = at(java, jars, caches).make()
    assert making is not None
    making.finish(written_by(making, WRITES))
    assert list((caches / "anabranch").iterdir()) == []


def test_a_jvm_that_takes_too_long_is_not_waited_for(
    java: JavaInfo, jars: list[Path], caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAKE_TIMEOUT_S", 0.0)
    making = at(java, jars, caches).make()
    assert making is not None
    process = written_by(making, "import signal; signal.pause()")
    try:
        making.finish(process)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert list((caches / "anabranch").iterdir()) == []


def test_archives_of_the_past_are_removed_when_one_is_made(
    java: JavaInfo, jars: list[Path], caches: Path
) -> None:
    first = at(java, jars, caches)
    assert first.path is not None
    for age in range(1, 7):
        old = first.path.with_name(f"old-{age}.jsa")
        old.touch()
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    killed, busy = first.path.with_name("killed.tmp"), first.path.with_name("busy.tmp")
    killed.touch()
    os.utime(killed, (1_000_000, 1_000_000))
    busy.touch()
    making = first.make()
    assert making is not None
    making.finish(written_by(making, WRITES))
    left = {p.name for p in first.path.parent.iterdir()}
    assert left == {first.path.name, "old-1.jsa", "old-2.jsa", "old-3.jsa", "busy.tmp"}


def nobodys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything belongs to another user from here on."""
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)


def linked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = path.with_name(f"{path.name}.elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def open_to_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize("spoil", [nobodys, linked, open_to_others])
@pytest.mark.parametrize("which", ["archive", "directory"])
def test_what_others_may_have_written_is_neither_used_nor_replaced(
    which: str,
    spoil: object,
    java: JavaInfo,
    jars: list[Path],
    caches: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = made(java, jars, caches)
    assert at(java, jars, caches).use() != ()
    assert callable(spoil)
    spoil(path if which == "archive" else path.parent, monkeypatch)
    found = at(java, jars, caches)
    assert (found.use(), found.make()) == ((), None)
    assert capfd.readouterr() == ("", "")


def test_without_a_place_for_it_there_is_none(
    java: JavaInfo, jars: list[Path], caches: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a b").mkdir()
    for place in (tmp_path / "file", tmp_path / "a b", Path("/proc/none")):
        found = at(java, jars, place)
        assert (found.use(), found.make()) == ((), None)
    made(java, jars, caches)
    caches.chmod(0o777)
    assert at(java, jars, caches).use() == ()
    caches.chmod(0o700)
    assert at(java, jars, caches).use() != ()
    (java.home / "lib/server/classes.jsa").unlink()
    assert at(java, jars, caches).path is None
