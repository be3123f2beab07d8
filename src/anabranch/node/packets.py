"""Packets: the rows of a slice for a partition, and how they are cut, carried and found again.

Rows of one (edge, slice, source partition) for all partitions of one node travel as one
**bundle**: one Arrow table sorted by partition, and the row range of each. A packet is such a
range, possibly empty. All bundles from one task to one node form one **blob**, the only thing
Spark's shuffle carries: exactly one per pair of task and node, so that a missing one is noticed.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.model.reports import Failure, SourceReport, Staged
from anabranch.operators.hashing import key_groups
from anabranch.storage.checkpoint_files import decode_table, encode_table

_HEADER_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Route:
    """How rows of one edge find their partition and node."""

    keys: tuple[str, ...]
    key_groups: int
    partition_of_group: npt.NDArray[np.uint16]
    node_of_partition: npt.NDArray[np.uint16]
    node_of_copy: Mapping[int, int] = field(default_factory=dict)  # where partitions have one


@dataclass(frozen=True, slots=True)
class Bundle:
    """Packets of one source partition on one edge for the partitions of one node."""

    edge: int
    slice: int
    source: int  # index of the source partition (or source task)
    epoch: int  # of the source partition (or generation of the driver)
    ranges: dict[int, tuple[int, int]]  # partition index → rows
    table: pa.Table | None  # None: every packet is empty


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What a source task has to report; it rides to one node and from there to the driver."""

    sources: tuple[SourceReport, ...] = ()
    staged: tuple[Staged, ...] = ()
    failures: tuple[Failure, ...] = ()
    # Of a replay: rows by source, per slice and the source task that logged them.
    replayed: Mapping[tuple[int, int], Mapping[str, int]] = field(default_factory=dict)


class Inbox:
    """Bundles that arrived on a node, until their slice is applied and confirmed."""

    def __init__(self) -> None:
        self._bundles: dict[tuple[int, int], dict[int, Bundle]] = {}  # (slice, edge) → source

    def add(self, bundle: Bundle) -> None:
        """Keep a bundle; a repeated one is dropped."""
        self._bundles.setdefault((bundle.slice, bundle.edge), {}).setdefault(bundle.source, bundle)

    def missing(self, slice_no: int, sources: Mapping[int, int]) -> str | None:
        """What a slice lacks, given the number of sources per edge; None when it is complete."""
        for edge, count in sources.items():
            have = self._bundles.get((slice_no, edge), {})
            if len(have) < count:
                absent = [s for s in range(count) if s not in have]
                return f"edge {edge}: packets of {len(absent)} of {count} sources, e.g. {absent[0]}"
        return None

    def packets(self, slice_no: int, edges: Iterable[int], partition: int) -> dict[int, list[Any]]:
        """A partition's rows per edge, in the order of the sources."""
        found: dict[int, list[Any]] = {}
        for edge in edges:
            bundles = self._bundles.get((slice_no, edge), {})
            for source in sorted(bundles):
                bundle = bundles[source]
                if bundle.table is not None and partition in bundle.ranges:
                    start, stop = bundle.ranges[partition]
                    found.setdefault(edge, []).append(bundle.table.slice(start, stop - start))
        return found

    def drop(self, upto: int) -> None:
        """Forget slices that every partition has applied."""
        self._bundles = {k: v for k, v in self._bundles.items() if k[0] > upto}


def cut(
    table: pa.Table,
    route: Route,
    nodes: int,
    edge: int,
    slice_no: int,
    source: int,
    epoch: int,
    only: Collection[int] | None = None,
) -> list[Bundle]:
    """Cut a table into one bundle per node; the order of rows of a key is kept.

    `only` names the partitions to cut for, where not all of them need the rows.
    """
    if route.node_of_copy and only is None:  # a recovery rebuilds no copies
        own = replace(route, node_of_copy={})
        homes = route.node_of_partition.copy()
        homes[list(route.node_of_copy)] = list(route.node_of_copy.values())
        elsewhere, copied = replace(own, node_of_partition=homes), set(route.node_of_copy)
        return [
            _joined(bundle, more)
            for bundle, more in zip(
                cut(table, own, nodes, edge, slice_no, source, epoch),
                cut(table, elsewhere, nodes, edge, slice_no, source, epoch, copied),
                strict=True,
            )
        ]
    empty = [Bundle(edge, slice_no, source, epoch, {}, None) for _ in range(nodes)]
    if table.num_rows == 0:
        return empty
    groups = key_groups(table, route.keys, route.key_groups)
    partitions = route.partition_of_group[groups]
    count = len(route.node_of_partition)
    if only is not None and len(only) < count:
        wanted = np.isin(partitions, list(only))
        table, partitions = table.filter(pa.array(wanted)), partitions[wanted]
    # Sort by node, then partition: rank partitions in that order first, then rows by rank.
    order = np.lexsort((np.arange(count), route.node_of_partition))
    rank = np.empty(count, dtype=np.uint16)
    rank[order] = np.arange(count, dtype=np.uint16)
    row_rank = rank[partitions]
    if count > 1:
        table = table.take(pa.array(np.argsort(row_rank, kind="stable")))
    bounds = np.concatenate(([0], np.cumsum(np.bincount(row_rank, minlength=count))))
    ranges: list[dict[int, tuple[int, int]]] = [{} for _ in range(nodes)]
    first = [0] * nodes
    last = [0] * nodes
    for position, partition in enumerate(order):
        start, stop = int(bounds[position]), int(bounds[position + 1])
        node = int(route.node_of_partition[partition])
        if not ranges[node] and last[node] == 0:
            first[node] = start
        last[node] = stop
        if stop > start:
            ranges[node][int(partition)] = (start - first[node], stop - first[node])
    return [
        Bundle(edge, slice_no, source, epoch, r, table.slice(first[n], last[n] - first[n]))
        if r
        else empty[n]
        for n, r in enumerate(ranges)
    ]


def _joined(bundle: Bundle, more: Bundle) -> Bundle:
    """One bundle for a node's own partitions and the copies it has."""
    if bundle.table is None or more.table is None:
        return bundle if more.table is None else more
    first = bundle.table.num_rows
    moved = {p: (start + first, stop + first) for p, (start, stop) in more.ranges.items()}
    table = pa.concat_tables([bundle.table, more.table]).combine_chunks()
    return replace(bundle, ranges=bundle.ranges | moved, table=table)


def encode_blob(bundles: Sequence[Bundle], facts: SideFacts | None = None) -> list[Any]:
    """The blob as a list of buffers, to be joined or written one after the other."""
    buffers: list[Any] = []
    metas = []
    for b in bundles:
        data = encode_table(b.table) if b.table is not None else None
        metas.append((b.edge, b.slice, b.source, b.epoch, b.ranges, data.size if data else 0))
        if data is not None:
            buffers.append(data)
    header = pickle.dumps((metas, facts), protocol=pickle.HIGHEST_PROTOCOL)
    return [len(header).to_bytes(_HEADER_LENGTH, "big"), header, *buffers]


def decode_blob(blob: Any) -> tuple[list[Bundle], SideFacts | None]:
    """The bundles of a blob; tables share its memory."""
    view = memoryview(blob)
    start = _HEADER_LENGTH + int.from_bytes(view[:_HEADER_LENGTH], "big")
    metas, facts = pickle.loads(view[_HEADER_LENGTH:start])
    bundles = []
    for edge, slice_no, source, epoch, ranges, size in metas:
        table = decode_table(view[start : start + size]) if size else None
        bundles.append(Bundle(edge, slice_no, source, epoch, ranges, table))
        start += size
    return bundles, facts
