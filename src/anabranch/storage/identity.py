"""Which job a checkpoint directory is: a random number that is made once and then stays.

    <checkpoint>/identity    {"format": 1, "job": "0c4f1e5a9b3d27e", "inherits": false}

Names of topologies and sinks are the user's and may repeat; two jobs that write to one place tell
each other apart by this number, in what sinks record and in checkpoint files. Only one of two
drivers that start at once can create it, so that both get the same one. A copy of the directory is
the same job.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from anabranch.errors import StorageError
from anabranch.storage.store import Store
from anabranch.storage.versions import check_format

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


def identify(store: Store) -> Identity:
    """The identity of the job in `store`, which gets one if it has none."""
    found = find_identity(store)
    if found is not None:
        return found
    made = new_identity(store)
    data = {"format": FORMAT, "job": made.job, "inherits": made.inherits}
    store.create(FILE, [json.dumps(data).encode()])
    found = find_identity(store)  # another driver's, if it was first
    if found is None:
        where = store.where(FILE)
        raise StorageError(f"{where} went away as it was made; start again", path=where)
    return found


def new_identity(store: Store) -> Identity:
    """One that the job in `store` might get, and nobody has."""
    inherits = any(n.endswith(".jsonl") for n in store.names("journal"))
    return Identity(f"{secrets.randbits(4 * DIGITS):0{DIGITS}x}", inherits)


def find_identity(store: Store) -> Identity | None:
    """The identity of the job in `store`; None if nobody has given it one."""
    data = store.read(FILE)
    if data is None:
        return None
    where = store.where(FILE)
    try:
        found = json.loads(data)
        check_format(where, found["format"], FORMAT)
        int(found["job"], 16)
        return Identity(found["job"], found["inherits"])
    except (ValueError, KeyError, TypeError) as e:
        raise StorageError(
            f"{where} should hold the identity of the job, but cannot be read ({e}); restore it "
            "from a copy: sinks know the job by it",
            path=where,
        ) from e
