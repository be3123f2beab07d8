"""What goes wrong, and when. All of it must be harmless; how much may come at once is bounded.

Between two slices only a few faults strike: the controller takes ten tries without progress for a
state that kills its nodes. Faults end after a while, and from then on the run must finish.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.model.ids import NodeId
from anabranch.model.slices import Cut
from anabranch.sim.world import World

if TYPE_CHECKING:
    from anabranch.sim.cluster import Cluster
    from anabranch.sim.requests import Request, Requests

MAX_BETWEEN_SLICES = 4
MAX_MACHINES = 14


class DriverCrashedError(Exception):
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
    requests: float = 0.0  # before a batch, the user asks for a scaling or a drain
    write_ms: int = 5  # at most, from a seal to its file
    last_step: int = 500  # then faults end

    @staticmethod
    def drawn(dice: random.Random) -> Chances:
        """They differ from run to run, so that some runs are full of what others have little of."""
        strikes = {k: dice.choice((0.0, 1.0, 4.0)) for k in ("crash", "hang", "replace", "join")}
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

    def strike(self, kind: str, cluster: Cluster) -> None:
        """Called between any two calls and commands of a driver; `kind` says where."""

    def loses_packets(self) -> bool:
        return False

    def fills_disk(self) -> bool:
        return not self.ended and self.world.chance(self.chances.full_disk)

    def write_delay_ms(self) -> int:
        """From a seal to its file."""
        return self.world.dice.randint(1, 5 if self.ended else self.chances.write_ms)

    def reads(self, path: str, cluster: Cluster) -> None:
        """A node is about to read a checkpoint file, and the driver waits for it."""

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
        self._left = MAX_BETWEEN_SLICES

    @property
    def ended(self) -> bool:
        return self.world.steps > self.chances.last_step

    def slice_happened(self) -> None:
        self._left = MAX_BETWEEN_SLICES

    def _may(self, share: float) -> bool:
        return not self.ended and self._left > 0 and self.world.chance(share)

    def _count(self, what: str) -> None:
        self._left -= 1
        self.world.counts[what] += 1

    def loses_packets(self) -> bool:
        if not self._may(self.chances.lost_packets):
            return False
        self._count("packets lost")
        self.world.tell("packets are lost")
        return True

    def reads(self, path: str, cluster: Cluster) -> None:
        """Only a file of the newest cut that the older one does not need, while there is one to
        fall back on: more damage than that no two cuts can mend."""
        head = cluster.disk.head
        if head is None or head.cut is None or not self._may(self.chances.torn):
            return
        whole = bool(head.slices) and head.slices[0].number == 1
        falls_back = head.previous is not None or whole
        if falls_back and _has(head.cut, path) and not _has(head.previous, path):
            self._count("torn files")
            self.world.tell("{} is torn", path)
            cluster.disk.torn.add(path)

    def request(self, requests: Requests, nodes: list[NodeId]) -> Request | None:
        asks = self.world.chance(self.chances.requests)
        return requests.drawn(nodes) if asks else None

    def strike(self, kind: str, cluster: Cluster) -> None:
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
        elif up and what in ("crash", "hang", "replace"):
            self.world.counts[f"faults at {kind}"] += 1
            self._hit(what, up, cluster)

    def _hit(self, what: str, up: list[NodeId], cluster: Cluster) -> None:
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
