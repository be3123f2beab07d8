"""Typed names of the things that move: partitions, nodes, slices."""

from __future__ import annotations

from typing import NamedTuple, NewType

NodeId = NewType("NodeId", str)  # a Spark executor id
SliceNo = NewType("SliceNo", int)


class PartitionId(NamedTuple):
    """One of the parallel instances of a chain: the unit of state, checkpoint and recovery."""

    chain: str
    index: int

    def __str__(self) -> str:
        return f"{self.chain}[{self.index}]"
