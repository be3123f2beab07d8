"""The start of a sink as its driver makes it: take over, show the newest slice again, begin."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.sinks import Sink
from anabranch.storage.identity import Identity

JOB = Identity("5eed")
ANOTHER = Identity("f0e")


def start(
    sink: Sink,
    newest: int = 0,
    files: Sequence[str] = (),
    run: int = 1,
    job: Identity = JOB,
) -> None:
    """`files` are those that the journal names for slice `newest`."""
    sink.take_over(job, run, newest)
    if newest:
        sink.expose(newest, files, [])
    sink.begin()
