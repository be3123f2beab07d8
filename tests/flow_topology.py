"""The topology of a dataflow of `oracle`: the same thing in the product's words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl

import anabranch as ab
from oracle import Dataflow


def build(
    flow: Dataflow,
    sink: Callable[[str], Any],
    rescale: int = 0,
    data: Callable[[str], Any] = lambda name: None,
) -> ab.Topology:
    """The topology of a dataflow; `rescale` shifts every parallelism (between 1 and 4)."""
    topology = ab.Topology("flow", key_groups=8)
    streams: dict[str, ab.Stream] = {}
    aggregates: dict[str, Any] = {
        "count": ab.count(),
        "sum": ab.sum("v"),
        "min": ab.min("v"),
        "max": ab.max("v"),
    }
    for step in flow.steps:
        if step.what == "source":
            streams[step.name] = topology.source(step.name, data(step.name))
            continue
        first, *others = [streams[n] for n in step.reads]
        stream = first.union(*others) if others else first
        number = step.number
        if step.what == "sink":
            stream.to(step.name, sink(step.name))
        elif step.what == "filter":
            streams[step.name] = stream.filter(step.name, pl.col("v") % number != 0)
        elif step.what == "map":
            streams[step.name] = stream.map(step.name, _spread(number))
        elif step.what == "keep":
            streams[step.name] = stream.select(step.name, "k", "v")
        else:
            parallelism = (number - 1 + rescale) % 4 + 1
            made = stream.key_by("k").aggregate(
                step.name, parallelism=parallelism, v=aggregates[step.what]
            )
            streams[step.name] = made.changes()
    return topology


def _spread(number: int) -> Callable[[pl.DataFrame], pl.DataFrame]:
    return lambda f: f.select(k=pl.col("k") * 7 % number, v=pl.col("v") + 1)
