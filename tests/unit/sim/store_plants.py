"""Bugs to plant in the driver, in storage and in sinks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from node_plants import PLANTS
from plants import plant

from anabranch.driver import showing
from anabranch.driver.holding import Holding
from anabranch.driver.steps import Steps
from anabranch.errors import InvariantError, StorageError
from anabranch.node.protocol import source_task
from anabranch.node.protocol.carried import ChainError
from anabranch.node.protocol.host import DriverRequest, Host
from anabranch.node.protocol.partition import Output, Partition
from anabranch.sim.sinks import SimSink
from anabranch.sinks.staged import StagedSink
from anabranch.storage import journal, source_log, spark_offsets
from anabranch.storage.generations import Generation
from anabranch.storage.journal import Journal
from anabranch.storage.store import Store
from anabranch.upgrade import going_on

__all__ = ["PLANTS"]

# -- torn and refused writes ----------------------------------------------------------------------


@plant
def torn_line_refused(patch: pytest.MonkeyPatch) -> None:
    """A crash in the middle of an append makes the directory unreadable."""
    real = journal._parse
    patch.setattr(journal, "_parse", lambda line, path, n, last: real(line, path, n, last=False))


@plant
def refused_slice_taken_for_journalled(patch: pytest.MonkeyPatch) -> None:
    real = Holding.write_slice

    def write_slice(self: Holding, record: Any) -> None:
        with contextlib.suppress(StorageError):
            real(self, record)
        self.confirmed = record.number

    patch.setattr(Holding, "write_slice", write_slice)


@plant
def first_of_a_share_appears_before_the_others_are_written(patch: pytest.MonkeyPatch) -> None:
    real = source_log.write_share

    def write_share(store: Store, *name: Any) -> tuple[int, bool]:
        *where, chunks = name
        if len(chunks) > 1:
            told = (chunks[0][0], {**chunks[0][1], "share": "x"})
            made = store.create(source_log.log_name(*where), source_log._encoded(*told))
            if made is None:
                return 0, False
            for n, chunk in enumerate(chunks[1:], 1):
                later = source_log.log_name(where[0] + n, *where[1:])
                store.create(later, source_log._encoded(*chunk))
            return made, True
        return real(store, *where, chunks)

    from anabranch.sim import payload

    patch.setattr(payload, "write_share", write_share)


# -- two drivers ----------------------------------------------------------------------------------


@plant
def no_look_for_a_newer_driver_after_a_write(patch: pytest.MonkeyPatch) -> None:
    real = Journal.__init__
    patch.setattr(Journal, "__init__", lambda self, store, _=None: real(self, store))


@plant
def newer_driver_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Generation, "check", lambda self: None)


@plant
def generation_taken_that_is_claimed(patch: pytest.MonkeyPatch) -> None:
    def claim(store: Store, above: int) -> Generation:
        mine = Generation(store, above + 1)
        store.put(f"{mine.directory}/driver", [b"me"])
        return mine

    patch.setattr(Generation, "claim", staticmethod(claim))


# -- attempts, tasks and functions ----------------------------------------------------------------


@plant
def slower_attempt_sends_its_own_rows(patch: pytest.MonkeyPatch) -> None:
    def share(job: Any, request: Any, task: int, batch: Any) -> Any:
        logged = source_task._logged(job, request.plan, task)
        if logged is not None:
            job.finish_log(request.plan, task, logged)
            return logged, 0
        shares = job.compute(request, task, batch)
        size, _ = job.write_log(request.plan, task, shares)
        return shares[0], size

    patch.setattr(source_task, "_share", share)


@plant
def call_for_another_node_taken(patch: pytest.MonkeyPatch) -> None:
    def refuse_strange(self: Host[Any], request: DriverRequest) -> None:
        if request.generation < self._generation:
            raise InvariantError("an older driver")

    patch.setattr(Host, "_refuse_strange", refuse_strange)


@plant
def function_that_raised_taken_for_one_without_rows(patch: pytest.MonkeyPatch) -> None:
    real = Partition.apply

    def apply(self: Partition[Any], plan: Any, packets: Any) -> Output[Any]:
        try:
            return real(self, plan, packets)
        except ChainError:
            return real(self, plan, {e: [] for e in packets})

    patch.setattr(Partition, "apply", apply)


@plant
def request_from_within_a_step_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Steps, "_step_later", lambda self, event: None)


# -- sinks ----------------------------------------------------------------------------------------


@plant
def error_of_a_sink_swallowed(patch: pytest.MonkeyPatch) -> None:
    real = showing._shown

    def shown(*args: Any) -> Any:
        with contextlib.suppress(StorageError):
            return real(*args)
        return None

    patch.setattr(showing, "_shown", shown)


@plant
def target_not_asked_what_it_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagedSink, "_has", lambda self, held, slice_no, exposure: False)


@plant
def newest_slice_not_shown_at_a_start(patch: pytest.MonkeyPatch) -> None:
    real = showing.Showing.take_over

    def take_over(self: showing.Showing, job: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(showing.Showing, "show", lambda self, record, staged: {})
            real(self, job)

    patch.setattr(showing.Showing, "take_over", take_over)


@plant
def staged_rows_removed_before_they_are_shown(patch: pytest.MonkeyPatch) -> None:
    real = SimSink._deliver

    def deliver(self: SimSink, slice_no: int, exposure: str, files: Any) -> None:
        rows = {str(p): self.home.store.read(str(p)) for p in files}
        for path in {Path(p).parent for p in rows}:
            self.home.store.delete(str(path))
        for name, data in rows.items():
            if data is not None:
                self.home.store.create(name, [data])
        real(self, slice_no, exposure, files)

    patch.setattr(SimSink, "_deliver", deliver)


# -- what a driver starts with --------------------------------------------------------------------


@plant
def offsets_not_compared_with_the_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(spark_offsets, "misfit", lambda *args: None)


@plant
def topology_not_compared_with_the_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(going_on, "check_fit", lambda *args: None)


@plant
def another_parallelism_taken_for_the_one_before(patch: pytest.MonkeyPatch) -> None:
    """The state stays where it was, and rows go where the new layout says."""
    real = Holding._resume

    def resume(self: Holding, dropped: Any) -> Any:
        past = real(self, dropped)
        return replace(
            past, groups={c: g for c, g in past.groups.items() if c not in past.rescaled}
        )

    patch.setattr(Holding, "_resume", resume)


# -- numbers that grow wider ----------------------------------------------------------------------


@plant
def log_trimmed_by_its_names(patch: pytest.MonkeyPatch) -> None:
    """As text, slice 1000000000000 comes before slice 999999999999."""

    def trim(store: Store, below: int) -> None:
        for entry in store.names(source_log.DIRECTORY):
            if entry.partition("-")[0] < f"{below:012d}":
                store.delete(f"{source_log.DIRECTORY}/{entry}")

    patch.setattr(source_log, "trim", trim)


@plant
def segments_in_the_order_of_their_names(patch: pytest.MonkeyPatch) -> None:
    real = Journal._segments

    def segments(self: Journal) -> Any:
        return {(str(g), str(n)): name for (g, n), name in real(self).items()}

    def begin(self: Journal, head: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Journal, "_segments", real)
            real_begin(self, head)

    real_begin = Journal.begin
    patch.setattr(Journal, "begin", begin)
    patch.setattr(Journal, "_segments", segments)
