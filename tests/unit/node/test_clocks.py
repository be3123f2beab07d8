"""A run whose wall clock is set: whatever is an interval does not notice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from local_run import LocalRun

import anabranch as ab

DAY_MS = 24 * 3_600_000


class Clocks:
    """Both clocks of a machine, in ms; a day may be put between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.ahead_ms = 5_000, 1_700_000_000_000
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ms * 1_000_000)
        monkeypatch.setattr(time, "time_ns", lambda: (self.now_ms + self.ahead_ms) * 1_000_000)


@pytest.mark.parametrize("leap_ms", [DAY_MS, -DAY_MS])
def test_a_leap_of_the_wall_clock_and_back_keeps_no_checkpoint_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leap_ms: int
) -> None:
    clocks = Clocks(monkeypatch)
    made = ab.Topology("t", key_groups=4, parallelism=2)
    counts = made.source("s", None).key_by("k").aggregate("count", n=ab.count())
    counts.to("out", ab.Memory())

    def fed(run: LocalRun, slices: int) -> tuple[int, list[int]]:
        """After so many slices of a second: the newest checkpoint, and the times of slices."""
        times = []
        for _ in range(slices):
            clocks.now_ms += 1_000
            run.feed([{"s": [(1, 1)]}])
            run.await_cut()
            assert run.controller.newest is not None
            times.append(run.controller.newest.processing_ms)
        assert run.controller.cut is not None
        return run.controller.cut.slice, times

    run = LocalRun(made, tmp_path, checkpoint_interval="3s")
    _, before = fed(run, 4)
    clocks.ahead_ms += leap_ms
    _, ahead = fed(run, 4)
    clocks.ahead_ms -= leap_ms
    cut, after = fed(run, 12)
    newest = run.controller.newest
    assert newest is not None
    assert newest.number - cut <= 3
    times = before + ahead + after
    assert times == sorted(times)
    rate = run.run.status().rows_per_s
    assert 0.5 < rate < 2
    run.stop()
    again = LocalRun(made, tmp_path, checkpoint_interval="3s")  # on a machine just set back
    clocks.ahead_ms -= DAY_MS
    cut, later = fed(again, 8)
    assert later[0] >= times[-1]
    assert later == sorted(set(later))
    assert again.controller.newest is not None
    assert again.controller.newest.number - cut <= 3
    again.kill()
