"""What reports mean. Pure functions of reports and of what was expected: nothing is decided here
but whether something happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anabranch.errors import AnabranchError, InvariantError, OperatorError, StorageError
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.reports import NodeReport


def replaced(
    reports: Sequence[NodeReport],
    nodes: Iterable[NodeId],
    known: Mapping[NodeId, str],
    version: int,
) -> list[NodeId]:
    """Nodes whose process is another one than the known one, or goes by another placement than that
    of this `version`: it has lost its partitions."""
    found = {r.node: r.incarnation for r in reports if r.placement in (None, version)}
    return [n for n in nodes if n not in found or known.get(n, found[n]) != found[n]]


def first_failure(reports: Sequence[NodeReport], when: str, number: int) -> AnabranchError | None:
    """The one error to show for a slice that was not applied everywhere, causes first."""
    failures = [f for r in reports for f in r.failures]
    if not failures:
        return None
    first = failures[0]
    cls = OperatorError if first.kind == "operator" else StorageError
    operator = f", operator {first.operator!r}" if first.operator else ""
    return cls(
        f"{when}{operator} ({first.where}): {first.message}",
        operator=first.operator,
        slice=number,
        detail=first.detail,
    )


def lacking(reports: Sequence[NodeReport]) -> dict[PartitionId, str]:
    """Partitions that could not run, and why."""
    found: dict[PartitionId, str] = {}
    for report in reports:
        found |= report.incomplete
        found |= dict.fromkeys(report.not_hosted, "it is not there")
    return found


def not_hosted(reports: Sequence[NodeReport]) -> frozenset[PartitionId]:
    """Partitions that are not where the placement has them."""
    return frozenset(p for r in reports for p in r.not_hosted)


def silent(
    reports: Sequence[NodeReport], expected: Iterable[PartitionId], placement: Placement
) -> frozenset[PartitionId]:
    """Partitions that were to be restored and are not spoken of. A process may be replaced
    between two waves of the first recovery it takes part in: nobody knows the one before."""
    epochs = {p: x.epoch for r in reports for p, x in r.partitions.items()}
    return frozenset(p for p in expected if epochs.get(p) != placement.owners[p].epoch)


def advanced(
    reports: Sequence[NodeReport],
    upto: int,
    partitions: Iterable[PartitionId],
    placement: Placement,
    frontier: Mapping[PartitionId, int],
    ahead: frozenset[PartitionId] = frozenset(),
) -> dict[PartitionId, int | None]:
    """These partitions are exactly at slice `upto`, as their owners say, but for those that may be
    `ahead`; when each one's next timer comes. One that contradicts the frontier, or is not heard
    of, breaks an invariant."""
    behind = set(partitions)
    due_ms: dict[PartitionId, int | None] = {}
    for report in reports:
        for partition, state in report.partitions.items():
            if partition not in behind:
                continue
            if state.epoch != placement.owners[partition].epoch:
                continue  # an owner that was replaced
            known = max(state.next_slice, frontier[partition])
            if known != upto and (partition not in ahead or state.next_slice < known):
                raise InvariantError(
                    f"{partition} reports next slice {state.next_slice} instead of {upto}; "
                    f"its frontier was {frontier[partition]}",
                    partition=str(partition),
                )
            behind.discard(partition)
            due_ms[partition] = state.due_ms
    if behind:
        names = ", ".join(map(str, sorted(behind)))
        raise InvariantError(
            f"before slice {upto} no report came from {names}", partition=str(min(behind))
        )
    return due_ms
