"""A partition on its node: its state, and its last output until the driver confirms it.

Invariants: state, output and next slice change in one step; a repeated slice returns the kept
output untouched. The host sees to it that a slice is applied only with its complete input.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.model.ids import PartitionId
from anabranch.model.reports import PartitionReport
from anabranch.node.chain import ChainProgram, ChainResult
from anabranch.operators.base import GROUP, SliceTime
from anabranch.storage.checkpoint_files import read_checkpoint

# Deltas are folded into a full checkpoint once together they outweigh this share of the state.
FULL_AFTER_DELTA_SHARE = 1.0


@dataclass(slots=True)
class Output:
    """What a slice produced, kept until the slice is confirmed."""

    slice: int
    edges: dict[int, pa.Table]
    sinks: dict[str, pa.Table]
    report: PartitionReport


class Partition:
    """Owned by one node; touched by one thread."""

    def __init__(
        self, partition: PartitionId, epoch: int, program: ChainProgram, next_slice: int
    ) -> None:
        self.id = partition
        self.epoch = epoch
        self.program = program
        self.next_slice = next_slice
        self.states = program.new_states()
        self.output: Output | None = None
        self._delta_rows: int | None = None  # since the last full checkpoint; None: none yet

    # -- apply ---------------------------------------------------------------------------------

    def has_applied(self, slice_no: int) -> bool:
        """Is this slice's output still kept? Then a repeated apply returns it untouched."""
        return self.output is not None and self.output.slice == slice_no

    def apply(self, when: SliceTime, shuffled: Mapping[int, list[pa.Table]]) -> Output:
        """Compute the slice from its packets per edge, then install it in one step.

        Raises ChainError, changing nothing.
        """
        if self.output is not None and self.output.slice == when.slice:
            return self.output
        cpu = time.process_time()
        result = self.program.run({}, shuffled, self.states, when)
        self._install(result)
        self.next_slice = when.slice + 1
        self.output = Output(
            when.slice,
            result.edges,
            {n: t for n, t in result.sinks.items() if t.num_rows},
            PartitionReport(
                next_slice=self.next_slice,
                epoch=self.epoch,
                rows_in=sum(t.num_rows for ts in shuffled.values() for t in ts),
                rows_out=sum(t.num_rows for t in result.edges.values())
                + sum(t.num_rows for t in result.sinks.values()),
                late_rows=result.late_rows,
                cpu_s=time.process_time() - cpu,
                packet_bytes=sum(t.nbytes for ts in shuffled.values() for t in ts),
                state_rows=sum(s.rows for s in self.states.values()),
                state_bytes=sum(s.nbytes for s in self.states.values()),
                rows_by_operator=result.rows,
            ),
        )
        return self.output

    def _install(self, result: ChainResult) -> None:
        for operator, change in result.changes.items():
            self.states[operator].install(change)

    def confirm(self, slice_no: int) -> None:
        """The driver journalled this slice: its output need not be repeated any more."""
        if self.output is not None and self.output.slice <= slice_no:
            self.output = None

    # -- checkpoints ---------------------------------------------------------------------------

    def seal(self) -> tuple[bool, dict[str, list[pa.Table]]]:
        """The state, or what changed since the last seal, as tables: (is it full?, tables)."""
        deltas = {n: s.seal() for n, s in self.states.items()}
        rows = sum(t.num_rows for t in deltas.values())
        total = sum(s.rows for s in self.states.values())
        if self._delta_rows is None or self._delta_rows + rows > FULL_AFTER_DELTA_SHARE * total:
            self._delta_rows = 0
            return True, {n: [s.snapshot()] for n, s in self.states.items()}
        self._delta_rows += rows
        return False, {n: [t] for n, t in deltas.items()}

    def restore(self, root: Path, files: Iterable[str], owned: Mapping[int, bool]) -> None:
        """Load checkpoint files, oldest first; only rows of the partition's own key groups."""
        for file in files:
            for operator, tables in read_checkpoint(root / file).items():
                if operator in self.states:
                    for table in tables:
                        self.states[operator].load(_only(table, owned))


def _only(table: pa.Table, owned: Mapping[int, bool]) -> pa.Table:
    if table.num_rows == 0:
        return table
    groups = table.column(GROUP).to_numpy()
    wanted = np.fromiter((owned.get(g, False) for g in range(int(groups.max()) + 1)), dtype=bool)
    mask: Any = wanted[groups]
    return table if mask.all() else table.filter(pa.array(mask))
