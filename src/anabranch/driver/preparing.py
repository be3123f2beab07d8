"""A topology and the schemas of its sources, compiled to what nodes run; refusals come first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.control.remarks import Remarks
from anabranch.control.settings import ControlConfig
from anabranch.driver.options import RunOptions
from anabranch.errors import ConfigError, TopologyError
from anabranch.model.plan import Plan
from anabranch.node.arrow.job import JobSpec
from anabranch.node.arrow.schemas import build_programs, fingerprint, infer_schemas
from anabranch.operators.described import keeps_for_ever
from anabranch.operators.rows.canonical import require_column
from anabranch.operators.rows.failing import DeadLetters
from anabranch.sinks import Parquet, Sink
from anabranch.storage import checkpoint_store
from anabranch.storage.identity import identify
from anabranch.storage.local import LocalStore


@dataclass(frozen=True)
class JobParts:
    """What the API hands over: the plan and everything that is not pure."""

    plan: Plan
    sources: Mapping[str, Any]
    event_times: Mapping[str, str]
    watermark_delays_us: Mapping[str, int]
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    idle_timeouts_ms: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A job that can run."""

    spec: JobSpec
    fingerprint: Mapping[str, Any]
    sources: tuple[str, ...]
    schema: pa.Schema  # of a batch: the source's rows, or one struct column per source
    dead_letters: str | None = None  # the sink they go to


def prepare(
    parts: JobParts,
    root: Path,
    options: RunOptions,
    schemas: Mapping[str, pa.Schema],
    united: pa.Schema,
) -> Prepared:
    """Compile the job for the schemas of its sources and of their union; refuse what cannot run."""
    plan = parts.plan
    outputs, inputs = infer_schemas(plan.graph, schemas, parts.sinks)
    _check_event_times(parts.event_times, outputs)
    place = options.checkpoints
    fingerprinted = fingerprint(plan, inputs)
    identity = identify(LocalStore(root))  # the first thing written: all refusals come before
    spec = JobSpec(
        name=plan.graph.name,
        identity=identity,
        programs=build_programs(plan, outputs, inputs),
        sinks=parts.sinks,
        root=str(root),
        # At a store, jobs that were given the same URL write beside each other.
        checkpoints=f"{place}/{identity.job}" if checkpoint_store.is_url(place) else place,
        key_groups=plan.graph.key_groups,
        max_rows_per_slice=options.max_rows_per_slice,
        event_times=parts.event_times,
        counts_keys=options.balancing is not None,
    )
    dead = (o.name for o in plan.graph.operators if isinstance(o.kernel, DeadLetters))
    return Prepared(spec, fingerprinted, tuple(schemas), united, next(dead, None))


def control_config(parts: JobParts, options: RunOptions) -> ControlConfig:
    """What decisions depend on."""
    bound_ms = options.recovery_bound_ms
    return ControlConfig(
        checkpoint_interval_ms=options.checkpoint_interval_ms,
        watermark_delays_us=parts.watermark_delays_us,
        idle_timeouts_ms=parts.idle_timeouts_ms,
        backups=backup_chains(parts.plan, options.backing_up),
        recovery_bound_s=None if bound_ms is None else bound_ms / 1000,
        slice_interval_ms=options.slice_interval_ms,
        autoscale=options.autoscaling,
        balance=options.balancing,
        parallel_recovery=options.parallel_recovery,
        strategy=options.survival,
        recovery=options.recovery,
        adaptive_backups=options.adaptive_backups,
    )


def remarks_for(spec: JobSpec, interval_ms: int | None, dead_letters: str | None) -> Remarks:
    """What to watch a job for; `interval_ms` is that of batches, if they come by the clock."""
    operators = {n: o for p in spec.programs.values() for n, o in p.operators.items()}
    return Remarks(
        interval_ms=interval_ms,
        endless=frozenset(
            p.chain.name
            for p in spec.programs.values()
            # Only the size of a whole chain is known: beside a window, it may be that one's.
            if p.stateful and all(keeps_for_ever(p.operators[n].kernel) for n in p.stateful)
        ),
        wanted=frozenset(p for o in operators.values() if o.gives_late for p in o.producers),
        dead_letters=dead_letters,
    )


def backup_chains(plan: Plan, operators: frozenset[str] | None) -> frozenset[str] | None:
    """The chains that keep their output, for the operators that are to back up."""
    if operators is None:
        return None
    unknown = operators - {o.name for o in plan.graph.operators}
    if unknown:
        known = ", ".join(o.name for o in plan.graph.operators)
        raise ConfigError(
            f"backups names {', '.join(sorted(unknown))}, which is no operator of this topology; "
            f"it has {known}"
        )
    return frozenset(c.name for c in plan.chains if operators & set(c.operators))


def _check_event_times(columns: Mapping[str, str], outputs: Mapping[str, pa.Schema]) -> None:
    for source, column in columns.items():
        kind = require_column(outputs[source], column, f"the event time of source {source!r}")
        if not pa.types.is_timestamp(kind):
            raise TopologyError(
                f"the event time of source {source!r}, column {column!r}, is {kind}; cast it to "
                "a timestamp",
                operator=source,
            )


def check_paths(sinks: Mapping[str, Sink]) -> None:
    """Two sinks in one directory would take each other's slices for their own."""
    owners: dict[Path, str] = {}
    for name, sink in sinks.items():
        if isinstance(sink, Parquet):
            other = owners.setdefault(Path(sink.path).resolve(), name)
            if other != name:
                raise TopologyError(
                    f"the sinks {other!r} and {name!r} write to the same directory {sink.path}; "
                    "give each its own, or unite their streams",
                    operator=name,
                )
