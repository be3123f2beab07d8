"""Which job a checkpoint directory is: a random number that is made once and then stays.

    <checkpoint>/identity    {"format": 1, "job": "0c4f1e5a9b3d27e", "inherits": false}

Names of topologies and sinks are the user's and may repeat; two jobs that write to one place tell
each other apart by this number, in what sinks record and in checkpoint files. It appears by an
exclusive hard link, so that of two drivers that start at once both get the same one. A copy of the
directory is the same job.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from anabranch.errors import StorageError
from anabranch.storage.files import create_exclusive, explained, make_private

FORMAT = 1
FILE = "identity"
DIGITS = 15  # hexadecimal: as a number it fits where a sink's target keeps only an int64


@dataclass(frozen=True, slots=True)
class Identity:
    """`inherits`: the directory was there before jobs had identities, so what a target recorded
    without one may be this job's."""

    job: str
    inherits: bool = False

    @property
    def number(self) -> int:
        return int(self.job, 16)


def identify(root: Path) -> Identity:
    """The identity of the job in `root`, which gets one if it has none."""
    found = find_identity(root)
    if found is not None:
        return found
    made = {
        "format": FORMAT,
        "job": f"{secrets.randbits(4 * DIGITS):0{DIGITS}x}",
        "inherits": any((root / "journal").glob("*.jsonl")),
    }
    with explained("create", root):
        make_private(root)
    create_exclusive(root / FILE, json.dumps(made).encode())
    found = find_identity(root)  # another driver's, if it was first
    if found is None:
        raise StorageError(f"{root / FILE} went away as it was made; start again", path=str(root))
    return found


def find_identity(root: Path) -> Identity | None:
    """The identity of the job in `root`; None if nobody has given it one."""
    path = root / FILE
    with explained("read", path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        found = json.loads(data)
        if found["format"] != FORMAT:
            raise StorageError(
                f"{path} has format {found['format']}, this version reads {FORMAT}; run the job "
                "with the version that wrote it",
                path=str(path),
            )
        int(found["job"], 16)
        return Identity(found["job"], found["inherits"])
    except (ValueError, KeyError, TypeError) as e:
        raise StorageError(
            f"{path} should hold the identity of the job, but cannot be read ({e}); restore it "
            "from a copy: sinks know the job by it",
            path=str(path),
        ) from e
