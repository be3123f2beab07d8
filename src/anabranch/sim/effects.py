"""The effects of a simulated driver: the real ones. Before each command time passes and faults
strike; what comes of it is told to the checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anabranch.driver.effects import Effects
from anabranch.model.commands import (
    CatchUp,
    Command,
    FinishRun,
    NoteBackups,
    NoteDecision,
    PreparePartitions,
    RecoverPartitions,
    ReleaseNodes,
    RunSlice,
    TrimStorage,
    WriteHead,
    WriteLate,
    WriteSlice,
)
from anabranch.model.events import (
    Event,
    NodesJoined,
    NodesLost,
    RestoreFailed,
    SliceRan,
)
from anabranch.model.recovery import Cause, RecoveryPlan
from anabranch.model.slices import Feed
from anabranch.sim.world import violated

if TYPE_CHECKING:
    from anabranch.sim.driver import SimDriver


class SimEffects(Effects):
    """The real effects, watched."""

    def __init__(self, *parts: object, driver: SimDriver) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._driver = driver
        self._world = driver.world
        self._disk = driver.disk
        self._checkers = driver.checkers
        self._faults = -1  # that there had been when the newest recovery began
        self._sealed: int | bool = False  # the last slice of a stage that a checkpoint ends

    def execute(self, command: Command) -> Event | None:
        self._driver.cluster.step(type(command).__name__)
        self._before(command)
        weather = self._driver.cluster.weather
        # A torn file that nobody is told of counts as whole: later cuts will build upon it.
        known, weather.torn = weather.torn, set(weather.torn)
        found: set[str] = set()
        segment = self._segment
        try:
            event = super().execute(command)
            if isinstance(event, RestoreFailed):
                found = weather.torn
        finally:
            weather.torn = known | found
            if isinstance(command, WriteHead) and self._segment not in (None, segment):
                self._head_written(command)
            if isinstance(command, WriteHead | WriteSlice | WriteLate):
                self._checkers.sync()
        self._after(command, event)
        return event

    @property
    def _segment(self) -> str | None:
        """The newest of the journal, if it is this driver's."""
        journal = self._disk.journal
        mine = journal and journal.name.startswith(f"journal/{self._holding.generation}-")
        return journal.name if journal and mine else None

    def _before(self, command: Command) -> None:
        match command:
            case RecoverPartitions() | CatchUp() | PreparePartitions():
                self._checkers.asked(command.plan.placement.nodes, self._driver.nodes)
                if not isinstance(command, PreparePartitions):
                    self._tell_recovery(command.plan)
                    self._checkers.waiting.recovers(command.plan)
            case ReleaseNodes():
                self._checkers.released(command.nodes)
            case RunSlice():
                if self._driver.stopping and command.plan.feed is Feed.LIVE:
                    violated(f"slice {command.plan.number} takes a batch after a stop")
                self._tell_slice(command)
                assert self._placement is not None
                self._checkers.slice_begins(command, self._placement)
            case _:
                pass

    def _head_written(self, command: WriteHead) -> None:
        free = [n for n in self._driver.nodes if n not in self._driver.requests.drains]
        self._checkers.head(command, free)
        self._disk.head = command
        # A rebuild may go through an older layout: what that fulfils may be still to do.
        sure = command.placement.groups == command.layout
        self._driver.requests.journalled(command.placement, sure)
        cuts = [c.slice for c in (command.cut, command.previous, *command.older) if c]
        self._world.counts["heads"] += 1
        version = command.placement.version
        self._world.tell("the journal begins anew: cuts {}, placement {}", cuts, version)

    def _after(self, command: Command, event: Event | None) -> None:
        match event:
            case NodesLost():
                self._driver.lost(event.nodes)
            case NodesJoined():
                self._driver.joined(event.nodes)
            case RestoreFailed():
                self._world.counts["restores failed"] += 1
                self._world.tell("the recovery met a torn checkpoint")
            case SliceRan():
                assert isinstance(command, RunSlice)
                assert self._placement is not None
                self._checkers.slice_ran(command, self._placement, event.reports)
                if self._driver.run is not None:
                    self._checkers.waiting.in_vain(self._driver.run.controller)
            case _:
                pass
        match command:
            case WriteHead() | TrimStorage():
                self._checkers.after(command)
            case ReleaseNodes():
                self._driver.released(command.nodes)
                self._world.counts["released"] += len(command.nodes)
            case NoteBackups():
                what = "begun" if command.backups else "ended"
                self._world.counts[f"backups {what if command.why else 'chosen anew'}"] += 1
                chosen = " ".join(map(str, sorted(command.backups)))
                self._world.tell("{} back up from now on", chosen or "none")
            case NoteDecision():
                self._world.counts["decisions"] += 1
                self._world.counts["keys balanced"] += command.decision.kind == "balance"
                self._world.tell("{}", command.decision)
            case FinishRun():
                self._world.tell("the run ends")
            case _:
                pass

    def _caught_up(self) -> Event:
        assert self._catching_up is not None
        while not self._catching_up[1].done():
            self._driver.cluster.step("beside")
            self._driver.cluster.go_on_beside()
        return super()._caught_up()

    # -- the story -----------------------------------------------------------------------------

    def _tell_slice(self, command: RunSlice) -> None:
        plan = command.plan
        assert self._placement is not None
        self._world.tell(
            "slice {} runs: {}, batch {}, attempt {}{} on {} (placement {}){}",
            plan.number, plan.feed.value, plan.batch, plan.attempt,
            ", sealed" if plan.seal else "", " ".join(self._placement.nodes), plan.placement,
            f" without {' '.join(sorted(plan.paused))}" if plan.paused else "",
        )  # fmt: skip

    def _tell_recovery(self, plan: RecoveryPlan) -> None:
        counts, faults = self._world.counts, self._world.faults
        next_stage, self._sealed = plan.cut == self._sealed, plan.seals and plan.next_slice - 1
        again = plan.cause is Cause.RECOVERY_LACKED and plan.part == 0 and not next_stage
        if again and faults == self._faults:
            violated("a recovery lacked something, though nothing had gone wrong")
        self._faults = faults
        counts["recoveries"] += 1
        counts["parts"] += plan.part > 0
        counts["adjustments"] += plan.adjusts
        counts["stages"] += plan.seals
        counts["shadows"] += len(plan.shadows)
        counts["senders"] += len(plan.senders)
        counts["promoted"] += len(plan.promoted)
        counts["comebacks"] += bool(plan.late) and plan.part == 0
        counts["comebacks in parts"] += bool(plan.late) and plan.part > 0
        self._world.tell(
            "{} {}.{} from cut {}: {}; promoted {}; slices {}; shadows {}; senders {}; late {}",
            "adjustment" if plan.adjusts else "recovery",
            plan.placement.version,
            plan.part,
            plan.cut,
            " ".join(f"{p}→{plan.placement.owners[p].node}" for p in sorted(plan.restored)),
            " ".join(map(str, sorted(plan.promoted))) or "none",
            [s.number for s in plan.slices],
            " ".join(map(str, sorted(plan.shadows))) or "none",
            " ".join(map(str, sorted(plan.senders))) or "none",
            dict(plan.late) or "none",
        )
