from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.operators.rows.grouping import group_rows
from anabranch.operators.rows.hashing import hash_keys
from anabranch.operators.state import row_log
from anabranch.operators.state.accumulators import load_rows, sum_part
from anabranch.operators.state.keyed_table import NEVER, KeyedTable
from anabranch.operators.state.row_log import _MIN_RUN, ABSENT, RowLog

SCHEMA = pa.schema([("k", pa.int64())])
GROUPS = 16
PART = sum_part("v", np.int64)


def new_table() -> KeyedTable:
    return KeyedTable(SCHEMA, {"v": PART.dtype}, GROUPS)


def keyed(keys: list[int]) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.int64())})


def upsert(table: KeyedTable, items: dict[int, int]) -> None:
    rows = keyed(list(items))
    first, second = hash_keys(rows, ["k"])
    slots = table.find(first, second)
    values = np.array(list(items.values()), dtype=np.int64)
    known, new = slots != ABSENT, slots == ABSENT
    table.write(slots[known], {"v": values[known]})
    table.add(first[new], second[new], rows.filter(pa.array(new)), {"v": values[new]})


def delete(table: KeyedTable, keys: list[int]) -> None:
    slots = table.find(*hash_keys(keyed(keys), ["k"]))
    table.delete(slots[slots != ABSENT])


def contents(table: KeyedTable) -> list[tuple[int, int]]:
    slots = table.live_slots()
    keys = table.rows(slots).column("k").to_pylist()
    return list(zip(keys, table.values(slots)["v"].tolist(), strict=True))


def load(table: KeyedTable, sealed: pa.Table) -> None:
    rows = sealed.select(["k"])
    deleted = np.asarray(sealed.column("_deleted"))
    load_rows(table, (PART,), hash_keys(rows, ["k"]), rows, sealed, deleted)


steps = st.one_of(
    st.tuples(st.just("upsert"), st.dictionaries(st.integers(0, 400), st.integers(), max_size=80)),
    st.tuples(st.just("delete"), st.sets(st.integers(0, 400), max_size=120)),
    st.tuples(st.just("seal"), st.none()),
)


@pytest.mark.parametrize("kept_bytes", [0, row_log._KEPT_BYTES])
@settings(max_examples=40, deadline=None)
@given(st.lists(steps, max_size=25))
def test_against_a_dict_and_its_sealed_copy(
    kept_bytes: int, script: list[tuple[str, object]]
) -> None:
    """A dict keeps insertion order, and a key deleted and set again goes to its end: so does a
    table, and so does another table that only sees what is sealed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_log, "_KEPT_BYTES", kept_bytes)
        patch.setattr(row_log, "_KEPT_ROW_BYTES", 0)
        play(script)


def play(script: list[tuple[str, object]]) -> None:
    table, copy = new_table(), new_table()
    model: dict[int, int] = {}
    for action, what in script:
        if action == "upsert":
            items = {k: v % 1000 for k, v in what.items()}  # type: ignore[attr-defined]
            upsert(table, items)
            model.update(items)
        elif action == "delete":
            delete(table, sorted(what))  # type: ignore[call-overload]
            model = {k: v for k, v in model.items() if k not in what}  # type: ignore[operator]
        else:
            load(copy, table.export(table.take_dirty()))
            assert contents(copy) == list(model.items())
        assert contents(table) == list(model.items())
        assert len(table) == len(model)
    assert new_table_from(table) == list(model.items())


def new_table_from(table: KeyedTable) -> list[tuple[int, int]]:
    fresh = new_table()
    load(fresh, table.export(table.live_slots()))
    assert not len(fresh.take_dirty())
    return contents(fresh)


def test_compaction_keeps_tombstones_that_are_not_sealed() -> None:
    table, copy = new_table(), new_table()
    upsert(table, dict.fromkeys(range(100), 0))
    load(copy, table.export(table.take_dirty()))
    delete(table, list(range(95)))
    upsert(table, {200: 0})  # more dead than alive, but all of them unsealed
    load(copy, table.export(table.take_dirty()))
    assert contents(copy) == contents(table)
    upsert(table, {201: 0})
    assert table._slots == len(table) == 7  # sealed: now they are gone


def test_unsealed_tombstones_do_not_make_every_add_a_compaction() -> None:
    table = new_table()
    upsert(table, dict.fromkeys(range(1_000), 0))
    delete(table, list(range(1_000)))
    upsert(table, {-1: 0})
    index = table._index
    for key in range(2_000, 2_100):
        upsert(table, {key: 0})
    assert table._index is index


def test_moments_are_kept_but_not_exported() -> None:
    table = KeyedTable(SCHEMA, {"v": PART.dtype}, GROUPS, ["at"])
    rows = keyed([1, 2])
    hashes = hash_keys(rows, ["k"])
    slots = table.add(*hashes, rows, {"v": np.array([5, 6])})
    assert table.values(slots)["at"].tolist() == [NEVER, NEVER]
    table.write(slots[:1], {"at": np.array([7])})
    upsert(table, {3: 0})
    assert table.values(table.find(*hashes))["at"].tolist() == [7, NEVER]
    assert table.export(slots).schema.names == ["_group", "_deleted", "k", "v"]


def test_growth_keeps_every_key_and_stays_small() -> None:
    table = new_table()
    rows = 200_000
    for start in range(0, rows, 10_000):
        keys = np.arange(start, start + 10_000)
        batch = pa.table({"k": keys})
        table.add(*hash_keys(batch, ["k"]), batch, {"v": keys})
    probe = pa.table({"k": np.arange(rows - 1, -2, -1)})
    slots = table.find(*hash_keys(probe, ["k"]))
    assert slots.tolist() == [*range(rows - 1, -1, -1), ABSENT]
    assert table.nbytes / rows < 100


def test_equal_first_hashes_are_told_apart_by_the_second() -> None:
    table = new_table()
    first = np.zeros(100, dtype=np.uint64)
    second = np.arange(100, dtype=np.uint64)
    table.add(first, second, keyed(list(range(100))), {"v": np.arange(100)})
    assert table.find(first, second).tolist() == list(range(100))
    assert table.find(first[:1], np.array([500], dtype=np.uint64)).tolist() == [ABSENT]


@given(st.lists(st.integers(1, 300), max_size=40), st.data())
def test_row_log_takes_any_slots_and_keeps_few_chunks(
    sizes: list[int], data: st.DataObject
) -> None:
    log = RowLog(SCHEMA)
    for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        log.append(keyed(list(range(start, start + size))))
    rows = sum(sizes)
    slots = data.draw(st.lists(st.integers(0, rows - 1), max_size=50)) if rows else []
    assert log.take(np.array(slots, dtype=np.int64)).column("k").to_pylist() == slots
    assert log.take(np.arange(rows)).column("k").to_pylist() == list(range(rows))


def test_nearly_all_rows_are_not_copied() -> None:
    log = RowLog(pa.schema([("x", pa.int64())]))
    for start in (0, 10_000):
        log.append(pa.table({"x": np.arange(start, start + 10_000)}))
    slots = np.setdiff1d(np.arange(20_000), [0, 77, 78, 9_999, 10_000, 19_999])
    before = pa.total_allocated_bytes()
    taken = log.take(slots)
    assert pa.total_allocated_bytes() - before < 8 * 20_000 / 4
    assert taken.column("x").to_pylist() == slots.tolist()
    few = slots[:: _MIN_RUN // 2]
    assert log.take(few).column("x").to_pylist() == few.tolist()


def test_a_large_state_is_not_copied_when_it_is_loaded() -> None:
    schema = pa.schema([("x", pa.int64()), ("note", pa.string())])
    piece = pa.table({"x": np.arange(10_000), "note": ["n" * 200] * 10_000}, schema)
    log = RowLog(schema)
    before = pa.total_allocated_bytes()
    log.load(pa.concat_tables([piece, piece]))
    assert pa.total_allocated_bytes() - before < piece.nbytes / 10
    log.append(piece.slice(5, 1))  # what comes with a packet is copied
    taken = log.take(np.array([3, 10_003, 20_000]))
    assert taken.column("x").to_pylist() == [3, 3, 5]


def test_a_snapshot_of_a_large_state_with_holes_is_not_copied() -> None:
    rows = pa.table({"k": np.arange(10_000), "note": ["n" * 200] * 10_000})
    table = KeyedTable(rows.schema, {"v": PART.dtype}, GROUPS)
    table.add(*hash_keys(rows, ["k"]), rows, {"v": np.arange(10_000)})
    table.delete(np.arange(0, 10_000, 3))
    before = pa.total_allocated_bytes()
    snapshot = table.snapshot()
    assert pa.total_allocated_bytes() - before < rows.nbytes / 10
    live = snapshot.filter(pc.invert(snapshot["_deleted"]))
    assert live["k"].to_pylist() == [k for k in range(10_000) if k % 3]
    assert live["v"].to_pylist() == live["k"].to_pylist()


def test_row_log_merges_small_chunks() -> None:
    log = RowLog(SCHEMA)
    for key in range(2_000):
        log.append(keyed([key]))
    assert len(log._chunks) < 20


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=200))
def test_groups_in_order_of_first_appearance(pairs: list[tuple[int, int]]) -> None:
    first = np.array([a for a, _ in pairs], dtype=np.uint64)
    second = np.array([b for _, b in pairs], dtype=np.uint64)
    groups = group_rows(first, second)
    distinct = list(dict.fromkeys(pairs))
    assert [pairs[row] for row in groups.firsts] == distinct
    if groups.members is None:
        assert len(distinct) == len(pairs)
    else:
        assert [distinct[group] for group in groups.members] == pairs


@pytest.mark.parametrize("distinct", [1, 100, 150_000])
def test_many_rows_group_exactly(distinct: int) -> None:
    keys = np.random.default_rng(1).integers(0, distinct, 300_000)
    groups = group_rows(*hash_keys(pa.table({"k": keys}), ["k"]))
    assert groups.members is not None
    assert np.array_equal(keys[groups.firsts][groups.members], keys)
    assert groups.count == len(np.unique(keys))
