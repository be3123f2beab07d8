"""Exact distinct counts: the aggregate `count_distinct`, and the pairs that make it exact.

A set does not reduce like a number, so it is kept beside the aggregates: one pair (key, value) for
every value a key has shown, by identity only, never the value. What goes through the ordinary
machinery is a number: of the pairs that arrive, those not seen before count one for their key.

A key that is forgotten and comes back (time to live) is another one to its pairs: they are told
its hashes salted with the slice it was born in. Pairs of keys that are gone are of no use, and
swept out when they may be half of all.

The identity of a pair keeps the upper half of the key's first hash, which decides the key group:
pairs move with their key. The other 96 bits mix key and value, so that two of n values of a key are
taken for one with probability about n²/2^97, and the pairs of one key spread over the whole index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import TopologyError
from anabranch.operators.base import GROUP
from anabranch.operators.rows.canonical import require_column
from anabranch.operators.rows.grouping import Groups, group_rows
from anabranch.operators.rows.hashing import Hashes, check_key_types, hash_keys
from anabranch.operators.state.accumulators import Part, Values, plain, sum_part, valid
from anabranch.operators.state.keyed_table import KeyedTable
from anabranch.operators.state.row_log import ABSENT, Slots

Hashed = tuple[Hashes, Hashes]

PAIR_FIRST, PAIR_SECOND = "_pair_first", "_pair_second"  # uint64, the identity of a pair
KEY_FIRST, KEY_SECOND = "_key_first", "_key_second"  # uint64, both hashes of its key
_KEY_SCHEMA = pa.schema([(KEY_FIRST, pa.uint64()), (KEY_SECOND, pa.uint64())])
PAIR_FIELDS = (pa.field(PAIR_FIRST, pa.uint64()), pa.field(PAIR_SECOND, pa.uint64()), *_KEY_SCHEMA)

_MIX = np.uint64(0xC2B2AE3D27D4EB4F)
_HALF = np.uint64(32)
_SALT = np.uint64(0x9E3779B97F4A7C15)
_SWEEP_FROM = 10_000  # pairs; fewer are not worth looking at


@dataclass(frozen=True, slots=True)
class CountDistinct:
    """How many different values a column has; nulls are none, NaN is one, -0.0 equals 0.0."""

    column: str

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        kind = require_column(schema, self.column, "count_distinct")
        try:
            check_key_types(schema, (self.column,))
        except TopologyError as error:
            raise TopologyError(
                f"count_distinct({self.column!r}): the column has type {kind}; count_distinct "
                "takes numbers, strings, binaries, booleans, decimals, dates and times",
                column=self.column,
            ) from error
        return pa.int64()

    def parts(self, name: str, schema: pa.Schema) -> tuple[Part, ...]:
        return (sum_part(f"{name}.distinct", np.int64),)

    def reduce(self, table: pa.Table, groups: Groups, parts: tuple[Part, ...]) -> list[Values]:
        """Is there a value? The groups are of key and value: all rows of one share the answer."""
        return [valid(table.column(self.column))[groups.firsts].astype(np.int64)]

    def identities(self, table: pa.Table, groups: Groups) -> Hashed:
        """The hashes of each group's value."""
        values = table.select([self.column])
        if groups.members is not None:
            values = values.take(pa.array(groups.firsts))
        return hash_keys(values, (self.column,))

    def result(self, values: Sequence[Values], kind: pa.DataType) -> pa.Array:
        return pa.array(values[0])


@dataclass(frozen=True, slots=True)
class NewPairs:
    """Pairs a set does not have, and the arriving rows that bring them."""

    rows: npt.NDArray[np.int64]
    first: Hashes
    second: Hashes
    keys: Hashed


class PairSet:
    """The (key, value) pairs that one `count_distinct` has seen."""

    def __init__(self, key_groups: int) -> None:
        self._table = KeyedTable(_KEY_SCHEMA, {}, key_groups)
        self._sweep_at = _SWEEP_FROM

    def __len__(self) -> int:
        return len(self._table)

    def unseen(self, keys: Hashed, values: Hashed, present: npt.NDArray[np.bool_]) -> NewPairs:
        """The first of each arriving pair that the set does not have; the set is only read."""
        rows = np.flatnonzero(present)
        key_first, key_second = keys[0][rows], keys[1][rows]
        first, second = _pair_identity(key_first, key_second, values[0][rows], values[1][rows])
        once = group_rows(first, second).firsts
        once = once[self._table.find(first[once], second[once]) == ABSENT]
        return NewPairs(rows[once], first[once], second[once], (key_first[once], key_second[once]))

    def add(self, pairs: NewPairs) -> None:
        self._add(pairs.first, pairs.second, pairs.keys, dirty=True)

    def seal(self) -> pa.Table:
        return self._export(self._table.take_dirty())

    def snapshot(self) -> pa.Table:
        return self._export(self._table.live_slots())

    def load(self, table: pa.Table) -> None:
        first, second = plain(table.column(PAIR_FIRST)), plain(table.column(PAIR_SECOND))
        keys = plain(table.column(KEY_FIRST)), plain(table.column(KEY_SECOND))
        new = self._table.find(first, second) == ABSENT
        self._add(first[new], second[new], (keys[0][new], keys[1][new]), dirty=False)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    @property
    def wants_sweep(self) -> bool:
        """Has it doubled since it was swept last?"""
        return len(self) >= self._sweep_at

    def sweep(self, keys: Hashed) -> None:
        """Keep the pairs of these keys, which are distinct, only."""
        slots = self._table.live_slots()
        rows = self._table.rows(slots)
        first, second = plain(rows.column(KEY_FIRST)), plain(rows.column(KEY_SECOND))
        # The keys come first: a group that begins behind them is of a key that is gone.
        both = np.concatenate([keys[0], first]), np.concatenate([keys[1], second])
        groups = group_rows(*both)
        if groups.members is not None:
            kept = groups.members[len(keys[0]) :] < len(keys[0])
            self._table.keep(slots[kept])
        elif len(slots):
            self._table.keep(slots[:0])
        self._sweep_at = max(_SWEEP_FROM, 2 * len(self))

    def pairs(self) -> tuple[Hashed, Hashed]:
        """Identities of all pairs and the hashes of their keys."""
        slots = self._table.live_slots()
        keys = self._table.rows(slots)
        key_hashes = plain(keys.column(KEY_FIRST)), plain(keys.column(KEY_SECOND))
        return self._table.hashes(slots), key_hashes

    def _add(self, first: Hashes, second: Hashes, keys: Hashed, dirty: bool) -> None:
        if len(first):
            rows = pa.table(list(keys), _KEY_SCHEMA)
            self._table.add(first, second, rows, {}, dirty)

    def _export(self, slots: Slots) -> pa.Table:
        """GROUP and `PAIR_FIELDS`; a pair is never deleted, so it needs no tombstone."""
        exported = self._table.export(slots)
        first, second = self._table.hashes(slots)
        return pa.table(
            {
                GROUP: exported.column(GROUP),
                PAIR_FIRST: first,
                PAIR_SECOND: second,
                KEY_FIRST: exported.column(KEY_FIRST),
                KEY_SECOND: exported.column(KEY_SECOND),
            }
        )


def salted(keys: Hashed, born: npt.NDArray[np.int64]) -> Hashed:
    """The hashes of keys that were born in these slices."""
    return keys[0], keys[1] + born.astype(np.uint64) * _SALT


def count_union(sets: Sequence[PairSet], keys: Hashed) -> npt.NDArray[np.int64]:
    """For each of these keys, which are distinct and hold every pair, the values in any set."""
    pairs = [one.pairs() for one in sets]
    first, second, key_first, key_second = (
        np.concatenate([columns[i][j] for columns in pairs]) for i in (0, 1) for j in (0, 1)
    )
    once = group_rows(first, second).firsts
    # The keys come first and are distinct: a group's number is the position of its key.
    groups = group_rows(
        np.concatenate([keys[0], key_first[once]]), np.concatenate([keys[1], key_second[once]])
    )
    if groups.members is None:
        return np.zeros(len(keys[0]), dtype=np.int64)
    return np.bincount(groups.members, minlength=groups.count) - 1


def _pair_identity(
    key_first: Hashes, key_second: Hashes, value_first: Hashes, value_second: Hashes
) -> Hashed:
    # Values are multiplied first: a column that is its own key must not cancel itself out.
    mixed = (key_first + value_first * _MIX) >> _HALF
    return (key_first >> _HALF << _HALF) | mixed, key_second + value_second * _MIX
