"""The schema of a source changes between two runs on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.testing import LocalJob, Restart

KEY, VALUE = pa.field("k", pa.string()), pa.field("v", pa.int64())


def topology() -> ab.Topology:
    made = ab.Topology("sums", key_groups=8)
    rows = made.source("rows", None)
    rows.key_by("k").aggregate("sum", total=ab.sum("v")).to("sums", ab.Memory())
    return made


def restarted(root: Path, *fields: pa.Field) -> LocalJob:
    """A job that had rows with a key and a value, started again on these columns."""
    job = LocalJob(topology(), root, {"rows": pa.schema([KEY, VALUE])})
    job.step({"rows": [{"k": "a", "v": 1}, {"k": "b", "v": 2}]})
    job.stop()
    job._schemas["rows"] = pa.schema(fields)
    job.step(Restart())
    return job


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ((KEY, VALUE, pa.field("new", pa.string())), {"k": "a", "v": 5, "new": "x"}),
        ((VALUE, KEY), {"v": 5, "k": "a"}),
        ((KEY, pa.field("v", pa.int32())), {"k": "a", "v": 5}),
    ],
    ids=["a new column", "another order", "a narrower number"],
)
def test_what_state_does_not_feel_goes_on(tmp_path: Path, fields: Any, row: Any) -> None:
    job = restarted(tmp_path, *fields)
    assert job.step({"rows": [row]})["sums"].rows() == [("a", 6)]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ((pa.field("k", pa.int64()), VALUE), r"'sum'.*k.*string.*int64"),
        ((KEY, pa.field("v", pa.float64())), r"'sum'.*int64.*(float64|double)"),
        ((KEY,), r"'v'"),
        ((VALUE,), r"'k'"),
    ],
    ids=["another key type", "another sum", "no value", "no key"],
)
def test_the_rest_is_refused_with_the_difference(
    tmp_path: Path, fields: Any, sentence: str
) -> None:
    with pytest.raises(ab.AnabranchError, match=sentence):
        restarted(tmp_path, *fields)
    job = LocalJob(topology(), tmp_path, {"rows": pa.schema([KEY, VALUE])})
    assert job.step({"rows": [{"k": "b", "v": 1}]})["sums"].rows() == [("b", 3)], "nothing is lost"
