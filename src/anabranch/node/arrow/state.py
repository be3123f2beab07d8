"""The state of a partition as a node carries it: one keyed table per operator of its chain."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.model.reports import PartitionReport
from anabranch.model.slices import SlicePlan
from anabranch.node import activity
from anabranch.node.arrow.chain import ChainProgram
from anabranch.node.priority import HalfTime
from anabranch.node.protocol.carried import Delta, Result
from anabranch.operators.base import GROUP, SliceTime
from anabranch.storage.checkpoint_files import read_checkpoint
from anabranch.storage.store import Store


class ArrowState:
    """`name` is what people call the partition."""

    def __init__(
        self, name: str, program: ChainProgram, store: Store, counts_keys: bool = False
    ) -> None:
        self._name = name
        self._counts_keys = counts_keys
        self._program = program
        self._store = store
        self._sealed_schemas: dict[str, pa.Schema] = {}
        self.states = program.new_states()

    def apply(self, plan: SlicePlan, packets: Mapping[int, list[pa.Table]]) -> Result[pa.Table]:
        cpu, began = time.process_time(), time.perf_counter()
        when = SliceTime(plan.number, plan.watermark_us, plan.processing_ms, plan.watermarks)
        with activity.at(self._name):
            result = self._program.run({}, packets, self.states, when)
        for operator, change in result.changes.items():
            self.states[operator].install(change)
        edges = result.edges.values()
        arrived = [t for tables in packets.values() for t in tables]
        return Result(
            result.edges,
            {n: t for n, t in result.sinks.items() if t.num_rows},
            PartitionReport(
                next_slice=0,
                epoch=0,
                rows_in=sum(t.num_rows for t in arrived),
                late_by_operator=result.late,
                cpu_s=time.process_time() - cpu,
                busy_s=time.perf_counter() - began,
                packet_bytes=sum(t.nbytes for t in arrived),
                state_rows=self.rows,
                state_bytes=sum(s.nbytes for s in self.states.values()),
                out_bytes=sum(t.nbytes for t in edges),
                rows_by_group=self._program.rows_by_group(packets) if self._counts_keys else {},
                rows_by_operator=result.rows,
                dead_by_operator=result.dead,
            ),
            # Edges that carry the same rows share one table.
            nbytes=sum(t.nbytes for t in {id(t): t for t in edges}.values()),
        )

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.states.values())

    @property
    def due_ms(self) -> int | None:
        moments = (getattr(state, "due_us", None) for state in self.states.values())
        first = min((us for us in moments if us is not None), default=None)
        return None if first is None else -(-first // 1_000)

    def seal(self) -> Delta:
        """Beside rows, what a schema says may change: up to which time windows are closed."""
        deltas = {n: s.seal() for n, s in self.states.items()}
        rows = sum(t.num_rows for t in deltas.values())
        before, now = self._sealed_schemas, {n: t.schema for n, t in deltas.items()}
        self._sealed_schemas = now
        same = before and all(now[n].equals(before[n], check_metadata=True) for n in now)
        return Delta(rows, bool(rows) or not same, {n: [t] for n, t in deltas.items()})

    def snapshot(self) -> dict[str, list[pa.Table]]:
        return {n: [s.snapshot()] for n, s in self.states.items()}

    def restore(self, files: Iterable[str], owned: Collection[int], gently: bool = False) -> None:
        pause: Callable[[], None] = HalfTime() if gently else lambda: None

        def wanted(piece: pa.Table) -> pa.Table:
            pause()
            return only(piece, owned)

        for file in files:
            for operator, tables in read_checkpoint(self._store, file, wanted).items():
                if operator in self.states:
                    for table in tables:
                        self.states[operator].load(table)


def only(table: pa.Table, owned: Collection[int]) -> pa.Table:
    """The rows of these key groups."""
    if table.num_rows == 0:
        return table
    groups = table.column(GROUP).to_numpy()
    wanted = np.fromiter((g in owned for g in range(int(groups.max()) + 1)), dtype=bool)
    mask: Any = wanted[groups]
    return table if mask.all() else table.filter(pa.array(mask))
