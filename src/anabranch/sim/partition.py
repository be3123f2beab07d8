"""A simulated partition: the rules of `node/partition.py` over running hashes instead of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anabranch.model.ids import PartitionId
from anabranch.model.plan import Chain
from anabranch.model.slices import SlicePlan, Writes
from anabranch.sim.disk import Snapshot
from anabranch.sim.workload import Row, close, fold, moment

DELTAS_UNTIL_FULL = 3


@dataclass(slots=True)
class Output:
    """What a slice produced, uncut; sink rows only until the slice is confirmed."""

    slice: int
    rows: tuple[Row, ...]
    to_sinks: bool = True


class SimPartition:
    """State, output queue and frontier change in one step."""

    def __init__(self, partition: PartitionId, epoch: int, chain: Chain) -> None:
        self.id = partition
        self.epoch = epoch
        self.chain = chain
        self.next_slice = 1
        self.sealed = 0
        self.outputs: dict[int, Output] = {}
        self.backs_up = True
        self._hashes: dict[int, int] = {}
        self._open: set[int] = set()
        self._closed_us = self._sealed_closed_us = -1
        self._changed: set[int] = set()
        self._deltas: int | None = None  # since the last full checkpoint; None: none yet

    def has_applied(self, slice_no: int) -> bool:
        return slice_no in self.outputs

    def apply(self, plan: SlicePlan, inputs: Sequence[tuple[int, Sequence[Row]]]) -> Output:
        """`inputs` are packets with their edge, in the order in which they count."""
        if plan.number in self.outputs:
            return self.outputs[plan.number]
        produced: list[Row] = []
        when = moment(plan.watermark_us, plan.processing_ms)
        hashes = self._hashes
        for edge, rows in inputs:
            for key, value in rows:
                hashes[key] = made = fold(hashes.get(key, key), edge, value, when)
                self._open.add(key)
                self._changed.add(key)
                produced.append((key, made))
        if plan.watermark_us is not None and plan.watermark_us > self._closed_us:
            self._closed_us = plan.watermark_us
            for key in sorted(self._open):
                hashes[key] = made = close(hashes[key], plan.watermark_us)
                self._changed.add(key)
                produced.append((key, made))
            self._open.clear()
        self.next_slice = plan.number + 1
        output = self.outputs[plan.number] = Output(plan.number, tuple(produced))
        return output

    def state(self) -> dict[int, tuple[int, bool]]:
        """Its keys, their hash and whether they are open."""
        return {k: (h, k in self._open) for k, h in self._hashes.items()}

    def confirm(self, slice_no: int, trim: int) -> None:
        """The driver journalled this slice; no recovery needs slices up to `trim`."""
        keeps = self.backs_up and bool(self.chain.outputs)
        floor = min(slice_no, trim) if keeps else slice_no
        for old in [n for n in self.outputs if n <= floor]:
            del self.outputs[old]
        for number, output in self.outputs.items():
            if number <= slice_no:
                output.to_sinks = False

    def seal(self, writes: Writes) -> Snapshot:
        before, self.sealed = self.sealed, self.next_slice - 1
        piled = (self._deltas or 0) >= DELTAS_UNTIL_FULL
        folds = writes is Writes.WHOLE or (writes is Writes.FOLDED and piled)
        full = self._deltas is None or folds
        self._deltas = 0 if full or self._deltas is None else self._deltas + 1
        keys = self._hashes if full else self._changed
        saved = {k: (self._hashes[k], k in self._open) for k in sorted(keys)}
        self._changed = set()
        changed = full or bool(saved) or self._closed_us != self._sealed_closed_us
        self._sealed_closed_us = self._closed_us
        return Snapshot(self.id, self.sealed, full, saved, self._closed_us, before, changed)

    def restore(self, files: Iterable[Snapshot], groups: Sequence[int]) -> None:
        """Load checkpoint files, oldest first; only keys of the partition's own groups."""
        for file in files:
            for key, (value, is_open) in file.keys.items():
                if groups[key % len(groups)] == self.id.index:
                    self._hashes[key] = value
                    (self._open.add if is_open else self._open.discard)(key)
            self._closed_us = file.closed_us
