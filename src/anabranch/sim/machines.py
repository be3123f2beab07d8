"""Simulated machines: executors that come, crash, hang and are given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.model.ids import NodeId
from anabranch.sim.faults import Faults
from anabranch.sim.payload import SimJob, SimNode, SimPartition, SimProcess
from anabranch.sim.world import World


@dataclass
class Machine:
    """An executor: its node process, and whether it runs."""

    process: SimNode
    dead: bool = False
    hung: bool = False


class Machines:
    """All there ever were, and what the driver knows about them."""

    def __init__(self, world: World, carried: SimJob, faults: Faults) -> None:
        self.world = world
        self.carried = carried
        self.faults = faults
        self.chances = faults.chances
        self.machines: dict[NodeId, Machine] = {}
        self.ready: list[NodeId] = []  # as the driver knows it
        self.lost: list[NodeId] = []  # declared; never used again
        self.on_install: Callable[[SimNode, SimPartition], None] = lambda node, partition: None
        self._incarnations = 0

    def join(self) -> None:
        node = NodeId(f"n{len(self.machines) + 1}")
        self.machines[node] = Machine(self._process())
        self.ready.append(node)
        self.world.tell("{} joins", node)

    def _process(self) -> SimNode:
        self._incarnations += 1
        memory = self.world.dice.choice((0, 10, 10**9))
        process = SimProcess(
            f"i{self._incarnations}", self._in_background, self.faults.fills_disk, memory
        )
        return SimNode(process, self.carried, self.on_install)

    def crash(self, node: NodeId, noticed_after_ms: int) -> None:
        machine = self.machines[node]
        machine.dead = True
        self.world.tell("{} crashes", node)
        self.world.schedule(noticed_after_ms, lambda: self._declare_lost(node))

    def hang(self, node: NodeId, for_ms: int, patience_ms: int) -> None:
        """It does not answer; after a while the driver gives it up, and later it wakes."""
        machine = self.machines[node]
        machine.hung = True
        self.world.tell("{} hangs", node)

        def wake() -> None:
            machine.hung = False
            zombie = ", a zombie" if node in self.lost else ""
            self.world.tell("{} wakes{}", node, zombie)

        def give_up() -> None:
            if machine.hung:
                self._declare_lost(node)

        self.world.schedule(for_ms, wake)
        self.world.schedule(patience_ms, give_up)

    def replace_process(self, node: NodeId) -> None:
        self.machines[node].process = self._process()
        self.world.tell("the node process of {} is replaced", node)

    def _declare_lost(self, node: NodeId) -> None:
        if node in self.ready:
            self.ready.remove(node)
            self.lost.append(node)
            self.world.tell("the driver hears that {} is lost", node)
            if self.world.chance(self.chances.rejoined):
                self.world.schedule(self.world.dice.randint(1, 150), self.join)

    def is_alive(self, process: SimNode) -> bool:
        return any(m.process is process and not m.dead for m in self.machines.values())

    def is_silent(self, node: NodeId | None) -> bool:
        return node is not None and (self.machines[node].dead or self.machines[node].hung)

    def _in_background(self, process: SimProcess, work: Callable[[], None]) -> None:
        """Threads write and load files at their own pace, while their machine runs."""
        machine = next((m for m in self.machines.values() if m.process.process is process), None)

        def go_on() -> None:
            if machine is None or machine.dead or machine.process.process is not process:
                return
            if machine.hung:
                self.world.schedule(20, go_on)
            else:
                work()

        self.world.schedule(self.faults.write_delay_ms(), go_on)
