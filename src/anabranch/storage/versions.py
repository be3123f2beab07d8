"""What another version wrote is read, or refused in one sentence.

Every durable format carries a number. A file from before its format had one counts as 1. A reader
names the formats it reads; what to do when one changes is in CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.errors import StorageError


def check_format(path: Path | str, found: object, *reads: int) -> None:
    """Refuse what this version does not read."""
    if found not in reads or isinstance(found, bool):
        raise StorageError(f"{path} {other_format(found, *reads)}", path=str(path))


def format_of(data: Mapping[str, Any]) -> object:
    """Of a format that had no number at first."""
    return data.get("format", 1)


def other_format(found: object, *reads: int, use: str = "run the job with") -> str:
    """What was found, what this version reads, and what to do."""
    read = " and ".join(map(str, reads))
    return (
        f"has {'no format' if found is None else f'format {found}'}, this version reads {read}; "
        f"{use} the version of Anabranch that wrote it"
    )
