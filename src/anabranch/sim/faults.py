"""What goes wrong, and when. All of it must be harmless; how much may come at once is bounded.

Between two slices only a few faults strike: the controller takes ten tries without progress for a
state that kills its nodes. Faults end after a while, and from then on the run must finish.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.errors import StorageError
from anabranch.model.ids import NodeId
from anabranch.model.slices import Cut
from anabranch.sim.world import World

if TYPE_CHECKING:
    from anabranch.sim.cluster import SimCluster
    from anabranch.sim.requests import Request, Requests

MAX_BETWEEN_SLICES, MANY = 4, 10**9  # the latter, no limit, in every fifth run
MAX_MACHINES = 14


class DriverCrashedError(BaseException):
    """The driver's process ends here; only what is on disk stays."""


@dataclass(frozen=True)
class Chances:
    """How likely what is, each time it could happen."""

    repeated: float = 0.0  # a call is made, or a blob delivered, twice
    late: float = 0.0  # a copy of a call arrives later, when nobody waits for it
    late_when_cut_short: float = 0.0  # the same for a call whose job was cancelled before it
    late_ms: int = 400  # at most
    rejoined: float = 1.0  # a machine joins some time after another one was lost
    lost_packets: float = 0.0
    full_disk: float = 0.0  # backups of a node find no room on its disk
    torn: float = 0.0  # a checkpoint file of the newest cut cannot be read
    struck: float = 0.0  # one of `strikes` happens
    strikes: Mapping[str, float] = field(default_factory=lambda: {"crash": 1.0})  # weights
    stored: float = 0.0  # one of `storms` happens at a write of the driver's
    storms: Mapping[str, float] = field(default_factory=lambda: {"crash": 1.0})  # weights
    refused: float = 0.0  # a write of a task or a node is refused: its run ends
    overlapping: float = 0.0  # a source task runs twice at once
    misplaced: float = 0.0  # a call comes to another node first
    raises: float = 0.0  # a user's function raises: its run ends
    calls_back: float = 0.0  # a sink's function, or an observer, asks for something
    sink_refuses: float = 0.0  # before or after it has taken a slice: its run ends
    misfit: float = 0.0  # a driver starts with others' offsets, or another topology: it is refused
    rescaled: float = 0.0  # … or with another parallelism
    requests: float = 0.0  # before a batch, the user asks for a scaling or a drain
    write_ms: int = 5  # at most, from a seal to its file
    last_step: int = 500  # then faults end

    @staticmethod
    def drawn(dice: random.Random) -> Chances:
        """They differ from run to run, so that some runs are full of what others have little of."""
        strikes = {k: dice.choice((0.0, 1.0, 4.0)) for k in ("crash", "hang", "replace", "join")}
        strikes["most"] = dice.choice((0.0, 0.0, 1.0, 4.0))  # crashes of most machines at once
        strikes["crash"] += 2
        strikes["driver"] = dice.choice((0.0, 0.25, 1.0))  # costs most: everything is restored
        return Chances(
            repeated=dice.choice((0.0, 0.1, 0.3)),
            late=dice.choice((0.0, 0.05, 0.2)),
            late_when_cut_short=dice.choice((0.2, 0.8)),
            late_ms=dice.choice((60, 400)),
            rejoined=dice.choice((0.3, 0.9, 1.0)),
            lost_packets=dice.choice((0.0, 0.0, 0.02)),
            full_disk=dice.choice((0.0, 0.0, 0.05)),
            torn=dice.choice((0.0, 0.1, 0.3)),
            struck=dice.choice((0.0, 0.01, 0.03, 0.08)),
            stored=dice.choice((0.0, 0.01, 0.05)),
            storms={k: dice.choice((0.0, 1.0, 3.0)) for k in ("crash", "refuse", "pause")},
            refused=dice.choice((0.0, 0.0, 0.005)),
            overlapping=dice.choice((0.0, 0.05, 0.2)),
            misplaced=dice.choice((0.0, 0.02)),
            raises=dice.choice((0.0, 0.0, 0.006)),
            calls_back=dice.choice((0.0, 0.0, 0.1)),
            sink_refuses=dice.choice((0.0, 0.0, 0.02)),
            misfit=dice.choice((0.0, 0.3)),
            rescaled=dice.choice((0.0, 0.5)),
            strikes=strikes,
            requests=dice.choice((0.0, 0.2, 0.5, 0.9)),
            write_ms=dice.choice((10, 40, 300)),
            last_step=dice.randint(100, 800),
        )


class Faults:
    """A world without faults; subclasses say what happens."""

    def __init__(self, world: World, chances: Chances | None = None) -> None:
        self.world = world
        self.chances = chances or Chances()

    @property
    def ended(self) -> bool:
        return True

    def strike(self, kind: str, cluster: SimCluster) -> None:
        """Called between any two calls and commands of a driver; `kind` says where."""

    def loses_packets(self) -> bool:
        return False

    def fills_disk(self) -> bool:
        return not self.ended and self.world.fault(self.chances.full_disk)

    def write_delay_ms(self) -> int:
        """From a seal to its file."""
        return self.world.dice.randint(1, 5 if self.ended else self.chances.write_ms)

    def reads(self, path: str, cluster: SimCluster) -> None:
        """A node is about to read a checkpoint file, and the driver waits for it."""

    def driver_writes(self, name: str, data: bytes, cluster: SimCluster) -> None:
        """The driver is about to write."""

    def driver_has_written(self, name: str, cluster: SimCluster) -> None:
        """The driver has written, and does not know it yet."""

    def task_writes(self, name: str, cluster: SimCluster) -> None:
        """A node or a source task is about to write."""

    def may(self, what: str, share: float) -> bool:
        """Does something happen that is counted as `what`?"""
        return False

    def slice_happened(self) -> None:
        """A slice was journalled."""

    def request(self, requests: Requests, nodes: list[NodeId]) -> Request | None:
        """What the user asks for before the next batch."""
        return None

    def takes_machines(self) -> bool:
        """Do the machines end with the driver?"""
        return self.world.chance(0.4)


class RandomFaults(Faults):
    """Chosen by the world's dice."""

    def __init__(self, world: World, chances: Chances | None = None) -> None:
        super().__init__(world, chances or Chances.drawn(world.dice))
        self._most = MANY if world.seed % 5 == 4 else MAX_BETWEEN_SLICES
        self._left = self._most

    @property
    def ended(self) -> bool:
        return self.world.steps > self.chances.last_step

    def slice_happened(self) -> None:
        self._left = self._most

    def _may(self, share: float) -> bool:
        return not self.ended and self._left > 0 and self.world.fault(share)

    def may(self, what: str, share: float) -> bool:
        if not self._may(share):
            return False
        self._count(what)
        return True

    def _count(self, what: str) -> None:
        self._left -= 1
        self.world.counts[what] += 1

    def loses_packets(self) -> bool:
        if not self._may(self.chances.lost_packets):
            return False
        self._count("packets lost")
        self.world.tell("packets are lost")
        return True

    def reads(self, path: str, cluster: SimCluster) -> None:
        """Only a file of a chain's newest cut that its older one does not need, while there is one
        to fall back on: more damage than that no two cuts can mend."""
        disk = cluster.disk
        if not disk.cuts or not self._may(self.chances.torn):
            return
        whole = bool(disk.slices) and disk.slices[0].number == 1
        chains = {c for cut in disk.cuts for c in cut.groups}
        found = [disk.covering(c)[:2] for c in sorted(chains)]
        mended = all(
            len(cuts) == 2 or whole if _has(cuts[0], path) else True for cuts in found
        ) and not any(_has(cut, path) for cuts in found for cut in cuts[1:])
        if mended and any(_has(cuts[0], path) for cuts in found):
            self._count("torn files")
            self.world.tell("{} is torn", path)
            cluster.weather.torn.add(path)

    def driver_writes(self, name: str, data: bytes, cluster: SimCluster) -> None:
        """A crash may leave a beginning of what was to be appended."""
        storm = self._storm()
        store = cluster.disk.store
        if storm == "crash" and name in store.files and name.startswith("journal/"):
            self._count("torn appends")
            torn = data[: self.world.dice.randrange(len(data))]
            store.write(name, store.files[name] + torn)
        if storm == "pause" and name.startswith("generations/"):
            return  # before its claim it is nobody: the one that starts meanwhile is the older one
        self._break(storm, f"before it writes {name}", cluster)

    def driver_has_written(self, name: str, cluster: SimCluster) -> None:
        """What is refused here has happened all the same."""
        self._break(self._storm(), f"when it has written {name}", cluster)

    def _storm(self) -> str | None:
        if not self._may(self.chances.stored):
            return None
        weights = self.chances.storms
        if not any(weights.values()):
            return None
        return self.world.dice.choices([*weights], [*weights.values()])[0]

    def _break(self, storm: str | None, when: str, cluster: SimCluster) -> None:
        if storm == "crash":
            self._count("driver crashes")
            self.world.counts["driver crashes at a write"] += 1
            self.world.tell("the driver crashes {}", when)
            raise DriverCrashedError
        if storm == "refuse":
            self._count("writes refused")
            self.world.tell("the driver is refused, {}", when)
            cluster.excuses.add(StorageError)
            raise StorageError("no space is left")
        if storm == "pause":
            self._count("drivers that pause")
            self.world.tell("the driver pauses, {}, and another one starts", when)
            cluster.replace_driver()
            self.world.tell("the driver that was replaced goes on")

    def task_writes(self, name: str, cluster: SimCluster) -> None:
        if self.may("writes of tasks refused", self.chances.refused):
            self.world.tell("the write of {} is refused", name)
            cluster.excuses.add(StorageError)
            raise StorageError("no space is left")

    def request(self, requests: Requests, nodes: list[NodeId]) -> Request | None:
        asks = self.world.fault(self.chances.requests)
        return requests.drawn(nodes) if asks else None

    def strike(self, kind: str, cluster: SimCluster) -> None:
        if not self._may(self.chances.struck):
            return
        weights = self.chances.strikes
        what = self.world.dice.choices([*weights], [*weights.values()])[0]
        up = [n for n in cluster.ready if not cluster.is_silent(n)]
        if what == "join" and len(cluster.machines) < MAX_MACHINES:
            self.world.counts["joins"] += 1
            cluster.join()
        elif what == "driver":
            self._count("driver crashes")
            self.world.counts[f"driver crashes at {kind}"] += 1
            raise DriverCrashedError
        elif what == "most":
            self._hit_most(up, cluster)
        elif up and what in ("crash", "hang", "replace"):
            self.world.counts[f"faults at {kind}"] += 1
            self._hit(what, up, cluster)

    def _hit_most(self, up: list[NodeId], cluster: SimCluster) -> None:
        """Crashes that belong together: of two machines at least, and not of the last one."""
        most = min(len(up) - 1, self._left)
        if most < 2:
            return
        self.world.counts["crashes of most machines"] += 1
        for node in self.world.dice.sample(up, self.world.dice.randint(2, most)):
            self._count("crashes")
            cluster.crash(node, noticed_after_ms=self.world.dice.randint(1, 200))

    def _hit(self, what: str, up: list[NodeId], cluster: SimCluster) -> None:
        dice = self.world.dice
        most = min(len(up), self._left)
        for node in dice.sample(up, dice.choice((1, 1, 1, 1, most))):
            self._count({"crash": "crashes", "hang": "hangs", "replace": "replaced"}[what])
            if what == "crash":
                cluster.crash(node, noticed_after_ms=dice.randint(1, 40))
            elif what == "hang":
                cluster.hang(node, for_ms=dice.randint(5, 500), patience_ms=60)
            else:
                cluster.replace_process(node)


def _has(cut: Cut | None, path: str) -> bool:
    return cut is not None and any(path in files for files in cut.files.values())
