"""The slices that have happened since the older cut, and the watermark they lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from anabranch.control.ledgers.watermark import OperatorClocks, WatermarkTracker
from anabranch.errors import AnabranchError, InvariantError, StorageError
from anabranch.model.progress import Clocks
from anabranch.model.reports import NodeReport, SourceReport, Staged
from anabranch.model.slices import Feed, Late, SlicePlan, SliceRecord


class SliceLedger:
    """The owner of the records: appended by `commit`, trimmed when a cut makes them needless."""

    def __init__(
        self,
        delays_us: Mapping[str, int],
        past: Iterable[SliceRecord],
        idle_ms: Mapping[str, int] | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self.records: list[SliceRecord] = list(past)
        self._clocks = OperatorClocks(clocks or {})
        self._watermark = WatermarkTracker(delays_us, idle_ms)
        for record in self.records:
            self._watermark.resume(record.watermark_us, record.quiet_ms)
            self._watermark.observe(record.max_time_us, record.batch_end)

    @property
    def newest(self) -> SliceRecord | None:
        return self.records[-1] if self.records else None

    @property
    def next_slice(self) -> int:
        return self.records[-1].number + 1 if self.records else 1

    @property
    def watermark_us(self) -> int | None:
        return self._watermark.watermark_us

    @property
    def watermarks(self) -> dict[str, int | None]:
        """Of the next slice: those of operators that do not go by the sources' watermark."""
        return self._clocks.next(self.watermark_us, self.newest)

    @property
    def time_has_moved(self) -> bool:
        """Is there a watermark, of the sources or of an operator, that no slice has used yet?"""
        newest = self.newest
        if newest is None:
            return False
        return newest.watermark_us != self.watermark_us or (newest.watermarks or {}) != (
            self.watermarks
        )

    @property
    def time_will_rest(self) -> bool:
        """Would the next slice, without rows, leave nothing for time to do in a later one?"""
        if self.newest is None:
            return True
        mark, marks = self.watermark_us, self.watermarks
        then = replace(self.newest, watermark_us=mark, watermarks=marks)
        return self._clocks.next(mark, then) == marks

    def look_is_due(self, now_ms: int) -> bool:
        """Must a slice run, though there are no rows, to see that a source is idle?"""
        return self.newest is not None and self._watermark.look_is_due(now_ms)

    def after(self, slice_no: int) -> list[SliceRecord]:
        return [r for r in self.records if r.number > slice_no]

    def reaches(self, slice_no: int) -> bool:
        """Are all slices after `slice_no` here?"""
        return not self.records or self.records[0].number <= slice_no + 1

    def complete(self, late: Late) -> SliceRecord:
        """With what has come late for a slice."""
        at = next(i for i, r in enumerate(self.records) if r.number == late.slice)
        self.records[at] = self.records[at].with_late(late)
        return self.records[at]

    def trim(self, first: int) -> None:
        self.records = [r for r in self.records if r.number >= first]

    def commit(
        self, plan: SlicePlan, source_tasks: int, reports: Sequence[NodeReport], began_ms: int
    ) -> tuple[SliceRecord, tuple[Staged, ...]]:
        """The record of a slice that every partition has applied, and that began then."""
        sources = {s.partition: s for r in reports for s in r.sources}
        if plan.feed is not Feed.NONE and len(sources) != source_tasks:
            raise InvariantError(
                f"slice {plan.number} was read by {source_tasks} source tasks, "
                f"{len(sources)} reported",
                slice=plan.number,
            )
        chunks_left = self._chunks_left(plan, sources.values())
        rows = _rows_by_source(s.rows for s in sources.values())
        self._watermark.look(rows, began_ms, anew=plan.feed is not Feed.LOG)
        self._watermark.observe(_latest_times(sources.values()), chunks_left == 0)
        staged = {(s.sink, s.writer): s for r in reports for s in r.staged}
        ordered = tuple(sorted(staged.values(), key=_place))
        files: dict[str, list[str]] = {}
        for out in ordered:
            if out.path is not None:
                files.setdefault(out.sink, []).append(out.path)
        before = self.newest
        record = SliceRecord(
            number=plan.number,
            feed=plan.feed.value,
            # Slices without rows keep the newest batch, so that a restart knows it.
            batch=plan.batch if plan.batch is not None else (before.batch if before else None),
            batch_end=chunks_left == 0,
            source_tasks=source_tasks,
            chunks_left=chunks_left,
            watermark_us=plan.watermark_us,
            processing_ms=plan.processing_ms,
            placement=plan.placement,
            generation=plan.generation,
            attempt=plan.attempt,
            max_time_us=self._watermark.latest_us,
            rows=rows,
            staged=files,
            chunks=self._chunks(plan, sources),
            quiet_ms=self._watermark.quiet_ms,
            watermarks=plan.watermarks,
            paused=tuple(sorted(plan.paused)),
        )
        self.records.append(record)
        return record, ordered

    def _chunks(self, plan: SlicePlan, sources: Mapping[int, SourceReport]) -> list[int]:
        """Per source task the slices of its share, from this one on: the first slice of a batch
        says it."""
        before = self.newest
        if plan.batch is None:
            return []
        if before is None or before.batch != plan.batch:
            return [sources[task].chunks for task in sorted(sources)]
        return [max(0, left - 1) for left in before.chunks]

    def _chunks_left(self, plan: SlicePlan, sources: Iterable[SourceReport]) -> int:
        """How many more slices the batch was cut into; the first one of a batch says it."""
        before = self.newest
        if plan.batch is not None and (before is None or before.batch != plan.batch):
            return max((s.chunks for s in sources), default=1) - 1
        return max(before.chunks_left - 1, 0) if before else 0

    def refuse_incomplete(
        self, slices: Iterable[SlicePlan], reports: Sequence[NodeReport]
    ) -> AnabranchError | None:
        """A replay must read as many rows as the journal says each slice had."""
        by_task = {key: rows for r in reports for key, rows in r.replayed.items()}
        for plan in slices:
            record = next(r for r in self.records if r.number == plan.number)
            read = _rows_by_source(rows for (n, _), rows in by_task.items() if n == plan.number)
            for source in sorted({*read, *record.rows}):
                found, wanted = read.get(source, 0), record.rows.get(source, 0)
                if found != wanted:
                    return StorageError(
                        f"the source log of slice {plan.number} has {found} rows of source "
                        f"{source!r}, the journal says {wanted}; restore the directory from a "
                        "copy, or start with a new checkpoint directory",
                        slice=plan.number,
                    )
        return None


def _place(staged: Staged) -> tuple[str, str, int]:
    """Of a writer's rows among those of a slice: source-2 comes before source-10."""
    kind, _, number = staged.writer.rpartition("-")
    if not number.isdecimal():
        kind, number = staged.writer, "0"
    return staged.sink, kind, int(number)


def _latest_times(sources: Iterable[SourceReport]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for source in sources:
        for name, t in source.max_time_us.items():
            latest[name] = max(t, latest.get(name, t))
    return latest


def _rows_by_source(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for part in parts:
        for name, n in part.items():
            rows[name] = rows.get(name, 0) + n
    return rows
