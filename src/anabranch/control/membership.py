"""Nodes come, are lost, or have another process than before: whose affair that is.

A loss ends the slice in hand, which has not happened. What was lost is rebuilt at once where the
nodes that are left suffice (rebuild.py), and else waits and comes back (comeback.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.control.machines import Machines
from anabranch.control.rebuild import RebuildState
from anabranch.control.settings import Past
from anabranch.model import events
from anabranch.model.commands import Command
from anabranch.model.ids import NodeId
from anabranch.model.recovery import Cause

Reported = events.SliceRan | events.PartitionsRecovered | events.CaughtUp | events.NodesPolled


class Membership:
    """Who takes part in the run."""

    def __init__(self, machines: Machines, past: Past) -> None:
        self._machines = machines
        self._owners = machines.ledgers.owners
        self._past = past

    def joined(self, event: events.NodesJoined) -> list[Command]:
        machines, owners, now_ms = self._machines, self._owners, event.now_ms
        rebuild, comeback = machines.rebuild, machines.comeback
        owners.join(event.nodes, event.hosts)
        if not comeback.absent:
            return machines.come_back(comeback.joined(), now_ms)
        if rebuild.state is not RebuildState.AWAITING or not owners.nodes:
            machines.adjustment.spread()
            return machines.go_on(now_ms)
        if owners.in_force is None:
            if comeback.starts(self._past):
                return machines.come_back(comeback.start(self._past), now_ms)
            return machines.go_on_rebuilding(rebuild.start(self._past), now_ms)
        if comeback.takes(rebuild.lost):
            return machines.come_back(comeback.lost((), Cause.NODES_CAME), now_ms)
        commands = rebuild.again(frozenset(), Cause.NODES_CAME)
        return machines.go_on_rebuilding(commands, now_ms)

    def lost(self, event: events.NodesLost) -> list[Command]:
        machines, owners = self._machines, self._owners
        noted = self._backups_for([n for n in event.nodes if n in owners.nodes])
        owners.leave(event.nodes)
        machines.adjustment.nodes_lost(event.nodes)
        machines.schedule.interrupt(event.logged)
        gone = owners.owned_by(event.nodes) if owners.in_force else frozenset()
        if machines.comeback.takes(gone):
            owners.forget_processes(event.nodes)
            commands = machines.comeback.lost(gone, Cause.NODES_LOST)
            return noted + machines.come_back(commands, event.now_ms)
        commands = machines.rebuild.nodes_lost(event.nodes, event.now_ms)
        return noted + machines.go_on_rebuilding(commands, event.now_ms)

    def replaced(
        self, event: Reported, logged: int | None, asked: Sequence[NodeId] | None = None
    ) -> list[Command]:
        """[] unless reports come from another node process than before."""
        nodes = self._owners.replaced(event.reports, asked)
        if not nodes:
            return []
        machines = self._machines
        machines.schedule.interrupt(logged)
        noted = self._backups_for(nodes)
        if machines.comeback.absent:
            commands = machines.rebuild.processes_replaced(nodes)
            return noted + machines.go_on_rebuilding(commands, event.now_ms)
        self._owners.forget_processes(nodes)
        lost = self._owners.owned_by(nodes)
        commands = machines.comeback.lost(lost, Cause.PROCESS_REPLACED)
        return noted + machines.come_back(commands, event.now_ms)

    def _backups_for(self, lost: Sequence[NodeId]) -> list[Command]:
        """These nodes, or all that they had, are gone; who backs up from now on, if others do."""
        placement, ledgers = self._owners.in_force, self._machines.ledgers
        if placement is None:
            return []
        noted = ledgers.backups.nodes_lost(len(lost), placement, ledgers.slices.next_slice)
        return [noted] if noted else []
