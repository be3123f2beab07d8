"""The machines of a run, and whose turn it is.

What is lost comes first: nothing else runs while partitions are rebuilt. Then the parts of what
comes back (comeback.py), before or beside slices; then the steps of a change of the placement,
and slices (schedule.py asks adjustment.py for the former). Every event ends here.
"""

from __future__ import annotations

from anabranch.control.adjustment import Adjustment
from anabranch.control.comeback import Comeback
from anabranch.control.ledgers import Ledgers
from anabranch.control.rebuild import Rebuild, RebuildState
from anabranch.control.schedule import Schedule, SliceState
from anabranch.control.self_scaling import SelfScaling
from anabranch.control.settings import ControlConfig, Past
from anabranch.control.story import Story
from anabranch.control.wishes import Wishes
from anabranch.model.commands import CatchUp, Command, PollNodes
from anabranch.model.plan import Plan


class Machines:
    """What they know of each other, and in which order they are asked for the next step."""

    def __init__(self, plan: Plan, config: ControlConfig, past: Past, story: Story) -> None:
        self.ledgers = Ledgers.of(plan, config, past)
        # Where rows may come out differently, a copy would not be one.
        self.wishes = Wishes(plan, config.strategy.copies and plan.repeatable)
        self.rebuild = Rebuild(plan, config, self.ledgers, self.wishes, story)
        self.comeback = Comeback(plan, config, self.ledgers, self.wishes, self.rebuild, story)
        self.adjustment = Adjustment(plan, self.ledgers, self.wishes, self.rebuild, story)
        self.schedule = Schedule(config, self.ledgers, self.adjustment, past.generation, story)
        self.scaling = SelfScaling(plan, config, past, self.ledgers, self.wishes, self.adjustment)

    @property
    def are_whole(self) -> bool:
        """Is everything that takes part in slices where it belongs, and nothing being replayed?"""
        return self.rebuild.whole and self.comeback.may_rest

    def go_on(self, now_ms: int) -> list[Command]:
        """The next step, whenever there may be one."""
        if self.rebuild.state is RebuildState.SEALING:
            if self.ledgers.checkpoints.in_flight:
                return [PollNodes()]
            return self.go_on_rebuilding(self.rebuild.next_stage(), now_ms)
        parts, nothing_else = self._parts(now_ms)
        return parts if nothing_else else parts + self.schedule.next(now_ms)

    def idle(self, now_ms: int) -> list[Command]:
        """No rows have come."""
        parts, nothing_else = self._parts(now_ms)
        commands = self.scale(now_ms) + parts
        return commands if nothing_else else commands + self.schedule.idle(now_ms)

    def scale(self, now_ms: int) -> list[Command]:
        """What the job wants of itself."""
        steady = self.are_whole and self.comeback.absent and not self.schedule.stopping
        return self.scaling.decide(now_ms, self.schedule.wall_ms, steady)

    def _parts(self, now_ms: int) -> tuple[list[Command], bool]:
        """Of what comes back beside slices, after one that was cut short; and must slices wait?"""
        self.schedule.beside, self.schedule.busy = self.comeback.beside, self.comeback.busy
        if not self.are_whole:
            return [], True
        if self.schedule.state is not SliceState.FREE:
            return [], False
        commands = self.comeback.step(now_ms, self.schedule.began_ms)
        if not commands:
            return [], False
        return self.come_back(commands, now_ms), not isinstance(commands[-1], CatchUp)

    def come_back(self, commands: list[Command], now_ms: int) -> list[Command]:
        """Go on where there is nothing to do for those that wait. A change of the placement waits
        for them."""
        if not commands:
            return self.go_on(now_ms)
        self.adjustment.rebuilding()
        return commands

    def go_on_rebuilding(self, commands: list[Command], now_ms: int) -> list[Command]:
        """Go on where there is nothing to rebuild. A change of the placement waits for a rebuild
        that is not its own switch."""
        if not commands:
            return self.go_on(now_ms)
        plan = self.rebuild.running
        if plan is None or not plan.adjusts:
            self.adjustment.rebuilding()
        return commands
