"""Rows that are replaced: the room of old ones is given back bit by bit, and nobody can tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.operators.rows.hashing import hash_keys
from anabranch.operators.state import row_log
from anabranch.operators.state.keyed_table import KeyedTable
from anabranch.operators.state.row_log import ABSENT
from effort import examples

GROUPS = 16
SCHEMA = pa.schema([("k", pa.int64()), ("note", pa.string())])
Model = dict[int, str]  # in order: a key that is replaced goes to the end


def new_table() -> KeyedTable:
    return KeyedTable(SCHEMA, {}, GROUPS)


def rows_of(items: Model) -> pa.Table:
    return pa.table({"k": list(items), "note": list(items.values())}, SCHEMA)


def replace(table: KeyedTable, rows: pa.Table, dirty: bool = True) -> None:
    """As a user's function does with its state."""
    first, second = hash_keys(rows, ["k"])
    old = table.find(first, second)
    table.delete(np.unique(old[old != ABSENT]), dirty=False)
    if rows.num_rows:
        table.add(first, second, rows, {}, dirty)


def load(table: KeyedTable, sealed: pa.Table) -> None:
    rows = sealed.select(SCHEMA.names)
    old = table.find(*hash_keys(rows, ["k"]))
    table.delete(np.unique(old[old != ABSENT]), dirty=False)
    replace(table, rows.filter(pc.invert(sealed["_deleted"])).combine_chunks(), dirty=False)


def contents(table: KeyedTable) -> list[tuple[int, str]]:
    found = table.rows(table.live_slots()).to_pydict()
    return list(zip(found["k"], found["note"], strict=True))


keys = st.sets(st.integers(0, 120), max_size=60)
steps = st.one_of(
    st.tuples(st.just("replace"), keys),
    st.tuples(st.just("replace"), keys),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("seal"), st.just(set[int]())),
    st.tuples(st.just("keep"), keys),
)


@pytest.mark.parametrize("small_bytes", [0, 3_000, 1 << 20])
@settings(max_examples=examples(50), deadline=None)
@given(st.lists(steps, max_size=40))
def test_against_a_dict_its_sealed_copy_and_its_snapshot(
    small_bytes: int, script: list[tuple[str, set[int]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_log, "_KEPT_BYTES", 500)
        patch.setattr(row_log, "_KEPT_ROW_BYTES", 10)
        patch.setattr(row_log, "_CHUNK_ROWS", 40)
        patch.setattr(row_log, "_SMALL_BYTES", small_bytes)
        play(script)


def play(script: list[tuple[str, set[int]]]) -> None:
    table, copy = new_table(), new_table()
    model: Model = {}
    for number, (action, what) in enumerate(script):
        if action == "replace":
            new = {k: f"{k} at {number}" for k in sorted(what)}
            replace(table, rows_of(new))
            model = {k: v for k, v in model.items() if k not in new} | new
        elif action == "delete":
            slots = table.find(*hash_keys(rows_of(dict.fromkeys(sorted(what), "")), ["k"]))
            table.delete(slots[slots != ABSENT])
            model = {k: v for k, v in model.items() if k not in what}
        elif action == "keep":  # no marks, so a copy cannot know
            kept = {k: v for k, v in model.items() if k not in what}
            if len(kept) < len(model):
                load(copy, table.export(table.take_dirty()))
                for held in (table, copy):
                    slots = held.live_slots()
                    gone = np.isin(held.rows(slots)["k"].to_numpy(), list(what))
                    held.keep(slots[~gone])
            model = kept
        else:
            load(copy, table.export(table.take_dirty()))
            assert contents(copy) == list(model.items())
        assert contents(table) == list(model.items())
        fresh = new_table()
        load(fresh, table.snapshot())
        assert contents(fresh) == list(model.items())


def test_no_slice_copies_much_and_little_room_is_wasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_log, "_CHUNK_ROWS", 1_000)
    monkeypatch.setattr(row_log, "_KEPT_BYTES", 1_000)
    monkeypatch.setattr(row_log, "_SMALL_BYTES", 100_000)
    copied: list[int] = []
    real = row_log._Chunk.only

    def only(self: Any, wanted: Any, copy: bool) -> Any:
        copied[-1] += np.count_nonzero(wanted) if copy else 0
        return real(self, wanted, copy)

    monkeypatch.setattr(row_log._Chunk, "only", only)
    table, model = new_table(), {k: f"{k:200}" for k in range(20_000)}
    replace(table, rows_of(model))
    table.take_dirty()
    live = table._log.nbytes
    dice = np.random.default_rng(1)
    for number in range(500):
        copied.append(0)
        new = {int(k): f"{k:100}{number:100}" for k in np.unique(dice.integers(0, 20_000, 200))}
        replace(table, rows_of(new))
        for key in new:
            del model[key]
        model |= new  # a row that is replaced moves to the end
        table.take_dirty()
        assert table._log.nbytes < 2.5 * live
    assert contents(table) == list(model.items())
    assert max(copied) <= 2_000
    assert sum(copied) > 20_000  # all of it has moved at least once
    assert len(table._log._chunks) < 2 * 20_000 * 220 / 100_000
