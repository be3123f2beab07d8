"""What a job's checkpoint directory holds, without the job and without touching anything.

Reads the journal's newest head and the files of its newest cut into the operators' own states, as
a restart would; takes no lock, so it may run beside the job. A job that completes checkpoints in
the meantime deletes old files: then the newer cut is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa

from anabranch.errors import ConfigError, StorageError
from anabranch.model.slices import Cut, SliceRecord
from anabranch.operators.base import DELETED, GROUP
from anabranch.operators.state.aggregate_state import PAIR_OF
from anabranch.storage.checkpoint_files import piece_bytes, read_checkpoint
from anabranch.storage.files import directory as named
from anabranch.storage.journal import Head, Journal
from anabranch.storage.local import LocalStore
from anabranch.upgrade.kernel_settings import decode, decode_schema

MAX_ATTEMPTS = 5  # a job would have to complete two checkpoints during each of them
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OperatorState:
    """The state of one operator at the cut; `bytes` are those of its pieces on disk. An operator
    that waited for nodes at the newest cut has it from `cut`, an older one."""

    name: str
    type: str
    key: tuple[str, ...]
    partitions: int
    keys: int
    rows: int
    bytes: int
    cut: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory holds. `slices` were journalled after the newest cut. Operators that are
    `behind` wait for nodes: the first slice that each lacks."""

    topology: str
    generation: int
    cut: int | None
    previous: int | None
    slices: tuple[SliceRecord, ...]
    operators: tuple[OperatorState, ...]
    behind: Mapping[str, int] = field(default_factory=dict)


def read_state(directory: str | Path, operator: str) -> pa.Table:
    """The state of an operator at the newest checkpoint of the job in `directory`.

    One row per key (and window, rank, …): `_group`, the key columns, then the operator's own.
    """
    root = named(directory, "the checkpoint directory")

    def read(head: Head, _: Sequence[SliceRecord]) -> pa.Table:
        chain = _chain_of(root, head, operator)
        cut = _cut(root, head, chain)
        rows = [_empty_state(root, head, operator).snapshot()]
        rows += [_rows_of(s[operator], mine) for s, mine in _states(root, head, cut, chain)]
        return pa.concat_tables(rows).drop_columns([DELETED]).replace_schema_metadata()

    return _consistently(root, read)


def inspect(directory: str | Path) -> Checkpoint:
    """A directory's operators and slices. Reads all state, one partition at a time."""
    root = named(directory, "the checkpoint directory")

    def look(head: Head, slices: Sequence[SliceRecord]) -> Checkpoint:
        cut = head.cut
        after = [s for s in (*head.slices, *slices) if cut is None or s.number > cut.slice]
        return Checkpoint(
            topology=head.fingerprint["topology"],
            generation=head.generation,
            cut=cut.slice if cut else None,
            previous=head.previous.slice if head.previous else None,
            slices=tuple(after),
            operators=tuple(_summaries(root, head)) if cut else (),
            behind={
                operator: lacks
                for chain, lacks in head.behind.items()
                for operator in head.fingerprint["chains"].get(chain, ())
            },
        )

    return _consistently(root, look)


def _consistently(root: Path, read: Callable[[Head, Sequence[SliceRecord]], T]) -> T:
    """Read from one cut; again from a newer one if its files went away meanwhile."""
    head, slices = _journal(root)
    for _ in range(MAX_ATTEMPTS):
        try:
            return read(head, slices)
        except StorageError:
            known = head.cut
            head, slices = _journal(root)
            if head.cut == known:
                raise
    raise StorageError(
        f"the job on {root} completed checkpoints faster than they could be read; try again",
        path=str(root),
    )


def _journal(root: Path) -> tuple[Head, list[SliceRecord]]:
    journal = Journal(LocalStore(root))
    try:
        found = journal.read()
    except StorageError:  # a segment may go away between being listed and being read
        found = journal.read()
    if found is None:
        raise ConfigError(
            f"{root} is not the checkpoint directory of a job: it has no journal; name the "
            "directory given as checkpoint",
            directory=str(root),
        )
    return found


def _chain_of(root: Path, head: Head, operator: str) -> str:
    chains = head.fingerprint["chains"]
    for chain, operators in chains.items():
        if operator in operators:
            return str(chain)
    known = ", ".join(n for names in chains.values() for n in names) or "none"
    raise ConfigError(
        f"no operator {operator!r} has state in {root}; those that have are: {known}",
        operator=operator,
    )


def _cut(root: Path, head: Head, chain: str) -> Cut:
    """The newest that has the chain's state."""
    cut = head.cut_of(chain)
    if cut is None:
        raise ConfigError(
            f"the job on {root} has not completed a checkpoint yet; its slices are in the journal "
            "and the source log until it does",
            directory=str(root),
        )
    if _waits_without(head, chain, cut):
        raise ConfigError(
            f"no checkpoint in {root} has the state of {chain!r}, which waits for nodes and lacks "
            f"the slices from {head.behind[chain]} on; read it when the job has made up for them",
            directory=str(root),
        )
    return cut


def _waits_without(head: Head, chain: str, cut: Cut) -> bool:
    return chain in head.behind and chain not in cut.groups


def _empty_state(root: Path, head: Head, operator: str) -> Any:
    """The operator's own empty state, from what the journal says about it."""
    known = head.fingerprint["operators"][operator]
    try:
        kernel = decode(known["kernel"])
        inputs = [decode_schema(s) for s in known["inputs"]]
        return kernel.new_state(head.fingerprint["key_groups"], *inputs)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(
            f"this version cannot read the state of operator {operator!r} in {root} ({e}); use "
            "the version of Anabranch that wrote it",
            operator=operator,
        ) from e


def _states(
    root: Path, head: Head, cut: Cut, chain: str
) -> Iterator[tuple[dict[str, Any], np.ndarray[Any, Any]]]:
    """Partition by partition: the states of the chain's operators, and its key groups."""
    names = head.fingerprint["chains"][chain]
    groups = np.asarray(cut.groups.get(chain, ()), dtype=np.int64)
    for index in range(int(groups.max()) + 1 if len(groups) else 0):
        states = {n: _empty_state(root, head, n) for n in names}
        for file in cut.files.get(f"{chain}/{index}", ()):
            for operator, tables in read_checkpoint(LocalStore(root), file).items():
                if operator in states:
                    for table in tables:
                        states[operator].load(table)
        yield states, np.flatnonzero(groups == index)


def _rows_of(state: Any, groups: np.ndarray[Any, Any]) -> pa.Table:
    table: pa.Table = state.snapshot()
    mine = np.isin(table.column(GROUP).to_numpy(), groups) & ~np.asarray(table.column(DELETED))
    return table if mine.all() else table.filter(pa.array(mine))


def _summaries(root: Path, head: Head) -> Iterator[OperatorState]:
    for chain, names in head.fingerprint["chains"].items():
        cut = head.cut_of(chain)
        if cut is None or _waits_without(head, chain, cut):
            continue
        keys, rows = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        partitions = 0
        for states, groups in _states(root, head, cut, chain):
            partitions += 1
            for name, state in states.items():
                table = _rows_of(state, groups)
                rows[name] += table.num_rows
                keys[name] += _distinct(table, head.fingerprint["operators"][name]["keys"])
        sizes = _bytes_of(root, cut, chain)
        for name in names:
            known = head.fingerprint["operators"][name]
            yield OperatorState(
                name=name,
                type=known["type"],
                key=tuple(known["keys"]),
                partitions=partitions,
                keys=keys[name],
                rows=rows[name],
                bytes=sizes.get(name, 0),
                cut=cut.slice,
            )


def _distinct(table: pa.Table, keys: Sequence[str]) -> int:
    """Keys of a partition; a key is never in two. Values of distinct counts stand for none."""
    if PAIR_OF in table.schema.names:
        table = table.filter(table.column(PAIR_OF).is_null())
    frame = pl.from_arrow(table.select(list(keys)))
    assert isinstance(frame, pl.DataFrame)
    return frame.n_unique() if frame.height else 0


def _bytes_of(root: Path, cut: Cut, chain: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    files = {f for key, fs in cut.files.items() if key.rpartition("/")[0] == chain for f in fs}
    for file in sorted(files):
        for name, size in piece_bytes(LocalStore(root), file).items():
            sizes[name] = sizes.get(name, 0) + size
    return sizes
