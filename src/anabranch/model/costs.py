"""What partitions cost, as a run knows it and the next one goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.model.ids import PartitionId


@dataclass(frozen=True, slots=True)
class Costs:
    """For how long a source row keeps each partition's node busy, and how many rows come."""

    row_s: Mapping[PartitionId, float] = field(default_factory=dict)
    rows_per_s: float = 0.0

    @property
    def loads(self) -> dict[PartitionId, float]:
        """Per partition, the share of a node that it needs to keep up; empty: not known."""
        return {p: self.load(p) for p in self.row_s} if self.rows_per_s else {}

    def to_json(self) -> dict[str, Any]:
        row_s = [[p.chain, p.index, s] for p, s in self.row_s.items()]
        return {"row_s": row_s, "rows_per_s": self.rows_per_s}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Costs:
        row_s = {PartitionId(c, i): s for c, i, s in data["row_s"]}
        return Costs(row_s, data["rows_per_s"])

    def load(self, partition: PartitionId) -> float:
        """Share of a node that the partition needs to keep up."""
        return self.row_s.get(partition, 0.0) * self.rows_per_s
