"""How soon each operator of a job with a recovery bound would be back, as the job last measured."""

from __future__ import annotations

import json
from pathlib import Path

from anabranch.driver.actions import PREDICTION
from anabranch.errors import StorageError
from anabranch.storage.files import explained


def describe_recovery(checkpoint: Path) -> str:
    """A line per chain: the slowest of its partitions, and how many of them back up."""
    path = checkpoint / PREDICTION
    if not path.is_file():
        raise StorageError(
            f"{checkpoint} holds no prediction: run the job with a recovery bound for at least "
            "20 slices",
            path=str(path),
        )
    with explained("read", path):
        found = json.loads(path.read_text())
    chains: dict[str, list[dict[str, float]]] = {}
    for partition, one in found["partitions"].items():
        chains.setdefault(partition.rpartition("[")[0], []).append(one)
    lines = ["back after the loss of a node within"]
    for chain, partitions in chains.items():
        slowest = max(p["seconds"] for p in partitions)
        kept = sum(1 for p in partitions if p["backs_up"])
        lines.append(
            f"    {slowest:6.2f} s  {chain}  ({kept} of {len(partitions)} partitions back up)"
        )
    if found["problem"]:
        lines.append(found["problem"])
    return "\n".join(lines)
