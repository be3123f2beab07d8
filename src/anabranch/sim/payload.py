"""What simulated nodes carry in place of Arrow tables: rows are tuples of small numbers, the state
of a key is a running hash. They are logged, staged and sealed as bytes in the simulated store, by
the code that does it for tables.

The node that carries it is the real one (`node/protocol`).
"""

from __future__ import annotations

import marshal
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabranch.model.ids import NodeId, PartitionId
from anabranch.model.placement import Placement
from anabranch.model.plan import Chain, Edge
from anabranch.model.reports import PartitionReport, Staged
from anabranch.model.slices import SlicePlan
from anabranch.node.protocol.carried import ChainError, Delta, Result, Sealed, Share, Vitals
from anabranch.node.protocol.host import Host
from anabranch.node.protocol.messages import RecoverRequest, SourceRequest
from anabranch.node.protocol.partition import Partition
from anabranch.sim.workload import FICKLE, RawShare, Row, Workload, close, fold, moment, rekey
from anabranch.sinks.base import Sink
from anabranch.storage.checkpoint_files import checkpoint_name, read_pieces, write_pieces
from anabranch.storage.source_log import finish_share, log_name, read_log, write_share
from anabranch.storage.store import Store

Rows = tuple[Row, ...]
Keys = dict[int, tuple[int, bool]]  # their hash, and whether they are open
Content = tuple[Keys, int]  # … and up to which watermark they were closed
JOB = "51"  # the job's identity
SPEC = b"job"  # in place of a pickled one


def encode(value: Any) -> bytes:
    return marshal.dumps(value)


def decode(data: Any) -> Any:
    return marshal.loads(data)


class SimState:
    """Keys with their hash, and which of them are open."""

    def __init__(self, partition: PartitionId, job: SimJob) -> None:
        self._chain = job.chains[partition.chain]
        self._store = job.store
        self._raises = job.raises
        self._row_s = job.workload.row_s
        self._groups = job.workload.plan.graph.key_groups
        self._open: set[int] = set()
        self._changed: set[int] = set()
        self._closed_us = self._sealed_closed_us = -1
        self.hashes: dict[int, int] = {}

    def apply(self, plan: SlicePlan, packets: Mapping[int, list[Rows]]) -> Result[Rows]:
        if self._raises():
            raise ChainError(self._chain.operators[0], ValueError("not today"))
        produced: list[Row] = []
        when = moment(plan.watermark_us, plan.processing_ms)
        hashes = self.hashes
        for edge, key, value in ((e, k, v) for e, ps in packets.items() for p in ps for k, v in p):
            hashes[key] = made = fold(hashes.get(key, key), edge, value, when)
            self._open.add(key)
            self._changed.add(key)
            produced.append((key, made))
        if plan.watermark_us is not None and plan.watermark_us > self._closed_us:
            self._closed_us = plan.watermark_us
            for key in sorted(self._open):
                hashes[key] = made = close(hashes[key], plan.watermark_us)
                self._changed.add(key)
                produced.append((key, made))
            self._open.clear()
        rows = tuple(produced)
        return Result(
            {e.id: rows for e in self._chain.outputs},
            {s: rows for s in self._chain.sinks if rows},
            PartitionReport(
                0,
                0,
                rows_in=sum(len(p) for ps in packets.values() for p in ps),
                cpu_s=0.002 * len(rows),
                busy_s=self._row_s * len(rows),
                state_rows=len(hashes),
                state_bytes=100_000 * len(hashes),
                out_bytes=len(rows),
                rows_by_group=Counter(
                    k % self._groups for ps in packets.values() for p in ps for k, _ in p
                ),
            ),
            nbytes=len(rows),
        )

    def content(self) -> Keys:
        """Its keys, their hash and whether they are open."""
        return {k: (h, k in self._open) for k, h in self.hashes.items()}

    def seal(self) -> Delta:
        saved = {k: (self.hashes[k], k in self._open) for k in sorted(self._changed)}
        changed = bool(saved) or self._closed_us != self._sealed_closed_us
        self._changed, self._sealed_closed_us = set(), self._closed_us
        return Delta(len(saved), changed, (saved, self._closed_us))

    def snapshot(self) -> Content:
        return dict(sorted(self.content().items())), self._closed_us

    def restore(self, files: Iterable[str], owned: Collection[int], gently: bool = False) -> None:
        for file in files:
            for _, _, (keys, closed_us, _) in read_pieces(self._store, file, decode):
                for key, (value, is_open) in keys.items():
                    if key % self._groups in owned:
                        self.hashes[key] = value
                        (self._open.add if is_open else self._open.discard)(key)
                self._closed_us = closed_us

    @property
    def rows(self) -> int:
        return len(self.hashes)

    @property
    def due_ms(self) -> int | None:
        return None


class ByPartition(dict[int, Rows]):
    """Packets of one node."""

    def of(self, partition: int) -> Rows | None:
        return self.get(partition)


@dataclass(frozen=True)
class Route:
    """An edge under a placement, with nodes numbered as in `nodes`."""

    edge: Edge
    placement: Placement
    nodes: Sequence[NodeId]


@dataclass(frozen=True)
class SimJob:
    """A workload, its store and its sinks, as nodes and source tasks see a job."""

    workload: Workload
    store: Store
    sinks: Mapping[str, Sink]
    read: list[RawShare] = field(default_factory=list)  # by source tasks, one share after another
    raises: Callable[[], bool] = lambda: False  # a user's function, now

    @property
    def chains(self) -> Mapping[str, Chain]:
        return self.workload.plan.by_name

    def rehearse(self) -> None:
        pass

    def new_state(self, partition: PartitionId) -> SimState:
        return SimState(partition, self)

    def route(self, edge: Edge, placement: Placement, nodes: Sequence[NodeId]) -> Route:
        return Route(edge, placement, nodes)

    def cut(
        self, rows: Rows, route: Route, only: Collection[int] | None
    ) -> list[ByPartition | None]:
        edge, placement = route.edge, route.placement
        groups = placement.groups[edge.target]
        packets: dict[NodeId, ByPartition] = {n: ByPartition() for n in route.nodes}
        for _, value in rows:
            key = rekey(edge.id, value)
            if key is None:
                continue
            index = groups[key % len(groups)]
            pid = PartitionId(edge.target, index)
            homes = [placement.owners[pid].node] if only is None or index in only else []
            if only is None and pid in placement.copies:  # a recovery rebuilds no copies
                homes.append(placement.copies[pid])
            for home in homes:
                packets[home][index] = (*packets[home].get(index, ()), (key, value))
        return [packets[n] or None for n in route.nodes]

    def stage(self, sink: str, rows: Rows, slice_no: int, generation: int, writer: str) -> Staged:
        return self.sinks[sink].stage(sink, rows, slice_no, generation, writer)

    def write_checkpoint(self, sealed: Sealed) -> tuple[str, int]:
        what = (sealed.partition, sealed.slice, sealed.epoch)
        name, content = checkpoint_name(*what), (*sealed.content, sealed.full)
        pieces = [(sealed.partition.chain, 0, content)]
        return name, write_pieces(
            self.store, name, JOB, *what, pieces, lambda piece: [encode(piece)]
        )

    # -- source tasks --------------------------------------------------------------------------

    def compute(self, request: SourceRequest, task: int, batch: RawShare) -> list[Share[Rows]]:
        if self.raises():
            raise ChainError(self.workload.sources[0], ValueError("not today"))
        if self.workload.fickle:
            more = FICKLE * (len(self.read) + 1)
            batch = {s: tuple((k, v + more, t) for k, v, t in r) for s, r in batch.items()}
        chunks = self.workload.chunks(batch, request.tasks, request.plan.max_rows)
        return [self._share(chunk, len(chunks)) for chunk in chunks]

    def _share(self, raw: RawShare, chunks: int) -> Share[Rows]:
        tables: dict[str, Rows] = {}
        for chain in self.workload.plan.source_chains:
            rows = tuple((key, value) for key, value, _ in raw.get(chain.name, ()))
            tables |= {f"edge:{e.id}": rows for e in chain.outputs}
            for sink in chain.sinks if rows else ():
                tables[f"sink:{sink}"] = (*tables.get(f"sink:{sink}", ()), *rows)
        weight = self.workload.row_weight
        self.read.append(raw)
        facts = {
            "share_read": len(self.read) - 1,
            "chunks": chunks,
            "batch_rows": 0,
            "rows": {s: len(rows) * weight for s, rows in raw.items()},
            "max_time_us": {s: max(t for _, _, t in r) for s, r in raw.items() if r},
            "rows_by_operator": {},
        }
        return Share(tables, facts)

    def log_name(self, plan: SlicePlan, task: int) -> str:
        return log_name(*_log(plan, task))

    def read_log(self, plan: SlicePlan, task: int) -> Share[Rows] | None:
        found = read_log(self.store, log_name(*_log(plan, task)), decode)
        return None if found is None else Share(*found)

    def write_log(
        self, plan: SlicePlan, task: int, shares: Sequence[Share[Rows]]
    ) -> tuple[int, bool]:
        chunks = [({n: encode(rows) for n, rows in s.tables.items()}, s.facts) for s in shares]
        return write_share(self.store, *_log(plan, task), chunks)

    def finish_log(self, plan: SlicePlan, task: int, share: Share[Rows]) -> None:
        finish_share(self.store, *_log(plan, task), share.facts)


def _log(plan: SlicePlan, task: int) -> tuple[int, int, int, int]:
    return plan.number, plan.generation, plan.attempt, task


class Spilled:
    """Backups on a node's own disk."""

    def __init__(self, held: set[Spilled]) -> None:
        self._held = held
        held.add(self)

    def drop(self) -> None:
        self._held.discard(self)


class SimProcess:
    """`background`: do it some time later, while this process lives. `fills_disk`: does the local
    disk refuse?"""

    def __init__(
        self,
        incarnation: str,
        background: Callable[[SimProcess, Callable[[], None]], None],
        fills_disk: Callable[[], bool],
        backup_memory_bytes: int,
    ) -> None:
        self.incarnation = incarnation
        self.backup_memory_bytes = backup_memory_bytes
        self.spilled: set[Spilled] = set()
        self._background = background
        self._fills_disk = fills_disk
        self._writes: deque[Callable[[], None]] = deque()

    def write_later(self, work: Callable[[], None]) -> None:
        self._writes.append(work)
        self._background(self, self.write_next)

    def write_next(self) -> None:
        """Each takes its time, but the oldest comes first."""
        if self._writes:
            self._writes.popleft()()

    def load_later(self, work: Callable[[], None]) -> None:
        self._background(self, work)

    def spill(self, edges: Mapping[int, Rows]) -> tuple[Mapping[int, Rows], Spilled]:
        if self._fills_disk():
            raise OSError("no space left on device")
        return edges, Spilled(self.spilled)

    def belong_to(self, pulse: object | None, node: NodeId) -> None:
        pass

    def monotonic_s(self) -> float:
        return 0.0

    def vitals(self) -> Vitals:
        return Vitals()

    def close(self) -> None:
        pass

    def join(self) -> None:
        pass


class SimNode(Host[Rows]):
    """The real host; the checkers hear of what it installs."""

    def __init__(
        self, process: SimProcess, job: SimJob, on_install: Callable[[SimNode, SimPartition], None]
    ) -> None:
        super().__init__(process, lambda spec: job)
        self.process = process
        self._on_install = on_install

    @property
    def node(self) -> NodeId:
        return self._node

    def _install(self, request: RecoverRequest) -> float:
        before = {p: (x, x.epoch) for p, x in self.partitions.items()}
        took_s = super()._install(request)
        copies = request.plan.placement.copied_by(request.node)
        for pid, partition in self.partitions.items():
            if pid not in copies and before.get(pid) != (partition, partition.epoch):
                self._on_install(self, partition)
        return took_s


SimPartition = Partition[Rows]
