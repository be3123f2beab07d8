"""A session that cannot work is refused with the setting to change."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pyspark.sql import SparkSession

from anabranch.errors import ClusterError, ConfigError
from anabranch.spark import session
from anabranch.spark.session import (
    SETTINGS,
    check_executors,
    check_session,
    executors,
    ship_package,
)


def test_the_settings_pass_the_check(spark: SparkSession) -> None:
    assert {key: spark.sparkContext.getConf().get(key) for key in SETTINGS} == SETTINGS
    check_session(spark)


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("spark.speculation", "true", "set spark.speculation=false"),
        ("spark.dynamicAllocation.enabled", "true", "set spark.dynamicAllocation.enabled=false"),
        ("spark.excludeOnFailure.enabled", "TRUE", "set spark.excludeOnFailure.enabled=false"),
        ("spark.executor.cores", "4", "set spark.executor.cores=1, or spark.task.cpus=4"),
        ("spark.locality.wait.process", "3s", "set spark.locality.wait.process=600s"),
        ("spark.shuffle.reduceLocality.enabled", "true", "reduceLocality.enabled=false"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_right_one(
    spark: SparkSession, key: str, value: str, advice: str
) -> None:
    conf = spark.sparkContext._conf  # check_session reads a copy of it
    conf.set(key, value)
    try:
        with pytest.raises(ConfigError, match=advice):
            check_session(spark)
    finally:
        conf.set(key, SETTINGS[key])


@pytest.mark.parametrize(
    ("master", "conf", "advice"),
    [
        ("local", {}, "EmbeddedCluster"),
        ("local[4]", {"spark.executor.cores": "1"}, "local-cluster"),
        ("local[*,3]", {}, "EmbeddedCluster"),
        ("local-cluster[3,2,1024]", {}, "spark.task.cpus=2"),
        ("spark://host:7077", {}, "spark.executor.cores=1"),
        ("yarn", {"spark.executor.cores": "8", "spark.task.cpus": "2"}, "spark.task.cpus=8"),
        ("yarn", {"spark.executor.cores": "1", "spark.task.cpus": "2"}, "spark.executor.cores=1"),
    ],
)
def test_slots_that_cannot_be_nodes_are_refused(
    master: str, conf: dict[str, str], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        session._check_slots(master, conf)


@pytest.mark.parametrize(
    ("master", "conf"),
    [
        ("local-cluster[3,1,1024]", {}),
        ("local-cluster[3, 4, 1024]", {"spark.task.cpus": "4"}),
        ("spark://host:7077", {"spark.executor.cores": "1"}),
        ("yarn", {}),
        ("k8s://https://host", {"spark.executor.cores": "3", "spark.task.cpus": "2"}),
    ],
)
def test_one_slot_per_executor_is_accepted(master: str, conf: dict[str, str]) -> None:
    session._check_slots(master, conf)


def test_an_old_spark_is_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MIN_SPARK", (99, 1))
    with pytest.raises(ConfigError, match=r"too old: install pyspark>=99\.1"):
        check_session(spark)


def test_spark_connect_is_refused() -> None:
    remote: Any = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ConfigError, match="Spark Connect"):
        check_session(remote)


def test_executors_are_listed_fast_enough_to_poll(spark: SparkSession) -> None:
    assert set(executors(spark).values()) == {"127.0.0.1"}
    costs = []
    for _ in range(20):
        start = time.perf_counter()
        executors(spark)
        costs.append(time.perf_counter() - start)
    assert sorted(costs)[10] < 0.005


def test_healthy_executors_pass(spark: SparkSession) -> None:
    check_executors(spark)


@pytest.mark.parametrize(
    ("package", "least", "complaint"),
    [
        ("no_such_package", (1,), r"have no_such_package missing.* install no_such_package>=1"),
        ("numpy", (99, 5), r"have numpy \d.* install numpy>=99\.5"),
    ],
)
def test_a_package_the_executors_lack_is_named(
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    least: tuple[int, ...],
    complaint: str,
) -> None:
    monkeypatch.setattr(session, "EXECUTOR_PACKAGES", {package: least})
    with pytest.raises(ClusterError, match=complaint):
        check_executors(spark)


def test_another_python_on_the_executors_is_a_sentence(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonVer", "3.9")
    with pytest.raises(ConfigError, match=r"executors run Python 3\.\d+ .* set PYSPARK_PYTHON"):
        check_executors(spark)


def test_no_python_on_the_executors_is_a_sentence(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/nowhere/python3")
    with pytest.raises(ConfigError, match="no Python at /nowhere/python3"):
        check_executors(spark)


def test_the_package_is_shipped_once_and_used(spark: SparkSession) -> None:
    name = ship_package(spark)
    files = list(spark.sparkContext.listFiles)
    assert ship_package(spark) == name
    assert list(spark.sparkContext.listFiles) == files

    def origin(_: int) -> str:
        # What a worker would import: this cluster's have done so before anything was shipped.
        import sys
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec("anabranch", sys.path)
        return str(spec.origin) if spec is not None else "nowhere"

    (found,) = spark.sparkContext.parallelize([0], 1).map(origin).collect()
    assert f"{name}/anabranch/__init__.py" in found
