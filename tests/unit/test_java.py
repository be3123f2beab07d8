from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.errors import ClusterError
from anabranch.spark.java import JavaInfo, find_java


def install(home: Path, version: str, release: bool = True) -> Path:
    """A fake Java that states its version in a release file, or only when it is asked."""
    (home / "bin").mkdir(parents=True)
    answer = f"echo 'openjdk version \"{version}\" 2025-01-01' >&2" if not release else "exit 9"
    (home / "bin" / "java").write_text(f"#!/bin/sh\n{answer}\n")
    (home / "bin" / "java").chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="X"\nJAVA_VERSION="{version}"\n')
    return home


def test_java_home_wins(tmp_path: Path) -> None:
    named = install(tmp_path / "named", "21.0.1")
    on_path = install(tmp_path / "path", "17.0.2")
    found = find_java({"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}, tmp_path / "none")
    assert found == JavaInfo(named, 21)
    assert found.executable == named / "bin" / "java"


def test_an_old_java_home_does_not_hide_a_good_one_on_the_path(tmp_path: Path) -> None:
    old = install(tmp_path / "old", "11.0.20")
    on_path = install(tmp_path / "path", "17.0.2")
    found = find_java({"JAVA_HOME": str(old), "PATH": str(on_path / "bin")}, tmp_path / "none")
    assert found == JavaInfo(on_path, 17)


def test_a_link_on_the_path_leads_to_the_real_home(tmp_path: Path) -> None:
    home = install(tmp_path / "jvm" / "java-17", "17")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert find_java({"PATH": str(tmp_path / "bin")}, tmp_path / "none") == JavaInfo(home, 17)


def test_the_oldest_usable_of_the_jvm_directory_is_taken(tmp_path: Path) -> None:
    for version in ("25.0.1", "17.0.15", "1.8.0_402"):
        install(tmp_path / f"java-{version}", version)
    (tmp_path / "openjdk-17").mkdir()  # Debian leaves a directory without a runtime
    assert find_java({}, tmp_path) == JavaInfo(tmp_path / "java-17.0.15", 17)


def test_a_java_without_a_release_file_is_asked(tmp_path: Path) -> None:
    home = install(tmp_path / "java", "17.0.9", release=False)
    assert find_java({"JAVA_HOME": str(home)}, tmp_path / "none") == JavaInfo(home, 17)


def test_none_is_refused_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none was found .*openjdk-17-jre-headless"):
        find_java({}, tmp_path)


def test_only_old_ones_are_refused_by_name(tmp_path: Path) -> None:
    old = install(tmp_path / "java-8", "1.8.0_402")
    with pytest.raises(ClusterError, match=f"{old} is Java 8"):
        find_java({}, tmp_path)


def test_a_broken_java_home_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "bin").mkdir(parents=True)
    (broken / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    (broken / "bin" / "java").chmod(0o755)
    good = install(tmp_path / "jvm" / "java-17", "17.0.1")
    assert find_java({"JAVA_HOME": str(broken)}, tmp_path / "jvm") == JavaInfo(good, 17)
