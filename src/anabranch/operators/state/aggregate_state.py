"""The aggregates of a set of keys: a table of parts and, per distinct count, its pairs.

One instance is the state of a running aggregate; a windowed one has one per open pane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from anabranch.operators.base import DELETED, GROUP
from anabranch.operators.kernels.distinct import (
    PAIR_FIELDS,
    Hashed,
    NewPairs,
    PairSet,
    count_union,
    salted,
)
from anabranch.operators.rows.canonical import canonical_table
from anabranch.operators.rows.hashing import hash_keys
from anabranch.operators.state.accumulators import (
    Merged,
    Update,
    load_rows,
    merge,
    plain,
    valid,
)
from anabranch.operators.state.keyed_table import Columns, KeyedTable
from anabranch.operators.state.row_log import ABSENT, Slots
from anabranch.operators.state.ttl import ALARM, BORN

if TYPE_CHECKING:
    from anabranch.operators.kernels.aggregates import AggregatePlan

PAIR_OF = "_pair_of"  # uint8, which distinct count a sealed pair belongs to; null for a key's row


@dataclass(frozen=True, slots=True)
class AggregateUpdate:
    """A computed change: of the parts, new pairs per distinct count, and, where keys have a time
    to live, the time it goes by."""

    parts: Update
    pairs: tuple[NewPairs, ...]
    now_us: int | None


class AggregateState:
    """The parts of every key, as the plan names them."""

    def __init__(self, plan: AggregatePlan, key_groups: int) -> None:
        self.plan = plan
        self._distinct = tuple(plan.distinct)
        dtypes = {part.name: part.dtype for part in plan.parts}
        moments = () if plan.ttl is None else (ALARM,)
        self._table = KeyedTable(plan.keys, dtypes, key_groups, moments)
        self._alarms = None if plan.ttl is None else plan.ttl.alarms(self._table)
        self._pairs = tuple(PairSet(key_groups) for _ in self._distinct)

    def merge(
        self, hashes: Hashed, keys: pa.Table, arriving: Columns, now_us: int | None = None
    ) -> tuple[Merged, AggregateUpdate]:
        """Reduce arriving parts by key and onto what is held and not due to be forgotten; the
        state is only read."""
        parts = {part.name: arriving[part.name] for part in self.plan.parts}
        forgotten = None if self._alarms is None else self._alarms.due(now_us)
        named = hashes if forgotten is None else self._salted(hashes, forgotten, arriving)
        new_pairs = []
        for name, pairs in zip(self._distinct, self._pairs, strict=True):
            present = parts[f"{name}.distinct"] > 0
            values = arriving[f"{name}.a"], arriving[f"{name}.b"]
            unseen = pairs.unseen(named, values, present)
            counts = np.zeros(len(present), dtype=np.int64)
            counts[unseen.rows] = 1
            parts[f"{name}.distinct"] = counts
            new_pairs.append(unseen)
        merged = merge(self._table, self.plan.parts, hashes, keys, parts, forgotten)
        return merged, AggregateUpdate(merged.update, tuple(new_pairs), now_us)

    def _salted(self, hashes: Hashed, forgotten: Slots, arriving: Columns) -> Hashed:
        """Arriving keys as their pairs know them: a key that is forgotten is born anew."""
        if not self._distinct:
            return hashes
        slots = self._table.find(*hashes)
        known = (slots != ABSENT) & ~np.isin(slots, forgotten)
        born = arriving[BORN].copy()
        born[known] = self._table.value(BORN, slots[known])
        return salted(hashes, born)

    def install(self, change: AggregateUpdate) -> None:
        added = change.parts.apply(self._table)
        if self._alarms is not None:
            self._alarms.settle(change.now_us)
            self._alarms.watch(added)
        for pairs, new in zip(self._pairs, change.pairs, strict=True):
            pairs.add(new)
            if self._alarms is not None and pairs.wants_sweep:
                live = self._table.live_slots()
                pairs.sweep(salted(self._table.hashes(live), self._table.value(BORN, live)))

    def seal(self) -> pa.Table:
        return self._sealed(
            self._table.export(self._table.take_dirty()), [pairs.seal() for pairs in self._pairs]
        )

    def snapshot(self) -> pa.Table:
        return self._sealed(
            self._table.export(self._table.live_slots()),
            [pairs.snapshot() for pairs in self._pairs],
        )

    def load(self, table: pa.Table) -> None:
        if self._pairs:
            of = plain(table.column(PAIR_OF), fill=0)
            is_pair = valid(table.column(PAIR_OF))
            for number, pairs in enumerate(self._pairs):
                pairs.load(table.filter(pa.array(is_pair & (of == number))))
            table = table.filter(pa.array(~is_pair))
        keys = canonical_table(table.select(self.plan.keys.names))
        deleted = np.asarray(table.column(DELETED))
        hashes = hash_keys(keys, keys.schema.names)
        load_rows(self._table, self.plan.parts, hashes, keys, table, deleted)
        if self._alarms is not None:
            slots = self._table.find(*hashes)
            self._alarms.watch(np.unique(slots[slots != ABSENT]))

    @property
    def rows(self) -> int:
        return len(self._table) + sum(len(pairs) for pairs in self._pairs)

    @property
    def due_us(self) -> int | None:
        by_event = self.plan.ttl is None or self.plan.ttl.time is not None
        return None if self._alarms is None or by_event else self._alarms.first

    @property
    def nbytes(self) -> int:
        alarms = 0 if self._alarms is None else self._alarms.nbytes
        return self._table.nbytes + alarms + sum(pairs.nbytes for pairs in self._pairs)

    def united(self, others: Sequence[AggregateState]) -> tuple[pa.Table, Columns]:
        """Keys and parts of all of `others` (not of this one, which is empty), in their order."""
        slots = [other._table.live_slots() for other in others]
        held = [(other._table, at) for other, at in zip(others, slots, strict=True)]
        if len(held) == 1:
            return held[0][0].rows(slots[0]), held[0][0].values(slots[0])
        hashes = [table.hashes(at) for table, at in held]
        values = [table.values(at) for table, at in held]
        merged = merge(
            self._table,
            self.plan.parts,
            (np.concatenate([h[0] for h in hashes]), np.concatenate([h[1] for h in hashes])),
            pa.concat_tables([table.rows(at) for table, at in held]),
            {part.name: np.concatenate([v[part.name] for v in values]) for part in self.plan.parts},
        )
        united = dict(merged.values)
        keys = merged.update.first, merged.update.second
        for number, name in enumerate(self._distinct):
            united[f"{name}.distinct"] = count_union([o._pairs[number] for o in others], keys)
        return merged.keys, united

    def _sealed(self, parts: pa.Table, pairs: list[pa.Table]) -> pa.Table:
        if not pairs:
            return parts
        schema = sealed_schema(self.plan)
        tables = [schema.empty_table(), parts]
        for number, table in enumerate(pairs):
            marks = {
                DELETED: pa.repeat(pa.scalar(False), table.num_rows),
                PAIR_OF: pa.repeat(pa.scalar(number, pa.uint8()), table.num_rows),
            }
            tables.append(pa.table({**marks, **{n: table.column(n) for n in table.schema.names}}))
        return pa.concat_tables(tables, promote_options="default")


def sealed_schema(plan: AggregatePlan) -> pa.Schema:
    """What `AggregateState.seal` gives."""
    marks = [pa.field(GROUP, pa.uint16()), pa.field(DELETED, pa.bool_())]
    pairs = [pa.field(PAIR_OF, pa.uint8()), *PAIR_FIELDS] if plan.distinct else []
    return pa.schema([*marks, *plan.keys, *(part.field for part in plan.parts), *pairs])
