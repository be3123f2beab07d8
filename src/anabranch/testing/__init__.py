"""Run a topology in this process, without Spark, slice by slice: for tests of your own topologies.

    outputs = play(topology, [{"lines": rows}, Lose(), {"lines": more}, Restart(nodes=3), Idle()])

The same driver, control plane, nodes and storage as on a cluster, with hosts in this process in
place of executors. Sinks are replaced by memory. A step is the rows of one slice per source (a list
of dicts, a Polars frame or an Arrow table), or something that happens between two slices; the
result is what reached every sink, step by step.

The clock is the steps' own: a second per slice, from 1970 on or from `start`. Only with a `start`
do sources compare event times with it (`max_ahead`).
"""

from __future__ import annotations

from anabranch.testing.play import LocalJob, Output, play
from anabranch.testing.steps import Drain, Idle, Join, Lose, Restart, Rows, Scale, Step

__all__ = [
    "Drain",
    "Idle",
    "Join",
    "LocalJob",
    "Lose",
    "Output",
    "Restart",
    "Rows",
    "Scale",
    "Step",
    "play",
]
