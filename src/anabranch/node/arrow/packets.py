"""Packets as Arrow tables: how they are cut, and how they travel.

What a bundle has for the partitions of one node is one table sorted by partition, and the row range
of each. All bundles from one task to one node form one **blob**, the only thing Spark's shuffle
carries.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.model.ids import NodeId
from anabranch.model.placement import Placement
from anabranch.model.plan import Edge
from anabranch.node.protocol.exchange import Bundle, Parcel
from anabranch.operators.rows.hashing import key_groups
from anabranch.storage.checkpoint_files import decode_table, encode_table

_HEADER_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Route:
    """How rows of one edge find their partition and node."""

    keys: tuple[str, ...]
    key_groups: int
    nodes: int
    partition_of_group: npt.NDArray[np.uint16]
    node_of_partition: npt.NDArray[np.uint16]
    node_of_copy: Mapping[int, int] = field(default_factory=dict)  # where partitions have one


def route_of(edge: Edge, placement: Placement, nodes: Sequence[NodeId], groups: int) -> Route:
    """The routing of one edge under a placement, with nodes numbered as in `nodes`. Those may be a
    few of the placement's, where nothing is sent to partitions of others."""
    position = dict.fromkeys(placement.nodes, 0) | {n: i for i, n in enumerate(nodes)}
    owners = placement.partitions(edge.target)
    node_of = np.zeros(len(owners), dtype=np.uint16)
    for partition in owners:
        node_of[partition.index] = position[placement.owners[partition].node]
    partition_of = np.asarray(placement.groups[edge.target], dtype=np.uint16)
    copies = {p.index: position[placement.copies[p]] for p in owners if p in placement.copies}
    return Route(edge.keys, groups, len(nodes), partition_of, node_of, copies)


@dataclass(frozen=True, slots=True)
class RowRanges:
    """Packets: rows sorted by partition."""

    ranges: dict[int, tuple[int, int]]  # partition index → rows
    table: pa.Table

    def of(self, partition: int) -> pa.Table | None:
        if partition not in self.ranges:
            return None
        start, stop = self.ranges[partition]
        return self.table.slice(start, stop - start)


def cut(
    table: pa.Table, route: Route, only: Collection[int] | None = None
) -> list[RowRanges | None]:
    """Cut a table into packets per node; the order of rows of a key is kept.

    `only` names the partitions to cut for, where not all of them need the rows.
    """
    if route.node_of_copy and only is None:  # a recovery rebuilds no copies
        own = replace(route, node_of_copy={})
        homes = route.node_of_partition.copy()
        homes[list(route.node_of_copy)] = list(route.node_of_copy.values())
        elsewhere, copied = replace(own, node_of_partition=homes), set(route.node_of_copy)
        cuts = zip(cut(table, own), cut(table, elsewhere, copied), strict=True)
        return [_joined(mine, more) for mine, more in cuts]
    if table.num_rows == 0:
        return [None] * route.nodes
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
    ranges: list[dict[int, tuple[int, int]]] = [{} for _ in range(route.nodes)]
    first = [0] * route.nodes
    last = [0] * route.nodes
    for position, partition in enumerate(order):
        start, stop = int(bounds[position]), int(bounds[position + 1])
        node = int(route.node_of_partition[partition])
        if not ranges[node] and last[node] == 0:
            first[node] = start
        last[node] = stop
        if stop > start:
            ranges[node][int(partition)] = (start - first[node], stop - first[node])
    return [
        RowRanges(r, table.slice(first[n], last[n] - first[n])) if r else None
        for n, r in enumerate(ranges)
    ]


def _joined(mine: RowRanges | None, more: RowRanges | None) -> RowRanges | None:
    """Packets for a node's own partitions and for the copies it has."""
    if mine is None or more is None:
        return mine or more
    first = mine.table.num_rows
    moved = {p: (start + first, stop + first) for p, (start, stop) in more.ranges.items()}
    table = pa.concat_tables([mine.table, more.table]).combine_chunks()
    return RowRanges(mine.ranges | moved, table)


def encode_blob(parcel: Parcel[pa.Table]) -> list[Any]:
    """The blob as a list of buffers, to be joined or written one after the other."""
    buffers: list[Any] = []
    metas: list[tuple[Any, ...]] = []
    for b in parcel.bundles:
        address, packets = (b.edge, b.slice, b.source, b.epoch), b.packets
        if packets is None:
            metas.append((*address, {}, 0))
        else:
            assert isinstance(packets, RowRanges)
            data = encode_table(packets.table)
            metas.append((*address, packets.ranges, data.size))
            buffers.append(data)
    header = pickle.dumps((metas, parcel.facts), protocol=pickle.HIGHEST_PROTOCOL)
    return [len(header).to_bytes(_HEADER_LENGTH, "big"), header, *buffers]


def decode_blob(blob: Any) -> Parcel[pa.Table]:
    """What is in a blob; tables share its memory."""
    view = memoryview(blob)
    start = _HEADER_LENGTH + int.from_bytes(view[:_HEADER_LENGTH], "big")
    metas, facts = pickle.loads(view[_HEADER_LENGTH:start])
    bundles: list[Bundle[pa.Table]] = []
    for edge, slice_no, source, epoch, ranges, size in metas:
        packets = None
        if size:
            packets = RowRanges(ranges, decode_table(view[start : start + size]))
        bundles.append(Bundle(edge, slice_no, source, epoch, packets))
        start += size
    return Parcel(bundles, facts)
