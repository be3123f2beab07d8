"""A partition on its node: its state, and its output queue.

Invariants: state, output and next slice change in one step; a repeated slice returns the kept
output untouched. The host sees to it that a slice is applied only with its complete input. The
last output is kept until the driver confirms the slice; a partition that backs up keeps it on,
until no recovery can need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic

from anabranch.model.ids import PartitionId
from anabranch.model.plan import Chain
from anabranch.model.reports import PartitionReport
from anabranch.model.slices import SlicePlan, Writes
from anabranch.node.protocol.carried import Kept, R, State

# Deltas are folded into a full checkpoint once together they outweigh this share of the state, or
# there are this many: a restore opens each, and every head of the journal names it. At the default
# interval this writes a large state that hardly changes once in ten minutes.
FULL_AFTER_DELTA_SHARE = 1.0
FULL_AFTER_DELTAS = 64


@dataclass(slots=True)
class Output(Generic[R]):
    """What a slice produced: whole rows per edge, cut into packets when they are sent.

    Uncut, a backup serves any later routing: no queue has to be split when a receiver is.
    """

    slice: int
    edges: Mapping[int, R]
    sinks: Mapping[str, R]
    report: PartitionReport
    nbytes: int  # of memory
    spilled: Kept | None = None

    def drop(self) -> None:
        if self.spilled is not None:
            self.spilled.drop()


class Partition(Generic[R]):
    """Owned by one node; touched by one thread."""

    def __init__(
        self,
        partition: PartitionId,
        epoch: int,
        chain: Chain,
        state: State[R],
        next_slice: int,
    ) -> None:
        self.id = partition
        self.epoch = epoch
        self.chain = chain
        self.state = state
        self.next_slice = next_slice
        self.sealed = 0  # the newest slice at which a checkpoint was sealed
        self.outputs: dict[int, Output[R]] = {}
        self.backs_up = True
        self._delta_rows: int | None = None  # since the last full checkpoint; None: none yet
        self._deltas = 0

    # -- apply ---------------------------------------------------------------------------------

    def has_applied(self, slice_no: int) -> bool:
        """Is this slice's output still kept? Then a repeated apply returns it untouched."""
        return slice_no in self.outputs

    def apply(self, plan: SlicePlan, packets: Mapping[int, list[R]]) -> Output[R]:
        """Compute the slice from its packets per edge and keep its output. Raises ChainError,
        changing nothing."""
        if plan.number in self.outputs:
            return self.outputs[plan.number]
        result = self.state.apply(plan, packets)
        self.next_slice = plan.number + 1
        output = Output(plan.number, result.edges, result.sinks, result.loads, result.nbytes)
        self.outputs[plan.number] = output
        output.report = replace(
            result.loads,
            next_slice=self.next_slice,
            epoch=self.epoch,
            backup_bytes=sum(o.nbytes for o in self.outputs.values()),
            due_ms=self.state.due_ms,
        )
        return output

    def report(self) -> PartitionReport:
        """Where it stands: what its newest slice was like, as far as that is known."""
        last = self.outputs.get(self.next_slice - 1)
        if last is not None:
            return last.report
        return PartitionReport(self.next_slice, self.epoch, due_ms=self.state.due_ms)

    def confirm(self, slice_no: int, trim: int) -> None:
        """The driver journalled this slice; no recovery needs slices up to `trim`.

        What is below both is forgotten, and at once where the partition does not back up.
        """
        keeps = self.backs_up and bool(self.chain.outputs)
        floor = min(slice_no, trim) if keeps else slice_no
        for old in [n for n in self.outputs if n <= floor]:
            self.outputs.pop(old).drop()
        for number, output in self.outputs.items():
            if number <= slice_no:
                output.sinks = {}

    def take_over(self, epoch: int) -> None:
        """A copy becomes the partition: what it repeats, it says under its own epoch."""
        self.epoch = epoch
        for output in self.outputs.values():
            output.report = replace(output.report, epoch=epoch)

    def forget(self) -> None:
        """The partition has another owner now, or none."""
        for output in self.outputs.values():
            output.drop()

    # -- checkpoints ---------------------------------------------------------------------------

    def seal(self, writes: Writes = Writes.FOLDED) -> tuple[bool, Any]:
        """The state, or what changed since the last seal: (is it full?, content), and no content
        where nothing changed.

        Once per slice: a second delta would be empty and take the place of the first.
        """
        self.sealed = self.next_slice - 1
        delta = self.state.seal()
        piled = (self._delta_rows or 0) + delta.rows > FULL_AFTER_DELTA_SHARE * self.state.rows
        piled = piled or self._deltas >= FULL_AFTER_DELTAS
        folds = writes is Writes.WHOLE or (writes is Writes.FOLDED and piled)
        if self._delta_rows is None or folds:
            self._delta_rows = self._deltas = 0
            return True, self.state.snapshot()
        if not delta.changed:
            return False, None
        self._delta_rows += delta.rows
        self._deltas += 1
        return False, delta.content

    def sealed_elsewhere(self) -> None:
        """A copy forgets what changed; should it take over, it begins with a full checkpoint."""
        self.state.seal()
