"""A topology and the schemas of its sources, compiled to what nodes run; refusals come first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.control.autoscaler import Autoscale
from anabranch.control.strategies import STRATEGIES, Strategy
from anabranch.errors import ConfigError, TopologyError
from anabranch.model.plan import Plan
from anabranch.node.messages import JobSpec
from anabranch.node.schemas import build_programs, fingerprint, infer_schemas
from anabranch.operators.canonical import require_column
from anabranch.operators.failing import DeadLetters
from anabranch.storage import checkpoint_store
from anabranch.storage.identity import identify
from anabranch.storage.sinks import Parquet, Sink


@dataclass(frozen=True)
class RunConfig:
    """How to run a topology."""

    checkpoint: Path
    checkpoints: str = checkpoint_store.LOCAL  # the place of checkpoint files
    slice_interval_ms: int = 1_000
    checkpoint_interval_ms: int = 10_000
    max_rows_per_slice: int | None = None
    available_now: bool = False
    backups: frozenset[str] | None = None  # operators that back up; None: all
    recovery_bound_ms: int | None = None  # … or those that bring a lost node back within this
    node_timeout_ms: int = 5_000  # silent for so long, a node counts as lost
    slice_timeout_ms: int | None = None  # a slice that takes longer ends the run
    autoscale: Autoscale | None = None
    parallel_recovery: int = 1  # partitions that a lost one is rebuilt as
    drop_state: tuple[str, ...] = ()  # operators that are gone, and their state with them
    strategy: Strategy = STRATEGIES["ours"]


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
    parts: JobParts, config: RunConfig, schemas: Mapping[str, pa.Schema], united: pa.Schema
) -> Prepared:
    """Compile the job for the schemas of its sources and of their union; refuse what cannot run."""
    plan = parts.plan
    outputs, inputs = infer_schemas(plan.topology, schemas, parts.sinks)
    _check_event_times(parts.event_times, outputs)
    _check_paths(parts.sinks)
    root, place = config.checkpoint.absolute(), config.checkpoints
    fingerprinted = fingerprint(plan, inputs)
    identity = identify(root)  # the first thing written: all refusals come before
    spec = JobSpec(
        name=plan.topology.name,
        identity=identity,
        programs=build_programs(plan, outputs, inputs),
        sinks=parts.sinks,
        root=str(root),
        # At a store, jobs that were given the same URL write beside each other.
        checkpoints=f"{place}/{identity.job}" if checkpoint_store.is_url(place) else place,
        key_groups=plan.topology.key_groups,
        max_rows_per_slice=config.max_rows_per_slice,
        event_times=parts.event_times,
    )
    dead = (o.name for o in plan.topology.operators if isinstance(o.kernel, DeadLetters))
    return Prepared(spec, fingerprinted, tuple(schemas), united, next(dead, None))


def backup_chains(plan: Plan, operators: frozenset[str] | None) -> frozenset[str] | None:
    """The chains that keep their output, for the operators that shall back up."""
    if operators is None:
        return None
    unknown = operators - {o.name for o in plan.topology.operators}
    if unknown:
        known = ", ".join(o.name for o in plan.topology.operators)
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


def _check_paths(sinks: Mapping[str, Sink]) -> None:
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
