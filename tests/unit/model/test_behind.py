"""What a journal says of chains that wait, and how far that lets sinks show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.model.behind import Behind
from anabranch.model.slices import Late, SliceRecord


def record(number: int, *paused: str) -> SliceRecord:
    return SliceRecord(number, "none", None, True, 0, 0, None, 0, 1, paused=paused)


def test_a_chain_lacks_slices_from_the_first_one_it_waited_in() -> None:
    behind = Behind({}, 3)
    behind.happened(record(4, "a"))
    behind.happened(record(5, "b", "a"))
    assert behind.chains == {"a": 4, "b": 5}
    assert [behind.shown(c) for c in ((), ("a",), ("b", "c"), ("a", "b"))] == [5, 3, 4, 3]


def test_what_is_made_up_for_is_lacked_no_more() -> None:
    behind = Behind({"a": 4, "b": 5}, 6)
    behind.made_up(Late(4, ("a",)))
    assert behind.chains == {"a": 5, "b": 5}
    behind.made_up(Late(5, ("a", "b")))
    assert behind.chains == {"a": 6, "b": 6}
    behind.made_up(Late(6, ("a",)))
    assert behind.chains == {"b": 6}
    assert behind.shown(("a",)) == 6


def test_slices_without_rows_have_no_line() -> None:
    behind = Behind({"a": 4}, 9)
    behind.made_up(Late(7, ("a",)))
    assert behind.shown(("a",)) == 7


def test_chains_that_make_up_together_are_as_far_as_each_was() -> None:
    behind = Behind({"a": 2, "b": 5}, 6)
    behind.made_up(Late(2, ("a", "b")))
    assert behind.chains == {"a": 3, "b": 5}


def test_a_chain_that_came_back_before_the_next_slice_lacks_nothing() -> None:
    behind = Behind({"a": 7, "b": 7, "c": 4}, 6)
    behind.happened(record(7, "b"))
    assert behind.chains == {"b": 7, "c": 4}


def test_files_that_come_late_stand_where_they_would_have_stood_in_time() -> None:
    def file(writer: str) -> str:
        return f"staged/out/4-3/{writer}.3-9f86d081.staged"

    before = SliceRecord(
        4,
        "none",
        None,
        True,
        0,
        0,
        None,
        0,
        1,
        staged={"out": [file("part-b-0"), file("source-2")]},
    )
    late = Late(
        4, ("a",), {"out": [file("part-a-10"), file("part-a-2")], "new": [file("part-a-2")]}
    )
    writers = ("part-a-2", "part-a-10", "part-b-0", "source-2")
    told = before.with_late(late)
    assert told.staged == {"out": [file(w) for w in writers], "new": [file("part-a-2")]}
    assert told.with_late(late) == told
    assert Late.from_json(late.to_json()) == late


CHAINS = ("a", "b", "c")


class SlowModel:
    """Which slices each chain has applied, one by one."""

    def __init__(self) -> None:
        self.newest = 0
        self.applied: dict[str, set[int]] = {c: set() for c in CHAINS}

    def lacks(self, chain: str) -> int | None:
        missing = {*range(1, self.newest + 1)} - self.applied[chain]
        return min(missing, default=None)


@given(st.lists(st.tuples(st.booleans(), st.sets(st.sampled_from(CHAINS)), st.integers(0, 2))))
def test_it_says_what_a_slow_model_says(
    steps: list[tuple[bool, set[str], int]],
) -> None:
    """Slices happen and chains that lack some come back, in parts, in any order."""
    model, behind = SlowModel(), Behind()
    for happens, some, parts in steps:
        if happens:
            waiting = {c for c in CHAINS if model.lacks(c)} | some
            model.newest += 1
            for chain in set(CHAINS) - waiting:
                model.applied[chain].add(model.newest)
            behind.happened(record(model.newest, *sorted(waiting)))
        elif waits := [c for c in some if model.lacks(c)]:
            upto = min(min(model.lacks(c) or 0 for c in waits) + parts, model.newest)
            for chain in waits:
                model.applied[chain] |= {*range(1, upto + 1)}
            behind.made_up(Late(upto, tuple(waits)))
        assert behind.chains == {c: n for c in CHAINS if (n := model.lacks(c))}
        for chains in (("a",), ("b", "c"), CHAINS):
            shown = behind.shown(chains)
            everything = {*range(1, shown + 1)}
            assert all(everything <= model.applied[c] for c in chains)
            assert shown == model.newest or any(shown + 1 not in model.applied[c] for c in chains)
