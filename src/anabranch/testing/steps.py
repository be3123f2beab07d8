"""What can happen in a test, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from anabranch.api import Topology
from anabranch.driver.options import Given

Rows = Any  # a list of dicts, a Polars frame or an Arrow table


@dataclass(frozen=True)
class Lose:
    """So many nodes die, with their state; as many others join."""

    nodes: int = 1


@dataclass(frozen=True, init=False)
class Restart:
    """The driver is killed, or `stopped` gracefully, and started again on the same checkpoint
    directory: with this number of nodes, with another topology if one is given (other code,
    another parallelism), with options that are changed from here on. `drop_state` is for one
    start."""

    nodes: int | None
    topology: Topology | None
    stopped: bool
    options: Given

    def __init__(
        self,
        nodes: int | None = None,
        topology: Topology | None = None,
        *,
        stopped: bool = False,
        **options: Unpack[Given],
    ) -> None:
        values = {"nodes": nodes, "topology": topology, "stopped": stopped, "options": options}
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Idle:
    """No rows come for a while: time moves on, windows that the watermark has passed close."""

    seconds: float = 1.0


@dataclass(frozen=True)
class Scale:
    """An operator gets another parallelism; it is there before the next step."""

    operator: str
    parallelism: int


@dataclass(frozen=True)
class Join:
    """So many nodes join; partitions move to them."""

    nodes: int = 1


@dataclass(frozen=True)
class Drain:
    """The node with the most partitions is emptied and released."""


Step = Mapping[str, Rows] | Lose | Restart | Idle | Scale | Join | Drain
