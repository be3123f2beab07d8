"""What a job says of itself: once, when it is sure, and nothing at all where nothing is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from anabranch.control.remarks import BEHIND_MS, CHECKPOINTS, Remarks, Seen

SLICE = Seen(ended_ms=0, batch=0, seconds=0.1, checkpoint_slice=0, cpu_s={"count": 0.5, "top": 0.1})


def test_late_rows_are_said_once_and_in_all_at_the_end() -> None:
    remarks = Remarks(wanted=frozenset({"kept"}))
    late = replace(SLICE, late={"count": 2, "kept": 5, "other": 0})
    (said,) = remarks.observe(late)
    assert said.startswith("'count' dropped 2 rows as too late; ")
    assert "watermark=" in said
    assert ".late(...)" in said
    assert remarks.observe(late) == []
    assert remarks.totals({"count": 1_204, "kept": 9}, {}) == [
        "in all, 1,204 rows came too late for 'count'"
    ]


def test_rows_put_aside_are_said_once_for_each_operator() -> None:
    remarks = Remarks(dead_letters="dead")
    (said,) = remarks.observe(replace(SLICE, dead={"parse": 1}))
    assert said.startswith("'parse' put 1 row aside that it cannot take; the reasons are in the s")
    assert "'dead'" in said
    (said,) = remarks.observe(replace(SLICE, dead={"parse": 3, "price": 1}))
    assert said.startswith("'price' put 1 row aside")
    assert remarks.totals({}, {"parse": 4}) == ["in all, 'parse' put 4 rows aside"]


# -- state ---------------------------------------------------------------------------------------


def sizes_said(sizes: Iterable[int], endless: frozenset[str] = frozenset({"count"})) -> list[str]:
    """What is said of a state with these sizes, one per checkpoint, with slices in between."""
    remarks = Remarks(endless=endless)
    said = []
    for number, size in enumerate(sizes):
        seen = replace(SLICE, checkpoint_slice=number + 1, state_rows={"count": size, "top": 1})
        said += remarks.observe(seen)
        said += remarks.observe(replace(seen, state_rows={"count": size + 1_000_000, "top": 1}))
    return said


LONG = 10 * CHECKPOINTS


def test_state_that_grows_for_ever_is_said_once() -> None:
    (said,) = sizes_said(100 * i for i in range(1, LONG))
    assert said.startswith("the state of 'count' grows with every checkpoint, to 3,100 rows by now")
    assert "ttl=" in said


@pytest.mark.parametrize(
    "size",
    [
        lambda i: 1_000_000,  # all keys are known
        lambda i: 1_000_000 + i,  # … nearly
        lambda i: min(100 * i, 2_000),  # … after a while
        lambda i: int(100_000 * (1 - math.exp(-i / 100))),  # … one after the other
        lambda i: int(1_000 * math.log(i + 1)),  # rare keys, ever fewer of them
        lambda i: int(1_000 * math.sqrt(i)),
        lambda i: 100 * (i % 7) + 10 * i,  # what goes up also comes down
    ],
    ids=["constant", "slow", "filled", "saturating", "log", "sqrt", "waves"],
)
def test_state_that_levels_off_is_not_said(size: Callable[[int], int]) -> None:
    assert sizes_said(size(i) for i in range(1, LONG)) == []


def test_a_window_that_fills_is_not_said() -> None:
    """Nor anything else that is forgotten by itself, however long it takes."""
    assert sizes_said((100 * i for i in range(1, LONG)), endless=frozenset()) == []


# -- lag -----------------------------------------------------------------------------------------


def batches_said(seconds: Iterable[float], interval_ms: int | None = 1_000) -> list[str]:
    """What is said of batches that take so long, each beginning when it may."""
    remarks, said, now_ms = Remarks(interval_ms=interval_ms), [], 0
    for number, took in enumerate(seconds):
        now_ms += max(int(took * 1_000), 1_000)
        seen = replace(SLICE, ended_ms=now_ms, batch=number, seconds=took)
        said += [f"{now_ms} {s}" for s in remarks.observe(seen)]
    return said


def test_a_job_that_falls_behind_says_so_once() -> None:
    (said,) = batches_said(1.1**i for i in range(60))
    when, _, text = said.partition(" ")
    assert int(when) >= BEHIND_MS
    assert text.startswith("the job falls behind: a batch takes ")
    assert "'count' uses most CPU" in text


@pytest.mark.parametrize("cpu", [{}, {"count": 0.5}])
def test_sources_may_be_what_is_slow(cpu: dict[str, float]) -> None:
    remarks, said, now_ms = Remarks(interval_ms=1_000), [], 0
    for number in range(40):
        took = 1.1 ** (number + 1)
        now_ms += int(took * 1_000)
        seen = replace(SLICE, ended_ms=now_ms, batch=number, seconds=took)
        said += remarks.observe(replace(seen, cpu_s=cpu, sources_cpu_s=0.7))
    (text,) = said
    assert text.endswith("What comes before the first key uses most CPU; give the job more nodes")


def test_slices_of_one_batch_count_together() -> None:
    """A batch that is cut into slices of the same length has ever more of them."""
    remarks, said, now_ms = Remarks(interval_ms=1_000), [], 0
    for number in range(40):
        for _ in range(3 + number):
            now_ms += 500
            said += remarks.observe(replace(SLICE, ended_ms=now_ms, batch=number, seconds=0.5))
    assert len(said) == 1


@pytest.mark.parametrize(
    "seconds",
    [
        [0.2] * 300,
        [1.3] * 300,  # slow, but it keeps up
        [1.3 + 0.2 * (i % 2) for i in range(300)],
        [30.0, *(30.0 * 0.8**i for i in range(20)), *[0.3] * 60],  # after a start
        [*[0.3] * 60, 40.0, 25.0, 15.0, 8.0, 4.0, 2.0, *[0.3] * 60],  # after a pause
        [*[0.3] * 100, *(0.3 * 1.2**i for i in range(10)), *[0.3] * 100],  # a short peak
        [*(0.2 + 0.005 * i for i in range(150))],  # more work, within what it can do
    ],
    ids=["calm", "slow", "uneven", "start", "pause", "peak", "busier"],
)
def test_a_job_that_keeps_up_says_nothing(seconds: list[float]) -> None:
    assert batches_said(seconds) == []


def test_a_job_that_reads_what_there_is_has_no_lag() -> None:
    assert batches_said((1.1**i for i in range(60)), interval_ms=None) == []


def test_a_recovery_begins_anew() -> None:
    remarks, now_ms = Remarks(interval_ms=1_000), 0
    for number in range(40):
        took = 2.0 + 0.3 * number
        now_ms += int(took * 1_000)
        if number % 5 == 0:
            remarks.interrupted()
        assert not remarks.observe(replace(SLICE, ended_ms=now_ms, batch=number, seconds=took))
