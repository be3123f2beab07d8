"""An executor is killed while its Python worker reads: half an input is not a whole one.

Found by a benchmark that killed nodes under load: the worker outlives its executor for a moment,
and PySpark's own deserializers take the end of the stream for the end of the data. The task logged
what it had got, all tasks had logged, and the recovery took the log for the truth.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.serializers import PairDeserializer, SpecialLengths

import anabranch as ab
from anabranch.model.slices import Feed, SlicePlan
from anabranch.node.protocol.messages import SourceRequest
from anabranch.spark import tasks
from anabranch.testing import LocalJob

END = struct.pack("!i", SpecialLengths.END_OF_DATA_SECTION)
SCHEMA = pa.schema([("k", pa.int64())])


def stream(*frames: bytes) -> bytes:
    """As the JVM writes it."""
    return b"".join(struct.pack("!i", len(f)) + f for f in frames) + END


def read(deserializer: Any, data: bytes) -> list[Any]:
    return list(deserializer.load_stream(io.BytesIO(data)))


@pytest.mark.parametrize("frames", [(), (b"",), (b"one", b"", b"three")])
def test_frames_end_with_the_mark_and_nowhere_else(frames: tuple[bytes, ...]) -> None:
    whole = stream(*frames)
    assert read(tasks.WholeFrames(), whole) == list(frames)
    for end in range(len(whole)):
        with pytest.raises(EOFError, match="went away in the middle of a task"):
            read(tasks.WholeFrames(), whole[:end])


def test_pairs_too() -> None:
    frames = tasks.WholeFrames()
    pairs = PairDeserializer(frames, frames)
    whole = stream(b"a", b"1", b"b", b"2")
    assert read(pairs, whole) == [(b"a", b"1"), (b"b", b"2")]
    for end in range(len(whole)):
        with pytest.raises(EOFError):
            read(pairs, whole[:end])


def topology() -> ab.Topology:
    made = ab.Topology("counts", key_groups=4)
    made.source("rows", None).key_by("k").aggregate("n", n=ab.count()).to("out", ab.Memory())
    return made


def batch(*keys: int) -> bytes:
    return pa.record_batch([pa.array(keys, pa.int64())], schema=SCHEMA).serialize().to_pybytes()


def test_a_source_task_without_all_its_rows_logs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LocalJob(topology(), tmp_path, {"rows": SCHEMA})
    placement = job.controller.placement
    assert placement is not None
    monkeypatch.setattr(tasks, "_load", lambda _: job.prepared.spec)
    plan = SlicePlan(1, Feed.LIVE, 0, 0, None, 0, placement.version, False, 1, 0)
    request = SourceRequest(1, placement.nodes, placement, plan, 1, ("rows",), SCHEMA)

    def run(data: bytes) -> list[bytes]:
        frames: Iterator[bytes] = tasks.WholeFrames().load_stream(io.BytesIO(data))
        return list(tasks.source_frames(b"", pickle.dumps(request), 0, frames))

    whole = stream(batch(1, 2), batch(3))
    for end in (0, 4, len(stream(batch(1, 2))) - 4, len(whole) - 4):
        with pytest.raises(EOFError):
            run(whole[:end])
        assert not list(tmp_path.glob("source-log/**/*.log"))
    assert run(whole)
    assert len(list(tmp_path.glob("source-log/**/*.log"))) == 1
    job.close()
