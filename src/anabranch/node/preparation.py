"""State loaded ahead of its installation, on a thread of its own, while slices go on.

A partition that moves is read from the newest cut in advance; when the mapping changes only the
checkpoint files written since then are left to load.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.model.ids import PartitionId
from anabranch.model.recovery import RecoveryPlan
from anabranch.node.messages import JobSpec
from anabranch.node.partition import Partition
from anabranch.node.priority import HalfTime, give_way


@dataclass
class _Prepared:
    partition: Partition
    groups: tuple[int, ...]  # of its chain
    files: tuple[str, ...]
    done: threading.Event = field(default_factory=threading.Event)
    failed: bool = False


class Preparations:
    """One thread calls it, another one loads."""

    def __init__(self) -> None:
        self._loading: dict[PartitionId, _Prepared] = {}

    def begin(self, job: JobSpec, plan: RecoveryPlan, mine: Mapping[PartitionId, int]) -> None:
        """Load what the plan installs here; what is being loaded already goes on."""
        wanted = {p: e for p, e in mine.items() if p in plan.restored or p in plan.copied}
        kept = {
            p: x
            for p, x in self._loading.items()
            if wanted.get(p) == x.partition.epoch and x.groups == plan.mapping.groups[p.chain]
        }
        new = {
            p: _Prepared(
                Partition(p, epoch, job.programs[p.chain], plan.cut + 1),
                plan.mapping.groups[p.chain],
                plan.files.get(p, ()),
            )
            for p, epoch in wanted.items()
            if p not in kept
        }
        self._loading = kept | new
        if new:
            threading.Thread(
                target=_load, args=(Path(job.root), list(new.values())), daemon=True
            ).start()

    def ready(self) -> tuple[PartitionId, ...]:
        """What could not be read counts too: its installation will say why."""
        return tuple(p for p, x in self._loading.items() if x.done.is_set())

    def take(self, pid: PartitionId, epoch: int, plan: RecoveryPlan) -> tuple[Partition, set[str]]:
        """The partition as far as it is loaded, and the files it has; KeyError if there is none
        that fits."""
        found = self._loading.pop(pid)
        files = set(found.files)
        fits = found.done.is_set() and not found.failed and found.partition.epoch == epoch
        same = found.groups == plan.mapping.groups[pid.chain]
        if not fits or not same or not files <= set(plan.files.get(pid, ())):
            raise KeyError(pid)
        return found.partition, files

    def clear(self) -> None:
        self._loading = {}


def _load(root: Path, wanted: list[_Prepared]) -> None:
    give_way()
    for prepared in wanted:
        partition = prepared.partition
        owned = {g: p == partition.id.index for g, p in enumerate(prepared.groups)}
        prepared.failed = True
        # Whatever it is, the installation meets it again and says it; a change must not wait.
        with contextlib.suppress(Exception):
            partition.restore(root, prepared.files, owned, HalfTime())
            prepared.failed = False
        prepared.done.set()
