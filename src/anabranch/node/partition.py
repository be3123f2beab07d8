"""A partition on its node: its state, and its output queue.

Invariants: state, output and next slice change in one step; a repeated slice returns the kept
output untouched. The host sees to it that a slice is applied only with its complete input. The
last output is kept until the driver confirms the slice; a partition that backs up keeps it on,
until no recovery can need it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.model.ids import PartitionId
from anabranch.model.reports import PartitionReport
from anabranch.model.slices import Writes
from anabranch.node.chain import ChainProgram, ChainResult
from anabranch.operators.base import GROUP, SliceTime
from anabranch.storage.checkpoint_files import decode_table, encode_table, read_checkpoint

# Deltas are folded into a full checkpoint once together they outweigh this share of the state, or
# are so many: a restore opens each, and every head of the journal names it. At the default interval
# this writes a large state that hardly changes once in ten minutes.
FULL_AFTER_DELTA_SHARE = 1.0
FULL_AFTER_DELTAS = 64


@dataclass(slots=True)
class Output:
    """What a slice produced: whole tables per edge, cut into packets when they are sent.

    Uncut, a backup serves any later routing: no queue has to be split when a receiver is.
    """

    slice: int
    edges: dict[int, pa.Table]
    sinks: dict[str, pa.Table]
    report: PartitionReport
    spilled: Path | None = None

    @property
    def nbytes(self) -> int:
        """Memory it takes; edges that carry the same rows share one table."""
        if self.spilled is not None:
            return 0
        return sum(t.nbytes for t in {id(t): t for t in self.edges.values()}.values())


class Partition:
    """Owned by one node; touched by one thread."""

    def __init__(
        self,
        partition: PartitionId,
        epoch: int,
        program: ChainProgram,
        next_slice: int,
    ) -> None:
        self.id = partition
        self.epoch = epoch
        self.program = program
        self.next_slice = next_slice
        self.sealed = 0  # the newest slice at which a checkpoint was sealed
        self.states = program.new_states()
        self.outputs: dict[int, Output] = {}
        self.backs_up = True
        self._delta_rows: int | None = None  # since the last full checkpoint; None: none yet
        self._deltas = 0
        self._sealed_schemas: dict[str, pa.Schema] = {}

    # -- apply ---------------------------------------------------------------------------------

    def has_applied(self, slice_no: int) -> bool:
        """Is this slice's output still kept? Then a repeated apply returns it untouched."""
        return slice_no in self.outputs

    def apply(self, when: SliceTime, shuffled: Mapping[int, list[pa.Table]]) -> Output:
        """Compute the slice from its packets per edge, then install it in one step.

        Raises ChainError, changing nothing.
        """
        if when.slice in self.outputs:
            return self.outputs[when.slice]
        cpu = time.process_time()
        result = self.program.run({}, shuffled, self.states, when)
        self._install(result)
        self.next_slice = when.slice + 1
        output = self.outputs[when.slice] = Output(
            when.slice,
            result.edges,
            {n: t for n, t in result.sinks.items() if t.num_rows},
            PartitionReport(
                next_slice=self.next_slice,
                epoch=self.epoch,
                rows_in=sum(t.num_rows for ts in shuffled.values() for t in ts),
                rows_out=sum(t.num_rows for t in result.edges.values())
                + sum(t.num_rows for t in result.sinks.values()),
                late_by_operator=result.late,
                cpu_s=time.process_time() - cpu,
                packet_bytes=sum(t.nbytes for ts in shuffled.values() for t in ts),
                state_rows=sum(s.rows for s in self.states.values()),
                state_bytes=sum(s.nbytes for s in self.states.values()),
                out_bytes=sum(t.nbytes for t in result.edges.values()),
                backup_bytes=sum(o.nbytes for o in self.outputs.values()),
                due_ms=self.due_ms,
                rows_by_operator=result.rows,
                dead_by_operator=result.dead,
            ),
        )
        return output

    @property
    def due_ms(self) -> int | None:
        """The processing time at which a key may have something to do, rows or not."""
        moments = (getattr(state, "due_us", None) for state in self.states.values())
        first = min((us for us in moments if us is not None), default=None)
        return None if first is None else -(-first // 1_000)

    def _install(self, result: ChainResult) -> None:
        for operator, change in result.changes.items():
            self.states[operator].install(change)

    def confirm(self, slice_no: int, trim: int) -> None:
        """The driver journalled this slice; no recovery needs slices up to `trim`.

        What is below both is forgotten, and at once where the partition does not back up.
        """
        keeps = self.backs_up and bool(self.program.chain.outputs)
        floor = min(slice_no, trim) if keeps else slice_no
        for old in [n for n in self.outputs if n <= floor]:
            drop_spilled(self.outputs.pop(old))
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
            drop_spilled(output)

    # -- checkpoints ---------------------------------------------------------------------------

    def seal(self, writes: Writes = Writes.FOLDED) -> tuple[bool, dict[str, list[pa.Table]]]:
        """The state, or what changed since the last seal, as tables: (is it full?, tables). No
        tables where nothing changed, neither rows nor what a schema says beside them (up to which
        time windows are closed).

        Once per slice: a second delta would be empty and take the place of the first.
        """
        self.sealed = self.next_slice - 1
        deltas = {n: s.seal() for n, s in self.states.items()}
        rows = sum(t.num_rows for t in deltas.values())
        total = sum(s.rows for s in self.states.values())
        piled = (self._delta_rows or 0) + rows > FULL_AFTER_DELTA_SHARE * total
        piled = piled or self._deltas >= FULL_AFTER_DELTAS
        folds = writes is Writes.WHOLE or (writes is Writes.FOLDED and piled)
        before, now = self._sealed_schemas, {n: t.schema for n, t in deltas.items()}
        self._sealed_schemas = now
        if self._delta_rows is None or folds:
            self._delta_rows = self._deltas = 0
            return True, {n: [s.snapshot()] for n, s in self.states.items()}
        if not rows and all(now[n].equals(before[n], check_metadata=True) for n in now):
            return False, {}
        self._delta_rows += rows
        self._deltas += 1
        return False, {n: [t] for n, t in deltas.items()}

    def sealed_elsewhere(self) -> None:
        """A copy forgets what changed; should it take over, it begins with a full checkpoint."""
        for state in self.states.values():
            state.seal()

    def restore(
        self,
        root: Path,
        files: Iterable[str],
        owned: Mapping[int, bool],
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Load checkpoint files, oldest first; only rows of the partition's own key groups, with a
        pause after every piece."""

        def wanted(piece: pa.Table) -> pa.Table:
            pause()
            return _only(piece, owned)

        for file in files:
            for operator, tables in read_checkpoint(root, file, wanted).items():
                if operator in self.states:
                    for table in tables:
                        self.states[operator].load(table)


def spill(output: Output, directory: Path) -> None:
    """Move an output's tables to a file; they are mapped from there when they are needed."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{uuid.uuid4().hex}.arrow"
    mapped: dict[int, pa.Table] = {}
    ranges: dict[int, tuple[int, int]] = {}
    offset = 0
    try:
        with path.open("wb") as file:
            for table in {id(t): t for t in output.edges.values()}.values():
                data = encode_table(table)
                file.write(data)
                ranges[id(table)] = (offset, data.size)
                offset += data.size
    except OSError:
        path.unlink(missing_ok=True)
        raise
    if offset:
        whole = pa.memory_map(str(path)).read_buffer()
        read = {key: decode_table(whole.slice(*where)) for key, where in ranges.items()}
        mapped = {edge: read[id(t)] for edge, t in output.edges.items()}
    output.edges, output.sinks, output.spilled = mapped, {}, path


def drop_spilled(output: Output) -> None:
    if output.spilled is not None:
        output.spilled.unlink(missing_ok=True)


def _only(table: pa.Table, owned: Mapping[int, bool]) -> pa.Table:
    if table.num_rows == 0:
        return table
    groups = table.column(GROUP).to_numpy()
    wanted = np.fromiter((owned.get(g, False) for g in range(int(groups.max()) + 1)), dtype=bool)
    mask: Any = wanted[groups]
    return table if mask.all() else table.filter(pa.array(mask))
