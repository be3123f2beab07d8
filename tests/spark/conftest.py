"""One embedded cluster for all tests on real Spark processes: starting it is the expensive part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from anabranch.spark import watchdog
from anabranch.spark.embedded import EmbeddedCluster

HERE = Path(__file__).parent
PATIENCE_S = 900  # a minute's test, on a machine that others keep busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.timeout(PATIENCE_S))  # unless it names its own


@pytest.fixture(scope="session")
def cluster() -> Iterator[EmbeddedCluster]:
    """Three nodes; a test may kill its processes but leaves three live workers."""
    with EmbeddedCluster(nodes=3) as cluster:
        yield cluster
    assert watchdog.members(str(cluster.directory)) == []
    assert not cluster.directory.exists()


@pytest.fixture(scope="session")
def spark(cluster: EmbeddedCluster) -> SparkSession:
    return cluster.session("tests")
