"""The result of a job by plain sequential evaluation: one slice after the other, one row at a time,
no partitions at work, no waves, no nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.sim.workload import RawShare, Row, Workload, close, fold, moment, rekey

Shown = dict[tuple[str, str], tuple[Row, ...]]  # (sink, writer) → rows


class Oracle:
    """Keys with their hash, per chain. A key's partition only orders what several of them send."""

    def __init__(self, job: Workload) -> None:
        self._job = job
        self._hashes: dict[str, dict[int, int]] = {c.name: {} for c in job.plan.node_chains}
        self._open: dict[str, set[int]] = {c.name: set() for c in job.plan.node_chains}
        self._closed_us = -1

    def run(
        self,
        shares: Sequence[RawShare],
        watermark_us: int | None,
        processing_ms: int,
        layout: Mapping[str, Sequence[int]],
    ) -> Shown:
        """One slice from the shares of its source tasks, with the partition of every key group;
        what every writer shows of it."""
        plan = self._job.plan
        shown: dict[tuple[str, str], list[Row]] = {}
        produced: dict[str, list[tuple[int, int, int]]] = {}  # source, key, value
        for chain in plan.source_chains:
            rows = [(t, k, v) for t, s in enumerate(shares) for k, v, _ in s.get(chain.name, ())]
            produced[chain.name] = rows
            for sink in chain.sinks:
                for task, key, value in rows:
                    shown.setdefault((sink, f"source-{task}"), []).append((key, value))
        when = moment(watermark_us, processing_ms)
        for chain in plan.node_chains:
            hashes, still_open = self._hashes[chain.name], self._open[chain.name]
            made: list[Row] = []
            for edge in chain.inputs:
                for _, _, value in produced[edge.source]:
                    to = rekey(edge.id, value)
                    if to is not None:
                        hashes[to] = fold(hashes.get(to, to), edge.id, value, when)
                        still_open.add(to)
                        made.append((to, hashes[to]))
            if watermark_us is not None and watermark_us > self._closed_us:
                for key in sorted(still_open):
                    hashes[key] = close(hashes[key], watermark_us)
                    made.append((key, hashes[key]))
                still_open.clear()
            groups = layout[chain.name]
            homes = [(groups[k % len(groups)], k, v) for k, v in made]
            rows = sorted(homes, key=lambda row: row[0])
            produced[chain.name] = rows
            for sink in chain.sinks:
                for index, key, value in rows:
                    writer = f"part-{chain.name}-{index}"
                    shown.setdefault((sink, writer), []).append((key, value))
        if watermark_us is not None:
            self._closed_us = max(self._closed_us, watermark_us)
        return {writer: tuple(rows) for writer, rows in shown.items()}

    def state(self) -> dict[str, dict[int, tuple[int, bool]]]:
        """Every chain's keys, their hash and whether they are open."""
        return {
            chain: {k: (h, k in self._open[chain]) for k, h in hashes.items()}
            for chain, hashes in self._hashes.items()
        }
