"""Virtual time, the dice, and the story of a run: everything random comes from one seed."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

STEP_MS = 6  # at most this passes between two things that happen
LEAP_MS, LEAPS = 100_000, 0.02  # of the wall clock, and how likely at each look
# Faults end within 800 steps; few seeds take more than 2,000.
MAX_STEPS = 8_000


class StuckError(BaseException):
    """The run does not come to an end."""


class ViolationError(BaseException):
    """Something that must never happen did."""


def violated(what: str) -> NoReturn:
    raise ViolationError(what)


class World:
    """The clock and what is due on it. Nothing happens but in `advance`, in order of time."""

    def __init__(self, seed: int, only: frozenset[int] | None = None) -> None:
        """Of the faults that the dice say, `only` those with these numbers happen, or all."""
        self.seed = seed
        self.only = only
        self.faults = 0
        self.dice = random.Random(seed)
        self.now_ms = 0
        self._ahead_ms = 0  # the wall clock
        self._clock_dice = random.Random(f"clock {seed}")  # it is looked at all the time
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._story: list[tuple[int, str, tuple[Any, ...]]] = []

    def schedule(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._due, (self.now_ms + delay_ms, self._scheduled, action))

    def advance(self, ms: int | None = None) -> None:
        """Let time pass, and with it whatever is due."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise StuckError(f"no end after {MAX_STEPS} steps")
        until = self.now_ms + (self.dice.randint(1, STEP_MS) if ms is None else ms)
        while self._due and self._due[0][0] <= until:
            self.now_ms, _, action = heapq.heappop(self._due)
            action()
        self.now_ms = until

    @property
    def wall_ms(self) -> int:
        """What the wall clock says; now and then somebody sets it."""
        if self._clock_dice.random() < LEAPS:
            self._ahead_ms = self._clock_dice.choice((0, 0, LEAP_MS, -LEAP_MS, 40, -40))
            self.counts["leaps of the clock"] += 1
            self.tell("the wall clock is set, to {} ms ahead", self._ahead_ms)
        return LEAP_MS + self.now_ms + self._ahead_ms

    def chance(self, share: float) -> bool:
        return share > 0 and self.dice.random() < share

    def fault(self, share: float) -> bool:
        """Does a fault happen here? They are numbered, so that a run can have fewer of them."""
        if not self.chance(share):
            return False
        self.faults += 1
        return self.only is None or self.faults - 1 in self.only

    def tell(self, what: str, *details: Any) -> None:
        """One line of the story; formatted only when somebody reads it."""
        self._story.append((self.now_ms, what, details))

    def story(self, lines: int) -> list[str]:
        """The newest lines, newest last."""
        return [
            f"{ms:>6} ms  {what.format(*details)}" for ms, what, details in self._story[-lines:]
        ]
