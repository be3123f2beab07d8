"""One simulated run from one seed."""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from anabranch.control.tries import MAX_TRIES
from anabranch.errors import AnabranchError, CheckpointLockedError, ClusterError
from anabranch.model.graph import Kind
from anabranch.sim.checkers import Checkers
from anabranch.sim.cluster import SimCluster
from anabranch.sim.disk import Disk
from anabranch.sim.driver import SimDriver
from anabranch.sim.faults import DriverCrashedError, Faults, RandomFaults
from anabranch.sim.long_run import long_run
from anabranch.sim.payload import JOB
from anabranch.sim.sinks import Target
from anabranch.sim.store import SimStore
from anabranch.sim.workload import Workload, random_workload
from anabranch.sim.world import StuckError, ViolationError, World, violated

STORY_LINES = 40
# What may lose a partition, or make a try lack something.
TROUBLES = ("crashes", "hangs", "replaced", "packets lost", "misplaced calls", "torn files")


@dataclass(frozen=True)
class Outcome:
    """How a run went: what was violated, if anything, and the end of its story."""

    seed: int
    violation: str | None
    story: tuple[str, ...]
    slices: int
    steps: int
    counts: Counter[str] = field(default_factory=Counter)  # of faults and recoveries
    faults: int = 0  # that the dice said


class EndedError(BaseException):
    """An error that nothing was done for has ended a run: a finding, too."""

    def __init__(self, error: AnabranchError) -> None:
        super().__init__(str(error))
        self.error = error


def simulate(
    seed: int,
    job: Workload | None = None,
    faults: Callable[[World], Faults] = RandomFaults,
    machines: int | None = None,
    lines: int = STORY_LINES,
    only: frozenset[int] | None = None,
) -> Outcome:
    """Run a job to its end or to a violation; what is not given is drawn from the seed. `only`
    faults with these numbers happen, if it is given."""
    world = World(seed, only)
    job = job or random_workload(seed, world.dice)
    cluster = SimCluster(world, job, _disk(world, job), faults(world))
    checkers = Checkers(cluster)
    if job.begins_after:
        checkers.begin_after(cluster.disk.slices[-1])
    for _ in range(machines or world.dice.randint(1, 5)):
        cluster.join()
    violation, of_controller = None, ()
    try:
        with _silence():
            _lives(cluster, checkers)
        checkers.run_ended()
    except (ViolationError, StuckError) as e:
        violation = str(e)
    except EndedError as e:
        violation = f"the run ended with {type(e.error).__name__}: {e.error.message}"
        of_controller = e.error.fields.get("story", ())
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        violation = f"the run ended with {type(e).__name__}: {e} ({where.name})"
    return Outcome(
        seed,
        violation,
        (*world.story(lines), *of_controller),
        cluster.disk.newest_slice - job.begins_after,
        world.steps,
        world.counts,
        world.faults,
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What a driver would log of simulated losses is in the story."""
    log = logging.getLogger("anabranch")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _disk(world: World, job: Workload) -> Disk:
    """Now and then the store is one that cannot append, and a sink one that remembers nothing."""
    sinks = [o.name for o in job.plan.graph.operators if o.kind is Kind.SINK]
    targets = {name: Target(name, forgets=world.chance(0.3)) for name in sinks}
    store = SimStore(appends=world.chance(0.7))
    disk = Disk(store, targets)
    store.write("identity", json.dumps({"format": 1, "job": JOB, "inherits": False}).encode())
    if job.begins_after:
        long_run(job, store, world.dice)
    return disk


def _lives(cluster: SimCluster, checkers: Checkers, number: int = 0) -> None:
    """Drivers, one after the other, until one of them ends gracefully with all batches done."""
    ended = False
    while not ended:
        number += 1
        cluster.excuses.clear()
        troubles = _troubles(cluster)
        driver = SimDriver(cluster, checkers, number)
        cluster.replace_driver = partial(_replaced, cluster, checkers, number)
        try:
            error = driver.live()
        except DriverCrashedError:
            cluster.world.tell("the driver crashes")
            cluster.driver_crashed()
            continue
        if error is None and CheckpointLockedError in cluster.excuses:
            violated("a driver that was replaced went on to its end")
        if _troubles(cluster) - troubles >= MAX_TRIES:
            # By design: one partition may have met them all, after it had none at the start.
            cluster.excuses.add(ClusterError)
        if error is not None:
            if not isinstance(error, tuple(cluster.excuses)):
                raise EndedError(error)
            cluster.world.counts[f"runs ended by {type(error).__name__}"] += 1
            cluster.world.tell("the run ends with a {}", type(error).__name__)
        ended = cluster.disk.committed_batch + 1 == len(cluster.job.batches) and error is None
        ended = ended or isinstance(error, CheckpointLockedError)


def _troubles(cluster: SimCluster) -> int:
    return sum(cluster.world.counts[what] for what in TROUBLES)


def _replaced(cluster: SimCluster, checkers: Checkers, number: int) -> None:
    """While a driver pauses, others take over and finish the job; then it goes on."""
    mine = {*cluster.excuses, CheckpointLockedError}
    cluster.replace_driver = lambda: None
    _lives(cluster, checkers, number)
    cluster.replace_driver = lambda: None
    cluster.excuses = mine
