"""Typed names of the things that move: partitions and nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

NodeId = NewType("NodeId", str)  # a Spark executor id


@dataclass(frozen=True, slots=True, order=True)
class PartitionId:
    """One of the parallel instances of a chain: the unit of state, checkpoint and recovery."""

    chain: str
    index: int

    def __str__(self) -> str:
        return f"{self.chain}[{self.index}]"
