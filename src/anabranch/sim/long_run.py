"""A job that has run for weeks: its numbers are about to grow wider."""

from __future__ import annotations

import random
from typing import Any

from anabranch.model.ids import PartitionId
from anabranch.model.placement import even_groups
from anabranch.model.slices import Cut, Feed, SliceRecord
from anabranch.sim.payload import JOB, encode
from anabranch.sim.store import SimStore
from anabranch.sim.workload import Workload, fingerprint
from anabranch.storage.checkpoint_files import checkpoint_name, write_pieces
from anabranch.storage.journal import Head, Journal

NUMBERS = (1, 9, 2**31 - 1, 10**9 - 1)  # of drivers, placements and owners


def long_run(job: Workload, store: SimStore, dice: random.Random) -> None:
    """Write what it has left, with no key in its state."""
    newest, groups = job.begins_after, job.plan.graph.key_groups
    generation, version, epoch = (dice.choice(NUMBERS) for _ in range(3))
    layout = {c.name: even_groups(groups, c.parallelism) for c in job.plan.node_chains}
    partitions = [PartitionId(c, i) for c, gs in layout.items() for i in sorted(set(gs))]
    cuts = [_cut(n, epoch, partitions, layout, store) for n in (newest, newest - 1)]
    record = SliceRecord(
        number=newest,
        feed=Feed.NONE.value,
        batch=None,
        batch_end=True,
        source_tasks=0,
        chunks_left=0,
        watermark_us=None,
        processing_ms=0,
        placement=version,
        generation=generation,
    )
    Journal(store).begin(
        Head(
            generation=generation,
            fingerprint=fingerprint(job.plan),
            cut=cuts[0],
            previous=cuts[1],
            slices=(record,),
            epochs=dict.fromkeys(partitions, epoch),
            groups=layout,
            placement_version=version,
        )
    )


def _cut(
    slice_no: int,
    epoch: int,
    partitions: list[PartitionId],
    layout: dict[str, tuple[int, ...]],
    store: SimStore,
) -> Cut:
    files = {}
    for partition in partitions:
        what = (partition, slice_no, epoch)
        name = checkpoint_name(*what)
        nothing: list[tuple[str, int, Any]] = [(partition.chain, 0, ({}, -1, True))]
        write_pieces(store, name, JOB, *what, nothing, lambda piece: [encode(piece)])
        files[f"{partition.chain}/{partition.index}"] = [name]
    return Cut(slice_no, files, {c: list(g) for c, g in layout.items()})
