"""What comes of reports: a slice has happened, or runs again; partitions are whole, or are rebuilt
once more; checkpoint files are durable, and a cut is complete.

Whatever reports say of another node process than before is a loss (membership.py) and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.control import verdict
from anabranch.control.machines import Machines
from anabranch.control.membership import Membership
from anabranch.control.rebuild import RebuildState
from anabranch.model import events
from anabranch.model.commands import (
    AwaitNodes,
    Command,
    FailRun,
    RecoverPartitions,
    TrimStorage,
)
from anabranch.model.recovery import Cause
from anabranch.model.reports import NodeReport


class Outcomes:
    """Of what the nodes were asked for."""

    def __init__(self, machines: Machines, membership: Membership) -> None:
        self._machines = machines
        self._membership = membership
        self._ledgers = machines.ledgers

    def slice_ran(self, event: events.SliceRan) -> list[Command]:
        machines, schedule = self._machines, self._machines.schedule
        plan = schedule.reported(event.number)
        logged = event.source_tasks if event.logged else None
        replaced = self._membership.replaced(event, logged, schedule.nodes)
        if replaced:
            return replaced
        error = verdict.first_failure(event.reports, f"slice {plan.number}", plan.number)
        if error is not None:
            return [FailRun(error)]
        if verdict.lacking(event.reports):
            schedule.interrupt(logged)
            return self._lacking(plan.number, event)
        machines.rebuild.tries.progress()
        machines.comeback.slice_ran(schedule.began_ms)
        commands = schedule.happened(plan, event)
        placement, took = self._ledgers.owners.placement, (schedule.began_ms, event.now_ms)
        choice = self._ledgers.backups.choose(event.reports, plan, placement, *took)
        commands += [choice] if choice else []
        machines.scaling.observe(plan, event.reports, *took)
        alone = machines.comeback.absent
        self._ledgers.costs.observe(placement, event.reports, *took, alone)
        commands += machines.scale(event.now_ms)
        if plan.seal:
            checkpoints = self._ledgers.checkpoints
            checkpoints.sealed(plan.number, placement, schedule.began_ms, plan.paused)
        commands += self._durable(event.reports)
        if schedule.waiting_batch is not None and not schedule.stop_asked:
            return commands  # it is offered again: between two slices, others have their turn
        return commands + machines.go_on(event.now_ms)

    def _lacking(self, slice_no: int, event: events.SliceRan) -> list[Command]:
        """Partitions were not there, or packets were lost: the slice runs again."""
        rebuild, comeback = self._machines.rebuild, self._machines.comeback
        if comeback.absent:
            commands = rebuild.lacked(slice_no, event.reports)
            return self._machines.go_on_rebuilding(commands, event.now_ms)
        lost = verdict.not_hosted(event.reports)
        too_often = rebuild.tries.lacked_too_often(slice_no, event.reports)
        if too_often is not None:
            return [FailRun(too_often)]
        commands = comeback.lost(lost, Cause.INPUT_LACKED) if lost else []
        return self._machines.come_back(commands, event.now_ms)

    def recovered(self, event: events.PartitionsRecovered) -> list[Command]:
        machines, rebuild = self._machines, self._machines.rebuild
        if machines.comeback.replaying:
            return self.part_done(event)
        replaced = self._membership.replaced(event, None, rebuild.expected().nodes)
        if replaced:
            return replaced
        commands = rebuild.recovered(event.reports, event.now_ms)
        if rebuild.state in (RebuildState.REPLAYING, RebuildState.AWAITING):
            return machines.go_on_rebuilding(commands, event.now_ms)
        commands += self._durable(event.reports)
        if rebuild.whole:
            machines.adjustment.rebuilt()
            machines.schedule.reopen()
            commands += machines.adjustment.release()
        return commands + machines.go_on(event.now_ms)

    def part_done(self, event: events.PartitionsRecovered | events.CaughtUp) -> list[Command]:
        """Something has made up for a part of what it lacks."""
        machines, comeback = self._machines, self._machines.comeback
        if isinstance(event, events.CaughtUp) and event.error is not None:
            return [FailRun(event.error)]
        replaced = self._membership.replaced(event, None, comeback.expected().nodes)
        if replaced:
            return replaced
        commands = comeback.recovered(event.reports)
        if commands and isinstance(commands[-1], RecoverPartitions | AwaitNodes | FailRun):
            return machines.come_back(commands, event.now_ms)
        if comeback.absent:
            machines.schedule.reopen()
            machines.adjustment.spread()
            commands += machines.adjustment.release()
        return commands + self._durable(event.reports) + machines.go_on(event.now_ms)

    def unreadable(self, event: events.RestoreFailed) -> list[Command]:
        """A checkpoint is."""
        machines = self._machines
        if machines.comeback.replaying:
            return machines.come_back(machines.comeback.torn(event.error), event.now_ms)
        return machines.go_on_rebuilding(machines.rebuild.torn(event.error), event.now_ms)

    def polled(self, event: events.NodesPolled) -> list[Command]:
        """What goes wrong between slices (a full disk, a lost node) must end the waiting too."""
        replaced = self._membership.replaced(event, None)
        if replaced:
            return replaced
        newest = self._ledgers.newest_slice
        error = verdict.first_failure(event.reports, f"after slice {newest}", newest)
        if error is not None:
            return [FailRun(error)]
        return self._durable(event.reports) + self._machines.go_on(event.now_ms)

    def _durable(self, reports: Sequence[NodeReport]) -> list[Command]:
        """Checkpoint files that became durable; a completed cut moves the restart point."""
        machines, ledgers = self._machines, self._ledgers
        checkpoints, placement = ledgers.checkpoints, ledgers.owners.placement
        full = any(r.disk_full for r in reports)
        heard = {r.node for r in reports} >= set(placement.nodes)
        machines.schedule.disk_full = full or (machines.schedule.disk_full and not heard)
        cut = checkpoints.written(c for r in reports for c in r.checkpoints)
        if checkpoints.broken:
            machines.adjustment.start_over("full files will take the place of those it loads ahead")
        if cut is None:
            return []
        ledgers.slices.trim(checkpoints.replay_from)
        machines.adjustment.unite()
        trimmed = TrimStorage(checkpoints.replay_from, checkpoints.keep_files)
        commands: list[Command] = [ledgers.head(), trimmed]
        covers_all = cut.groups.keys() >= placement.groups.keys()
        if covers_all and machines.rebuild.whole and machines.comeback.absent:
            noted = ledgers.backups.all_in_a_cut()
            commands += [noted] if noted else []
        return commands
