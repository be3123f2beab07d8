"""One simulated run from one seed."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.errors import AnabranchError
from anabranch.sim.checkers import Checkers, ViolationError
from anabranch.sim.cluster import Cluster
from anabranch.sim.disk import Disk
from anabranch.sim.driver import SimDriver
from anabranch.sim.faults import DriverCrashedError, Faults, RandomFaults
from anabranch.sim.workload import Workload, random_workload
from anabranch.sim.world import StuckError, World

STORY_LINES = 40


@dataclass(frozen=True)
class Outcome:
    """How a run went: what was violated, if anything, and the end of its story."""

    seed: int
    violation: str | None
    story: tuple[str, ...]
    slices: int
    steps: int
    counts: Counter[str] = field(default_factory=Counter)  # of faults and recoveries


def simulate(
    seed: int,
    job: Workload | None = None,
    faults: Callable[[World], Faults] = RandomFaults,
    machines: int | None = None,
    lines: int = STORY_LINES,
) -> Outcome:
    """Run a job to its end or to a violation; what is not given is drawn from the seed."""
    world = World(seed)
    job = job or random_workload(seed, world.dice)
    disk = Disk()
    cluster = Cluster(world, job, disk, faults(world))
    checkers = Checkers(cluster)
    for _ in range(machines or world.dice.randint(1, 5)):
        cluster.join()
    violation = None
    try:
        _lives(cluster, checkers)
        checkers.run_ended()
    except (ViolationError, StuckError) as e:
        violation = str(e)
    except Exception as e:  # whatever else ends a run is a finding, too
        where = traceback.extract_tb(e.__traceback__)[-1]
        told = f"the run ended with {type(e).__name__}: {e}"
        violation = told if isinstance(e, AnabranchError) else f"{told} ({where.name})"
    return Outcome(
        seed,
        violation,
        tuple(world.story(lines)),
        disk.newest_slice,
        world.steps,
        world.counts,
    )


def _lives(cluster: Cluster, checkers: Checkers) -> None:
    """Drivers, one after the other, until one of them ends gracefully with all batches done."""
    number = 0
    ended = False
    while not ended:
        number += 1
        try:
            driver = SimDriver(cluster, checkers, number)
            driver.live()
            ended = cluster.disk.committed_batch + 1 == len(cluster.job.batches)
        except DriverCrashedError:
            cluster.world.tell("the driver crashes")
            cluster.driver_crashed()
