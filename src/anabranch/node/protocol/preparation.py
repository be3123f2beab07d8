"""State loaded ahead of its installation, while slices go on.

A partition that moves is read from the newest cut in advance; when the placement changes only the
checkpoint files written since then are left to load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic

from anabranch.model.ids import PartitionId
from anabranch.model.recovery import RecoveryPlan
from anabranch.node.protocol.carried import Job, R, State


@dataclass
class _Prepared(Generic[R]):
    state: State[R]
    epoch: int
    groups: tuple[int, ...]  # of its chain
    files: tuple[str, ...]
    failed: bool = False
    done: bool = False  # set last: another thread reads it


class Preparations(Generic[R]):
    """One thread calls it; `later` loads, on another one."""

    def __init__(self, later: Callable[[Callable[[], None]], None]) -> None:
        self._later = later
        self._loading: dict[PartitionId, _Prepared[R]] = {}

    def begin(self, job: Job[R], plan: RecoveryPlan, mine: Mapping[PartitionId, int]) -> None:
        """Load what the plan installs here; what is being loaded already goes on."""
        groups = plan.placement.groups
        wanted = {p: e for p, e in mine.items() if p in plan.restored or p in plan.copied}
        kept = {
            p: x
            for p, x in self._loading.items()
            if wanted.get(p) == x.epoch and x.groups == groups[p.chain]
        }
        new = {
            p: _Prepared(job.new_state(p), epoch, groups[p.chain], plan.files.get(p, ()))
            for p, epoch in wanted.items()
            if p not in kept
        }
        self._loading = kept | new
        for pid, prepared in new.items():
            self._later(partial(self._load, pid, prepared))

    def _load(self, pid: PartitionId, prepared: _Prepared[R]) -> None:
        if self._loading.get(pid) is not prepared:
            return  # nobody wants it any more
        prepared.failed = True
        # Whatever it is, the installation meets it again and says it; a change must not wait.
        with contextlib.suppress(Exception):
            owned = {g for g, p in enumerate(prepared.groups) if p == pid.index}
            prepared.state.restore(prepared.files, owned, gently=True)
            prepared.failed = False
        prepared.done = True

    def ready(self) -> tuple[PartitionId, ...]:
        """What could not be read counts too: its installation will say why."""
        return tuple(p for p, x in self._loading.items() if x.done)

    def take(self, pid: PartitionId, epoch: int, plan: RecoveryPlan) -> tuple[State[R], set[str]]:
        """The state as far as it is loaded, and the files it has; KeyError if there is none that
        fits."""
        found = self._loading.pop(pid)
        files = set(found.files)
        fits = found.done and not found.failed and found.epoch == epoch
        same = found.groups == plan.placement.groups[pid.chain]
        if not fits or not same or not files <= set(plan.files.get(pid, ())):
            raise KeyError(pid)
        return found.state, files

    def clear(self) -> None:
        self._loading = {}

    def __len__(self) -> int:
        return len(self._loading)
