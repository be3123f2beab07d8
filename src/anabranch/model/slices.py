"""A slice as the driver plans it and as the journal keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any


class Feed(Enum):
    """Where the rows of a slice come from."""

    LIVE = "live"  # a batch of the Spark query, logged on the way
    LOG = "log"  # the source log: later slices of a large batch, and a slice that is run again
    NONE = "none"  # no rows: time moves, windows close, checkpoints are sealed


class Writes(Enum):
    """What a checkpoint's files have; a partition's first one has its whole state in any case."""

    CHANGES = "changes"  # what changed since the last one
    FOLDED = "folded"  # … or the whole state, once changes have piled up
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """One slice to run, with every input that decides its result."""

    number: int
    feed: Feed
    batch: int | None
    source_tasks: int  # of the log; a live batch knows its own number
    watermark_us: int | None
    processing_ms: int
    placement: int
    seal: bool  # seal a checkpoint after this slice
    # Which log the rows are in: the driver that wrote it, and its try at reading the batch.
    generation: int = 0
    attempt: int = 0
    writes: Writes = Writes.FOLDED
    waits: bool = False  # for the files of its checkpoint: nothing of it is out before
    # Source tasks that logged nothing for this slice; None where the journal does not say.
    without_log: tuple[int, ...] | None = ()
    # Of operators behind others that emit when time passes; all others have `watermark_us`.
    watermarks: Mapping[str, int | None] = field(default_factory=dict)
    max_rows: int | None = None  # a live batch with more is cut into slices; None: none is
    paused: frozenset[str] = frozenset()  # chains that wait: nothing of theirs runs


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """A slice that happened: the journal's line. Sinks may expose it from here on."""

    number: int
    feed: str
    batch: int | None
    batch_end: bool  # no later slice carries rows of this batch
    source_tasks: int
    chunks_left: int
    watermark_us: int | None
    processing_ms: int
    placement: int
    generation: int = 0
    attempt: int = 0
    max_time_us: Mapping[str, int] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)
    # Per sink, the staged files to expose.
    staged: Mapping[str, list[str]] = field(default_factory=dict)
    # Per source task, how many slices its share of the batch fills from this one on.
    chunks: Sequence[int] = ()
    # Per source with an idle time-out, how long it had brought no rows.
    quiet_ms: Mapping[str, int] = field(default_factory=dict)
    # Of operators that had another one than `watermark_us`; None: written before there were any.
    watermarks: Mapping[str, int | None] | None = field(default_factory=dict)
    paused: Sequence[str] = ()  # chains that waited, and make up for it later

    def without_log(self, later: int) -> tuple[int, ...] | None:
        """The source tasks that logged nothing for the slice `later` slices after this one."""
        if not self.chunks and self.source_tasks:
            return None  # written before the journal said it
        return tuple(task for task, left in enumerate(self.chunks) if left <= later)

    def plan(self, placement: int) -> SlicePlan:
        """The slice as it is replayed: the same inputs, from the log."""
        return SlicePlan(
            number=self.number,
            feed=Feed.NONE if self.feed == Feed.NONE.value else Feed.LOG,
            batch=self.batch,
            source_tasks=self.source_tasks,
            watermark_us=self.watermark_us,
            processing_ms=self.processing_ms,
            placement=placement,
            seal=False,
            generation=self.generation,
            attempt=self.attempt,
            without_log=self.without_log(0),
            watermarks=self.watermarks or {},
        )

    def to_json(self) -> dict[str, Any]:
        """In the journal a placement is called a mapping, as it once was in the code."""
        return {_WRITTEN.get(n, n): getattr(self, n) for n in _RECORDED}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SliceRecord:
        known = {_READ.get(name, name): value for name, value in data.items()}
        known["paused"] = tuple(data.get("paused", ()))
        chunks = tuple(data.get("chunks", ()))
        return SliceRecord(**{"watermarks": None, **known, "chunks": chunks})

    def with_late(self, late: Late) -> SliceRecord:
        """With the files that chains which had waited have staged for it, in the order that they
        would have had in time."""
        staged = {sink: list(files) for sink, files in self.staged.items()}
        for sink, files in late.staged.items():
            staged[sink] = sorted({*staged.get(sink, ()), *files}, key=_order_of_file)
        return replace(self, staged=staged)


@dataclass(frozen=True, slots=True)
class Late:
    """Chains that had waited have made up for everything up to and including `slice`: a line of
    the journal. What they have staged for that slice is shown from here on; for slices before it,
    nothing is staged that an earlier line does not name."""

    slice: int
    chains: tuple[str, ...]
    staged: Mapping[str, list[str]] = field(default_factory=dict)  # files, by sink

    def to_json(self) -> dict[str, Any]:
        return {"late": self.slice, "chains": list(self.chains), "staged": self.staged}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Late:
        return Late(data["late"], tuple(data["chains"]), data["staged"])


def order_of(writer: str) -> tuple[str, int]:
    """Of a writer's rows among those of a sink and slice: source-2 comes before source-10."""
    kind, _, number = writer.rpartition("-")
    return (kind, int(number)) if number.isdecimal() else (writer, 0)


def _order_of_file(name: str) -> tuple[tuple[str, int], str]:
    """A staged file is named by its writer, and then by its attempt (`sinks.staged`)."""
    return order_of(name.rpartition("/")[2].rsplit(".", 2)[0]), name


_RECORDED = tuple(f.name for f in fields(SliceRecord))
_WRITTEN = {"placement": "mapping"}
_READ = {written: name for name, written in _WRITTEN.items()}


@dataclass(frozen=True, slots=True)
class Cut:
    """A consistent cut: every partition's state up to and including `slice`.

    `files` lists, per partition ("chain/index"), its checkpoint files: a full one, then deltas.
    `groups` is the routing at the cut: which partition's files hold a key group. A chain that
    waited then is in neither: the cut does not cover it.
    """

    slice: int
    files: Mapping[str, list[str]] = field(default_factory=dict)
    groups: Mapping[str, list[int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"slice": self.slice, "files": self.files, "groups": self.groups}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Cut:
        return Cut(**data)
