"""Runs a stateful kernel slice by slice on partitions that are cut, sealed, restored, split and
merged at will, and gives the output by key group: whatever was done to the partitions, it must not
change."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.node.arrow.state import only
from anabranch.operators.base import SliceTime, Stateful
from anabranch.operators.rows.hashing import key_groups

GROUPS = 8
Row = tuple[Any, ...]


def plain_value(value: Any) -> Any:
    """NaN and negative zero made comparable."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    return value


def rows_of(table: pa.Table) -> list[Row]:
    columns = [[plain_value(v) for v in column.to_pylist()] for column in table.columns]
    return list(zip(*columns, strict=True))


def by_group(table: pa.Table, keys: tuple[str, ...]) -> dict[int, list[Row]]:
    groups: dict[int, list[Row]] = {}
    for group, row in zip(key_groups(table, keys, GROUPS), rows_of(table), strict=True):
        groups.setdefault(int(group), []).append(row)
    return groups


@dataclass
class Partition:
    groups: frozenset[int]
    state: Any
    sealed: list[pa.Table] = field(default_factory=list)


class KernelRun:
    def __init__(self, kernel: Stateful, *schemas: pa.Schema) -> None:
        self.kernel = kernel
        self.schemas = schemas
        self.late = 0
        self.slice = 0
        self.leaves_garbage = False  # that a restored state may have more of
        self.partitions = [Partition(frozenset(range(GROUPS)), self._fresh())]

    def run(
        self,
        inputs: tuple[pa.Table, ...],
        watermark: int | None,
        cuts: list[int],
        processing_ms: int = 0,
    ) -> dict[int, list[Row]]:
        """One slice; each input is combined in the pieces that `cuts` makes of it."""
        combined = [self._combined(port, table, cuts) for port, table in enumerate(inputs)]
        self.slice += 1
        time = SliceTime(self.slice, watermark, processing_ms)
        outputs: dict[int, list[Row]] = {}
        for partition in self.partitions:
            own = tuple(self._routed(table, partition.groups) for table in combined)
            once = self.kernel.compute(partition.state, own, time)
            again = self.kernel.compute(partition.state, own, time)
            assert once.output.equals(again.output) or rows_of(once.output) == rows_of(again.output)
            assert once.late_rows == again.late_rows
            assert once.output.schema == self.kernel.output_schema(*self.schemas)
            partition.state.install(again.change)
            self.late += once.late_rows
            for group, rows in by_group(once.output, self.kernel.keys).items():
                assert group in partition.groups
                outputs.setdefault(group, []).extend(rows)
        return outputs

    def act(self, action: str) -> None:
        if action == "seal":
            for partition in self.partitions:
                partition.sealed.append(partition.state.seal())
        elif action == "restore":
            self.act("seal")
            for partition in self.partitions:
                state = self._fresh()
                for table in partition.sealed:
                    assert table.schema.equals(self.kernel.state_schema(*self.schemas))
                    state.load(table)
                assert state.rows == partition.state.rows or self.leaves_garbage
                assert state.seal().num_rows == 0
                partition.state = state
        elif action == "split":
            self._split()
        elif action == "merge" and len(self.partitions) > 1:
            self._merge()

    def _split(self) -> None:
        whole = max(self.partitions, key=lambda partition: len(partition.groups))
        moved = frozenset(sorted(whole.groups)[::2])
        if moved == whole.groups:
            return
        self.partitions.remove(whole)
        snapshot = whole.state.snapshot()
        for groups in (whole.groups - moved, moved):  # as files are read
            state, mine = self._fresh(), only(snapshot, groups)
            state.load(mine)
            self.partitions.append(Partition(groups, state, [mine]))

    def _merge(self) -> None:
        gone, kept = self.partitions.pop(), self.partitions[0]
        kept.state.load(gone.state.snapshot())
        kept.groups |= gone.groups
        kept.sealed = [kept.state.snapshot()]
        kept.state.seal()

    def _fresh(self) -> Any:
        return self.kernel.new_state(GROUPS, *self.schemas)

    def _combined(self, port: int, table: pa.Table, cuts: list[int]) -> pa.Table:
        edges = sorted({0, table.num_rows, *(cut % (table.num_rows + 1) for cut in cuts)})
        pieces = [
            self.kernel.combine(port, table.slice(low, high - low))
            for low, high in itertools.pairwise(edges)
        ]
        return pa.concat_tables(pieces) if pieces else self.kernel.combine(port, table)

    def _routed(self, table: pa.Table, groups: frozenset[int]) -> pa.Table:
        mine = np.isin(key_groups(table, self.kernel.keys, GROUPS), sorted(groups))
        return table.filter(pa.array(mine))
