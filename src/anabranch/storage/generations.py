"""Who may write below a checkpoint directory: one driver, the one of the newest generation.

The kernel's lock keeps a second driver away for as long as it works. A lease on a network file
system may expire and a lock file may be deleted, and then two drivers run, one of them unknowing.
So every driver claims a generation of its own by making the directory `generations/N`, which
succeeds for one only, and whoever finds a greater one than its own ends:

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

import contextlib
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from anabranch.errors import CheckpointLockedError
from anabranch.storage.files import explained, write_atomic

CLAIMS = "generations"
OWNER = "driver"  # in a claim: whose it is


@dataclass(frozen=True)
class Generation:
    """The claim of one driver on a checkpoint directory."""

    root: Path
    number: int

    @staticmethod
    def claim(root: Path, above: int) -> Generation:
        """The next generation, greater than all claimed ones and than `above`."""
        claims = root / CLAIMS
        with explained("write", claims):
            claims.mkdir(parents=True, exist_ok=True)
            number = max([above, *claimed(root)]) + 1
            while True:
                try:
                    (claims / str(number)).mkdir()
                    break
                except FileExistsError:  # somebody else was faster
                    number += 1
        mine = Generation(root, number)
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            write_atomic(mine.directory / OWNER, [owner.encode()])
        finally:
            mine.check()  # a newer driver may even have removed this claim
        return mine

    @property
    def directory(self) -> Path:
        """For what only this generation writes."""
        return self.root / CLAIMS / str(self.number)

    def check(self) -> None:
        """Refuse to go on when a newer driver has claimed the directory."""
        newest = max(claimed(self.root), default=0)
        if newest <= self.number:
            return
        owner = "another process"
        with contextlib.suppress(OSError):  # it has only just claimed it
            owner = (self.root / CLAIMS / str(newest) / OWNER).read_text()
        raise CheckpointLockedError(
            f"{owner} has taken over the checkpoint directory {self.root} (generation {newest}) "
            f"while this driver (generation {self.number}) was running: its lock was lost, by a "
            "deleted lock file or an expired lease of the file system. This driver ends, the other "
            "one goes on from the last slice that both know of; look for who started it",
            directory=str(self.root),
            generation=self.number,
            newest=newest,
        )

    def clean_up(self) -> None:
        """Delete the claims before this one, whose drivers end by this one's as well, and what
        writers that were killed before it left half-written. What a newer driver writes is younger
        than this claim, but for the job's identity: that comes before its claim."""
        for number in claimed(self.root):
            if number < self.number:
                shutil.rmtree(self.root / CLAIMS / str(number), ignore_errors=True)
        with explained("clean up", self.root):
            since = (self.directory / OWNER).stat().st_mtime_ns
            for where in (".recovery.json.*.tmp", "journal/.*.tmp", "checkpoints/*/*/.*.tmp"):
                for leftover in self.root.glob(where):
                    with contextlib.suppress(FileNotFoundError):
                        if leftover.stat().st_mtime_ns < since:
                            leftover.unlink()


def claimed(root: Path) -> list[int]:
    """All generations that have a claim, in order."""
    with explained("list", root / CLAIMS):
        try:
            names = [p.name for p in (root / CLAIMS).iterdir()]
        except FileNotFoundError:
            return []
    return sorted(int(n) for n in names if n.isdecimal())
