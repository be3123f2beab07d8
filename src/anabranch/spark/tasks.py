"""What runs inside Spark's Python workers: thin functions over raw frames.

Frames are bytes: no pickling of rows anywhere. A map task yields pairs of frames (destination as
a big-endian long, blob), which the JVM shuffles as they are.
"""

from __future__ import annotations

import os

# One thread: an executor has one core. Set before Polars is first imported in this worker.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

import contextlib
import gc
import hashlib
import pickle
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.serializers import SpecialLengths

from anabranch.errors import AnabranchError, ClusterError
from anabranch.node import activity
from anabranch.node.arrow.job import JobSpec
from anabranch.node.arrow.packets import encode_blob
from anabranch.node.process import client
from anabranch.node.protocol.messages import ReplayRequest, SourceRequest
from anabranch.node.protocol.source_task import run_replay_task, run_source_task

# PySpark collects garbage after every task: some 28 ms with all that was imported, far more than
# a small wave takes. What is here by now is here for good, so keep it out of that.
gc.freeze()

_LONG = struct.Struct("!q")
_INT = struct.Struct("!i")
_jobs: dict[bytes, JobSpec] = {}


class WholeFrames:
    """A PySpark deserializer: frames up to the mark that ends them.

    PySpark takes the end of the stream for the end of the data, too. When an executor is killed its
    Python workers live on for a moment: a source task that had got nothing yet, or a part, would
    log that as its whole share, and a recovery would believe it.
    """

    def load_stream(self, stream: Any) -> Iterator[bytes]:
        while True:
            (length,) = _INT.unpack(_exactly(stream, _INT.size))
            if length == SpecialLengths.END_OF_DATA_SECTION:
                return
            yield _exactly(stream, length)

    def _load_stream_without_unbatching(self, stream: Any) -> Iterator[list[bytes]]:
        """What PySpark's PairDeserializer asks for: frames in batches of one."""
        return ([frame] for frame in self.load_stream(stream))


def _exactly(stream: Any, length: int) -> bytes:
    data: bytes = stream.read(length)
    if len(data) < length:
        raise EOFError("the executor went away in the middle of a task")
    return data


def source_frames(job: bytes, request: bytes, task: int, batches: Iterable[Any]) -> Iterator[bytes]:
    """The source wave: Arrow batches in, one (node, blob) pair per node out. A batch may come
    with an empty partner that pins it."""
    ask: SourceRequest = pickle.loads(request)
    with contextlib.suppress(AnabranchError, OSError):  # it can work without telling of it
        activity.keep_slate(client.socket_path(client.executor_pid()))
    frames = (b[0] if isinstance(b, tuple) else b for b in batches)
    for node, parcel in enumerate(run_source_task(_load(job), ask, task, frames)):
        yield _LONG.pack(node)
        yield b"".join(encode_blob(parcel))


def replay_frames(
    job: bytes, request: bytes, task: int, nothing: Iterable[bytes]
) -> Iterator[bytes]:
    """The source wave of a recovery: it reads only the log."""
    deque(nothing, maxlen=0)  # Spark reuses a worker only if it read all its input
    ask: ReplayRequest = pickle.loads(request)
    for node, parcel in enumerate(run_replay_task(_load(job), ask, task)):
        yield _LONG.pack(node)
        yield b"".join(encode_blob(parcel))


def _load(job: bytes) -> JobSpec:
    """The job, unpickled once per worker."""
    digest = hashlib.blake2b(job, digest_size=16).digest()
    if digest not in _jobs:
        _jobs.clear()
        _jobs[digest] = pickle.loads(job)
    return _jobs[digest]


def rehearsal_frames(job: bytes, task: int, nothing: Iterable[bytes]) -> Iterator[bytes]:
    """Load the job in this worker and run its source chains once; a pair for the shuffle."""
    deque(nothing, maxlen=0)
    for program in _load(job).programs.values():
        if program.chain.is_source:
            program.rehearse()
    yield _LONG.pack(task)
    yield b"rehearsal"


def dropped_frames(task: int, batches: Iterable[Any]) -> Iterator[bytes]:
    """Read a batch for nothing but having read one."""
    deque(batches, maxlen=0)
    return iter(())


def wave_frames(task: int, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """One wave on one node: (request in the first pair, blobs) in, pairs or the report out."""
    request: Any = None
    blobs: list[bytes] = []
    for head, blob in pairs:
        if head:
            request = pickle.loads(head)
        if blob:
            blobs.append(blob)
    (shape, report), buffers = client.call(request, blobs)
    if report is not None:
        yield pickle.dumps(report, protocol=pickle.HIGHEST_PROTOCOL)
        return
    start = 0
    for node, count in enumerate(shape):
        yield _LONG.pack(node)
        yield b"".join(buffers[start : start + count])
        start += count


def control_frames(task: int, requests: Iterable[Any]) -> Iterator[bytes]:
    """Warm, prepare, poll or forget: one request in, one answer out. An error travels as a value,
    but for a node process that went away: Spark tries again, as it does with a wave, and the
    answer of the next process says that its partitions are gone."""
    for pair in requests:
        request = pair[0] if isinstance(pair, tuple) else pair
        try:
            answer, _ = client.call(pickle.loads(request))
        except ClusterError:
            raise
        except Exception as e:
            answer = e
        yield pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
