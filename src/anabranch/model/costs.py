"""What partitions cost, as a run knows it and the next one goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.model.ids import PartitionId


@dataclass(frozen=True, slots=True)
class Costs:
    """For how long a source row keeps each partition's node busy, and how many rows come."""

    row_s: Mapping[PartitionId, float] = field(default_factory=dict)
    rows_per_s: float = 0.0

    def load(self, partition: PartitionId) -> float:
        """Share of a node that the partition needs to keep up."""
        return self.row_s.get(partition, 0.0) * self.rows_per_s
