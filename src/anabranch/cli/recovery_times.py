"""How soon each operator of a job with a recovery bound would be back, as the job last measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.driver.notes import PREDICTION, PREDICTION_FORMAT
from anabranch.errors import StorageError
from anabranch.storage.files import directory, explained
from anabranch.storage.versions import check_format, format_of


def describe_recovery(checkpoint: Path) -> str:
    """A line per chain: the slowest of its partitions, and how many of them back up."""
    path = directory(checkpoint, "--checkpoint") / PREDICTION
    if not path.is_file():
        raise StorageError(
            f"{checkpoint} holds no prediction: run the job with a recovery bound for at least "
            "20 slices",
            path=str(path),
        )
    with explained("read", path):
        text = path.read_text(errors="replace")
    try:
        found = json.loads(text)
        check_format(path, format_of(found), PREDICTION_FORMAT)
        return _told(found)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise StorageError(
            f"{path} is damaged ({e!r}); the job writes it anew when it runs", path=str(path)
        ) from e


def _told(found: Mapping[str, Any]) -> str:
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
