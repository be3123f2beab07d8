"""Cutting rows into packets: every row in exactly one, where it belongs, in its key's order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.node.arrow.packets import Route, cut, decode_blob, encode_blob
from anabranch.node.protocol.exchange import Bundle, Inbox, Parcel
from anabranch.operators.rows.hashing import key_groups
from effort import examples

GROUPS = 16


@st.composite
def routes(draw: st.DrawFn) -> Route:
    partitions, nodes = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    group = st.integers(0, partitions - 1)
    of_group = draw(st.lists(group, min_size=GROUPS, max_size=GROUPS))
    of_partition = draw(
        st.lists(st.integers(0, nodes - 1), min_size=partitions, max_size=partitions)
    )
    arrays = [np.array(a, dtype=np.uint16) for a in (of_group, of_partition)]
    return Route(("k",), GROUPS, nodes, *arrays)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.none() | st.text(max_size=3), max_size=40), routes())
def test_every_row_in_exactly_one_packet_of_its_partition(
    keys: list[str | None], route: Route
) -> None:
    table = pa.table({"k": pa.array(keys, pa.large_string()), "row": range(len(keys))})
    groups = key_groups(table, ("k",), GROUPS) if keys else []
    home = [int(route.partition_of_group[g]) for g in groups]
    cuts = cut(table, route)
    assert len(cuts) == route.nodes
    seen: list[int] = []
    for node, packets in enumerate(cuts):
        parcel = Parcel([Bundle(3, 9, 2, 5, packets)])
        (again,) = decode_blob(b"".join(encode_blob(parcel))).bundles
        assert (again.edge, again.slice, again.source, again.epoch) == (3, 9, 2, 5)
        inbox: Inbox[pa.Table] = Inbox()
        inbox.add(again)
        inbox.add(again)
        for partition in range(len(route.node_of_partition)):
            found = inbox.packets(9, [3], partition).get(3, [])
            rows = [r for p in found for r in p.column("row").to_pylist()]
            if rows:
                assert route.node_of_partition[partition] == node
            assert rows == sorted(rows)
            assert all(home[r] == partition for r in rows)
            seen += rows
    assert sorted(seen) == list(range(len(keys)))


def test_an_inbox_says_what_is_missing_and_drops_what_is_done() -> None:
    inbox: Inbox[pa.Table] = Inbox()
    for source in (0, 2):
        inbox.add(Bundle(1, 5, source, 1, None))
    assert inbox.missing(5, {1: 3}) == "edge 1: packets of 1 of 3 sources, e.g. 1"
    inbox.add(Bundle(1, 5, 1, 1, None))
    assert inbox.missing(5, {1: 3}) is None
    inbox.drop(5)
    assert inbox.missing(5, {1: 3}) is not None
    assert inbox.missing(5, {1: 0}) is None
