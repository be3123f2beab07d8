"""What cannot be sent to nodes is named, with the operator and the function that uses it."""

from __future__ import annotations

import functools
import logging
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.driver.options import RunOptions
from anabranch.driver.preparing import JobParts, prepare
from anabranch.errors import TopologyError
from anabranch.spark.shipping import LARGE, pickle_spec

lock = threading.Lock()
SCHEMA = pa.schema([("k", pa.int64())])


def uses_a_global(frame: pl.DataFrame) -> pl.DataFrame:
    with lock:
        return frame


def calls_another(frame: pl.DataFrame) -> pl.DataFrame:
    return uses_a_global(frame)


def with_an_open_file() -> Callable[[pl.DataFrame], pl.DataFrame]:
    log = Path("/dev/null").open("w")  # noqa: SIM115 - as a user would
    return lambda frame: frame.with_columns(n=pl.lit(log.fileno()))


def takes_two(lines: Any, frame: pl.DataFrame) -> pl.DataFrame:
    return frame


class Client:
    def __init__(self) -> None:
        self.connection = threading.RLock()

    def look_up(self, frame: pl.DataFrame) -> pl.DataFrame:
        return frame


def pickled(function: Callable[[pl.DataFrame], pl.DataFrame], root: Path) -> bytes:
    topology = ab.Topology("t")
    topology.source("in", None).map("mapped", function).to("out", ab.Memory())
    sinks = {"out": ab.Memory()}
    parts = JobParts(topology.plan(), {"in": None}, {}, {}, sinks)
    return pickle_spec(prepare(parts, root, RunOptions(), {"in": SCHEMA}, SCHEMA).spec)


@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (uses_a_global, r"lock \(_thread\.lock\), used by uses_a_global,? cannot"),
        (calls_another, r"lock \(_thread\.lock\), used by uses_a_global"),
        (with_an_open_file(), r"log \(_io\.TextIOWrapper\), used by with_an_open_file.*lambda"),
        (Client().look_up, r"connection \(_thread\.RLock\), used by Client\.look_up"),
        (functools.partial(takes_two, (i for i in "ab")), r"\[0\] \(builtins\.generator\)"),
    ],
)
def test_what_cannot_be_pickled(
    function: Callable[[pl.DataFrame], pl.DataFrame], culprit: str, tmp_path: Path
) -> None:
    with pytest.raises(TopologyError, match=f"'mapped' cannot be sent to nodes: {culprit}") as told:
        pickled(function, tmp_path)
    assert "cloudpickle" not in "".join(traceback.format_exception(told.value))


def test_what_can_be_pickled(tmp_path: Path) -> None:
    assert pickled(lambda frame: frame.with_columns(n=pl.lit(SCHEMA.names[0])), tmp_path)


def test_a_function_that_takes_large_data_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytes(LARGE + 1)
    with caplog.at_level(logging.WARNING, logger="anabranch"):
        assert len(pickled(lambda frame: frame.with_columns(n=len(data)), tmp_path)) > LARGE
    (record,) = caplog.records
    assert record.getMessage().startswith("operator 'mapped' takes 64 MB to every node")
