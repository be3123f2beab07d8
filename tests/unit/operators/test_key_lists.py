from __future__ import annotations

import numpy as np
import pyarrow as pa
from kernel_runs import GROUPS

from anabranch.operators.rows.hashing import hash_keys
from anabranch.operators.state.key_lists import KeyLists, Replacement
from anabranch.operators.state.row_log import ABSENT

KEYS = pa.schema([("k", pa.int64())])


def written(lists: KeyLists, keys: list[int], lengths: list[int], value: int) -> Replacement:
    """Lists of these lengths, all rows with one value, in place of what the keys have."""
    first, second = hash_keys(pa.table({"k": keys}, KEYS), ("k",))
    _, removed = lists.find(first, second)
    owner = np.repeat(np.arange(len(keys)), lengths)
    numbers = np.concatenate([np.arange(length) for length in lengths])
    rows = pa.table({"k": pa.array(keys).take(pa.array(owner))}, KEYS)
    values = {"v": np.full(len(owner), value)}
    return Replacement(removed, (first[owner], second[owner]), numbers, rows, values)


def contents(lists: KeyLists, keys: list[int]) -> list[list[int]]:
    owners, slots = lists.find(*hash_keys(pa.table({"k": keys}, KEYS), ("k",)))
    values = lists.values(slots)["v"]
    return [values[owners == i].tolist() for i in range(len(keys))]


def new_lists() -> KeyLists:
    return KeyLists(("k",), KEYS, {"v": np.dtype(np.int64)}, GROUPS)


def test_a_loaded_list_replaces_a_longer_one() -> None:
    lists, restored = new_lists(), new_lists()
    lists.apply(written(lists, [1, 2], [3, 2], 7))
    restored.load(lists.seal())
    lists.apply(written(lists, [1], [1], 8))
    delta = lists.seal()
    assert delta.num_rows == 1
    restored.load(delta)
    for one in (lists, restored):
        assert contents(one, [1, 2, 3]) == [[8], [7, 7], []]
        assert len(one) == 3


def test_a_list_that_is_written_often_is_found_as_fast() -> None:
    """Among many keys that rest, one key's dead rows must not pile up in the index."""
    lists = new_lists()
    lists.apply(written(lists, list(range(1_000)), [1] * 1_000, 0))
    for value in range(300):
        lists.apply(written(lists, [5], [2], value))
    used = np.count_nonzero(lists.table._index != ABSENT)
    assert used <= 1_000 + 1 + 2
    assert contents(lists, [5, 6]) == [[299, 299], [0]]
