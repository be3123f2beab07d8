"""What must hold in every run, judged from outside: from the raw input, the disk and the buffers.

- Every slice of every sink is what a plain sequential evaluation gives: exactly once, in order.
- A slice that has happened stays, one that is exposed does not change, every row is in one.
- What a recovery from either cut may need is there: files, log, backups; a cut's files hold
  exactly the state after its slice.
- Backups, packets and storage never go back beyond the older cut.
- Live partitions hold exactly the state of their own key groups.
- A mapping is journalled before anything of it is installed, and its version means one mapping.
- No partition has two owners with the same epoch; an epoch is given out once, with one owner and
  one set of key groups.
- Requests are accepted or refused as they can or cannot be done; a drained node gets nothing while
  there is another, and is released with nothing on it.
- Once the faults have ended, what was asked for is done and the run finishes (`run.py` counts the
  steps).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from anabranch.model.commands import Command, RunSlice, TrimStorage, WriteHead
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.mapping import Mapping
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Cut, Feed, SliceRecord
from anabranch.sim.cluster import Cluster
from anabranch.sim.node import SimNode
from anabranch.sim.oracle import Oracle, Shown
from anabranch.sim.partition import SimPartition
from anabranch.sim.requests import Request
from anabranch.sim.workload import KEYS


class ViolationError(Exception):
    """Something that must never happen did."""


def violated(what: str) -> NoReturn:
    raise ViolationError(what)


class Checkers:
    """Told of what happens; raises ViolationError."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._disk = cluster.disk
        self._job = cluster.job
        self._oracle = Oracle(cluster.job)
        self._records: dict[int, SliceRecord] = {}  # that have happened
        self._expected: dict[int, Shown] = {}
        self._states = {0: self._oracle.state()}  # after each slice
        self._values: Counter[int] = Counter()  # of rows, in all slices
        self._owners: dict[tuple[PartitionId, int], SimNode] = {}
        self._mappings: dict[int, Mapping] = {}  # that were journalled
        self._given: dict[tuple[PartitionId, int], tuple[NodeId, frozenset[int]]] = {}
        self._checked_cuts: set[int] = set()
        self._backed_from: dict[tuple[PartitionId, int], int] = {}  # as the driver asked for it
        cluster.on_install = self.installed

    # -- slices --------------------------------------------------------------------------------

    def before_slice(self, record: SliceRecord) -> None:
        """The slice is about to have happened: from here on its log is the truth."""
        number = record.number
        if number in self._records:
            violated(f"slice {number} happens twice")
        if number != len(self._records) + 1:
            violated(f"slice {number} happens after slice {len(self._records)}")
        shares = []
        for task in range(record.source_tasks if record.feed != Feed.NONE.value else 0):
            name = (number, record.generation, record.attempt, task)
            logged = self._disk.logs.get(name)
            shares.append(logged.share if logged else {})
        rows = [row for share in shares for rows in share.values() for row in rows]
        self._values.update(value for _, value, _ in rows)
        if sum(record.rows.values()) != len(rows) * self._job.row_weight:
            violated(f"slice {number} is journalled with {record.rows}, its log has {len(rows)}")
        before = self._records.get(number - 1)
        if before is not None and record.processing_ms < before.processing_ms:
            violated(f"time goes back with slice {number}")
        self._records[number] = record
        mapping = self._mappings.get(record.mapping)
        if mapping is None:
            violated(f"slice {number} ran under mapping {record.mapping}, which is not journalled")
        self._expected[number] = self._oracle.run(
            shares, record.watermark_us, record.processing_ms, mapping.groups
        )
        self._states[number] = self._oracle.state()
        self._check_live(number, mapping)

    def _check_live(self, number: int, mapping: Mapping) -> None:
        """Partitions that live, and their copies, hold the state of their own key groups, and
        nothing else."""
        homes = [(p, o.node) for p, o in mapping.owners.items()]
        for pid, node in (*homes, *mapping.copies.items()):
            owner = mapping.owners[pid]
            found = self._cluster.machines[node].process.partitions.get(pid)
            if found is None or found.epoch != owner.epoch or found.next_slice != number + 1:
                continue  # it has been replaced since it reported
            groups = mapping.groups[pid.chain]
            state = self._states[number][pid.chain]
            mine = {k: v for k, v in state.items() if groups[k % len(groups)] == pid.index}
            if found.state() != mine:
                violated(
                    f"after slice {number}, {pid} has state of keys {sorted(found.state())}; the "
                    f"sequential evaluation gives keys {sorted(mine)} for it, or other values"
                )

    def exposed(self, record: SliceRecord) -> None:
        """Called whenever a slice is shown, also again."""
        if self._records.get(record.number) != record:
            violated(f"slice {record.number} is exposed, but it is not what has happened")
        self._check_shown(record.number)

    def _check_shown(self, number: int) -> None:
        shown, expected = self._disk.exposed.get(number), self._expected[number]
        if shown is None:
            violated(f"slice {number} has happened and is not exposed")
        if shown == expected:
            return
        for writer in sorted({*shown, *expected}):
            found, wanted = shown.get(writer, ()), expected.get(writer, ())
            if found != wanted:
                where = next(
                    (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
                    min(len(found), len(wanted)),
                )
                sink, of = writer
                violated(
                    f"slice {number}: {of} shows {len(found)} rows in {sink}, the sequential "
                    f"evaluation gives {len(wanted)}; they differ from row {where} on"
                )

    def batch_returned(self, batch: int, finished: int | None) -> None:
        if finished != batch:
            violated(f"batch {batch} was offered and not finished")

    def run_ended(self) -> None:
        """The graceful end: all input, shown once, and a cut that covers everything."""
        raw = [v for b in self._job.batches for rows in b.values() for _, v, _ in rows]
        if Counter(raw) != self._values:
            missing, extra = Counter(raw) - self._values, self._values - Counter(raw)
            violated(f"rows {[*missing]} are in no slice, rows {[*extra]} in more than one")
        for number in self._records:
            self._check_shown(number)
        head = self._disk.head
        covered = head.cut.slice if head and head.cut else 0
        if covered != len(self._records):
            violated(f"the run ended at slice {len(self._records)}, its cut is at {covered}")

    # -- the journal and storage ---------------------------------------------------------------

    def before_head(self, head: WriteHead, free: Sequence[NodeId]) -> None:
        """A mapping is about to count; `free` are the nodes that are not drained."""
        mapping = head.mapping
        if self._mappings.setdefault(mapping.version, mapping) != mapping:
            violated(f"mapping {mapping.version} has two meanings")
        if mapping.version < max(self._mappings):
            violated(f"mapping {mapping.version} comes after mapping {max(self._mappings)}")
        for pid, owner in mapping.owners.items():
            groups = frozenset(g for g, i in enumerate(mapping.groups[pid.chain]) if i == pid.index)
            now = (owner.node, groups)
            is_new = (pid, owner.epoch) not in self._given
            before = self._given.setdefault((pid, owner.epoch), now)
            if before != now:
                violated(f"{pid} is given away with epoch {owner.epoch}, as {before} and as {now}")
            if is_new and free and owner.node not in free:
                violated(f"{pid} is given to {owner.node}, which is drained")

    def after(self, command: Command) -> None:
        if isinstance(command, WriteHead):
            self._check_journal()
            self._check_epochs(command)
        if isinstance(command, WriteHead | TrimStorage):
            self._check_cuts()
            self._check_logs()
        if isinstance(command, TrimStorage):
            self._check_bounded_storage()

    def _check_journal(self) -> None:
        for record in self._disk.slices:
            if self._records.get(record.number) != record:
                violated(f"the journal's slice {record.number} is not what has happened")
        if self._disk.newest_slice != len(self._records):
            violated(
                f"the journal ends at slice {self._disk.newest_slice}, "
                f"slice {len(self._records)} has happened"
            )

    def _check_epochs(self, head: WriteHead) -> None:
        """What a later driver counts on from must not be behind what was given out."""
        for partition, epoch in self._owners:
            if head.epochs.get(partition, 0) < epoch:
                violated(f"{partition} had epoch {epoch}, the journal says {head.epochs}")

    def _check_cuts(self) -> None:
        head = self._disk.head
        for found in (head.cut, head.previous) if head else ():
            if found is not None:
                self._check_cut(found)

    def _check_cut(self, found: Cut) -> None:
        """All files there; once per cut, that they hold exactly the state after its slice."""
        missing = [f for fs in found.files.values() for f in fs if f not in self._disk.files]
        if missing:
            violated(f"cut {found.slice} needs {missing[0]}, which is not there")
        if found.slice in self._checked_cuts:
            return
        self._checked_cuts.add(found.slice)
        state = self._states[found.slice]
        for chain in self._job.plan.node_chains:
            groups = found.groups[chain.name]
            restored: dict[int, tuple[int, bool]] = {}
            for index in range(max(groups) + 1):
                paths = found.files.get(f"{chain.name}/{index}", [])
                files = [self._disk.files[p] for p in paths]
                if not files or not files[0].full:
                    violated(f"cut {found.slice} has no full file of {chain.name}[{index}]")
                merged = {k: v for f in files for k, v in f.keys.items()}
                mine = [k for k in range(KEYS) if groups[k % len(groups)] == index]
                restored |= {k: merged[k] for k in mine if k in merged}
            if restored != state[chain.name]:
                violated(f"cut {found.slice} does not hold the state of {chain.name}")

    def needed_after(self) -> int:
        """Recoveries may need slices after this one: the older cut, or what there is instead."""
        head = self._disk.head
        if head is None or head.previous is not None:
            return self._disk.older_cut
        slices = self._disk.slices
        whole = not slices or slices[0].number == 1
        return 0 if whole or head.cut is None else head.cut.slice

    def _check_logs(self) -> None:
        after = self.needed_after()
        for record in self._disk.slices:
            if record.number <= after:
                continue
            names = (
                (record.number, record.generation, record.attempt, task)
                for task in range(record.source_tasks)
            )
            found = [self._disk.logs[n] for n in names if n in self._disk.logs]
            rows = sum(len(r) for f in found for r in f.share.values())
            if rows * self._job.row_weight != sum(record.rows.values()):
                violated(f"the log of slice {record.number} has {rows} rows, not {record.rows}")

    def _check_bounded_storage(self) -> None:
        older = self._disk.older_cut
        old = [n for n in self._disk.logs if n[0] <= older]
        if old:
            violated(f"the log still has slice {old[0][0]}, the older cut is {older}")
        head = self._disk.head
        cuts = [c for c in (head.cut, head.previous) if c] if head else []
        named = {f for c in cuts for fs in c.files.values() for f in fs}
        for path, file in self._disk.files.items():
            if file.slice <= older and path not in named:
                violated(f"{path} is kept, the older cut is {older}")

    # -- requests ------------------------------------------------------------------------------

    def answered(self, request: Request, possible: bool, accepted: bool) -> None:
        if possible != accepted:
            violated(f"{request} was {'accepted' if accepted else 'refused'}")

    def asked(self, nodes: Sequence[NodeId], known: Sequence[NodeId]) -> None:
        """Nodes are about to be asked for something; the driver knows of `known`."""
        gone = [n for n in nodes if n not in known]
        if gone:
            violated(f"{gone[0]} is asked for something, though it is known to be gone")

    def released(self, nodes: Sequence[NodeId]) -> None:
        assert self._disk.head is not None
        for pid, owner in self._disk.head.mapping.owners.items():
            if owner.node in nodes:
                violated(f"{owner.node} is released and has {pid}")
        for pid, node in self._disk.head.mapping.copies.items():
            if node in nodes:
                violated(f"{node} is released and has a copy of {pid}")

    # -- nodes ---------------------------------------------------------------------------------

    def installed(self, process: SimNode, partition: SimPartition) -> None:
        key = (partition.id, partition.epoch)
        if process.mapping is None or process.mapping.version not in self._mappings:
            violated(f"{partition.id} is installed under a mapping that is not journalled")
        if partition.backs_up:
            self._backed_from[key] = partition.next_slice
        other = self._owners.setdefault(key, process)
        if other is process:
            return
        if self._cluster.is_alive(other):
            violated(
                f"{partition.id} has two owners with epoch {partition.epoch}: "
                f"{other.node} and {process.node}"
            )
        self._owners[key] = process

    def slice_ran(self, command: RunSlice, mapping: Mapping, reports: Sequence[NodeReport]) -> None:
        """The buffers of the nodes after a slice: enough, and not too much."""
        number, backups = command.plan.number, command.backups
        for pid, owner in mapping.owners.items():
            if backups is None or pid in backups:
                self._backed_from.setdefault((pid, owner.epoch), number)
            else:
                self._backed_from.pop((pid, owner.epoch), None)
        for report in reports:
            if report.partitions.keys() != mapping.hosted_by(report.node).keys():
                continue  # it could not apply the slice, or is another process than before
            machine = self._cluster.machines.get(report.node)
            if machine is None or machine.process.incarnation != report.incarnation:
                continue
            if any(slice_no < number for slice_no, _ in machine.process.inbox):
                violated(f"{report.node} keeps packets of slices before {number}")
            for pid in report.partitions:
                self._check_backups(machine.process.partitions[pid], number)

    def _check_backups(self, partition: SimPartition, running: int) -> None:
        kept = sorted(partition.outputs)
        since = self._backed_from.get((partition.id, partition.epoch))
        if since is None or not partition.chain.outputs:
            if any(n < running for n in kept):
                violated(f"{partition.id} does not back up, but keeps slices {kept}")
            return
        older = self._disk.older_cut
        if kept and kept[0] <= older:
            violated(f"{partition.id} keeps slices {kept}, the older cut is {older}")
        first = max(self.needed_after() + 1, since)
        missing = [n for n in range(first, partition.next_slice) if n not in kept]
        if missing:
            violated(f"{partition.id} has no backup of slice {missing[0]}, which may be needed")
