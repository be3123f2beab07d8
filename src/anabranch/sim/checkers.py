"""What must hold in every run, judged from outside: from the raw input, the disk and the buffers.

- Every slice of every sink is what a plain sequential evaluation gives: exactly once, in order.
- A slice that has happened stays, one that is exposed does not change, every row is in one.
- What a recovery from either cut may need is there: files, log, backups; a cut's files hold
  exactly the state after its slice. For a chain that waits, these are the cuts that cover it.
- Every sink shows a prefix without gaps, in order, at every moment, and all of it in the end.
- Backups, packets and storage never go back beyond the older cut.
- Live partitions hold exactly the state of their own key groups.
- A placement is journalled before anything of it is installed, and its version means one placement.
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
from dataclasses import replace

from anabranch.model.commands import Command, RunSlice, TrimStorage, WriteHead
from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.reports import NodeReport
from anabranch.model.slices import Cut, Feed, SliceRecord
from anabranch.sim.cluster import SimCluster
from anabranch.sim.oracle import Oracle, Shown
from anabranch.sim.payload import Rows, SimNode, SimPartition, SimState
from anabranch.sim.requests import Request
from anabranch.sim.waiting import WaitingChecks
from anabranch.sim.workload import FICKLE, KEYS, RawShare
from anabranch.sim.world import violated


class Checkers:
    """Told of what happens; raises ViolationError."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._disk = cluster.disk
        self._job = cluster.job
        self._oracle = Oracle(cluster.job)
        self._records: dict[int, SliceRecord] = {}  # that have happened
        self._expected: dict[int, Shown] = {}
        self._states = {0: self._oracle.state()}  # after each slice
        self._values: Counter[int] = Counter()  # of rows, in all slices
        self._shown: dict[tuple[int, str], dict[str, Rows]] = {}  # by slice and sink
        self._owners: dict[tuple[PartitionId, int], SimNode] = {}
        self._placements: dict[int, Placement] = {}  # that were journalled
        self._given: dict[tuple[PartitionId, int], tuple[NodeId, frozenset[int]]] = {}
        self._checked_cuts: set[int] = set()
        self._backed_from: dict[tuple[PartitionId, int], int] = {}  # as the driver asked for it
        self._first = 1  # slice
        self.waiting = WaitingChecks(cluster.job.plan)
        cluster.on_install = self.installed
        for target in self._disk.targets.values():
            target.on_given = self.given

    def begin_after(self, record: SliceRecord) -> None:
        """The job has run for long: this is its newest slice, and no key has been seen."""
        number, empty = record.number, self._oracle.state()
        self._first = number
        self._records, self._expected = {number: record}, {number: {}}
        self._states = {number - 1: empty, number: empty}

    # -- slices --------------------------------------------------------------------------------

    def sync(self) -> None:
        """Look into the journal: what is new there has happened."""
        for record in self._disk.slices:
            if record.number > self._newest:
                self._happened(record)
            elif record.staged != self._records[record.number].staged:
                self._came_late(record)

    @property
    def _newest(self) -> int:
        return self._first + len(self._records) - 1

    def _happened(self, record: SliceRecord) -> None:
        """From here on its log is the truth."""
        number = record.number
        if number != self._newest + 1:
            violated(f"slice {number} happens after slice {self._newest}")
        shares = self._shares(record)
        rows = [row for share in shares for rows in share.values() for row in rows]
        self._values.update(value % FICKLE for _, value, _ in rows)
        if sum(record.rows.values()) != len(rows) * self._job.row_weight:
            violated(f"slice {number} is journalled with {record.rows}, its log has {len(rows)}")
        before = self._records.get(number - 1)
        if before is not None and record.processing_ms < before.processing_ms:
            violated(f"time goes back with slice {number}")
        self._records[number] = record
        placement = self._placements.get(record.placement)
        if placement is None:
            what = f"slice {number} ran under placement {record.placement}"
            violated(f"{what}, which is not journalled")
        self.waiting.paused(record, before, self._placements)
        self._expected[number] = self._oracle.run(
            shares, record.watermark_us, record.processing_ms, placement.groups
        )
        self._states[number] = self._oracle.state()
        self._check_live(number, placement)
        self._cluster.faults.slice_happened()
        self._cluster.world.tell("slice {} has happened", number)

    def _came_late(self, record: SliceRecord) -> None:
        """Only files of chains that had waited, and only more of them."""
        before = self._records[record.number]
        if replace(record, staged=before.staged) != before:
            violated(f"the journal's slice {record.number} is not what has happened")
        if any(set(f) - set(record.staged.get(s, ())) for s, f in before.staged.items()):
            violated(f"files of slice {record.number} were named, and are not any more")
        self._records[record.number] = record

    def _shares(self, record: SliceRecord) -> list[RawShare]:
        """What its source tasks had read, as their log says."""
        tasks = range(record.source_tasks if record.feed != Feed.NONE.value else 0)
        logged = [self._disk.logged(record, task) for task in tasks]
        return [{} if share is None else self._cluster.carried.read[share] for share in logged]

    def _check_live(self, number: int, placement: Placement) -> None:
        """Partitions that live, and their copies, hold the state of their own key groups, and
        nothing else."""
        homes = [(p, o.node) for p, o in placement.owners.items()]
        for pid, node in (*homes, *placement.copies.items()):
            owner = placement.owners[pid]
            found = self._cluster.machines[node].process.partitions.get(pid)
            if found is None or found.epoch != owner.epoch:
                continue  # it has been replaced since it reported
            at = found.next_slice - 1  # less than `number` where its chain waits
            if at not in self._states:
                continue
            groups = placement.groups[pid.chain]
            state = self._states[at][pid.chain]
            mine = {k: v for k, v in state.items() if groups[k % len(groups)] == pid.index}
            assert isinstance(found.state, SimState)
            held = found.state.content()
            if held != mine:
                violated(
                    f"after slice {at}, {pid} has state of keys {sorted(held)}; the "
                    f"sequential evaluation gives keys {sorted(mine)} for it, or other values"
                )

    def given(self, sink: str, number: int, rows: dict[str, Rows]) -> None:
        """A target is given a slice; the newest one may come again to one that forgets."""
        self.sync()
        if number not in self._records:
            violated(f"slice {number} is exposed, but it is not what has happened")
        again = (number, sink) in self._shown
        newest = max((n for n, s in self._shown if s == sink), default=self._first - 1)
        if again and not (self._disk.targets[sink].forgets and number == newest):
            violated(f"slice {number} is exposed to {sink} again")
        for passed in range(newest + 1, number):
            if any(s == sink for s, _ in self._expected[passed]):
                violated(f"slice {number} is exposed to {sink} before slice {passed}")
        if not again and number < newest:
            violated(f"slice {number} is exposed to {sink} after slice {newest}")
        self._shown[number, sink] = rows
        self._check_shown(number, sink)

    def _check_shown(self, number: int, sink: str) -> None:
        shown = self._shown.get((number, sink), {})
        expected = {w: rows for (s, w), rows in self._expected[number].items() if s == sink}
        if not shown and expected:
            violated(f"slice {number} has happened and is not exposed")
        for of in sorted({*shown, *expected}):
            found, wanted = shown.get(of, ()), expected.get(of, ())
            if found != wanted:
                where = next(
                    (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
                    min(len(found), len(wanted)),
                )
                violated(
                    f"slice {number}: {of} shows {len(found)} rows in {sink}, the sequential "
                    f"evaluation gives {len(wanted)}; they differ from row {where} on"
                )

    def run_ended(self) -> None:
        """The graceful end: all input, shown once, and a cut that covers everything."""
        raw = [v for b in self._job.batches for rows in b.values() for _, v, _ in rows]
        if Counter(raw) != self._values:
            missing, extra = Counter(raw) - self._values, self._values - Counter(raw)
            violated(f"rows {[*missing]} are in no slice, rows {[*extra]} in more than one")
        for number in self._records:
            for sink in self._disk.targets:
                self._check_shown(number, sink)
        head = self._disk.journal
        covered = head.cut.slice if head and head.cut else 0
        if covered != self._newest:
            violated(f"the run ended at slice {self._newest}, its cut is at {covered}")
        chains = {c.name for c in self._job.plan.node_chains}
        if head and head.cut and head.cut.groups.keys() != chains:
            violated(f"the run ended, and its cut covers {sorted(head.cut.groups)} only")

    # -- the journal and storage ---------------------------------------------------------------

    def head(self, head: WriteHead, free: Sequence[NodeId]) -> None:
        """A placement counts from now on; `free` are the nodes that are not drained."""
        placement = head.placement
        if self._placements.setdefault(placement.version, placement) != placement:
            violated(f"placement {placement.version} has two meanings")
        if placement.version < max(self._placements):
            violated(f"placement {placement.version} comes after placement {max(self._placements)}")
        for pid, owner in placement.owners.items():
            groups = frozenset(
                g for g, i in enumerate(placement.groups[pid.chain]) if i == pid.index
            )
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
        if self._disk.newest_slice != self._newest:
            violated(
                f"the journal ends at slice {self._disk.newest_slice}, "
                f"slice {self._newest} has happened"
            )

    def _check_epochs(self, head: WriteHead) -> None:
        """What a later driver counts on from must not be behind what was given out."""
        for partition, epoch in self._owners:
            if head.epochs.get(partition, 0) < epoch:
                violated(f"{partition} had epoch {epoch}, the journal says {head.epochs}")

    def _check_cuts(self) -> None:
        for found in self._disk.cuts:
            self._check_cut(found)
        for chain in self._job.plan.node_chains:
            newest = next(iter(self._disk.covering(chain.name)), None)
            above = self._job.plan.above[chain.name]
            if newest is not None and not above <= newest.groups.keys():
                violated(f"{chain.name} begins with cut {newest.slice}, a chain above it cannot")

    def _check_cut(self, found: Cut) -> None:
        """All files there; once per cut, that they hold exactly the state after its slice."""
        missing = [f for fs in found.files.values() for f in fs if f not in self._disk.store.files]
        if missing:
            violated(f"cut {found.slice} needs {missing[0]}, which is not there")
        if found.slice in self._checked_cuts or not found.slice:
            return
        self._checked_cuts.add(found.slice)
        state = self._states[found.slice]
        for chain in self._job.plan.node_chains:
            if chain.name not in found.groups:
                continue  # it waited
            groups = found.groups[chain.name]
            restored: dict[int, tuple[int, bool]] = {}
            for index in range(max(groups) + 1):
                paths = found.files.get(f"{chain.name}/{index}", [])
                files = [self._disk.snapshot(p) for p in paths]
                if not files or not files[0].full:
                    violated(f"cut {found.slice} has no full file of {chain.name}[{index}]")
                merged = {k: v for f in files for k, v in f.keys.items()}
                mine = [k for k in range(KEYS) if groups[k % len(groups)] == index]
                restored |= {k: merged[k] for k in mine if k in merged}
            if restored != state[chain.name]:
                violated(f"cut {found.slice} does not hold the state of {chain.name}")

    def needed_after(self) -> int:
        """Recoveries may need slices after this one: the older cut, or what there is instead."""
        slices = self._disk.slices
        whole = not slices or slices[0].number == 1
        after = self._disk.older_cut
        for chain in {c for cut in self._disk.cuts for c in cut.groups}:
            found = self._disk.covering(chain)
            if len(found) == 1 and not whole:
                after = max(after, found[0].slice)
        return after

    def _check_logs(self) -> None:
        after = self.needed_after()
        for record in self._disk.slices:
            if record.number <= after:
                continue
            rows = sum(len(r) for share in self._shares(record) for r in share.values())
            if rows * self._job.row_weight != sum(record.rows.values()):
                violated(f"the log of slice {record.number} has {rows} rows, not {record.rows}")

    def _check_bounded_storage(self) -> None:
        older = self._disk.older_cut
        old = [n for n in self._disk.logged_slices() if n <= older]
        if old:
            violated(f"the log still has slice {old[0]}, the older cut is {older}")
        named = {f for c in self._disk.cuts for fs in c.files.values() for f in fs}
        for path in self._disk.checkpoints():
            slice_no = int(path.rpartition("/")[2].partition("-")[0])
            if slice_no <= older and path not in named:
                violated(f"{path} is kept, the older cut is {older}")

    # -- requests ------------------------------------------------------------------------------

    def answered(self, request: Request, possible: bool | None, accepted: bool) -> None:
        if possible not in (None, accepted):
            violated(f"{request} was {'accepted' if accepted else 'refused'}")

    def asked(self, nodes: Sequence[NodeId], known: Sequence[NodeId]) -> None:
        """Nodes are about to be asked for something; the driver knows of `known`."""
        gone = [n for n in nodes if n not in known]
        if gone:
            violated(f"{gone[0]} is asked for something, though it is known to be gone")

    def released(self, nodes: Sequence[NodeId]) -> None:
        assert self._disk.head is not None
        for pid, owner in self._disk.head.placement.owners.items():
            if owner.node in nodes:
                violated(f"{owner.node} is released and has {pid}")
        for pid, node in self._disk.head.placement.copies.items():
            if node in nodes:
                violated(f"{node} is released and has a copy of {pid}")

    # -- nodes ---------------------------------------------------------------------------------

    def installed(self, process: SimNode, partition: SimPartition) -> None:
        key = (partition.id, partition.epoch)
        if process.placement is None or process.placement.version not in self._placements:
            violated(f"{partition.id} is installed under a placement that is not journalled")
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

    def slice_begins(self, command: RunSlice, placement: Placement) -> None:
        """Whatever comes of it, those that it does not name may forget what they kept."""
        for pid, owner in placement.owners.items():
            if command.backups is not None and pid not in command.backups:
                self._backed_from.pop((pid, owner.epoch), None)

    def slice_ran(
        self, command: RunSlice, placement: Placement, reports: Sequence[NodeReport]
    ) -> None:
        """The buffers of the nodes after a slice: enough, and not too much."""
        number, backups, paused = command.plan.number, command.backups, command.plan.paused
        for pid, owner in placement.owners.items():
            if backups is None or pid in backups:
                self._backed_from.setdefault((pid, owner.epoch), number)
        for report in reports:
            hosted = placement.hosted_by(report.node)
            if report.partitions.keys() != {p for p in hosted if p.chain not in paused}:
                continue  # it could not apply the slice, or is another process than before
            machine = self._cluster.machines.get(report.node)
            if machine is None or machine.process.incarnation != report.incarnation:
                continue
            if (
                machine.process.placement is None
                or machine.process.placement.version != placement.version
            ):
                continue  # nothing is on it; a late call has given it what was there before
            hands = machine.process.hands[: 1 if command.beside else 2]
            if any(n < number for h in hands for n in h.inbox.slices()):
                violated(f"{report.node} keeps packets of slices before {number}")
            for pid in report.partitions:
                self._check_backups(machine.process.partitions[pid], number)
            kept = [o for p in machine.process.partitions.values() for o in p.outputs.values()]
            if len(machine.process.process.spilled) != sum(o.spilled is not None for o in kept):
                violated(f"{report.node} keeps files of backups that nobody needs")

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
