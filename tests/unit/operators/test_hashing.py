from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import TopologyError
from anabranch.operators.rows.hashing import LONG_BYTES, groups_of, hash_keys, key_groups

MASK = 2**64 - 1
# Never change these: key groups are written into checkpoints.
FIRST = ["dceb95050492f371", "de51c4b8df675e5a", "4fcc4fa1d9a4c710", "8a2942894dfa195b"]
SECOND = ["d465bee508647882", "209ef8e6bdcee6c0", "0f836d91e7367f5b", "b1cec8f32d59567f"]
TEXT_GROUPS = [543, 808, 763, 952]
NUMBER_GROUPS = [17399, 9867, 3368, 30485]


def column(values: list[Any], kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"k": pa.array(values, kind)})


def reference(words: list[int], null: bool = False) -> tuple[int, int]:
    """The specification in the module's docstring, in plain integers."""
    a, b = 0x243F6A8885A308D3, 0x13198A2E03707344
    for word in words:
        a = ((a ^ word) * 0x9E3779B97F4A7C15) & MASK
        a ^= a >> 32
        b = ((b + word) * 0xD6E8FEB86659FD93) & MASK
        b ^= b >> 29
    if null:
        a ^= 0xA4093822299F31D1
        b ^= 0x082EFA98EC4E6C89
    return finished(a), finished(b)


def finished(h: int) -> int:
    h = (h * 0xBF58476D1CE4E5B9) & MASK
    h ^= h >> 29
    h = (h * 0x94D049BB133111EB) & MASK
    return h ^ (h >> 32)


def words_of(text: bytes) -> list[int]:
    padded = text + b"\0" * (-len(text) % 8)
    return [len(text), *np.frombuffer(padded, dtype="<u8").tolist()]


def test_golden_values() -> None:
    table = pa.table(
        {
            "text": ["", "a", "hello world", None],
            "number": pa.array([0, 1, -1, None], pa.int32()),
            "real": [0.0, -1.5, float("nan"), None],
        }
    )
    first, second = hash_keys(table, ["text", "number", "real"])
    assert [f"{h:016x}" for h in first] == FIRST
    assert [f"{h:016x}" for h in second] == SECOND
    assert key_groups(table, ["text"], 1024).tolist() == TEXT_GROUPS
    assert key_groups(table, ["number"], 32_768).tolist() == NUMBER_GROUPS


@given(st.lists(st.one_of(st.none(), st.text(max_size=40)), max_size=20), st.integers(0, 5))
def test_strings_follow_the_specification(texts: list[str | None], skipped: int) -> None:
    expected = [
        reference(words_of((text or "").encode()), null=text is None) for text in texts[skipped:]
    ]
    kinds = [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ]
    for kind in kinds:
        first, second = hash_keys(column(texts, kind).slice(skipped), ["k"])
        assert list(zip(first.tolist(), second.tolist(), strict=True)) == expected


def test_long_strings() -> None:
    texts = ["x" * LONG_BYTES, "x" * (LONG_BYTES + 1), "short", "y" * 10_000]
    together, _ = hash_keys(column(texts), ["k"])
    alone = [hash_keys(column([text]), ["k"])[0][0] for text in texts]
    assert together.tolist() == alone
    assert together[0] == reference(words_of(b"x" * LONG_BYTES))[0]
    assert len(set(together.tolist())) == 4


@given(st.lists(st.one_of(st.none(), st.integers(-128, 127)), min_size=1))
def test_integers_hash_by_value(numbers: list[int | None]) -> None:
    expected = [reference([(n or 0) & MASK], null=n is None) for n in numbers]
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64()):
        first, second = hash_keys(column(numbers, kind), ["k"])
        assert list(zip(first.tolist(), second.tolist(), strict=True)) == expected


def test_unsigned_equals_signed() -> None:
    for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
        assert same(column([5], kind), column([5], pa.int64()))
    assert hash_keys(column([2**64 - 1], pa.uint64()), ["k"])[0][0] == reference([MASK])[0]


def test_equal_values_in_other_clothes() -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
    for unit in ("s", "ms", "ns"):
        assert same(column([moment], pa.timestamp(unit)), column([moment], pa.timestamp("us")))
    assert same(column([moment], pa.timestamp("us", "UTC")), column([moment], pa.timestamp("us")))
    day = dt.date(2026, 1, 2)
    assert same(column([day], pa.date32()), column([day], pa.date64()))
    assert same(column([0.0]), column([-0.0]))
    assert same(column([1.5], pa.float32()), column([1.5], pa.float64()))
    strange = np.array([0x7FF8000000000001, 0xFFF8000000000000], dtype=np.uint64).view(np.float64)
    assert same(pa.table({"k": strange}), column([float("nan")] * 2))
    assert same(column([b"ab"], pa.binary(2)), column([b"ab"], pa.large_binary()))
    assert same(column([Decimal("1.50")], pa.decimal128(5, 2)), column([Decimal("1.50")]))


def same(one: pa.Table, other: pa.Table) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in zip(hash_keys(one, ["k"]), hash_keys(other, ["k"]), strict=True)
    )


def test_null_is_a_key_of_its_own() -> None:
    kinds = (pa.int64(), pa.string(), pa.float64(), pa.bool_(), pa.date32(), pa.decimal128(9, 2))
    for kind in kinds:
        first, second = hash_keys(column([None, None], kind), ["k"])
        assert first[0] == first[1] and second[0] == second[1]
    numbers = column([0, None], pa.int64())
    assert len(set(hash_keys(numbers, ["k"])[0].tolist())) == 2
    assert len(set(hash_keys(column(["", None]), ["k"])[0].tolist())) == 2
    assert hash_keys(pa.table({"k": pa.nulls(2)}), ["k"])[0][0] == reference([0], null=True)[0]


def test_order_and_boundaries_of_columns_matter() -> None:
    table = pa.table({"x": ["a", "ab"], "y": ["bc", "c"]})
    assert len(set(hash_keys(table, ["x", "y"])[0].tolist())) == 2
    assert hash_keys(table, ["x", "y"])[0][0] != hash_keys(table, ["y", "x"])[0][0]


def test_chunks_and_blocks_do_not_matter() -> None:
    texts = [f"key{n}" * (n % 5) for n in range(40_000)]
    whole = column(texts)
    pieces = pa.concat_tables([whole.slice(0, 7), whole.slice(7, 0), whole.slice(7)])
    assert same(whole, pieces)
    assert np.array_equal(key_groups(whole, ["k"], 64), groups_of(hash_keys(whole, ["k"])[0], 64))


@pytest.mark.parametrize("kind", ["consecutive", "strided", "text"])
def test_groups_are_even(kind: str) -> None:
    rows, groups = 200_000, 128
    numbers = np.arange(rows) * (1 if kind == "consecutive" else 1 << 20)
    table = pa.table({"k": [f"user-{n}" for n in range(rows)] if kind == "text" else numbers})
    sizes = np.bincount(key_groups(table, ["k"], groups), minlength=groups)
    chi_square = float(((sizes - rows / groups) ** 2 / (rows / groups)).sum())
    assert 75 < chi_square < 195  # about 127 ± 4 standard deviations of 16


def test_every_input_bit_reaches_every_output_bit() -> None:
    numbers = np.random.default_rng(3).integers(0, 2**63, 2_000).astype(np.uint64)
    before = hash_keys(pa.table({"k": numbers}), ["k"])
    for bit in range(0, 64, 7):
        after = hash_keys(pa.table({"k": numbers ^ np.uint64(1 << bit)}), ["k"])
        for one, other in zip(before, after, strict=True):
            flips = np.unpackbits((one ^ other).view(np.uint8)).reshape(len(numbers), 64).mean(0)
            assert flips.min() > 0.4 and flips.max() < 0.6


@pytest.mark.parametrize(
    ("values", "words"),
    [([[1]], "list"), ([{"a": 1}], "struct"), ([Decimal("1" * 40)], "decimal256")],
)
def test_types_without_a_hash_are_refused(values: list[Any], words: str) -> None:
    with pytest.raises(TopologyError, match=f"'k' of type {words}.* cannot be a key"):
        hash_keys(column(values), ["k"])


def test_missing_and_no_key_columns_are_refused() -> None:
    with pytest.raises(TopologyError, match="'absent' is not in the input"):
        hash_keys(column([1]), ["absent"])
    with pytest.raises(TopologyError, match="at least one column"):
        hash_keys(column([1]), [])
    with pytest.raises(TopologyError, match="from 1 to 65536"):
        key_groups(column([1]), ["k"], 65_537)


def test_times_of_the_day_below_a_microsecond_are_other_keys() -> None:
    nanoseconds = [0, 1, 999, 1_000, 1_001, 86_399_999_999_999]
    fine = pa.table({"k": pa.array(nanoseconds, pa.time64("ns"))})
    first, second = hash_keys(fine, ["k"])
    assert len({*zip(first.tolist(), second.tolist(), strict=True)}) == len(nanoseconds)
    # Whole microseconds hash as they always did: they are in checkpoints.
    coarse = pa.table({"k": pa.array([0, 1], pa.time64("us"))})
    whole = pa.table({"k": pa.array([0, 1_000], pa.time64("ns"))})
    for one, other in zip(hash_keys(coarse, ["k"]), hash_keys(whole, ["k"]), strict=True):
        assert one.tolist() == other.tolist()
