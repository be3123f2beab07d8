"""A fault before and after every step of an adjustment: of each node, of the driver, of both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from jobs import line

from anabranch.model.events import DrainRequested, ScaleRequested
from anabranch.model.ids import NodeId
from anabranch.sim import Outcome, simulate
from anabranch.sim.cluster import SimCluster
from anabranch.sim.faults import DriverCrashedError, Faults
from anabranch.sim.requests import Request, Requests
from anabranch.sim.world import World
from effort import LONG

MACHINES = 4
FAULTS = (*(f"n{i + 1}" for i in range(MACHINES)), "driver", "all")
SCRIPTS: dict[str, list[Request | str]] = {
    "up": [ScaleRequested("a", 4, 0)],
    "down": [ScaleRequested("a", 1, 0)],
    "drain": [DrainRequested(NodeId("n1"), 0)],
    "join": ["join"],
}


@dataclass
class Seen:
    """The steps from the first request to the first slice after its change."""

    kinds: list[str] = field(default_factory=list)


class Once(Faults):
    """The requests of a script after the third slice; one fault, so many steps after the first."""

    def __init__(
        self, world: World, script: list[Request | str], at: int, fault: str, seen: Seen
    ) -> None:
        super().__init__(world)
        self._script, self._at, self._fault, self._seen = list(script), at, fault, seen
        self._slices = 0
        self._asked = False
        self._over = False

    def slice_happened(self) -> None:
        self._slices += 1

    def request(self, requests: Requests, nodes: list[NodeId]) -> Request | None:
        if self._slices < 3 or not self._script or isinstance(self._script[0], str):
            return None
        if isinstance(self._script[0], DrainRequested) and self._script[0].node not in nodes:
            return None
        self._asked = True
        return self._script.pop(0)  # type: ignore[return-value]

    def strike(self, kind: str, cluster: SimCluster) -> None:
        if self._slices >= 3 and kind == "idle" and self._script == ["join"]:
            self._script.clear()
            self._asked = True
            cluster.join()
        if not self._asked or self._over:
            return
        journal = cluster.disk.journal
        if journal and any(r.placement > 1 for r in journal.after):
            self._over = True  # a slice under another placement
        self._seen.kinds.append(kind)
        if len(self._seen.kinds) == self._at:
            self._over = True
            if self._fault in ("driver", "all"):
                raise DriverCrashedError
            if not cluster.is_silent(NodeId(self._fault)):
                cluster.crash(NodeId(self._fault), noticed_after_ms=3)

    def takes_machines(self) -> bool:
        return self._fault == "all"


def run(script: str, at: int, fault: str) -> tuple[Outcome, Seen]:
    seen = Seen()
    job = line("a", "b", interval_ms=60, seed=1)
    outcome = simulate(
        1,
        job,
        lambda world: Once(world, SCRIPTS[script], at, fault, seen),
        machines=MACHINES - (script == "join"),
        lines=200,
    )
    return outcome, seen


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_fault_at_any_step_of_an_adjustment_is_harmless(script: str) -> None:
    quiet, seen = run(script, 0, "none")
    assert quiet.violation is None, quiet.story
    assert any("adjustment 2.0 from cut" in line for line in quiet.story)  # it was adjusted
    steps = seen.kinds
    for step in ("PreparePartitions", "prepare", "wave", "poll", "WriteHead", "recovery"):
        assert step in steps
    assert ("ReleaseNodes" in steps) == (script == "drain")
    met: Counter[str] = Counter()
    for at in range(1, len(steps) + 1, 1 if LONG else 2):
        for i, fault in enumerate(FAULTS):
            if not LONG and (at // 2 + i) % len(FAULTS):  # every other step with one of them
                continue
            outcome, _ = run(script, at, fault)
            told = f"{fault} fails at step {at}, {steps[at - 1]}: {outcome.violation}"
            assert outcome.violation is None, "\n".join((told, *outcome.story))
            met[fault] += 1
    assert met.keys() == set(FAULTS)
