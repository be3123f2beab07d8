"""State loaded ahead on a simulated node: the rules of `node/preparation.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from anabranch.errors import StorageError
from anabranch.model.ids import PartitionId
from anabranch.model.recovery import RecoveryPlan
from anabranch.sim.disk import Disk
from anabranch.sim.partition import SimPartition


@dataclass
class _Prepared:
    partition: SimPartition
    groups: tuple[int, ...]  # of its chain
    files: tuple[str, ...]
    done: bool = False
    failed: bool = False


class SimPreparations:
    """`begin` says what is to be loaded; each of it is loaded some time later."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._loading: dict[PartitionId, _Prepared] = {}

    def begin(
        self,
        plan: RecoveryPlan,
        mine: Mapping[PartitionId, int],
        empty: Callable[[PartitionId, int], SimPartition],
    ) -> list[Callable[[], None]]:
        """What is left to do: a call for every partition that is new."""
        wanted = {p: e for p, e in mine.items() if p in plan.restored or p in plan.copied}
        kept = {
            p: x
            for p, x in self._loading.items()
            if wanted.get(p) == x.partition.epoch and x.groups == plan.mapping.groups[p.chain]
        }
        new = {
            p: _Prepared(empty(p, e), plan.mapping.groups[p.chain], plan.files.get(p, ()))
            for p, e in wanted.items()
            if p not in kept
        }
        self._loading = kept | new
        return [partial(self._load, prepared) for prepared in new.values()]

    def _load(self, prepared: _Prepared) -> None:
        try:
            files = [self._disk.read_checkpoint(f) for f in prepared.files]
            prepared.partition.restore(files, prepared.groups)
        except StorageError:
            prepared.failed = True
        prepared.done = True

    def ready(self) -> tuple[PartitionId, ...]:
        return tuple(p for p, x in self._loading.items() if x.done)

    def take(
        self, pid: PartitionId, epoch: int, plan: RecoveryPlan
    ) -> tuple[SimPartition, set[str]]:
        """The partition as far as it is loaded, and the files it has; KeyError if none fits."""
        found = self._loading.pop(pid)
        files = set(found.files)
        fits = found.done and not found.failed and found.partition.epoch == epoch
        same = found.groups == plan.mapping.groups[pid.chain]
        if not fits or not same or not files <= set(plan.files.get(pid, ())):
            raise KeyError(pid)
        return found.partition, files

    def clear(self) -> None:
        self._loading = {}

    def __len__(self) -> int:
        return len(self._loading)
