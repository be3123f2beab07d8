"""Who may write below a checkpoint directory: one driver, the one of the newest generation.

The kernel's lock keeps a second driver away for as long as it works. A lease on a network file
system may expire and a lock file may be deleted, and then two drivers run, one of them unknowing.
So every driver claims a generation of its own by creating `generations/N/driver`, which succeeds
for one only, and a driver that finds a greater one than its own ends:

    the older:  write to the journal → look for a newer claim → act on what was written
    the newer:  claim → read the journal → write what was read under its own generation → act

If the older finds no claim, the newer reads what it wrote; if it finds one, it does nothing more.
Either way both agree on what has happened, wherever one of them is paused. All names of files that
may still be written after a claim (journal, source log, staged rows, autoscaler's memory) have the
generation in them, and checkpoint files an epoch that is journalled before it is used: what an
older driver writes late takes no newer one's place. What it deletes late is below a cut that the
newer one knows.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from anabranch.errors import CheckpointLockedError
from anabranch.storage.store import Store

CLAIMS = "generations"
OWNER = "driver"  # in a claim: whose it is


@dataclass(frozen=True)
class Generation:
    """The claim of one driver on a checkpoint directory."""

    store: Store
    number: int

    @staticmethod
    def claim(store: Store, above: int) -> Generation:
        """The next generation, greater than all claimed ones and than `above`."""
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        mine = Generation(store, max([above, *claimed(store)]) + 1)
        try:
            while store.create(f"{mine.directory}/{OWNER}", [owner.encode()]) is None:
                mine = Generation(store, mine.number + 1)  # somebody else was faster
        finally:
            mine.check()  # a newer driver may have removed this claim while it was made
        return mine

    @property
    def directory(self) -> str:
        """For what only this generation writes."""
        return f"{CLAIMS}/{self.number}"

    def check(self) -> None:
        """Refuse to go on when a newer driver has claimed the directory."""
        newest = max(claimed(self.store), default=0)
        if newest <= self.number:
            return
        found = self.store.read(f"{CLAIMS}/{newest}/{OWNER}")
        owner = found.decode() if found else "another process"  # it has only just claimed it
        raise CheckpointLockedError(
            f"{owner} has taken over the checkpoint directory {self.store.where()} (generation "
            f"{newest}) while this driver (generation {self.number}) was running: its lock was "
            "lost, by a deleted lock file or an expired lease of the file system. This driver "
            "ends, the other one goes on from the last slice that both know of; look for who "
            "started it",
            directory=self.store.where(),
            generation=self.number,
            newest=newest,
        )

    def clean_up(self) -> None:
        """Delete the claims before this one, whose drivers end by this one's as well, and what
        writers that were killed before it left half-written. What a newer driver writes is younger
        than this claim, but for the job's identity: that comes before its claim."""
        for number in claimed(self.store):
            if number < self.number:
                self.store.delete(f"{CLAIMS}/{number}")
        left = ("recovery.json.*", "journal/*", "checkpoints/*/*/*")
        self.store.sweep(f"{self.directory}/{OWNER}", *left)


def claimed(store: Store) -> list[int]:
    """All generations that have a claim, in order."""
    return sorted(int(n) for n in store.names(CLAIMS) if n.isdecimal())
