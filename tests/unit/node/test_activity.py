"""What a busy executor says of itself, and what its driver hears of it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.driver.heartbeats import Beat, Caller, Heartbeats
from anabranch.model.ids import NodeId
from anabranch.node import activity
from anabranch.node.activity import Slate
from anabranch.node.process import heartbeat
from anabranch.node.process.heartbeat import ALIVE, BUSY, HELPING
from anabranch.testing import play


@pytest.fixture
def slate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slate:
    monkeypatch.setattr(activity, "_slate", None)
    activity.keep_slate(tmp_path / "1-2.sock")
    assert activity._slate is not None
    return activity._slate


def test_an_operator_is_named_while_its_function_runs_and_not_after(slate: Slate) -> None:
    told: dict[str, str] = {}

    def look(frame: pl.DataFrame, name: str) -> pl.DataFrame:
        doing = activity.current()
        if doing is not None and frame.height:
            assert doing.pid == os.getpid()
            told[name] = doing.what
        return frame

    topology = ab.Topology("t", parallelism=1, key_groups=4)
    rows = topology.source("rows", None).map("before", lambda f: look(f, "before"))
    counts = rows.key_by("k").aggregate("count", n=ab.count())
    counts.map("behind", lambda f: look(f, "behind")).to("out", ab.Memory())
    play(topology, [{"rows": [{"k": 1}]}], schemas={"rows": pa.schema([("k", pa.int64())])})
    assert told == {
        "before": "operator 'before' (source task 0)",
        "behind": "operator 'behind' (count[0])",
    }
    assert activity.current() is None


def test_a_process_that_is_gone_does_nothing(slate: Slate) -> None:
    with activity.at("count[0]"):
        activity.enter("count")
        doing = activity.current()
        assert doing is not None
        assert doing.since_s <= time.monotonic()
        with subprocess.Popen(["true"]) as gone:
            pass
        line = f"1.0 {gone.pid} operator 'count' (count[0])"
        os.pwrite(slate._file, line.encode().ljust(activity.SIZE), 0)
        assert activity.current() is None


def test_a_beat_says_who_is_busy_and_with_what(slate: Slate) -> None:
    caller = Caller(Heartbeats("127.0.0.1", 5.0).pulse, node=NodeId("1"))
    assert heartbeat._sign() == ALIVE
    with activity.at("count[0]"):
        activity.enter("a name of ever so many characters, and so on " * 9)
        sign = heartbeat._sign()
    assert sign.startswith(BUSY)
    (beat,) = caller.beats(sign)
    assert beat.itself
    assert beat.doing.startswith("operator 'a name of ever so many")
    said = HELPING + bytes([4]) + b"work"
    # However it is cut on its way.
    found = [caller.beats(bytes([b])) for b in ALIVE + said + ALIVE]
    assert [b for beats in found for b in beats] == [
        Beat(False, ""),
        Beat(False, "work"),
        Beat(False, ""),
    ]
    with pytest.raises(ConnectionError):
        caller.beats(b"?")
