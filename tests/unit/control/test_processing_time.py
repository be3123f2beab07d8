"""Processing time: the wall clock, but never back; and intervals, whatever the wall clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plays import Play, record

from anabranch.control.policies.processing_time import ProcessingTime
from anabranch.control.settings import Past
from anabranch.model.commands import RunSlice
from anabranch.model.events import BatchArrived

DAY_MS = 24 * 3_600_000
T0 = 1_700_000_000_000


def test_it_follows_the_wall_clock() -> None:
    time = ProcessingTime(None)
    assert [time.at(ms, T0 + ms) for ms in (0, 10, 500)] == [T0, T0 + 10, T0 + 500]
    assert time.at(600, T0 + DAY_MS) == T0 + DAY_MS  # as after a night asleep


def test_set_back_it_goes_on_at_half_the_pace_until_the_clock_has_caught_up() -> None:
    time = ProcessingTime(None)
    time.at(0, T0 + 10_000)
    assert time.at(0, T0) == T0 + 10_000
    assert [time.at(ms, T0 + ms) for ms in (1, 2, 3, 2_000)] == [
        T0 + 10_000, T0 + 10_001, T0 + 10_001, T0 + 11_000,
    ]  # fmt: skip
    assert time.at(19_999, T0 + 19_999) == T0 + 19_999
    assert time.at(30_000, T0 + 30_000) == T0 + 30_000


def test_a_restart_with_the_clock_set_back_goes_on_from_the_newest_slice() -> None:
    time = ProcessingTime(T0)
    assert time.at(7_000, T0 - DAY_MS) == T0
    assert time.at(8_000, T0 - DAY_MS + 1_000) == T0 + 500


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(-DAY_MS, DAY_MS)), max_size=30))
def test_it_never_goes_back_and_never_stands_still_for_long(steps: list[tuple[int, int]]) -> None:
    time, now_ms = ProcessingTime(None), 0
    first = before = time.at(0, T0)
    for passed, leap in steps:
        now_ms += passed
        found = time.at(now_ms, T0 + now_ms + leap)
        assert found >= before
        before = found
    assert before - first >= now_ms // 2 - 1


def test_checkpoints_go_on_when_the_wall_clock_leaps_ahead_and_back() -> None:
    play = Play(interval=1_000)
    play.start()
    sealed, times = [], []
    for batch in range(40):
        now_ms = 500 * batch
        wall_ms = T0 + now_ms + (DAY_MS if 4 <= batch < 8 else 0)
        (run,) = play.controller.handle(BatchArrived(batch, now_ms), wall_ms)
        assert isinstance(run, RunSlice)
        sealed.append(run.plan.seal)
        times.append(run.plan.processing_ms)
        if run.plan.seal:
            play.written(run.plan.number)
        play.ran(run, now_ms=now_ms + 100, wall_ms=wall_ms + 100)
    assert times == sorted(times)
    assert times[-1] > T0 + DAY_MS + 8_000  # at half the pace
    assert sealed[2:] == [batch % 2 == 0 for batch in range(2, 40)]


def test_a_restart_on_another_boot_takes_its_own_intervals() -> None:
    """The steady clock begins anew: a journalled time is no reason to wait, or to hurry."""
    play = Play(Past(slices=(record(1, processing_ms=T0 + DAY_MS),), generation=1), interval=1_000)
    play.start()
    sealed = []
    for batch in range(1, 5):
        (run,) = play.controller.handle(BatchArrived(batch, 400 * batch), T0)
        assert isinstance(run, RunSlice)
        assert T0 + DAY_MS <= run.plan.processing_ms < T0 + DAY_MS + 2_000
        sealed.append(run.plan.seal)
        play.ran(run, now_ms=400 * batch + 100, wall_ms=T0)
    assert sealed == [False, False, False, True]
