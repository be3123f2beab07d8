"""A node is lost after a silence; a driver that slept has heard nobody, and nobody is lost."""

from __future__ import annotations

import pytest

from anabranch.control.policies.liveness import Liveness
from anabranch.model.ids import NodeId

ONE, TWO = NodeId("1"), NodeId("2")
TIMEOUT_S, LOOK_S = 5.0, 0.05


class Watch:
    """A driver's looks, one every 50 ms while it is awake; nodes beat as they are told."""

    def __init__(self) -> None:
        self.liveness = Liveness(TIMEOUT_S)
        self.now_s = 1_000.0
        self.liveness.look(self.now_s)

    def awake(self, seconds: float, *beating: NodeId) -> set[NodeId]:
        """Who was found silent meanwhile."""
        found: set[NodeId] = set()
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            for node in beating:
                self.liveness.heard(node)
            found |= self.liveness.look(self.now_s).keys()
        return found

    def asleep(self, seconds: float) -> set[NodeId]:
        self.now_s += seconds
        return set(self.liveness.look(self.now_s))


def test_a_node_is_silent_after_its_time_out() -> None:
    watch = Watch()
    assert watch.awake(1, ONE, TWO) == set()
    assert watch.awake(4.9, ONE) == set()
    assert watch.awake(0.3, ONE) == {TWO}
    (silent_s,) = watch.liveness.look(watch.now_s).values()
    assert silent_s == pytest.approx(5.2, abs=2 * LOOK_S)


@pytest.mark.parametrize("pause_s", [5.1, 60.0, 10 * 3_600.0])
def test_a_pause_of_the_driver_is_nobodys_silence(pause_s: float) -> None:
    watch = Watch()
    watch.awake(1, ONE, TWO)
    assert watch.asleep(pause_s) == set()
    # They are slow to come back, too: a connection may have to be made again.
    assert watch.awake(4) == set()
    assert watch.awake(10, ONE, TWO) == set()


def test_a_node_that_went_during_a_pause_is_found_a_time_out_later() -> None:
    watch = Watch()
    watch.awake(1, ONE, TWO)
    watch.asleep(60)
    assert watch.awake(4.8, TWO) == set()
    assert watch.awake(0.4, TWO) == {ONE}


def test_a_driver_that_stumbles_again_and_again_still_finds_it() -> None:
    watch = Watch()
    watch.awake(1, ONE, TWO)
    found: set[NodeId] = set()
    for _ in range(7):
        found |= watch.asleep(3) | watch.awake(1, TWO)
    assert found == {ONE}


def test_one_that_never_spoke_or_was_forgotten_is_not_silent() -> None:
    watch = Watch()
    watch.awake(1, ONE)
    watch.liveness.forget(ONE)
    assert watch.awake(20) == set()
    assert not watch.liveness.knows(ONE)


def test_a_process_that_starts_anew_has_more_time() -> None:
    watch = Watch()
    watch.awake(1, ONE)
    watch.liveness.heard(ONE, patience_s=15.0)
    assert watch.awake(19.9) == set()
    assert watch.awake(0.3) == {ONE}
