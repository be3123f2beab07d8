"""What a job decides about itself, as it is carried out, logged and shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from anabranch.model.ids import NodeId


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to change, and why: a sentence with the figures it rests on."""

    at_ms: int
    # "up", "down", "back" (a rollback), "balance", or "none": it would, but it may not or cannot
    kind: str
    what: str
    why: str
    parallelism: Mapping[str, int] = field(default_factory=dict)  # chain → partitions
    add_nodes: int = 0
    drain: NodeId | None = None
    dry_run: bool = False
    by: str = "autoscaler"

    def __str__(self) -> str:
        would = "would do: " if self.dry_run else ""
        return f"{self.by}: {would}{self.what}, because {self.why}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
