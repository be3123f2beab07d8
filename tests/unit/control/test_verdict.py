"""What reports mean: pure functions, each with what it must not be deceived by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plays import COUNT, FIRST, NODES, SECOND, counting

from anabranch.control import verdict
from anabranch.errors import InvariantError, OperatorError, StorageError
from anabranch.model.placement import place
from anabranch.model.reports import Failure, NodeReport, PartitionReport

MAPPING = place(counting(), NODES, 1, {})
FRONTIER = dict.fromkeys(COUNT, 4)


def reports(next_slice: int = 5) -> list[NodeReport]:
    return [
        NodeReport(
            node,
            f"i{node}",
            next_slice - 1,
            {p: PartitionReport(next_slice, e) for p, e in MAPPING.hosted_by(node).items()},
        )
        for node in NODES
    ]


def test_a_process_is_replaced_if_it_is_not_the_known_one_or_does_not_report() -> None:
    known = {FIRST: "i1", SECOND: "i2"}
    assert verdict.replaced(reports(), NODES, known, 1) == []
    assert verdict.replaced(reports(), NODES, {}, 1) == []  # heard of for the first time
    assert verdict.replaced(reports(), NODES, {SECOND: "another"}, 1) == [SECOND]
    assert verdict.replaced(reports()[:1], NODES, known, 1) == [SECOND]
    assert verdict.replaced(reports()[:1], NODES, {}, 1) == [SECOND]
    first, second = reports()
    told = [replace(first, placement=1), replace(second, placement=2)]
    assert verdict.replaced(told, NODES, known, 1) == [SECOND]


def test_partitions_that_could_not_run() -> None:
    first, second = reports()
    assert verdict.lacking([first, second]) == {}
    first = replace(first, incomplete={COUNT[0]: "no bundle of s"}, not_hosted=(COUNT[1],))
    assert verdict.lacking([first, second]) == {
        COUNT[0]: "no bundle of s",
        COUNT[1]: "it is not there",
    }
    assert verdict.not_hosted([first, second]) == {COUNT[1]}


def test_silence_is_a_partition_that_no_owner_of_this_epoch_speaks_of() -> None:
    first, second = reports()
    assert verdict.silent([first, second], COUNT, MAPPING) == frozenset()
    assert verdict.silent([first], COUNT, MAPPING) == {COUNT[1]}
    older = replace(second, partitions={COUNT[1]: PartitionReport(5, 0)})
    assert verdict.silent([first, older], COUNT, MAPPING) == {COUNT[1]}
    assert verdict.silent([first], COUNT[:1], MAPPING) == frozenset()


def test_the_first_failure_is_told_with_its_kind() -> None:
    first, second = reports()
    assert verdict.first_failure([first, second], "slice 4", 4) is None
    operator = Failure("node 1", "count", "no such key", "trace")
    disk = Failure("node 2", "", "no room", "", "storage")
    found = verdict.first_failure([replace(first, failures=(operator, disk)), second], "slice 4", 4)
    assert isinstance(found, OperatorError)
    assert found.message == "slice 4, operator 'count' (node 1): no such key"
    found = verdict.first_failure([first, replace(second, failures=(disk,))], "after slice 4", 4)
    assert isinstance(found, StorageError)
    assert found.message == "after slice 4 (node 2): no room"


def test_everybody_is_exactly_there_and_says_when_its_timer_comes() -> None:
    first, second = reports()
    timed = replace(first, partitions={COUNT[0]: PartitionReport(5, 1, due_ms=70)})
    due = verdict.advanced([timed, second], 5, COUNT, MAPPING, FRONTIER)
    assert due == {COUNT[0]: 70, COUNT[1]: None}
    assert verdict.advanced([timed, second], 5, COUNT[1:], MAPPING, FRONTIER) == {COUNT[1]: None}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (PartitionReport(4, 1), r"count\[0\] reports next slice 4 instead of 5"),
        (PartitionReport(6, 1), r"count\[0\] reports next slice 6 instead of 5"),
        (PartitionReport(5, 0), r"before slice 5 no report came from count\[0\]"),
    ],
)
def test_whoever_is_elsewhere_is_a_broken_invariant(state: PartitionReport, words: str) -> None:
    first, second = reports()
    first = replace(first, partitions={COUNT[0]: state})
    with pytest.raises(InvariantError, match=words) as e:
        verdict.advanced([first, second], 5, COUNT, MAPPING, FRONTIER)
    assert e.value.fields["partition"] == "count[0]"


def test_a_frontier_does_not_go_back() -> None:
    with pytest.raises(InvariantError, match="its frontier was 6"):
        verdict.advanced(reports(), 5, COUNT, MAPPING, dict.fromkeys(COUNT, 6))
