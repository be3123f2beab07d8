"""The part of a start that needs no Spark: whatever can be refused without it is refused here.

A cluster takes many times longer to start than everything else. So the directory is locked, the
past is read and the targets of sinks are looked at first. Two invariants: the lock that was taken
to look is the one that the run holds until its end; and a start that is refused has changed
nothing, so that what is claimed (the directory, a target) is claimed later, by the run.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NoReturn

from anabranch.driver.endpoint import Controlled, Endpoint
from anabranch.driver.options import RunOptions
from anabranch.driver.preparing import JobParts, backup_chains, check_paths
from anabranch.driver.starting import announce, newest_phase
from anabranch.driver.status import JobStatus
from anabranch.errors import AdjustmentError
from anabranch.model.behind import Behind
from anabranch.model.slices import SliceRecord
from anabranch.node.arrow.schemas import declared
from anabranch.sinks import Home, refuse_lost_slices
from anabranch.storage.identity import find_identity, new_identity
from anabranch.storage.journal import DirectoryLock, Journal
from anabranch.storage.local import LocalStore
from anabranch.storage.spark_offsets import refuse_misfit_offsets
from anabranch.upgrade.going_on import refuse_lost_state, refuse_misfit


class Opening:
    """A job whose directory is this process's; not yet one that runs."""

    def __init__(self, parts: JobParts, checkpoint: Path, options: RunOptions) -> None:
        self.parts = parts
        self.options = options
        self.root = checkpoint.absolute()
        self.store = LocalStore(self.root)
        self._endpoint: Endpoint | None = None
        self._behind = Behind()
        announce(f"opening the checkpoint directory {checkpoint}")
        check_paths(parts.sinks)
        backup_chains(parts.plan, options.backing_up)
        self._lock = DirectoryLock(self.root)
        try:
            self._newest = self._read_past()
            self._look_at_sinks()
        except BaseException:
            self.close()
            raise

    def _read_past(self) -> SliceRecord | None:
        """The newest slice; refused where the topology cannot go on from it."""
        found = Journal(self.store).read()
        if found is None:
            return None
        head, slices = found
        dropped = self.options.drop_state
        refuse_misfit(self.store, head, slices, declared(self.parts.plan), dropped)
        if not dropped:
            refuse_lost_state(self.store, head)
        records = (*head.slices, *slices)
        if not records:
            return None
        self._behind = Behind(head.behind, records[-1].number)
        refuse_lost_slices(records, self._shown(), self.parts.sinks, self.store)
        return records[-1]

    def _shown(self) -> dict[str, int]:
        """The newest slice that each sink is to have shown."""
        feeds = self.parts.plan.evaluating
        return {name: self._behind.shown(feeds.get(name, ())) for name in self.parts.sinks}

    def _look_at_sinks(self) -> None:
        job, shown = find_identity(self.store) or new_identity(self.store), self._shown()
        self.bind_sinks(None)
        for name, sink in self.parts.sinks.items():
            sink.look(job, shown[name])

    def bind_sinks(self, spark: Any) -> None:
        topology = self.parts.plan.graph
        for name, sink in self.parts.sinks.items():
            aside = topology.by_name[name].puts_aside
            sink.bind(Home(topology.name, name, self.root, spark, aside))

    def ready_for_spark(self) -> None:
        """For a run on Spark: its offsets belong to the journal, and `anabranch status` finds it
        from now on."""
        refuse_misfit_offsets(self.root, self._newest)
        self._endpoint = Endpoint(self.root, _Starting(self.parts.plan.graph.name))

    def runs(self, job: Controlled) -> None:
        """From now on the job itself answers."""
        if self._endpoint is not None:
            self._endpoint.answers_for(job)

    def close(self) -> None:
        """Let go of the directory; may be called again."""
        if self._endpoint is not None:
            with contextlib.suppress(OSError):
                self._endpoint.close()
        self._lock.release()


class _Starting:
    """Answers for a job that does not run yet."""

    def __init__(self, topology: str) -> None:
        self._topology = topology

    def status(self) -> JobStatus:
        return JobStatus(self._topology, "starting", newest_phase())

    def scale(self, operator: str, parallelism: int) -> NoReturn:
        self._refuse()

    def add_nodes(self, count: int) -> NoReturn:
        self._refuse()

    def drain(self, node: str) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AdjustmentError("the job is still starting; ask again when it runs")
