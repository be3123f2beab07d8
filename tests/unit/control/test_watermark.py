from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.control.ledgers.watermark import WatermarkTracker


def test_the_least_over_the_sources_minus_their_delays() -> None:
    tracker = WatermarkTracker({"a": 10, "b": 0})
    tracker.observe({"a": 100}, True)
    assert tracker.watermark_us is None  # b has shown no time
    tracker.observe({"b": 500, "other": 3}, True)
    assert tracker.watermark_us == 90
    tracker.observe({"a": 1000}, True)
    assert tracker.watermark_us == 500


def test_it_stands_still_inside_a_batch() -> None:
    tracker = WatermarkTracker({"a": 0})
    tracker.observe({"a": 5}, True)
    tracker.observe({"a": 100}, False)
    assert tracker.watermark_us == 5
    assert tracker.latest_us == {"a": 100}
    tracker.observe({}, True)
    assert tracker.watermark_us == 100


def test_no_event_time_no_watermark() -> None:
    tracker = WatermarkTracker({})
    tracker.observe({"a": 5}, True)
    assert tracker.watermark_us is None


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(-50, 50), st.booleans()), max_size=30),
    st.integers(0, 29),
)
def test_it_never_goes_back_also_when_resumed(seen: list[tuple[str, int, bool]], at: int) -> None:
    delays = {"a": 3, "b": 7}
    whole, resumed = WatermarkTracker(delays), WatermarkTracker(delays)
    before = None
    for i, (source, time, end) in enumerate(seen):
        whole.observe({source: time}, end)
        assert before is None or (whole.watermark_us is not None and whole.watermark_us >= before)
        if i == at:
            resumed.resume(before)
            resumed.observe(whole.latest_us, end)
        elif i > at:
            resumed.observe({source: time}, end)
        if i >= at:
            assert resumed.watermark_us == whole.watermark_us
        before = whole.watermark_us


def test_where_all_sources_are_idle_time_is_as_far_as_that_of_the_furthest() -> None:
    tracker = WatermarkTracker({"a": 0, "b": 0}, {"a": 10, "b": 10})
    tracker.look({"a": 1, "b": 1}, 0, anew=True)
    tracker.observe({"a": 100, "b": 50}, batch_end=True)
    assert tracker.watermark_us == 50
    tracker.look({}, 10, anew=True)
    tracker.observe({}, batch_end=True)
    assert tracker.watermark_us == 100
