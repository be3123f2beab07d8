"""What a changed topology takes over from the run before it.

The journal's head and slices go in, and come out as if the new topology had written them: state
under the names of the new chains, or a CheckpointMismatchError that says what to change. Nothing
on disk is touched: the driver journals the result when it begins.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from anabranch.errors import CheckpointMismatchError, StorageError
from anabranch.model.slices import Cut, SliceRecord
from anabranch.storage import checkpoint_store
from anabranch.storage.checkpoint_files import read_checkpoint
from anabranch.storage.credentials import masked
from anabranch.storage.journal import Head
from anabranch.storage.store import Store
from anabranch.upgrade.fit import (
    changes_late_slices,
    changes_replay,
    check_fit,
    clean_stop_needed,
    origins_of,
    rechained,
)

log = logging.getLogger("anabranch")


def continue_from(
    store: Store,
    head: Head,
    slices: Sequence[SliceRecord],
    fingerprint: Mapping[str, Any],
    dropped: Collection[str] = (),
) -> tuple[Head, tuple[SliceRecord, ...]]:
    """The head and all slices after its older cut, for the topology of `fingerprint`.

    `dropped` names operators that are gone and whose state is given up.
    """
    old, records = head.fingerprint, (*head.slices, *slices)
    refuse_misfit(store, head, slices, fingerprint, dropped)
    _tell(old, fingerprint, records)
    if changes_replay(old, fingerprint):
        # The older cut needs a replay that this topology cannot make, so the newer one has to do.
        _check_files(store, head.cut)
        head, records = replace(head, previous=None), records[-1:]
    if old["chains"] != fingerprint["chains"]:
        head = _rechained(head, fingerprint)
    return replace(head, slices=()), records


def refuse_misfit(
    store: Store,
    head: Head,
    slices: Sequence[SliceRecord],
    fingerprint: Mapping[str, Any],
    dropped: Collection[str] = (),
) -> None:
    """Where the topology cannot go on, say why. Changes nothing; `fingerprint` may be what a
    topology declares by itself."""
    old, records = head.fingerprint, (*head.slices, *slices)
    check_fit(old, fingerprint, store.where(), dropped)
    if head.behind and (reason := changes_late_slices(old, fingerprint)):
        raise _late_needed(store, head.behind, reason)
    reason = clean_stop_needed(old, fingerprint, head.cut, records)
    if reason is not None:
        raise _replay_needed(store, head.cut, records, reason)


def refuse_lost_state(store: Store, head: Head) -> None:
    """Where files are gone from both checkpoints that a restart could begin with, say which. A
    job with one of them goes back to its first slice."""
    if head.cut is None or head.previous is None:
        return
    cuts, there = (head.cut, head.previous), checkpoint_store.is_there
    gone = [next((f for f in _files(c) if not there(store, f)), None) for c in cuts]
    if None not in gone:
        raise _lost(store, gone[0], cuts[0])
    for chain in head.behind:  # covered by older ones
        covering = [c for c in (*cuts, *head.older) if chain in c.groups]
        lost = [next((f for f in _files(c, chain) if not there(store, f)), None) for c in covering]
        if covering and None not in lost:
            raise _lost(store, lost[0], covering[0])


def _lost(store: Store, file: str | None, cut: Cut) -> StorageError:
    return StorageError(
        f"the state of the job in {store.where()} is gone: {masked(str(file))} is missing, "
        f"which its checkpoint of slice {cut.slice} names; restore it from a copy, or "
        "start with a new checkpoint directory",
        path=store.where(),
    )


def _files(cut: Cut, chain: str | None = None) -> list[str]:
    """Of all chains, or of one."""
    return [
        f
        for partition, files in cut.files.items()
        if chain is None or partition.rpartition("/")[0] == chain
        for f in files
    ]


def _replay_needed(
    store: Store, cut: Cut | None, records: Sequence[SliceRecord], reason: str
) -> CheckpointMismatchError:
    newest, where = records[-1], store.where()
    after = newest.number - (cut.slice if cut else 0)
    count = f"{after} slices were" if after > 1 else "one slice was"
    told = f"{count} committed after the last checkpoint in {where}"
    if newest.chunks_left:
        told = f"{newest.chunks_left} slices of the newest batch are still to run in {where}"
    return CheckpointMismatchError(
        f"{told}, and this topology cannot run them: {reason}; start the topology that wrote them "
        "once more with available_now=True, let it end, and then start this one",
        directory=where,
    )


def _late_needed(store: Store, behind: Mapping[str, int], reason: str) -> CheckpointMismatchError:
    where, first = store.where(), min(behind.values())
    return CheckpointMismatchError(
        f"nodes were lost, and {', '.join(map(repr, sorted(behind)))} could not go on: the slices "
        f"from {first} on are still to be made up for in {where}, which this topology cannot do: "
        f"{reason}; start the topology that wrote them once more with enough nodes, stop it "
        "gracefully, and then start this one",
        directory=where,
    )


def _tell(old: Mapping[str, Any], new: Mapping[str, Any], records: Sequence[SliceRecord]) -> None:
    first = records[-1].number + 1 if records else 1
    for name in old["operators"]:
        if name not in new["operators"]:
            log.warning("the state of operator %r is dropped, as asked for", name)
    for name in new["operators"]:
        if name not in old["operators"]:
            log.info("operator %r is new: it starts empty with slice %d", name, first)


def _check_files(store: Store, cut: Cut | None) -> None:
    """Read every file of the cut: what it cannot restore must be found while there is a choice."""
    for file in _files(cut) if cut else []:
        try:
            read_checkpoint(store, file)
        except StorageError as e:
            raise StorageError(
                f"{e.message}; this topology can only begin with the newest checkpoint: start the "
                "one that wrote it, which goes on from the checkpoint before, stop it, and then "
                "start this one",
                **e.fields,
            ) from e


def _rechained(head: Head, fingerprint: Mapping[str, Any]) -> Head:
    """State and routing under the names of the chains that its operators are in now."""
    old = head.fingerprint
    before, now = old["chains"], fingerprint["chains"]
    groups = _renamed(head.groups, before, now)
    parallelism: dict[str, int] = dict(fingerprint["parallelism"])
    for chain in groups:
        origins = [o for o in origins_of(now[chain], before) if o in head.groups]
        parallelism[chain] = old["parallelism"][origins[0]]
    return replace(
        head,
        fingerprint={**old, "chains": now, "parallelism": parallelism},
        cut=head.cut and rechained(head.cut, before, now),
        previous=head.previous and rechained(head.previous, before, now),
        groups=groups,
        layouts={v: _renamed(x, before, now) for v, x in head.layouts.items()},
    )


def _renamed(
    layout: Mapping[str, tuple[int, ...]], before: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """A layout by the chains there are now, as far as they take over one layout."""
    found: dict[str, tuple[int, ...]] = {}
    for chain, operators in now.items():
        origins = {layout[o] for o in origins_of(operators, before) if o in layout}
        if len(origins) == 1:
            found[chain] = origins.pop()
    return found
